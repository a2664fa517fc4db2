"""What a worker process of an environment replies to one request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a worker process of the environment replies to one request: the score of a response,
    the next observation of a session, or the failure of the user's code with its message.
    """

    score: float | None = None
    """What the verifier returned: from 0 (wrong) to 1 (right), or a reward of any range; None if
    there is no score."""
    correct: bool | None = None
    """Whether the response is correct; None if the verifier did not say."""
    metrics: dict[str, float] = field(default_factory=dict)
    """{name: value} of the verifier's own metrics."""
    failure: Literal["", "error", "timeout", "nan"] = ""
    detail: str = ""
    observation: list[int] | None = None
    """Token ids that the model reads next; None if the rollout has ended."""
    reward: float = 0.0
    """Reward of a session for the turn that `observation` replies to."""
    answer: str | None = None
    """Text of a session that has ended, which the recipe's verifier scores."""
    finish: Literal["", "tool_call"] = ""
    """Where the response was cut off, if inside a tool call."""
    warning: str = ""
    """What the user should know of the environment; said once."""

    @classmethod
    def of(cls, reply: Mapping[str, Any], *ends: str) -> Outcome:
        """The outcome that a worker process's reply holds: one of the fields `ends`, or a failure.
        Any other reply is a failure.
        """
        score = reply.get("score")
        known = score is None or (isinstance(score, int | float) and math.isfinite(score))
        if known and (reply.get("failure") or any(reply.get(name) is not None for name in ends)):
            try:
                return cls(**reply)
            except TypeError:
                pass
        return cls(failure="error", detail=f"the worker process replied {reply!r:.200}")
