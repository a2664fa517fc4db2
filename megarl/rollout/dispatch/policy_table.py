"""The dispatch policies by the names that recipes use."""

from __future__ import annotations

from megarl.rollout.config import RolloutConfig
from megarl.rollout.dispatch.contract import DispatchPolicy, Limits
from megarl.rollout.dispatch.ordered import Ordered
from megarl.rollout.dispatch.windowed import Windowed
from megarl.types import Cursor

POLICIES: dict[str, type[DispatchPolicy]] = {"ordered": Ordered, "windowed": Windowed}
"""{`rollout.dispatch`: class}"""


def limits_of(config: RolloutConfig, *, rejects: bool, last_step: int) -> Limits:
    """The limits of a recipe. `rejects`: whether dynamic sampling is used."""
    per_step = config.groups_per_step
    draws = round(config.dynamic_sampling.max_draws * per_step) if rejects else per_step
    return Limits(
        per_step=per_step,
        max_draws=draws,
        staleness=config.max_staleness,
        last_step=last_step,
        max_open=config.most_open_groups,
    )


def refusal(dispatch: str, cursor: Cursor) -> str:
    """Why a run with `rollout.dispatch` set to `dispatch` cannot go on from `cursor`, with what to
    set; empty if the run can.
    """
    if POLICIES[dispatch].takes_gaps or not cursor.beyond:
        return ""
    able = " or ".join(repr(name) for name, policy in POLICIES.items() if policy.takes_gaps)
    return (
        f"its run has used {len(cursor.beyond)} groups beyond group {cursor.first}, which it has"
        f" not used, and rollout.dispatch '{dispatch}' uses groups in order; set rollout.dispatch"
        f" to {able}"
    )
