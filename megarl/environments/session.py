"""Environment sessions: one object per rollout, which reads what the model writes and replies with
an observation, with a score, or with an answer that the recipe's verifier scores.

    start(prompt) -> Observation      step(text, token_ids) -> Observation | Answer | score

A verifier is a session of one step. Sessions run in the worker processes of
`megarl.environments.workers`, each call under its own time limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from megarl.types import Prompt


@dataclass(frozen=True, slots=True)
class Observation:
    """Text of the environment that the model reads next."""

    text: str
    """The text, including the chat template's markup. It is tokenised without adding special
    tokens. It may be empty only at the start, where it means no observation."""
    reward: float = 0.0
    """Reward for the turn that the observation replies to. The rewards of all turns add up with the
    score at the end."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a rollout whose reward the recipe's verifier (`environment.verifier` or
    `environment.rewards`) decides.
    """

    text: str
    """The text that the verifier scores as the response."""
    metrics: dict[str, float] = field(default_factory=dict)
    """{name: number} of the session's own metrics."""


class Session(Protocol):
    """The environment of one rollout. If a method raises or exceeds its time limit, only this
    rollout fails.

    Methods may be `async`: those of one process then wait beside one another. Plain functions run
    on `environment.threads` threads of the process.
    """

    def start(self, prompt: Prompt) -> Any:
        """Return the `Observation` that follows the prompt, before the model's first response."""
        ...

    def step(self, text: str, token_ids: np.ndarray) -> Any:
        """Respond to the model's latest segment, given as decoded text and as sampled token ids
        ([T] int32). The text has no special tokens (but the tags of thinking), and never the token
        that ends the turn; the ids have all.

        Return an `Observation`, after which the model continues; or what ends the rollout: an
        `Answer`, or a score from 0 (wrong) to 1 (right).
        """
        ...


class Closing(Protocol):
    """A session that holds something, such as a file or a process, may have this method too."""

    def close(self) -> Any:
        """Called once when the rollout has ended, however it ended, unless the session's process
        ended before.
        """
        ...
