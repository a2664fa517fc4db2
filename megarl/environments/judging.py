"""Scores responses with all verifiers of a recipe, wherever these run: in worker processes, on
reward servers, or both.

    Judge.judge(prompt, response) -> Outcome    by Workers, and a RewardClient for each server
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from megarl.environments.codec import Codec
from megarl.environments.reward_client import RewardClient
from megarl.environments.scores import BadScore, Outcome, Score, add_up, as_reward
from megarl.environments.verifiers import local, named, named_part, setting_of, short_names
from megarl.environments.workers import Workers
from megarl.settings.addresses import Token, is_remote
from megarl.settings.environments import EnvironmentConfig
from megarl.types import Prompt


class Judge:
    """Scores responses with the verifier, the weighted reward functions or the mixture of verifiers
    of the section `environment` of a recipe (`config`). `await judge(...)` for each response,
    `await close()` at the end, all in one event loop. Worker processes and connections to reward
    servers start with the first response that needs them. `codec` decodes responses given as token
    ids.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        codec: Codec | None,
        token: Token | None,
    ) -> None:
        """`codec` decodes responses that are given as token ids; None if all are texts. `token`:
        bearer token of the reward servers, or None. Raises `ValueError` if a file of the user's is
        missing or a verifier's name is unknown.
        """
        self._config = config
        self.pool = Workers(config, codec)
        self.clients = {
            name: RewardClient(name, config, token) for name in named(config) if is_remote(name)
        }
        self._parts = config.named_parts

    async def judge(
        self, prompt: Prompt, response: str | np.ndarray, num_tokens: int | None = None
    ) -> Outcome:
        """Score one response, a text or token ids [T] int32, with the verifier that `prompt` asks
        for. Returns an `Outcome`: `score` (higher is better), `correct` and `metrics`, or, after an
        error or time-out, `failure` and `detail`. Raises `ValueError` only if a verifier cannot be
        loaded, `RuntimeError` after `close`.

        `num_tokens`: tokens that the model has generated; None: the number of token ids or, if a
        codec was given, of tokens in the text.
        """
        try:
            name = named_part(prompt, self._config) if self._config.mixture else ""
        except ValueError as error:
            return Outcome(failure="error", detail=str(error))
        config = self._parts[name]
        clients = {one: self.clients[one] for one in named(config) if is_remote(one)}
        if not clients:
            return await self.pool.judge(prompt, response, num_tokens)
        if not isinstance(response, str):
            num_tokens = len(response) if num_tokens is None else num_tokens
            try:
                response = await self.pool.decode(response)
            except RuntimeError as error:
                return Outcome(failure="error", detail=str(error))
        calls = {one: client.score(prompt, response) for one, client in clients.items()}
        if local(config):
            calls[""] = self.pool.judge(prompt, response, num_tokens)
        outcomes = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
        return _total(config, outcomes) if config.rewards else outcomes[config.verifier]

    async def close(self) -> None:
        """End the worker processes and close the connections to reward servers."""
        for client in self.clients.values():
            await client.close()
        await self.pool.close()


def _total(config: EnvironmentConfig, outcomes: dict[str, Outcome]) -> Outcome:
    """The weighted sum of the servers' outcomes and, under the name "", those of the functions in
    worker processes, which are added up already.
    """
    weights = named(config)
    shown, first = short_names(list(weights)), next(iter(weights))
    warning = "; ".join(filter(None, [one.warning for one in outcomes.values()]))
    for name, outcome in outcomes.items():
        if outcome.failure:
            # The worker has named the function already.
            place = f"{shown[name]}: " if name else ""
            return replace(outcome, detail=f"{place}{outcome.detail}", warning=warning)
    scores = {
        name: Score(outcome.score, outcome.correct, outcome.metrics)
        for name, outcome in outcomes.items()
    }
    here = scores.pop("", Score(None))
    order = sorted(scores, key=lambda name: name != first)
    try:
        there = add_up([(shown[name], weights[name], scores[name]) for name in order])
        given = [one for one in (there, here) if one.reward is not None]
        reward = as_reward(sum(one.reward or 0.0 for one in given)) if given else None
    except BadScore as error:
        said = f"{setting_of(config)}: {error}"
        return Outcome(failure=error.failure, detail=said, warning=warning)
    metrics = there.metrics | here.metrics
    if not given:
        return Outcome(abstained=True, metrics=metrics, warning=warning)
    correct = given[0 if is_remote(first) else -1].correct
    return Outcome(reward, correct, metrics, warning=warning)
