"""Scores responses with all verifiers of a recipe, in worker processes and on reward servers.

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
    """Scores responses with the verifier, the weighted reward functions or the mixture of a recipe,
    in one event loop. Processes and connections start with the first response that needs them.
    """

    def __init__(self, config: EnvironmentConfig, codec: Codec | None, token: Token | None) -> None:
        """`codec`: None if all responses are texts. `token`: of the reward servers. Raises
        `ValueError` if a file of the user's is missing or a verifier's name is unknown.
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
        for. Raises `ValueError` if a verifier cannot be loaded, `RuntimeError` after `close`.
        `num_tokens`: generated; None: they are counted.
        """
        try:
            name = named_part(prompt, self._config) if self._config.mixture else ""
        except ValueError as error:
            return Outcome(failure="error", detail=str(error))
        config = self._parts[name]
        clients = {server: self.clients[server] for server in named(config) if is_remote(server)}
        if not clients:
            return await self.pool.judge(prompt, response, num_tokens)
        if not isinstance(response, str):
            num_tokens = len(response) if num_tokens is None else num_tokens
            try:
                response = await self.pool.decode(response)
            except RuntimeError as error:
                return Outcome(failure="error", detail=str(error))
        calls = {server: client.score(prompt, response) for server, client in clients.items()}
        if local(config):
            calls[""] = self.pool.judge(prompt, response, num_tokens)
        outcomes = dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
        return _total(config, outcomes) if config.rewards else outcomes[config.verifier]

    async def close(self) -> None:
        """End the worker processes and close the connections."""
        for client in self.clients.values():
            await client.close()
        await self.pool.close()


def _total(config: EnvironmentConfig, outcomes: dict[str, Outcome]) -> Outcome:
    """The weighted sum of the servers' outcomes and, under the name "", that of the worker
    processes.
    """
    weights = named(config)
    shown, first = short_names(list(weights)), next(iter(weights))
    warning = "; ".join(filter(None, [outcome.warning for outcome in outcomes.values()]))
    for name, outcome in outcomes.items():
        if outcome.failure:
            # The worker has named the function already.
            prefix = f"{shown[name]}: " if name else ""
            return replace(outcome, detail=f"{prefix}{outcome.detail}", warning=warning)
    scores = {
        name: Score(outcome.score, outcome.correct, outcome.metrics)
        for name, outcome in outcomes.items()
    }
    local_score = scores.pop("", Score(None))
    order = sorted(scores, key=lambda name: name != first)
    try:
        there = add_up([(shown[name], weights[name], scores[name]) for name in order])
        scored = [score for score in (there, local_score) if score.reward is not None]
        reward = as_reward(sum(score.reward or 0.0 for score in scored)) if scored else None
    except BadScore as error:
        detail = f"{setting_of(config)}: {error}"
        return Outcome(failure=error.failure, detail=detail, warning=warning)
    metrics = there.metrics | local_score.metrics
    if not scored:
        return Outcome(abstained=True, metrics=metrics, warning=warning)
    correct = scored[0 if is_remote(first) else -1].correct
    return Outcome(reward, correct, metrics, warning=warning)
