"""The dispatch policy `windowed`: steps use groups as they finish, and groups too old are *swept*.

A batch closes with the first `per_step` groups that finish and are accepted, or after `max_draws`.
Then a group in flight that no later step could train is cancelled and rejected as "stale". It is
not dispatched again: its prompt would likely take long again, and each ordinal stays trained or
rejected once. The price: training sees fewer long answers (metric `groups/stale`).

With the default `max_open`, (1 + staleness) * per_step, only groups that take longer than
`staleness` steps are swept; more keeps engines fuller. From `per_step` on it cannot deadlock: with
nothing in flight or to train, the open batch has room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

from megarl.rollout.dispatch.contract import Batch, Limits
from megarl.types import Cursor


@dataclass
class Windowed:
    limits: Limits
    step: int = 0
    """Step of the open batch."""
    version: int = 0
    next: int = 0
    """Ordinal of the next group to start, unless `used` contains it."""
    first: int = 0
    """Ordinal of the first group that no closed batch has used."""
    used: set[int] = field(default_factory=set)
    """Ordinals above `first` that closed batches have used."""
    flying: dict[int, int] = field(default_factory=dict)
    """{ordinal: version at its start} of the groups in flight."""
    finished: dict[int, bool] = field(default_factory=dict)
    """{ordinal: accepted} of the open batch."""
    adopted: set[int] = field(default_factory=set)
    """Ordinals from the checkpoint."""
    untrained: dict[int, int] = field(default_factory=dict)
    """{step: accepted groups} of closed batches that are not trained yet."""
    takes_gaps: ClassVar[bool] = True

    @classmethod
    def restore(cls, limits: Limits, cursor: Cursor, step: int) -> Self:
        first = cursor.first
        return cls(limits, step, version=step, next=first, first=first, used=set(cursor.beyond))

    @property
    def num_open(self) -> int:
        """Groups started and neither trained nor rejected."""
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
        """Groups in flight that the steps left will use, however many are rejected."""
        limits = self.limits
        needed = limits.per_step - sum(self.finished.values())
        draws = limits.max_draws - len(self.finished)
        return min(needed, draws) + (limits.last_step - self.step) * limits.per_step
