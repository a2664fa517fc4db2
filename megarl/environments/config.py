"""Which verifier scores a rollout, how it is bounded, and how its verdict becomes a reward."""

from __future__ import annotations

from megarl.schema import config, require, require_range


@config
class OverlongConfig:
    """DAPO's soft length penalty (arXiv:2503.14476): 0 up to `limit - buffer` response tokens, then
    falling linearly to -1 at `limit`.
    """

    limit_tokens: int = 0
    """Response length at which the penalty reaches -1; 0 turns it off."""
    buffer_tokens: int = 0
    """Number of tokens before the limit over which the penalty falls from 0 to -1."""

    def __post_init__(self) -> None:
        require_range("environment.overlong.limit_tokens", self.limit_tokens, 0)
        require(
            self.limit_tokens == 0 or 0 < self.buffer_tokens <= self.limit_tokens,
            f"environment.overlong.buffer_tokens is {self.buffer_tokens}; set it between 1 and"
            f" limit_tokens ({self.limit_tokens}), or limit_tokens to 0 to turn the penalty off",
        )


@config
class EnvironmentConfig:
    """The verifier or multi-turn session, its rewards, worker processes and time limits."""

    verifier: str = "exact_match"
    """`exact_match`, `math` (boxed or final expression, compared by math-verify), or
    `path/to/file.py:function` for a user's function."""
    session: str = ""
    """`path/to/file.py:Class` for a multi-turn environment (`megarl.environments.session`); used
    instead of `verifier`."""
    answer_after: str = ""
    """`exact_match` compares only the text after the last occurrence of this marker in the
    response; if empty, the whole response."""
    correct: float = 1.0
    """Reward of a correct answer."""
    wrong: float = 0.0
    """Reward of a wrong answer, and of a rollout whose verifier failed."""
    require_stop: bool = True
    """Treat a response that was cut off at the token limit as wrong."""
    overlong: OverlongConfig = OverlongConfig()
    """Length penalty added to the reward."""
    num_workers: int = 1
    """Processes that decode responses and run the verifier or the sessions."""
    time_limit_s: float = 10.0
    """Time limit of a verifier call or session step, in seconds. Beyond it the sample counts as a
    failure (time-out); the run goes on."""
    start_limit_s: float = 60.0
    """Time limit of a session's start, in seconds; beyond it the sample counts as a failure."""

    def __post_init__(self) -> None:
        require(
            bool(self.verifier),
            "environment.verifier is empty; set 'exact_match', 'math' or 'file.py:function'",
        )
        require_range("environment.num_workers", self.num_workers, 1)
        require_range("environment.time_limit_s", self.time_limit_s, 0.01)
        require_range("environment.start_limit_s", self.start_limit_s, 0.01)
        require(
            not self.session or self.verifier == "exact_match",
            f"environment.session is '{self.session}' and environment.verifier is"
            f" '{self.verifier}', but a session scores its rollouts itself; set one of the two",
        )
