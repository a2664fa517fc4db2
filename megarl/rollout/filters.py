"""Which groups of rollouts are trained on; the others are replaced by new ones.

A filter is a function of a `megarl.types.Group` that returns True for a group to keep. It runs in
the rollout service, which has rewards, verdicts and lengths, but no tokens: `Segment.arrays` is a
reference.
"""

from __future__ import annotations

from collections.abc import Callable

from megarl.types import Group


def differing(group: Group) -> bool:
    """Keeps a group whose rewards, without length penalty, are not all equal."""
    # Without the length penalty: answers that are all wrong stay a group to reject, however long
    # they are.
    return len({round(one.reward - one.verdict.penalty, 9) for one in group.rollouts}) > 1


def every(group: Group) -> bool:
    """Keeps every group."""
    return True


FILTERS: dict[str, Callable[[Group], bool]] = {"differing": differing, "all": every}
"""{name in `rollout.filter`: function}"""
