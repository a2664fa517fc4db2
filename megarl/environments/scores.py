"""What a reward function may return, how several scores add up, and what a worker process replies.

    number | None | {"reward": number, "correct": bool, other names: numbers} --read_score--> Score

None abstains: the response has no reward, which is no failure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.types import Failure

MAX_REWARD = 1e9
"""Squares of larger rewards leave the range of float32."""
MAX_METRICS = 64
"""Of one reward function."""
METRIC = re.compile(r"[\w .%+@-][\w .%+@/-]{0,63}")
DETAIL_CHARACTERS = 2000
"""Most characters of a failure's message."""
Reply = dict[str, Any]
"""JSON data: {score, correct, metrics}, {observation, reward}, {answer, metrics}, {abstained,
metrics}, {failure, detail}, or of other requests other keys."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one response; a reward function may return one."""

    reward: float | None
    correct: bool | None = None
    """None if the function did not say."""
    metrics: dict[str, float] = field(default_factory=dict)


class BadScore(ValueError):
    """Raised if a user's function returned no score, or nothing in time; `failure` says which."""

    def __init__(self, failure: Failure, message: str) -> None:
        super().__init__(message)
        self.failure: Failure = failure


def read_score(answer: Any) -> Score:
    """What a reward function returned (numbers of Python, numpy or torch) as a `Score`. Raises
    `BadScore`.
    """
    if isinstance(answer, Score):
        return answer
    if not isinstance(answer, Mapping):
        return Score(None if answer is None else as_reward(answer))
    rest = dict(answer)
    if "reward" not in rest:
        keys = ", ".join(map(str, rest)) or "nothing"
        raise BadScore(
            "error",
            f"the verifier returned a dict with {keys:.200}, but without 'reward'; add that key",
        )
    raw, correct = rest.pop("reward"), _correct(rest.pop("correct", None))
    reward = None if raw is None else as_reward(raw)
    if len(rest) > MAX_METRICS:
        raise BadScore(
            "error", f"the verifier returned {len(rest)} metrics; return at most {MAX_METRICS}"
        )
    metrics = {}
    for name, value in rest.items():
        if not isinstance(name, str) or not METRIC.fullmatch(name):
            raise BadScore(
                "error",
                f"the verifier returned a metric named {name!r:.100}; use letters, digits and"
                " _ - . / in at most 64 characters",
            )
        number = _number(value)
        if not math.isfinite(number):
            raise BadScore(
                "nan",
                f"the verifier returned {value!r:.100} for metric '{name}', not a finite number",
            )
        metrics[name] = number
    return Score(reward, correct, metrics)


def add_up(parts: Sequence[tuple[str, float, Score]]) -> Score:
    """The weighted sum of several scores of one response. `parts`: (name, weight, score), at least
    one. Those that abstain are left out, as in TRL; it abstains if all do. The first of the others
    says whether the response is correct, by `correct` or a reward of 1. Metrics are
    `reward/<name>`, unweighted, and `<name>/<metric>`. Raises as `as_reward`.
    """
    metrics: dict[str, float] = {}
    terms, correct = list[float](), None
    for name, weight, score in parts:
        metrics |= {f"{name}/{key}": value for key, value in score.metrics.items()}
        if score.reward is None:
            continue
        metrics[f"reward/{name}"] = score.reward
        if not terms:
            correct = score.reward == 1.0 if score.correct is None else score.correct
        terms.append(weight * score.reward)
    return Score(as_reward(math.fsum(terms)) if terms else None, correct, metrics)


def as_reward(value: Any) -> float:
    """A number of Python, numpy or torch as a float. Raises `BadScore` unless it is finite and at
    most 1e9 in size.
    """
    number = _number(value)
    if not math.isfinite(number):
        raise BadScore("nan", f"the verifier returned {value!r:.200}, not a finite number")
    if abs(number) > MAX_REWARD:
        raise BadScore(
            "error",
            f"the verifier returned {number:g}; return a reward between {-MAX_REWARD:g} and"
            f" {MAX_REWARD:g}",
        )
    return number


def _correct(value: Any) -> bool | None:
    number = _number(value)
    if value is not None and number not in (0.0, 1.0):
        raise BadScore(
            "error",
            f"the verifier returned {value!r:.100} for 'correct'; return True, False or None",
        )
    return None if value is None else bool(number)


def as_number(value: Any) -> float | None:
    """A number of Python, numpy or torch as a float; None for anything else; NaN if it is too
    large.
    """
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except OverflowError:
        return math.nan
    except (TypeError, ValueError, RuntimeError):  # the last of a tensor of several elements
        return None


def _number(value: Any) -> float:
    number = as_number(value)
    return math.nan if number is None else number


def late_verdict(limit_s: float) -> str:
    return f"no verdict within environment.time_limit_s = {limit_s:g} s"


def score_reply(answer: Any, *, maps_scores: bool = False) -> Reply:
    """A verifier's or session's answer as a reply. `maps_scores`: a score outside of 0 to 1 is a
    failure, as `environment.correct` and `environment.wrong` map scores to rewards.
    """
    try:
        score = read_score(answer)
        if score.reward is None:
            return {"abstained": True, "metrics": score.metrics}
        if maps_scores and not 0.0 <= score.reward <= 1.0:
            raise BadScore(
                "error",
                f"the verifier returned {score.reward:g}, but environment.correct and"
                " environment.wrong map scores from 0 (wrong) to 1 (right); leave both out to use"
                " rewards as they are",
            )
    except BadScore as error:
        return {"failure": error.failure, "detail": str(error)[:DETAIL_CHARACTERS]}
    return {"score": score.reward, "correct": score.correct, "metrics": score.metrics}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one request to a worker process or reward server, in the fields that apply."""

    score: float | None = None
    """From 0 (wrong) to 1 (right), or a reward of any range."""
    correct: bool | None = None
    """None if the verifier did not say."""
    metrics: dict[str, float] = field(default_factory=dict)
    failure: Failure = ""
    detail: str = ""
    abstained: bool = False
    """Whether the verifier returned None."""
    observation: list[int] | None = None
    """Token ids that the model reads next; None at the end."""
    reward: float = 0.0
    """Of the turn that `observation` replies to."""
    follows: int | None = None
    """See `megarl.environments.session.Observation`."""
    max_tokens: int = 0
    """Of the model's next turn; 0: no limit but the rollout's."""
    stop: Sequence[str] = ()
    """Texts at which the model's next turn ends."""
    answer: str | None = None
    """Final text of a session, for the recipe's verifier."""
    finish: Literal["", "tool_call"] = ""
    """"tool_call" if the response was cut off inside a tool call."""
    warning: str = ""
    """What the user should know, in one outcome only."""
    untrained: Sequence[int] = ()
    """At the end of a session, segments that are not trained."""
    lost: bool = False
    """Whether the session's process has ended, through whatever ran in it."""

    @classmethod
    def of(cls, reply: Reply) -> Outcome:
        """A worker process's `reply`. One without a result, or with unknown keys, becomes a failure
        "error".
        """
        score = reply.get("score")
        known = score is None or (isinstance(score, int | float) and math.isfinite(score))
        ends = ("failure", "score", "abstained", "observation", "answer", "finish")
        if known and any(reply.get(name) is not None for name in ends):
            try:
                return cls(**reply)
            except TypeError:
                pass
        return cls(failure="error", detail=f"the worker process replied {reply!r:.200}")
