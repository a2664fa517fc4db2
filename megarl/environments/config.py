"""Which verifier scores a rollout, how it is bounded, and how its verdict becomes a reward."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from megarl.schema import MOST_TOKENS, PathText, Range, config, require

WEIGHT = Range(-1e6, 1e6)
"""Range of the weight of a reward function."""


@config
class OverlongConfig:
    """DAPO's soft length penalty (arXiv:2503.14476): 0 up to `limit - buffer` response tokens, then
    falling linearly to -1 at `limit`.
    """

    limit_tokens: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Response length at which the penalty reaches -1; 0 turns it off."""
    buffer_tokens: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Number of tokens before the limit over which the penalty falls from 0 to -1."""

    def __post_init__(self) -> None:
        require(
            self.limit_tokens == 0 or 0 < self.buffer_tokens <= self.limit_tokens,
            f"environment.overlong.buffer_tokens is {self.buffer_tokens}; set it between 1 and"
            f" limit_tokens ({self.limit_tokens}), or limit_tokens to 0 to turn the penalty off",
        )


@config
class EnvironmentConfig:
    """The verifier or multi-turn session, its rewards, worker processes and time limits."""

    verifier: PathText = "exact_match"
    """`exact_match`, `math` (boxed or final expression, compared by math-verify),
    `path/to/file.py:function` for a user's function (docs/rewards.md), or `none` where
    `reward_models` alone give the reward."""
    rewards: Annotated[dict[str, float], WEIGHT] = dataclasses.field(default_factory=dict)
    """Several reward functions with their weights, used instead of `verifier`; for example
    `{math: 1.0, "style.py:brevity": 0.2}`. The reward is the weighted sum; the first function says
    what counts as correct."""
    session: PathText = ""
    """`path/to/file.py:Class` for a multi-turn environment (`megarl.environments.session`); used
    instead of `verifier`."""
    answer_after: str = ""
    """`exact_match` compares only the text after the last occurrence of this marker in the
    response; if empty, the whole response."""
    correct: Annotated[float, Range(-1e6, 1e6)] = 1.0
    """Reward of a correct answer."""
    wrong: Annotated[float, Range(-1e6, 1e6)] = 0.0
    """Reward of a wrong answer."""
    unscored: Annotated[float | None, Range(-1e9, 1e9)] = None
    """Reward of a rollout without a score: cut off at the token limit (`require_stop`), or its
    verifier failed. None: the reward of a wrong answer."""
    require_stop: bool = True
    """Treat a response that was cut off at the token limit as wrong."""
    overlong: OverlongConfig = OverlongConfig()
    """Length penalty added to the reward."""
    num_workers: Annotated[int, Range(1, 1024)] = 1
    """Processes that decode responses and run the verifier or the sessions."""
    time_limit_s: Annotated[float, Range(0.01, 86400.0)] = 10.0
    """Time limit of a verifier call or session step, in seconds. Beyond it the sample counts as a
    failure (time-out); the run goes on."""
    load_limit_s: Annotated[float, Range(0.1, 86400.0)] = 10.0
    """Time limit in seconds for loading the verifier's or session's file in the check before a run.
    A file that imports large libraries may need more."""
    memory_limit_mib: Annotated[int | None, Range(64, 2**24)] = None
    """Memory of a worker process in MiB (Linux); a verifier that asks for more fails. None: 512 for
    a built-in verifier, no limit for a user's file."""
    start_limit_s: Annotated[float, Range(0.01, 86400.0)] = 60.0
    """Time limit of a session's start, in seconds; beyond it the sample counts as a failure."""
    max_failure_share: Annotated[float, Range(0.0, 1.0)] = 0.5
    """The run ends if the verifier or session fails (error, time-out, no number) for at least this
    share of the responses of a step or an evaluation; 1 ends it only if all fail. A tenth of
    failures is a warning."""

    def __post_init__(self) -> None:
        require(
            bool(self.verifier),
            "environment.verifier is empty; set 'exact_match', 'math' or 'file.py:function'",
        )
        require(
            not self.session or self.verifier == "exact_match",
            f"environment.session is '{self.session}' and environment.verifier is"
            f" '{self.verifier}', but a session scores its rollouts itself; set one of the two",
        )
        require(
            not self.rewards or (self.verifier == "exact_match" and not self.session),
            "environment.rewards and environment.verifier or session are set, but each says by"
            " itself what a response is worth; set one of them (a verifier may be one of rewards)",
        )
        require(
            not self.rewards or any(self.rewards.values()) or self.overlong.limit_tokens > 0,
            f"environment.rewards weighs {', '.join(self.rewards)} with 0, so that all rewards are"
            " equal and nothing can be learned; set a weight other than 0",
        )
        require(
            not self.rewards or self.maps_no_scores,
            f"environment.correct is {self.correct:g} and environment.wrong is {self.wrong:g}, but"
            " environment.rewards adds up rewards as they are; leave both out",
        )

    @property
    def maps_no_scores(self) -> bool:
        """Whether scores are rewards: `correct` and `wrong` have their defaults. Otherwise a score
        from 0 to 1 is mapped to the range from `wrong` to `correct`.
        """
        return (self.correct, self.wrong) == (1.0, 0.0)
