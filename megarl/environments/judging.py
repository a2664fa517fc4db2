"""Outcomes of responses, wherever their verifiers run: in worker processes, on reward servers, or
both.

    Judge.judge(prompt, response) -> Outcome    WorkerPool and a RewardClient for each server
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig, is_remote
from megarl.environments.pool import Outcome, WorkerPool
from megarl.environments.reward_client import RewardClient, Token
from megarl.environments.scores import BadScore, Score, add_up
from megarl.environments.verifiers import local, named, setting_of, short_names
from megarl.types import Prompt


class Judge:
    """Scores responses with the verifier or the reward functions of a recipe."""

    def __init__(self, config: EnvironmentConfig, codec: Codec | None, token: Token | None) -> None:
        """`codec`: see `WorkerPool`. `token`: of the reward servers. Raises `ValueError` as
        `megarl.environments.verifiers.own_files` does.
        """
        self._config = config
        self.pool = WorkerPool(config, codec)
        self._weights, self._local = named(config), local(config)
        self.clients = {
            name: RewardClient(name, config, token) for name in self._weights if is_remote(name)
        }
        self._shown = short_names(list(self._weights))

    async def judge(self, prompt: Prompt, response: str | np.ndarray) -> Outcome:
        """Score a response, given as text or token ids. Failures are part of the outcome;
        `ValueError` is raised only if a verifier cannot be loaded.
        """
        if not self.clients:
            return await self.pool.judge(prompt, response)
        if not isinstance(response, str):
            try:
                response = await self.pool.decode(response)
            except RuntimeError as error:
                return Outcome(failure="error", detail=str(error))
        calls = [client.score(prompt, response) for client in self.clients.values()]
        if self._local:
            calls.append(self.pool.judge(prompt, response))
        outcomes = await asyncio.gather(*calls)
        if not self._config.rewards:
            return outcomes[0]
        return self._total(outcomes)

    def _total(self, outcomes: list[Outcome]) -> Outcome:
        """The weighted sum of the servers' outcomes and, if there are functions in worker
        processes, of theirs, which comes last and is added up already.
        """
        names = [*self.clients, ""] if self._local else [*self.clients]
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

    async def close(self) -> None:
        """End the worker processes and the connections."""
        for client in self.clients.values():
            await client.close()
        await self.pool.close()


def _together(servers: Score, here: Score, *, decides: bool) -> Score:
    """The sum of two scores. `decides`: the second one says whether the response is correct."""
    sums = add_up([("", 1.0, servers), ("", 1.0, here)])
    correct = here.correct if decides else servers.correct
    return Score(sums.reward, correct, servers.metrics | here.metrics)
