"""From what the model wrote to what follows: an observation, or the verdict with its reward.

Environment.step(rollout, prompt, segment) -> Segment | Verdict
reward = wrong + (correct - wrong) * score + length penalty; with the defaults (1 and 0) the
score is the reward
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig, OverlongConfig
from megarl.environments.judging import Judge
from megarl.environments.pool import Outcome
from megarl.environments.reward_client import Token, read_token
from megarl.types import Prompt, Segment, TokenArrays, Verdict


def overlong_penalty(config: OverlongConfig, num_tokens: int) -> float:
    """DAPO's length penalty (arXiv:2503.14476, eq. 13): 0 up to limit - buffer tokens, then falling
    linearly to -1 at the limit; -1 beyond.
    """
    if config.limit_tokens == 0:
        return 0.0
    beyond = num_tokens - (config.limit_tokens - config.buffer_tokens)
    return -min(beyond, config.buffer_tokens) / config.buffer_tokens if beyond > 0 else 0.0


def client_token(config: EnvironmentConfig) -> Token | None:
    """The token for the recipe's reward servers, from this process's environment variables; None if
    the recipe names none. Raises `ValueError` if the variable is not set.
    """
    return read_token(config.remote.token_variable, "environment.remote.token_variable")


class Environment:
    """Scores rollouts with a verifier or session class and converts scores to rewards. Implements
    `megarl.rollout.attempts.EnvironmentHandle` for token arrays in this process.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        codec: Codec | None = None,
        token: Token | None = None,
    ) -> None:
        """`codec` is required for sessions, and for responses given as token ids. `token` is for
        reward servers; None: what `environment.remote.token_variable` names is read.

        Raises `ValueError` if the verifier's name is unknown or its file is missing, or the token's
        variable is not set. Errors inside the file are found by `start`.
        """
        self._config = config
        self._judge = Judge(config, codec, token or client_token(config))
        self.has_start = bool(config.session)

    async def start(self, *, within_s: float | None = None) -> None:
        """Load the verifier before the first rollout; raises `ValueError` if it does not load, or
        takes longer than `within_s` seconds (None: two minutes, since a run's processes start
        beside it).
        """
        await self._judge.pool.start(within_s)

    async def begin(self, key: str, prompt: Prompt) -> Segment | Verdict | None:
        """See `megarl.rollout.attempts.EnvironmentHandle`."""
        outcome = await self._judge.pool.begin(key, prompt)
        if outcome.observation is None:
            return self._verdict(outcome, 0)
        return observed(outcome.observation) if outcome.observation else None

    async def step(
        self, key: str, prompt: Prompt, segment: Segment, *, num_tokens: int
    ) -> Segment | Verdict:
        """See `megarl.rollout.attempts.EnvironmentHandle`."""
        truncated = segment.finish == "length"
        token_ids = segment.arrays.token_ids
        if not self.has_start:
            return await self.score(prompt, token_ids, num_tokens, truncated)
        if truncated and self._config.require_stop:
            return await self.cut_off(key, num_tokens)
        outcome = await self._judge.pool.step(key, token_ids)
        if outcome.observation is not None:
            return observed(outcome.observation)
        return self._verdict(outcome, num_tokens)

    async def cut_off(self, key: str, num_tokens: int) -> Verdict:
        """See `megarl.rollout.attempts.EnvironmentHandle`. The rollout gets the reward of a wrong
        answer.
        """
        await self._judge.pool.end(key)
        return replace(self._verdict(Outcome(), num_tokens), judged=False)

    async def texts(self, segments: Sequence[Segment]) -> list[str]:
        """See `megarl.rollout.attempts.EnvironmentHandle`."""
        parts = (self._judge.pool.decode(part.arrays.token_ids) for part in segments)
        return list(await asyncio.gather(*parts))

    async def score(
        self, prompt: Prompt, response: str | np.ndarray, num_tokens: int, truncated: bool
    ) -> Verdict:
        """Score a response, given as text or token ids, and return the verdict with its reward.
        `num_tokens`: length of the response. `truncated`: the response was cut off at the token
        limit.

        If the verifier fails, the verdict says so and nothing is raised. Raises `ValueError` only
        if the verifier does not load.
        """
        if truncated and self._config.require_stop:
            return replace(self._verdict(Outcome(), num_tokens), judged=False)
        return self._verdict(await self._judge.judge(prompt, response), num_tokens)

    def _verdict(self, outcome: Outcome, num_tokens: int) -> Verdict:
        config = self._config
        penalty = overlong_penalty(config.overlong, num_tokens)
        score = outcome.score
        if score is None:
            base = config.wrong if config.unscored is None else config.unscored
        elif score == 1.0:
            # Not wrong + (correct - wrong) * 1, which may miss `correct` by a rounding.
            base = config.correct
        else:
            base = config.wrong + (config.correct - config.wrong) * score
        return Verdict(
            reward=base + penalty,
            correct=score == 1.0 if outcome.correct is None else outcome.correct,
            failure=outcome.failure,
            detail=outcome.detail,
            penalty=penalty,
            metrics=outcome.metrics,
            warning=outcome.warning,
        )

    async def close(self) -> None:
        """End the worker processes and the connections to reward servers."""
        await self._judge.close()


def observed(token_ids: Sequence[int]) -> Segment:
    """A segment of kind "environment" with `token_ids`, which the model reads and is not trained
    on.
    """
    arrays = TokenArrays(
        np.asarray(token_ids, dtype=np.int32), np.zeros(len(token_ids), dtype=np.float32)
    )
    return Segment("environment", len(token_ids), arrays)
