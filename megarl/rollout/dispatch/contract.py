"""What a dispatch policy is: a pure state machine that the rollout service drives.

    may_start -> start -> finish -> close -> release -> may_start ...

Groups have ordinals 0, 1, 2, ..., which decide their prompts and seeds. Steps count from 0; step k
trains weights of version k, so that a group which starts at version v and is trained in step k has
an age of at most k - v. The *open* batch is the one of the earliest step whose batch is not
complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self

from megarl.types import Cursor


@dataclass(frozen=True, slots=True)
class Limits:
    """What a recipe allows; the same for the whole run."""

    per_step: int
    """Accepted groups that a step's batch has."""
    max_draws: int
    """Groups, rejected ones included, after which a batch is complete with fewer accepted ones; at
    least `per_step`."""
    staleness: int
    """Largest age, in versions, of a group that is trained on."""
    last_step: int
    """Last step of the run; groups that only later steps would use are not started."""
    max_open: int
    """Largest number of groups that are started and neither trained nor rejected; at least
    `per_step`. Policies that need no such limit, because another one is stricter, ignore it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of a step, as ordinals in ascending order."""

    drawn: list[int]
    """Finished groups that the step has looked at, rejected ones included."""
    accepted: list[int]
    """Groups of `drawn` that the step trains on."""
    swept: list[int] = field(default_factory=list)
    """Unfinished groups that are given up, because every later step would find them too old."""


class DispatchPolicy(Protocol):
    """Interface of a dispatch policy. The service calls every method from one event loop."""

    takes_gaps: ClassVar[bool]
    """Whether `restore` takes a cursor with groups used beyond the first one that is not."""
    step: int
    """Step of the open batch."""
    version: int
    """Version of the trainer's weights."""

    @classmethod
    def restore(cls, limits: Limits, cursor: Cursor, step: int) -> Self:
        """The state after `step` steps have used the groups of `cursor`; nothing is in flight."""
        ...

    def may_start(self) -> bool:
        """Whether another group may start now. Must be true where nothing is in flight, no batch is
        complete that the trainer could train, and steps are left: otherwise the run is stuck.
        """
        ...

    def start(self) -> int:
        """Mark the next group as started; returns its ordinal. Ordinals ascend, and skip those that
        the cursor of `restore` names as used, and those that were adopted.
        """
        ...

    def adopt(self, ordinal: int, version: int, accepted: bool) -> bool:
        """Record that group `ordinal` was started at `version` and finished before the run was
        resumed. Called after `restore`, ascending by version and then by ordinal, before any group
        is started, with `close` after each. Returns False, and records nothing, if a step might
        find the group too old: it is then started as if it were new.
        """
        ...

    def finish(self, ordinal: int, accepted: bool) -> None:
        """Record that group `ordinal` is finished, and whether dynamic sampling accepts it. A swept
        group does not finish.
        """
        ...

    def close(self) -> Batch | None:
        """If the open batch is complete, return it and open the next one; otherwise None."""
        ...

    def release(self, version: int) -> None:
        """Record that weights `version` are on the engines, so that earlier steps are trained. A
        version that was released before changes nothing.
        """
        ...

    def cursor(self) -> Cursor:
        """The groups that the batches closed so far have used, swept ones included."""
        ...
