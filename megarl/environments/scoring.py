"""From a finished rollout to its reward.

Environment.score(prompt, text, num_tokens, truncated) -> Verdict
reward = wrong + (correct - wrong) * score + length penalty
"""

from __future__ import annotations

from megarl.environments.config import EnvironmentConfig, OverlongConfig
from megarl.environments.pool import Outcome, VerifierPool
from megarl.environments.verifiers import load_verifier, split_name
from megarl.types import Prompt, Verdict

IN_PROCESS = frozenset({"exact_match"})  # bounded by their nature, so no process is worth its cost


def overlong_penalty(config: OverlongConfig, num_tokens: int) -> float:
    """0 up to limit - buffer tokens, then linear to -1 at the limit and beyond (arXiv:2503.14476,
    eq. 13).
    """
    if config.limit_tokens == 0:
        return 0.0
    beyond = num_tokens - (config.limit_tokens - config.buffer_tokens)
    return -min(beyond, config.buffer_tokens) / config.buffer_tokens if beyond > 0 else 0.0


class Environment:
    """A verifier, its bounds, and the reward that its verdict is worth; `score` is a
    what the rollout service calls.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        """Raises `ValueError` where the verifier's name is unknown or its file missing; `start`
        finds what is wrong inside.
        """
        self._config = config
        split_name(config.verifier)
        self._verifier = load_verifier(config) if config.verifier in IN_PROCESS else None
        self._pool = VerifierPool(config) if self._verifier is None else None

    async def start(self) -> None:
        """Load the verifier now, rather than with the first rollout; raises `ValueError` where it
        does not load.
        """
        if self._pool is not None:
            await self._pool.start()

    async def score(self, prompt: Prompt, text: str, num_tokens: int, truncated: bool) -> Verdict:
        """The verdict on a response of `num_tokens` tokens; `truncated` where the token limit cut
        it off.

        A verifier's failure is that sample's failure, never an exception. Raises `ValueError` where
        the verifier does not load at all.
        """
        config = self._config
        penalty = overlong_penalty(config.overlong, num_tokens)
        if truncated and config.require_stop:
            return Verdict(reward=config.wrong + penalty, correct=False, penalty=penalty)
        if self._verifier is not None:
            outcome = Outcome(score=await self._verifier(prompt, text))
        else:
            assert self._pool is not None
            outcome = await self._pool.judge(prompt, text)
        # Not wrong + (correct - wrong) * 1, which may miss `correct` by a rounding.
        base = (
            config.correct
            if outcome.score == 1.0
            else config.wrong + (config.correct - config.wrong) * outcome.score
        )
        return Verdict(
            reward=base + penalty,
            correct=outcome.score == 1.0,
            failure=outcome.failure,
            detail=outcome.detail,
            penalty=penalty,
        )

    async def close(self) -> None:
        """End the verifier's processes."""
        if self._pool is not None:
            await self._pool.close()
