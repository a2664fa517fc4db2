"""Environment sessions: one object per rollout, which reads what the model writes and replies with
an observation or with a score.

    start(prompt) -> Observation      step(text, token_ids) -> Observation | score

A verifier is a session of one step. Sessions run in the worker processes of
`megarl.environments.pool`, each call under its own time limit.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megarl.types import Prompt


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model reads next."""

    text: str
    """With whatever the model's chat template puts around it. Tokenised once, without special
    tokens added; empty only at the start, for nothing.
    """


class Session(Protocol):
    """The environment of one rollout. Methods may be `async`, may raise and may hang: that costs
    their own rollout only.
    """

    def start(self, prompt: Prompt) -> Any:
        """The `Observation` that follows the prompt, before the model's first turn."""
        ...

    def step(self, text: str, token_ids: np.ndarray) -> Any:
        """Reply to the model's turn, given decoded and as sampled ([T] int32): an `Observation`,
        after which the model writes again, or a score from 0 (wrong) to 1 (right), which ends the
        rollout.
        """
        ...


class VerifierSession:
    """A verifier as a session of one step. See `Session`."""

    def __init__(self, verifier: Any) -> None:
        self._verifier = verifier

    def start(self, prompt: Prompt) -> Observation:
        self._prompt = prompt
        return Observation("")

    async def step(self, text: str, token_ids: np.ndarray) -> Any:
        score = self._verifier(self._prompt, text)
        return await score if inspect.isawaitable(score) else score
