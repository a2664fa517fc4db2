"""What the environment replies to the model's turn in a rollout: an observation, or the verdict
with its reward.

    Environment.step(key, prompt, segment) -> Segment | Verdict
    reward = wrong + (correct - wrong) * score + length penalty

With the default settings correct = 1 and wrong = 0 the score is the reward.
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
    """DAPO's length penalty (arXiv:2503.14476, eq. 13) of a response of `num_tokens` tokens: 0 up
    to limit - buffer tokens (`config.limit_tokens`, `config.buffer_tokens`), then falling linearly
    to -1 at the limit, and -1 beyond. 0 if `config.limit_tokens` is 0.
    """
    if config.limit_tokens == 0:
        return 0.0
    beyond = num_tokens - (config.limit_tokens - config.buffer_tokens)
    return -min(beyond, config.buffer_tokens) / config.buffer_tokens if beyond > 0 else 0.0


def client_token(config: EnvironmentConfig) -> Token | None:
    """The bearer token for the recipe's reward servers, read from the environment variable of this
    process that `environment.remote.token_variable` names; None if the recipe names none. Raises
    `ValueError` if the variable is not set.
    """
    return read_token(config.remote.token_variable, "environment.remote.token_variable")


class Environment:
    """Scores the rollouts of a run: calls the recipe's verifier or its session (a multi-turn
    environment) for each turn, and turns scores into rewards. `await start()` once; then for each
    rollout `begin` (only if `has_start` is true, as with sessions), `step` for each turn of the
    model, `cut_off` if a limit is reached; `close` at the end. All calls are from one event loop;
    verifiers run in worker processes.
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
        """Load the verifier or session class in a worker process, before the first rollout. Raises
        `ValueError` if loading fails or takes more than `within_s` seconds; None: two minutes, or
        `environment.load_limit_s` if that is longer.
        """
        if self._sessions is not None:
            await self._sessions.start(within_s)
        if self._config.needs_verifier:
            await self._judge.pool.start(within_s)

    @property
    def thinking(self) -> tuple[str, ...] | None:
        """(opening, closing) tag around a model's thinking, which verifiers do not read; None if
        responses are read whole.
        """
        return self._config.thinking

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools of the recipe (`environment.tools`) that the model may call, each in OpenAI's
        format: {"type": "function", "function": {name, description, parameters}}. Known after
        `start`; empty before, and if the recipe has none.
        """
        return self._sessions.tools if self._sessions is not None else []

    @property
    def forms(self) -> dict[str, str]:
        """The reward functions that are written for another library, TRL or verl: {function as the
        recipe writes it: signature that was recognised, such as "TRL's f(completions, ...)"}. Empty
        before `start`.
        """
        return self._judge.pool.forms

    async def begin(self, key: str, prompt: Prompt) -> Segment | Verdict | None:
        """Start the session of rollout `key`, a text that no other open rollout has. Call it only
        if `has_start`, before the model's first turn. Returns a `Segment` of token ids that the
        model reads after the prompt, None if there is nothing to read, or the `Verdict` (reward,
        failure) of a session that could not start.
        """
        assert self._sessions is not None
        outcome = await self._sessions.begin(key, prompt)
        if outcome.observation is None:
            return replace(self._verdict(outcome, 0), left_out=True)  # nothing to train on
        return _segment(outcome) if outcome.observation else None

    async def step(
        self, key: str, prompt: Prompt, segment: Segment, *, num_tokens: int
    ) -> Segment | Verdict:
        """Reply to the model's latest turn, `segment` (its token ids and why it ended), in rollout
        `key`. Returns a `Segment` of kind "environment", token ids that the model reads next, or
        the `Verdict` that ends the rollout: reward, whether correct, and any failure of the
        verifier or session. `num_tokens`: tokens that the model has generated in the whole rollout,
        for the length penalty.
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
            told = outcome.metrics | verdict.metrics
            warning = "; ".join(filter(None, [outcome.warning, verdict.warning]))
            return replace(verdict, metrics=told, untrained=outcome.untrained, warning=warning)
        return self._verdict(outcome, num_tokens)

    async def cut_off(self, key: str, num_tokens: int, fault: str = "") -> Verdict:
        """End the session of rollout `key`, which has reached a limit of tokens or turns. Returns a
        `Verdict` without asking the verifier. Its reward is `environment.unscored`, or that of a
        wrong answer where the recipe does not set this, plus the length penalty for `num_tokens`,
        the tokens that the model generated. `fault`: what the session did wrong, which makes it a
        failure.
        """
        if self._sessions is not None:
            ended = await self._sessions.cut_off(key)
            if not fault:
                return replace(self._no_verdict(num_tokens), untrained=ended.untrained)
        if fault:
            return self._verdict(Outcome(failure="error", detail=fault), num_tokens)
        return self._no_verdict(num_tokens)

    async def texts(self, segments: Sequence[Segment]) -> list[str]:
        """The texts of `segments`, parts of a rollout that hold token ids, one for each, without
        special tokens; decoded in worker processes. Raises `RuntimeError` if decoding fails.
        """
        pool = self._sessions or self._judge.pool
        parts = (pool.decode(part.arrays.token_ids) for part in segments)
        return list(await asyncio.gather(*parts))

    async def score(
        self, prompt: Prompt, response: str | np.ndarray, num_tokens: int, truncated: bool
    ) -> Verdict:
        """Score a response to `prompt`, a text or token ids [T] int32. Returns a `Verdict`:
        `reward`, whether `correct`, and `failure` if the verifier failed, for which nothing is
        raised. `num_tokens`: tokens that the model has generated; 0 for a text of another origin.
        `truncated`: the response was cut off at the token limit, so that with
        `environment.require_stop` it counts as wrong and no verifier is asked.

        Raises `ValueError` only if the verifier does not load.
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
            untrained=outcome.untrained,
            lost=outcome.lost,
            left_out=outcome.abstained
            or (config.on_failure == "leave_out" and outcome.failure not in ("", "response_limit")),
        )

    async def close(self) -> None:
        """End the worker processes and the connections to reward servers. Nothing can be scored
        afterwards.
        """
        if self._sessions is not None:
            await self._sessions.close()
        await self._judge.close()


def _segment(outcome: Outcome) -> Segment:
    """The segment of a session's observation."""
    found = observed(outcome.observation or [], outcome.reward)
    return replace(
        found,
        follows=outcome.follows,
        max_next=outcome.max_tokens,
        stop_next=tuple(outcome.stop),
    )


def observed(token_ids: Sequence[int], reward: float = 0.0) -> Segment:
    """A segment of kind "environment" with `token_ids`, [T], which the model reads and is not
    trained on; its log-probs are 0. `reward`: the reward of the model's turn before it.
    """
    arrays = TokenArrays(
        np.asarray(token_ids, dtype=np.int32), np.zeros(len(token_ids), dtype=np.float32)
    )
    return Segment("environment", len(token_ids), arrays, reward=reward)
