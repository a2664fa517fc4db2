"""What a dispatch policy is: a pure state machine that the rollout service asks which group (all
rollouts of a prompt) may start now, and which groups a step trains on.

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
    """The limits of a run, from its recipe, that a dispatch policy must keep: groups in a step,
    their age, and groups started at the same time. A dispatch policy decides when groups (all
    rollouts of a prompt) start and in which step they are trained.
    """

    per_step: int
    """Groups that a step trains on: those that dynamic sampling accepts."""
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
    """Which groups (all rollouts of a prompt) a step uses, as ordinals in ascending order. An
    ordinal is the position of the group's prompt in the training order, from 0.
    """

    drawn: list[int]
    """Finished groups that the step has looked at, rejected ones included."""
    accepted: list[int]
    """Groups of `drawn` that the step trains on."""
    swept: list[int] = field(default_factory=list)
    """Unfinished groups that are given up, because every later step would find them too old."""


class DispatchPolicy(Protocol):
    """Interface of a dispatch policy, which decides when groups (all rollouts of a prompt) start
    and which groups each step trains on. Groups are known by ordinals, their positions in the
    training order. The open batch is that of the earliest step that still lacks groups. The rollout
    service calls every method from one event loop.
    """

    takes_gaps: ClassVar[bool]
    """Whether `restore` takes a cursor that is not contiguous: groups are used although an earlier
    one is not."""
    step: int
    """Step of the open batch."""
    version: int
    """Version of the trainer's weights."""

    @classmethod
    def restore(cls, limits: Limits, cursor: Cursor, step: int) -> Self:
        """The state with which a run begins or is resumed: the first `step` steps have used the
        groups that `cursor` names (all below `cursor.first` in the training order, and those in
        `cursor.beyond`), weights have the version `step`, and no group is being generated.
        """
        ...

    def may_start(self) -> bool:
        """Whether another group (all rollouts of a prompt) may start now. Must be true where no
        group is being generated, no complete batch waits to be trained, and steps are left:
        otherwise the run is stuck.
        """
        ...

    def start(self) -> int:
        """Mark the next group (all rollouts of a prompt) as started; returns its ordinal, its
        position in the training order. Only if `may_start()`. Ordinals ascend, and skip the groups
        that the cursor of `restore` names as used and those that `adopt` has noted.
        """
        ...

    def adopt(self, ordinal: int, version: int, accepted: bool) -> bool:
        """Note a group from a checkpoint, so that it is not generated again: group `ordinal` (its
        position in the training order) was started at weights of `version` and finished before the
        run was resumed; `accepted`: dynamic sampling keeps it. Called after `restore`, ascending by
        version and then by ordinal, before any group is started, with `close` after each. Returns
        False, and notes nothing, if the group might be too old for the step that would use it:
        `start` then returns it like a new one.
        """
        ...

    def finish(self, ordinal: int, accepted: bool) -> None:
        """Note that group `ordinal` (its position in the training order) is finished, and whether
        dynamic sampling accepts it. Not called for a group that `close` has given up for its age
        (`Batch.swept`).
        """
        ...

    def close(self) -> Batch | None:
        """If the batch of the earliest incomplete step is complete now, return it and go on to the
        next step; otherwise None. A `Batch` lists groups by their positions in the training order:
        those finished, those to train on, and those given up. Call it until it returns None.
        """
        ...

    def release(self, version: int) -> None:
        """Note that weights of `version` are on the engines, so that the steps before `version` are
        trained. A second call with the same version changes nothing.
        """
        ...

    def cursor(self) -> Cursor:
        """The groups that the complete batches have used so far, also those given up for their age,
        in the form that `restore` takes: all below `first` in the training order, and those in
        `beyond`.
        """
        ...
