"""Outcomes of responses, wherever their verifiers run: in worker processes, on reward servers, or
both.

    Judge.judge(prompt, response) -> Outcome    Workers and a RewardClient for each server
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from megarl.environments.addresses import Token, is_remote
from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig
from megarl.environments.reward_client import RewardClient
from megarl.environments.scores import BadScore, Outcome, Score, add_up
from megarl.environments.verifiers import local, named, named_part, setting_of, short_names
from megarl.environments.workers import Workers
from megarl.types import Prompt


class Judge:
    """Scores responses with the verifier, the reward functions or the mixture of a recipe."""

    def __init__(
        self,
        config: EnvironmentConfig,
        codec: Codec | None,
        token: Token | None,
    ) -> None:
        """`codec`: see `Workers`. `token`: of the reward servers. Raises `ValueError`
        as `megarl.environments.verifiers.own_files` does.
        """
        self._config = config
        self.pool = Workers(config, codec)
        self.clients = {
            name: RewardClient(name, config, token) for name in named(config) if is_remote(name)
        }
        parts = config.named_parts or {"": config}
        self._parts = {
            name: _Part(
                part, self.pool, {one: self.clients[one] for one in named(part) if is_remote(one)}
            )
            for name, part in parts.items()
        }

    async def judge(
        self, prompt: Prompt, response: str | np.ndarray, num_tokens: int | None = None
    ) -> Outcome:
        """Score a response, given as text or token ids. Failures are part of the outcome;
        `ValueError` is raised only if a verifier cannot be loaded.

        `num_tokens`: tokens that the model has generated; None: the number of token ids, or
        of tokens in a text, which is unknown without a codec.
        """
        try:
            name = named_part(prompt, self._config) if self._config.mixture else ""
        except ValueError as error:
            return Outcome(failure="error", detail=str(error))
        return await self._parts[name].judge(prompt, response, num_tokens)

    async def close(self) -> None:
        """End the worker processes and the connections."""
        for client in self.clients.values():
            await client.close()
        await self.pool.close()


class _Part:
    """Scores responses with one verifier, or with several reward functions."""

    def __init__(
        self, config: EnvironmentConfig, pool: Workers, clients: dict[str, RewardClient]
    ) -> None:
        self._config, self._pool, self._clients = config, pool, clients
        self._weights, self._local = named(config), local(config)
        self._shown = short_names(list(self._weights))

    async def judge(
        self, prompt: Prompt, response: str | np.ndarray, num_tokens: int | None
    ) -> Outcome:
        """See `Judge.judge`."""
        if not self._clients:
            return await self._pool.judge(prompt, response, num_tokens)
        if not isinstance(response, str):
            num_tokens = len(response) if num_tokens is None else num_tokens
            try:
                response = await self._pool.decode(response)
            except RuntimeError as error:
                return Outcome(failure="error", detail=str(error))
        calls = [client.score(prompt, response) for client in self._clients.values()]
        if self._local:
            calls.append(self._pool.judge(prompt, response, num_tokens))
        outcomes = await asyncio.gather(*calls)
        if not self._config.rewards:
            return outcomes[0]
        return self._total(outcomes)

    def _total(self, outcomes: list[Outcome]) -> Outcome:
        """The weighted sum of the servers' outcomes and, if there are functions in worker
        processes, of theirs, which comes last and is added up already.
        """
        names = [*self._clients, ""] if self._local else [*self._clients]
        warning = "; ".join(filter(None, [one.warning for one in outcomes]))
        for name, outcome in zip(names, outcomes, strict=True):
            if outcome.failure:
                # The worker has named the function already.
                shown = f"{self._shown[name]}: " if name else ""
                return replace(outcome, detail=f"{shown}{outcome.detail}", warning=warning)
        parts = {
            name: Score(outcome.score or 0.0, outcome.correct, outcome.metrics)
            for name, outcome in zip(names, outcomes, strict=True)
        }
        here = parts.pop("", None)
        first = next(iter(self._weights))
        order = sorted(parts, key=lambda name: name != first)
        try:
            total = add_up(
                [(self._shown[name], self._weights[name], parts[name]) for name in order]
            )
            if here is not None:
                total = _together(total, here, decides=first in self._local)
        except BadScore as error:
            said = f"{setting_of(self._config)}: {error}"
            return Outcome(failure=error.failure, detail=said, warning=warning)
        return Outcome(total.reward, total.correct, total.metrics, warning=warning)


def _together(servers: Score, here: Score, *, decides: bool) -> Score:
    """The sum of two scores. `decides`: the second one says whether the response is correct."""
    sums = add_up([("", 1.0, servers), ("", 1.0, here)])
    correct = here.correct if decides else servers.correct
    return Score(sums.reward, correct, servers.metrics | here.metrics)
