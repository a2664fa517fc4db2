"""What a dispatch policy is: a pure state machine that says which group may start, and which groups
a step trains on.

    may_start -> start -> finish -> close -> release -> may_start ...

Groups have ordinals 0, 1, 2, ..., which decide their prompts and seeds. Step k trains weights of
version k: a group that starts at version v has an age of at most k - v there. The *open* batch is
that of the earliest step that lacks groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

from megarl.types import Cursor


@dataclass(frozen=True, slots=True)
class Limits:
    """What a policy must keep."""

    per_step: int
    """Accepted groups that a step trains on."""
    max_draws: int
    """Groups, also rejected ones, after which a batch is complete with fewer; at least
    `per_step`.
    """
    staleness: int
    """Largest age, in versions, of a group that is trained on."""
    last_step: int
    """Last step of the run."""
    max_open: int
    """Most groups started and neither trained nor rejected, where no other limit is stricter; at
    least `per_step`.
    """


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups that a step uses, as ascending ordinals."""

    drawn: list[int]
    """Finished groups that the step has looked at."""
    accepted: list[int]
    """Those of `drawn` that it trains on."""
    swept: list[int] = field(default_factory=list)
    """Unfinished groups given up, since every later step would find them too old."""


class DispatchPolicy(Protocol):
    """The rollout service calls every method from one event loop."""

    takes_gaps: ClassVar[bool]
    """Whether a cursor may name groups beyond an unused one."""
    step: int
    """Step of the open batch."""
    version: int

    @classmethod
    def restore(cls, limits: Limits, cursor: Cursor, step: int) -> Self:
        """The state in which the first `step` steps have used the groups of `cursor`."""
        ...

    def may_start(self) -> bool:
        """Must be true where no group is generated, no batch waits for training and steps are
        left.
        """
        ...

    def start(self) -> int:
        """Mark the next group as started; returns its ordinal. Only if `may_start()`."""
        ...

    def adopt(self, ordinal: int, version: int, accepted: bool) -> bool:
        """Note a finished group of a checkpoint, started at `version`. Returns False if it might be
        too old: `start` then returns it.

        Called ascending by version and ordinal before any `start`, with `close` after each.
        """
        ...

    def finish(self, ordinal: int, accepted: bool) -> None:
        """Not called for groups that `close` has swept."""
        ...

    def close(self) -> Batch | None:
        """The open batch, if it is complete. Call it until it returns None."""
        ...

    def release(self, version: int) -> None:
        """Weights of `version` are on the engines: earlier steps are trained."""
        ...

    def cursor(self) -> Cursor:
        """The groups that complete batches have used or swept."""
        ...
