"""The dispatch policy `windowed`: steps use groups (all rollouts of a prompt) as they finish, and
groups that would be too old are swept, that is, given up.

A step's batch closes with the first `per_step` groups that finish and are accepted, or short of
that once `max_draws` groups have finished. When a batch closes, a group in flight whose version is
older than the next step minus `staleness` can be trained by no step any more: the group is *swept*,
which means that its generation is cancelled and the group is rejected with the reason "stale".

A swept group is rejected and not dispatched a second time, for three reasons. A prompt whose
answers are long once is likely to have long answers again, so that a second attempt could be swept
as well, and so on for ever; a rejected group ends. Prompt and seeds stay functions of the ordinal
alone. And the ledger stays exact without attempts: each ordinal is trained once or rejected once,
with the reason. The price: what is trained on contains fewer long answers than the policy gives.
The metric `groups/stale` counts the swept groups of a step.

At most `max_open` groups are started and neither trained nor rejected. With the default,
(1 + staleness) * per_step, only groups that take longer than `staleness` steps are swept; a larger
number keeps the engines fuller and sweeps more. A number from `per_step` on cannot deadlock: with
nothing in flight and nothing to train, the open batch has fewer than `per_step` accepted groups,
so that another one may start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

from megarl.rollout.dispatch.contract import Batch, Limits
from megarl.types import Cursor


@dataclass
class Windowed:
    """The dispatch policy `windowed` and its state: steps use groups (all rollouts of a prompt) as
    they finish, and groups that would be too old are given up. Make it by `restore`. Then, as the
    run goes on: `start()` returns the position in the training order of the next group to generate,
    if `may_start()`; `finish(position, accepted)` notes that a group is done; `close()` returns the
    next complete `Batch` or None; `release(version)` notes that the steps before `version` are
    trained.
    """

    limits: Limits
    step: int = 0
    """Earliest step whose batch is not complete, from 0: that of the open batch."""
    version: int = 0
    """Version of the trainer's weights."""
    next: int = 0
    """Ordinal (position in the training order) of the next group to start, unless `used` contains
    it."""
    first: int = 0
    """Ordinal of the first group that no closed batch has used."""
    used: set[int] = field(default_factory=set)
    """Ordinals above `first` that closed batches have used."""
    flying: dict[int, int] = field(default_factory=dict)
    """{ordinal: weight version at its start} of the groups that are being generated."""
    finished: dict[int, bool] = field(default_factory=dict)
    """{ordinal: accepted by dynamic sampling} of the finished groups of the open batch."""
    adopted: set[int] = field(default_factory=set)
    """Ordinals of the groups that were finished before the run was resumed."""
    untrained: dict[int, int] = field(default_factory=dict)
    """{step: accepted groups} of the closed batches that are not trained yet."""
    takes_gaps: ClassVar[bool] = True

    @classmethod
    def restore(cls, limits: Limits, cursor: Cursor, step: int) -> Self:
        first = cursor.first
        return cls(limits, step, version=step, next=first, first=first, used=set(cursor.beyond))

    @property
    def num_open(self) -> int:
        """Number of groups (all rollouts of a prompt) that are started and neither trained nor
        rejected.
        """
        accepted = sum(self.finished.values())
        return len(self.flying) + accepted + sum(self.untrained.values())

    def may_start(self) -> bool:
        limits = self.limits
        if self.step > min(self.version + limits.staleness, limits.last_step):
            return False  # too old for the open batch already, or no batch is left
        return self.num_open < limits.max_open and len(self.flying) < self._usable()

    def start(self) -> int:
        assert self.may_start()
        # `used` forgets what is below `first`, which may have passed `next` in a resumed run.
        self.next = max(self.next, self.first)
        while self.next in self.used or self.next in self.adopted:
            self.next += 1
        self.flying[self.next] = self.version
        self.next += 1
        return self.next - 1

    def adopt(self, ordinal: int, version: int, accepted: bool) -> bool:
        # The open batch has the group. Before, it may have been in an earlier one: there, batches
        # were made in the order in which groups finished.
        if version < self.step - self.limits.staleness:
            return False
        self.adopted.add(ordinal)
        self.finished[ordinal] = accepted
        return True

    def finish(self, ordinal: int, accepted: bool) -> None:
        del self.flying[ordinal]
        self.finished[ordinal] = accepted

    def close(self) -> Batch | None:
        drawn = sorted(self.finished)
        # By ordinal: the same groups make the same batch, in whatever order they have finished.
        accepted = [ordinal for ordinal in drawn if self.finished[ordinal]]
        if len(accepted) < self.limits.per_step and len(drawn) < self.limits.max_draws:
            return None
        self.untrained[self.step] = len(accepted)
        self.step += 1
        oldest = self.step - self.limits.staleness
        swept = sorted(ordinal for ordinal, version in self.flying.items() if version < oldest)
        for ordinal in swept:
            del self.flying[ordinal]
        self.finished = {}
        self.used.update(drawn, swept)
        while self.first in self.used:
            self.used.remove(self.first)
            self.first += 1
        return Batch(drawn, accepted, swept)

    def release(self, version: int) -> None:
        self.version = max(self.version, version)
        self.untrained = {
            step: count for step, count in self.untrained.items() if step >= self.version
        }

    def cursor(self) -> Cursor:
        return Cursor(self.first, tuple(sorted(self.used)))

    def _usable(self) -> int:
        """Groups in flight that the steps left will use, however many of them are rejected."""
        limits = self.limits
        wanted = limits.per_step - sum(self.finished.values())
        draws = limits.max_draws - len(self.finished)
        return min(wanted, draws) + (limits.last_step - self.step) * limits.per_step
