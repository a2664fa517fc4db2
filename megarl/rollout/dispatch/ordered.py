"""The dispatch policy `ordered`: steps use groups in the order of their ordinals, and sweep none.

A batch closes with `per_step` accepted groups, or after `max_draws`. Group o may start at version v
only if it is certain to be trained by step v + staleness. Without a draw limit this is `o -
rejected < (v + 1 + staleness) * per_step`.

What a step trains on does not depend on how long groups take, so a run can be repeated exactly. The
price: a slow group holds its step back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

from megarl.rollout.dispatch.contract import Batch, Limits
from megarl.types import Cursor


@dataclass
class Ordered:
    limits: Limits
    first: int = 0
    """Ordinal of the open batch's first group."""
    step: int = 0
    """Step of the open batch."""
    version: int = 0
    next: int = 0
    """Ordinal of the next group to start."""
    known: dict[int, bool] = field(default_factory=dict)
    """{ordinal: accepted} of the finished groups from `first` on."""
    takes_gaps: ClassVar[bool] = False

    @classmethod
    def restore(cls, limits: Limits, cursor: Cursor, step: int) -> Self:
        assert not cursor.beyond
        return cls(limits, cursor.first, step, version=step, next=cursor.first)

    def adopt(self, ordinal: int, version: int, accepted: bool) -> bool:
        if self._latest_step(ordinal) > version + self.limits.staleness:
            return False
        self.known[ordinal] = accepted
        self._pass_known()
        return True

    def may_start(self) -> bool:
        limits = self.limits
        return self._latest_step(self.next) <= min(
            self.version + limits.staleness, limits.last_step
        )

    def start(self) -> int:
        assert self.may_start()
        ordinal, self.next = self.next, self.next + 1
        self._pass_known()
        return ordinal

    def finish(self, ordinal: int, accepted: bool) -> None:
        assert self.first <= ordinal and ordinal not in self.known
        self.known[ordinal] = accepted

    def close(self) -> Batch | None:
        end, accepted = self._end(self.first, assume=False)
        if end is None:
            return None
        drawn = list(range(self.first, end))
        for ordinal in drawn:
            del self.known[ordinal]
        self.first, self.step = end, self.step + 1
        self.next = max(self.next, end)
        self._pass_known()
        return Batch(drawn, accepted)

    def release(self, version: int) -> None:
        self.version = max(self.version, version)

    def cursor(self) -> Cursor:
        return Cursor(self.first)

    def _pass_known(self) -> None:
        while self.next in self.known:
            self.next += 1

    def _end(self, first: int, *, assume: bool) -> tuple[int | None, list[int]]:
        """(ordinal after the batch that begins at `first`, its accepted groups). `assume`:
        unfinished groups count as accepted; else None if one of them decides the batch.
        """
        accepted: list[int] = []
        for ordinal in range(first, first + self.limits.max_draws):
            outcome = self.known.get(ordinal)
            if outcome is None and not assume:
                return None, accepted
            if outcome is not False:
                accepted.append(ordinal)
            if len(accepted) == self.limits.per_step:
                return ordinal + 1, accepted
        return first + self.limits.max_draws, accepted

    def _latest_step(self, ordinal: int) -> int:
        """The latest step that can have group `ordinal`: a rejection only moves groups to earlier
        steps.
        """
        first, step = self.first, self.step
        if False not in self.known.values():  # then no batch needs more groups than it trains on
            return step + (ordinal - first) // min(self.limits.per_step, self.limits.max_draws)
        while True:
            end, _ = self._end(first, assume=True)
            assert end is not None
            if ordinal < end:
                return step
            first, step = end, step + 1
