"""From what the model wrote to what follows: an observation, or the verdict with its reward.

Environment.step(rollout, prompt, segment) -> Segment | Verdict
reward = wrong + (correct - wrong) * score + length penalty; with the defaults (1 and 0) the
score is the reward
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.environments.addresses import Token, read_token
from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig, OverlongConfig
from megarl.environments.judging import Judge
from megarl.environments.response_text import TAGS, with_tags, without_opening
from megarl.environments.scores import Outcome
from megarl.environments.workers import Workers
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
        config = with_tags(config, codec.thinking if codec else TAGS)
        self._config = config
        token = token or client_token(config)
        self._judge = Judge(config.without_sessions(), codec, token)
        self._sessions = Workers(config, codec) if config.has_sessions else None
        self.has_start = self._sessions is not None

    async def start(self, *, within_s: float | None = None) -> None:
        """Load the verifier before the first rollout; raises `ValueError` if it does not load, or
        takes longer than `within_s` seconds (None: two minutes, since a run's processes start
        beside it).
        """
        if self._sessions is not None:
            await self._sessions.start(within_s)
        if self._config.needs_verifier:
            await self._judge.pool.start(within_s)

    @property
    def thinking(self) -> tuple[str, ...] | None:
        """The tags around a model's thinking; None if responses are read whole."""
        return self._config.thinking

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The recipe's tools once the environment has started, as
        `megarl.apps.tools.tool.Schema`; empty if there are none.
        """
        return self._sessions.tools if self._sessions is not None else []

    @property
    def forms(self) -> dict[str, str]:
        """{name of a reward function: its form}, where that is another library's, once the
        environment has started; see `megarl.environments.signatures`.
        """
        return self._judge.pool.forms

    async def begin(self, key: str, prompt: Prompt) -> Segment | Verdict | None:
        """See `megarl.rollout.attempts.EnvironmentHandle`."""
        assert self._sessions is not None
        outcome = await self._sessions.begin(key, prompt)
        if outcome.observation is None:
            return self._verdict(outcome, 0)
        return observed(outcome.observation, outcome.reward) if outcome.observation else None

    async def step(
        self, key: str, prompt: Prompt, segment: Segment, *, num_tokens: int
    ) -> Segment | Verdict:
        """See `megarl.rollout.attempts.EnvironmentHandle`."""
        truncated = segment.finish == "length"
        token_ids = segment.arrays.token_ids
        if self._sessions is None:
            return await self.score(prompt, token_ids, num_tokens, truncated)
        if truncated and self._config.require_stop:
            outcome = await self._sessions.cut_off(key, token_ids)
            return replace(self._no_verdict(num_tokens), finish=outcome.finish)
        outcome = await self._sessions.step(key, token_ids)
        if outcome.observation is not None:
            return observed(outcome.observation, outcome.reward)
        if outcome.answer is not None:
            if self._config.session:  # whose answer need not be what the model wrote
                prompt = without_opening(prompt, self._config.thinking)
            verdict = await self.score(prompt, outcome.answer, num_tokens, truncated=False)
            return replace(verdict, metrics=outcome.metrics | verdict.metrics)
        return self._verdict(outcome, num_tokens)

    async def cut_off(self, key: str, num_tokens: int) -> Verdict:
        """See `megarl.rollout.attempts.EnvironmentHandle`. The rollout gets the reward of a wrong
        answer.
        """
        if self._sessions is not None:
            await self._sessions.cut_off(key)
        return self._no_verdict(num_tokens)

    async def texts(self, segments: Sequence[Segment]) -> list[str]:
        """See `megarl.rollout.attempts.EnvironmentHandle`."""
        pool = self._sessions or self._judge.pool
        parts = (pool.decode(part.arrays.token_ids) for part in segments)
        return list(await asyncio.gather(*parts))

    async def score(
        self, prompt: Prompt, response: str | np.ndarray, num_tokens: int, truncated: bool
    ) -> Verdict:
        """Score a response, given as text or token ids, and return the verdict with its reward.
        `num_tokens`: tokens that the model has generated; 0 for a text of another origin.
        `truncated`: the response was cut off at the token limit.

        If the verifier fails, the verdict says so and nothing is raised. Raises `ValueError` only
        if the verifier does not load.
        """
        if truncated and self._config.require_stop:
            return self._no_verdict(num_tokens)
        outcome = await self._judge.judge(prompt, response, num_tokens or None)
        return self._verdict(outcome, num_tokens)

    def _no_verdict(self, num_tokens: int) -> Verdict:
        """The verdict on a rollout that was cut off, for which no verifier is asked."""
        return replace(self._verdict(Outcome(), num_tokens), judged=False)

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
        if self._sessions is not None:
            await self._sessions.close()
        await self._judge.close()


def observed(token_ids: Sequence[int], reward: float = 0.0) -> Segment:
    """A segment of kind "environment" with `token_ids`, which the model reads and is not trained
    on. `reward`: of the model segment before it.
    """
    arrays = TokenArrays(
        np.asarray(token_ids, dtype=np.int32), np.zeros(len(token_ids), dtype=np.float32)
    )
    return Segment("environment", len(token_ids), arrays, reward=reward)
