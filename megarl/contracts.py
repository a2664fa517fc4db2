"""What `megarl.loop` needs of each room. A class that has these methods fits, whatever it is made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from megarl.types import Group, Prompt, StepBatch, StepReport

Verifier = Callable[[Prompt, str], Awaitable[float]]
"""(prompt, response text) -> reward-free score: 1.0 right, 0.0 wrong, or anything between. May raise; may be slow."""


class PromptSource(Protocol):
    """Prompts by ordinal: a pure function of (seed, ordinal), so that a cursor is one number."""

    def __len__(self) -> int: ...

    def at(self, ordinal: int) -> Prompt:
        """The prompt trained as number `ordinal`; epochs follow each other, each shuffled anew."""
        ...


class Rollouts(Protocol):
    """One rank's end of the rollout service."""

    def take(self, step: int) -> StepBatch:
        """Wait for this rank's share of step `step`."""
        ...

    def release(self, step: int) -> None:
        """Weights of version `step + 1` are out: newer rollouts may start."""
        ...


class Policy(Protocol):
    """The model that learns."""

    step: int
    """Steps done; the version of the weights."""

    def train(self, batch: StepBatch) -> StepReport:
        """Log-probs, loss, one optimizer step per mini-batch."""
        ...


class Observer(Protocol):
    """Where a run's numbers go."""

    def step(self, report: StepReport) -> None: ...


class EngineLost(RuntimeError):
    """Engines that died, or are of no more use; others can take their places."""

    def __init__(self, reason: str, engines: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.engines = engines


Scorer = Callable[[Prompt, str, int, bool], Awaitable[object]]
"""(prompt, response text, response tokens, truncated) -> Verdict."""

__all__ = ["EngineLost", "Group", "Observer", "Policy", "PromptSource", "Rollouts", "Scorer", "Verifier"]
