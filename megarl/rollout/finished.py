"""The finished groups of a run that are of no trained step, as the rollout service keeps them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from megarl.types import Cursor, Group


@dataclass
class FinishedGroups:
    """Finished groups: those of the open batch, and those of complete batches that are not trained
    yet, rejected ones included.
    """

    open: dict[int, Group] = field(default_factory=dict)
    """Groups of no complete batch, by ordinal."""
    closed: dict[int, list[Group]] = field(default_factory=dict)
    """{step: groups that its complete batch has looked at}"""
    _kept: dict[int, list[Group]] = field(default_factory=dict)
    """{steps done: what `after` has returned}"""

    def close(self, step: int, drawn: Sequence[int]) -> list[Group]:
        """Move the groups `drawn` to the complete batch of `step`, and return them."""
        self.closed[step] = [self.open.pop(ordinal) for ordinal in drawn]
        return self.closed[step]

    def release(self, version: int) -> None:
        """Forget the groups of the steps before `version`, which are trained."""
        for step in [step for step in self.closed if step < version]:
            del self.closed[step]
        for done in [done for done in self._kept if done < version]:
            del self._kept[done]

    def after(self, done: int) -> list[Group]:
        """The finished groups that the first `done` steps have not used, ascending. A second call
        for the same steps returns the same groups, though more are finished by then: several ranks
        write them into one checkpoint.

        A group that was started because another one was rejected would be too old without the
        other one, so a checkpoint has both or neither.
        """
        if done not in self._kept:
            found = [*self.open.values()]
            for step, groups in self.closed.items():
                found += groups if step >= done else ()
            self._kept[done] = sorted(found, key=lambda group: group.ordinal)
        return self._kept[done]


def by_version(groups: Collection[Group]) -> list[tuple[int, Group]]:
    """(version at which it was dispatched, group), ascending by version and then by ordinal: the
    order in which groups are due. It is not that of the ordinals where a resumed run has generated
    some of them again.
    """
    found = [(group.rollouts[0].dispatched_at, group) for group in groups]
    return sorted(found, key=lambda one: (one[0], one[1].ordinal))


def refuse_used(groups: Collection[Group], cursor: Cursor) -> None:
    """Raise `ValueError` if a group of a checkpoint is one that its cursor says is used, or if one
    is there twice.
    """
    seen = set(cursor.beyond)
    for group in groups:
        if group.ordinal < cursor.first or group.ordinal in seen:
            raise ValueError(
                f"the checkpoint has group {group.ordinal}, which its steps have used, or has it"
                " twice; remove its folder groups/ and its line in digests.json, and resume again"
            )
        seen.add(group.ordinal)
