"""The dispatch policies by their names in recipes."""

from __future__ import annotations

from megarl.rollout.dispatch.contract import DispatchPolicy, Limits
from megarl.rollout.dispatch.ordered import Ordered
from megarl.rollout.dispatch.windowed import Windowed
from megarl.settings.rollout import RolloutConfig
from megarl.types import Cursor

POLICIES: dict[str, type[DispatchPolicy]] = {"ordered": Ordered, "windowed": Windowed}


def limits_of(config: RolloutConfig, *, rejects: bool, last_step: int) -> Limits:
    """`rejects`: whether dynamic sampling may reject groups."""
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
    """Why a run with this `cursor` cannot be resumed with a policy, and what to set; "" if it
    can.
    """
    if POLICIES[dispatch].takes_gaps or not cursor.beyond:
        return ""
    able = " or ".join(repr(name) for name, policy in POLICIES.items() if policy.takes_gaps)
    return (
        f"its run has used {len(cursor.beyond)} groups beyond group {cursor.first}, which it has"
        f" not used, and rollout.dispatch '{dispatch}' uses groups in order; set rollout.dispatch"
        f" to {able}"
    )
