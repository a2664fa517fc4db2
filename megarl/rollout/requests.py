"""Requests to the engines: spread over them, each with a deadline, asked again where an engine is
lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megarl.errors import EngineLost
from megarl.rollout.config import RolloutConfig
from megarl.types import Prompt, Segment

REPLACEMENT_POLL_S = 0.2
"""Seconds between two checks whether a dead engine has been replaced."""


class EngineHandle(Protocol):
    """Interface that the rollout service needs of an engine, in this process or a remote one."""

    async def generate(
        self,
        prompt_ids: np.ndarray,
        segments: Sequence[Segment],
        *,
        seed: int,
        max_tokens: int,
        temperature: float,
    ) -> Segment:
        """Generate the model segment that follows the prompt ([P] int32) and the earlier
        `segments`, of at most `max_tokens` tokens. Raises `EngineLost` if a process of the engine
        is dead.
        """
        ...


@dataclass
class Route:
    """The engine that a rollout's requests go to. Its later turns find their tokens in that
    engine's cache.
    """

    engine: int | None = None
    """Number of the engine; None before the first request."""


class EnginePool:
    """All engines of a run. The first request of a rollout goes to the engine with the fewest open
    requests, its later ones to the same engine.
    """

    def __init__(self, engines: Sequence[EngineHandle], config: RolloutConfig) -> None:
        self.engines, self._config = list(engines), config
        # An engine's own queue stays short, so that a request's deadline is about the engine and
        # not about the queue.
        limit = config.engine.max_num_sequences + config.engine.max_num_sequences // 4
        self._slots = [asyncio.Semaphore(limit) for _ in self.engines]
        self._load = [0] * len(self.engines)
        self._waiting = 0
        """Number of trainer calls that are waiting for rollouts."""

    def replace(self, number: int, engine: EngineHandle) -> None:
        """Replace the dead engine `number` by a new one; requests that the dead engine left
        unanswered are sent again.
        """
        self.engines[number] = engine

    @contextlib.contextmanager
    def trainer_waits(self) -> Iterator[None]:
        """A context in which a dead engine is an error: the trainer, which would replace it, is
        waiting.
        """
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    async def generate(
        self,
        prompt: Prompt,
        prompt_ids: np.ndarray,
        segments: Sequence[Segment],
        *,
        seed: int,
        max_tokens: int,
        temperature: float,
        route: Route,
    ) -> Segment:
        """Generate the next model segment of a rollout. `route`: the rollout's, which the first
        request sets.

        Raises `RuntimeError` if the engine does not answer within `rollout.request_timeout_s`, or
        dies while the trainer waits.
        """
        if route.engine is None:
            route.engine = min(range(len(self.engines)), key=self._load.__getitem__)
        number = route.engine
        self._load[number] += 1
        deadline = self._config.request_timeout_s
        try:
            async with self._slots[number]:
                while True:
                    engine = self.engines[number]
                    answer = engine.generate(
                        prompt_ids,
                        segments,
                        seed=seed,
                        max_tokens=max_tokens,
                        temperature=temperature,
                    )
                    try:
                        async with asyncio.timeout(deadline):
                            return await answer
                    except EngineLost as lost:
                        await self._replacement(number, engine, lost)
        except TimeoutError:
            raise RuntimeError(
                f"engine {number} did not answer prompt {prompt.index} within {deadline:g} s; "
                "raise rollout.request_timeout_s or look at the engine's log"
            ) from None
        finally:
            self._load[number] -= 1

    async def _replacement(self, number: int, dead: EngineHandle, lost: EngineLost) -> None:
        """Wait until engine `number` is no longer `dead` but its replacement. The caller then sends
        the request again with the same seed.
        """
        # The trainer replaces engines while it publishes; once it waits for rollouts, nobody will.
        while self.engines[number] is dead:
            if self._waiting:
                raise RuntimeError(f"engine {number} was lost: {lost}") from lost
            await asyncio.sleep(REPLACEMENT_POLL_S)
