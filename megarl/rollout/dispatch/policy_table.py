"""The dispatch policies by the names that recipes use."""

from __future__ import annotations

from megarl.rollout.dispatch.contract import DispatchPolicy, Limits
from megarl.rollout.dispatch.ordered import Ordered
from megarl.rollout.dispatch.windowed import Windowed
from megarl.settings.rollout import RolloutConfig
from megarl.types import Cursor

POLICIES: dict[str, type[DispatchPolicy]] = {"ordered": Ordered, "windowed": Windowed}
"""{value of the setting `rollout.dispatch`: class of the policy}"""


def limits_of(config: RolloutConfig, *, rejects: bool, last_step: int) -> Limits:
    """The limits that the settings `config` set to a dispatch policy, which decides when groups
    (all rollouts of a prompt) start: groups in a step, their age, and groups started at the same
    time. `rejects`: whether dynamic sampling may reject groups. `last_step`: last step of the run,
    from 0.
    """
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
    """Why a run cannot be resumed with the policy `dispatch` ("ordered" or "windowed"): a phrase
    that also says what to set; "" if it can. `cursor`: the groups (prompts with their rollouts)
    that the steps before the checkpoint have used; the policy `ordered` needs that no earlier group
    is unused.
    """
    if POLICIES[dispatch].takes_gaps or not cursor.beyond:
        return ""
    able = " or ".join(repr(name) for name, policy in POLICIES.items() if policy.takes_gaps)
    return (
        f"its run has used {len(cursor.beyond)} groups beyond group {cursor.first}, which it has"
        f" not used, and rollout.dispatch '{dispatch}' uses groups in order; set rollout.dispatch"
        f" to {able}"
    )
