"""Environment sessions: one object per rollout, which reads what the model writes and replies with
an observation or with a score.

    start(prompt) -> Observation      step(text, token_ids) -> Observation | score

A verifier is a session of one step. Sessions run in the worker processes of
`megarl.environments.pool`, each call under its own time limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megarl.types import Prompt


@dataclass(frozen=True, slots=True)
class Observation:
    """Text of the environment that the model reads next."""

    text: str
    """The text, including the chat template's markup. It is tokenised without adding special
    tokens. It may be empty only at the start, where it means no observation."""


class Session(Protocol):
    """The environment of one rollout. Methods may be `async`. If a method raises or exceeds its
    time limit, only this rollout fails.
    """

    def start(self, prompt: Prompt) -> Any:
        """Return the `Observation` that follows the prompt, before the model's first response."""
        ...

    def step(self, text: str, token_ids: np.ndarray) -> Any:
        """Respond to the model's latest segment, given as decoded text and as sampled token ids
        ([T] int32).

        Return an `Observation`, after which the model continues, or a score from 0 (wrong) to 1
        (right), which ends the rollout.
        """
        ...


class VerifierSession:
    """Runs a verifier as a session with a single step. See `Session`."""

    def __init__(self, verifier: Any) -> None:
        self._verifier = verifier

    def start(self, prompt: Prompt) -> Observation:
        self._prompt = prompt
        return Observation("")

    def step(self, text: str, token_ids: np.ndarray) -> Any:
        # Not async: a plain function may start an event loop, which only one can be in a thread.
        return self._verifier(self._prompt, text)
