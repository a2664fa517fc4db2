"""What the environment replies to the model's turn: an observation, or the verdict with its reward.

Environment.step(key, prompt, segment) -> Segment | Verdict
reward = wrong + (correct - wrong) * score + length penalty
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.environments.codec import Codec
from megarl.environments.judging import Judge
from megarl.environments.response_text import TAGS, with_tags, without_opening
from megarl.environments.scores import Outcome
from megarl.environments.workers import Workers
from megarl.settings.addresses import Token, read_token
from megarl.settings.environments import EnvironmentConfig, OverlongConfig
from megarl.types import Prompt, Segment, TokenArrays, Verdict


def overlong_penalty(config: OverlongConfig, num_tokens: int) -> float:
    """DAPO's length penalty (arXiv:2503.14476, eq. 13): 0 up to limit - buffer tokens, falling
    linearly to -1 at the limit. Without a limit 0.
    """
    if config.limit_tokens == 0:
        return 0.0
    beyond = num_tokens - (config.limit_tokens - config.buffer_tokens)
    return -min(beyond, config.buffer_tokens) / config.buffer_tokens if beyond > 0 else 0.0


def client_token(config: EnvironmentConfig) -> Token | None:
    """The bearer token for reward servers, if `environment.remote.token_variable` names one. Raises
    `ValueError` if that variable is not set.
    """
    return read_token(config.remote.token_variable, "environment.remote.token_variable")


class Environment:
    """Scores the rollouts of a run with the recipe's verifier or session. `start` once; for each
    rollout `begin` (if `has_start`), `step` for each turn, `cut_off` at a limit; `close` at the
    end. For one event loop.
    """

    def __init__(
        self, config: EnvironmentConfig, codec: Codec | None = None, token: Token | None = None
    ) -> None:
        """`codec`: for sessions, and responses given as token ids. `token`: None: see
        `client_token`. Raises `ValueError` as it does, and if the verifier's name is unknown or its
        file is missing.
        """
        config = with_tags(config, codec.thinking if codec else TAGS)
        self._config = config
        token = token or client_token(config)
        self._judge = Judge(config.without_sessions(), codec, token)
        self._sessions = Workers(config, codec) if config.has_sessions else None
        self.has_start = self._sessions is not None

    async def start(self, *, within_s: float | None = None) -> None:
        """Load the verifier or session class before the first rollout. Raises as `Worker.load`."""
        if self._sessions is not None:
            await self._sessions.start(within_s)
        if self._config.needs_verifier:
            await self._judge.pool.start(within_s)

    @property
    def thinking(self) -> tuple[str, ...] | None:
        """(opening, closing) tag around thinking, which verifiers do not read; None: they read
        all.
        """
        return self._config.thinking

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The recipe's tools, in OpenAI's format; empty before `start`."""
        return self._sessions.tools if self._sessions is not None else []

    @property
    def forms(self) -> dict[str, str]:
        """{reward function: TRL's or verl's signature that was recognised}; empty before
        `start`.
        """
        return self._judge.pool.forms

    async def begin(self, key: str, prompt: Prompt) -> Segment | Verdict | None:
        """Start the session of rollout `key`, which no other open rollout has. Returns what the
        model reads after the prompt, maybe None, or the verdict of a session that could not start.
        """
        assert self._sessions is not None
        outcome = await self._sessions.begin(key, prompt)
        if outcome.observation is None:
            return replace(self._verdict(outcome, 0), left_out=True)  # nothing to train on
        return _segment(outcome) if outcome.observation else None

    async def step(
        self, key: str, prompt: Prompt, segment: Segment, *, num_tokens: int
    ) -> Segment | Verdict:
        """Reply to the model's turn `segment` in rollout `key`. `num_tokens`: generated in the
        whole rollout, for the length penalty.
        """
        truncated = segment.finish == "length"
        token_ids = segment.arrays.token_ids
        if self._sessions is None:
            return await self.score(prompt, token_ids, num_tokens, truncated)
        if truncated and self._config.require_stop and not self._config.agent.is_used:
            outcome = await self._sessions.cut_off(key, token_ids)
            return replace(self._no_verdict(num_tokens), finish=outcome.finish)
        outcome = await self._sessions.step(key, token_ids)
        if outcome.observation is not None:
            return _segment(outcome)
        if outcome.answer is not None:
            if self._config.session:  # whose answer need not be what the model wrote
                prompt = without_opening(prompt, self._config.thinking)
            verdict = await self.score(prompt, outcome.answer, num_tokens, truncated=False)
            metrics = outcome.metrics | verdict.metrics
            warning = "; ".join(filter(None, [outcome.warning, verdict.warning]))
            return replace(verdict, metrics=metrics, untrained=outcome.untrained, warning=warning)
        return self._verdict(outcome, num_tokens)

    async def cut_off(self, key: str, num_tokens: int, fault: str = "") -> Verdict:
        """End rollout `key` at a limit of tokens or turns, without asking the verifier: the reward
        is `environment.unscored`, or that of a wrong answer, plus the length penalty. `fault`: what
        the session did wrong: a failure.
        """
        if self._sessions is not None:
            ended = await self._sessions.cut_off(key)
            if not fault:
                return replace(self._no_verdict(num_tokens), untrained=ended.untrained)
        if fault:
            return self._verdict(Outcome(failure="error", detail=fault), num_tokens)
        return self._no_verdict(num_tokens)

    async def texts(self, segments: Sequence[Segment]) -> list[str]:
        """The texts of parts of a rollout, without special tokens. Raises `RuntimeError` if
        decoding fails.
        """
        pool = self._sessions or self._judge.pool
        parts = (pool.decode(segment.arrays.token_ids) for segment in segments)
        return list(await asyncio.gather(*parts))

    async def score(
        self, prompt: Prompt, response: str | np.ndarray, num_tokens: int, truncated: bool
    ) -> Verdict:
        """Score a response, a text or token ids [T] int32; a verifier's failure is in the verdict.
        `num_tokens`: generated; 0 for a text of another origin. `truncated`: at the token limit;
        with `environment.require_stop` it is then wrong without asking. Raises `ValueError` only if
        the verifier does not load.
        """
        if truncated and self._config.require_stop:
            return self._no_verdict(num_tokens)
        outcome = await self._judge.judge(prompt, response, num_tokens or None)
        return self._verdict(outcome, num_tokens)

    def _no_verdict(self, num_tokens: int) -> Verdict:
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
            untrained=outcome.untrained,
            lost=outcome.lost,
            left_out=outcome.abstained
            or (config.on_failure == "leave_out" and outcome.failure not in ("", "response_limit")),
        )

    async def close(self) -> None:
        if self._sessions is not None:
            await self._sessions.close()
        await self._judge.close()


def _segment(outcome: Outcome) -> Segment:
    segment = observed(outcome.observation or [], outcome.reward)
    return replace(
        segment, follows=outcome.follows, max_next=outcome.max_tokens, stop_next=tuple(outcome.stop)
    )


def observed(token_ids: Sequence[int], reward: float = 0.0) -> Segment:
    """A segment of token ids that the model reads, with log-probs 0. `reward`: of the model's turn
    before.
    """
    arrays = TokenArrays(
        np.asarray(token_ids, dtype=np.int32), np.zeros(len(token_ids), dtype=np.float32)
    )
    return Segment("environment", len(token_ids), arrays, reward=reward)
