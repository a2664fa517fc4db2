"""Generation requests: spread over the engines, with deadlines, and sent again where an engine is
lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from megarl.engines.remote import RemoteEngine
from megarl.errors import ActorUnreachable, ProcessLost
from megarl.settings.rollout import RolloutConfig
from megarl.types import Prompt, Segment

T = TypeVar("T")

MOST_LOSSES = 5
"""Engines that one request may lose before it counts as the cause."""

LOOKS = 20
"""Fraction of the deadline (1 / LOOKS) between two questions to a paused engine."""


@dataclass
class RequestRoute:
    """The engine of one rollout's requests, whose prefix cache has its tokens. `EnginePool` fills
    it in.
    """

    engine: int | None = None


@dataclass
class ServedEngine:
    """An engine as requests see it."""

    remote: RemoteEngine
    """That of its newest actor."""
    slots: asyncio.Semaphore
    load: int = 0
    """Requests that it answers, or that wait for it."""
    is_lost: bool = False
    """Dead and not yet replaced."""


@dataclass
class _Home:
    """The engine of a prompt's newest request."""

    engine: int
    requests: int = 0
    """Open requests of the prompt, on all engines."""


class EnginePool:
    """Spreads requests over the engines, in one event loop.

    A rollout keeps its engine as long as that lives. It begins at the engine of its group, whose
    prefix cache has the prompt; or at the least busy one, if that has `rollout.group_size` fewer
    open requests.
    """

    def __init__(self, engines: Sequence[RemoteEngine], config: RolloutConfig) -> None:
        self._config = config
        # An engine's own queue stays short, so that a request's deadline is about the engine and
        # not about the queue.
        limit = config.engine.max_num_sequences + config.engine.max_num_sequences // 4
        self.engines = [ServedEngine(engine, asyncio.Semaphore(limit)) for engine in engines]
        self._homes: dict[int, _Home] = {}
        """{prompt index: the engine of its group}, while the group has open requests."""
        self._has_living = asyncio.Event()
        self.version: int | None = None
        """What every engine has at least; None if unknown."""

    def replace(self, number: int, engine: RemoteEngine) -> None:
        """Send the requests for engine `number` to the new `engine`."""
        self.engines[number].remote, self.engines[number].is_lost = engine, False
        self._has_living.set()

    async def generate(
        self,
        prompt: Prompt,
        prompt_ids: np.ndarray,
        segments: Sequence[Segment],
        *,
        seed: int,
        max_tokens: int,
        temperature: float,
        stop: tuple[str, ...] = (),
        route: RequestRoute,
    ) -> Segment:
        """The next model segment of a rollout. `stop`: texts that end it.

        A request whose engine is lost is sent to another one, with the same seed. Raises
        `RuntimeError` after `rollout.request_timeout_s` without pauses, after 5 lost engines, or
        for tokens of older weights.
        """
        deadline, losses = self._config.request_timeout_s, 0
        while True:
            number = await self._choose(route, prompt)
            served = self.engines[number]
            served.load += 1
            self._homes[prompt.index].requests += 1
            try:
                async with served.slots:
                    engine = served.remote
                    if served.is_lost:
                        continue
                    required = self.version
                    generated = engine.generate(
                        prompt_ids,
                        segments,
                        seed=seed,
                        max_tokens=max_tokens,
                        temperature=temperature,
                        **({"stop": stop} if stop else {}),
                    )
                    answer = await before_deadline(generated, deadline, engine)
                refuse_older(answer, required, number)
                return answer
            except ActorUnreachable:
                await asyncio.sleep(1.0)  # and it is sent again
            except ProcessLost as lost:
                if served.remote is engine:  # else it was replaced already
                    served.is_lost = True
                losses += 1
                if losses == MOST_LOSSES:
                    raise RuntimeError(
                        f"{losses} engines were lost while they answered prompt {prompt.index},"
                        f" the last one engine {number}: {lost}; look at run.log for what they"
                        " printed last"
                    ) from lost
            except TimeoutError:
                raise RuntimeError(
                    f"engine {number} did not answer prompt {prompt.index} within {deadline:g} s;"
                    " raise rollout.request_timeout_s or look at the engine's log"
                ) from None
            finally:
                served.load -= 1
                self._homes[prompt.index].requests -= 1
                if not self._homes[prompt.index].requests:
                    del self._homes[prompt.index]

    async def _choose(self, route: RequestRoute, prompt: Prompt) -> int:
        """The engine of the next request. Waits while none is alive."""
        # Whoever replaces engines ends the run where none can be started.
        if route.engine is None or self.engines[route.engine].is_lost:
            while not (living := [n for n, other in enumerate(self.engines) if not other.is_lost]):
                self._has_living.clear()
                await self._has_living.wait()
            route.engine = min(living, key=lambda number: self.engines[number].load)
            home = self._homes.get(prompt.index)
            if home is not None and home.engine in living:
                ahead = self.engines[home.engine].load - self.engines[route.engine].load
                if ahead < self._config.group_size:
                    route.engine = home.engine
        self._homes.setdefault(prompt.index, _Home(route.engine)).engine = route.engine
        return route.engine


async def before_deadline(answer: Awaitable[T], deadline_s: float, engine: RemoteEngine) -> T:
    """The result of `answer`. Raises `TimeoutError` once the engine had `deadline_s` seconds
    without pauses, for which it is asked only after `deadline_s`.
    """
    began, left_s = time.monotonic(), deadline_s
    task = asyncio.ensure_future(answer)
    try:
        while True:
            if (await asyncio.wait([task], timeout=left_s))[0]:
                return task.result()
            passed_s = time.monotonic() - began
            left_s = deadline_s - (passed_s - await engine.paused_s(passed_s))
            if task.done():
                return task.result()
            if left_s <= 0:
                raise TimeoutError
            left_s = max(left_s, deadline_s / LOOKS)
    finally:
        task.cancel()


def refuse_older(answer: Segment, required: int | None, number: int) -> None:
    """Raise `RuntimeError` if a token of `answer` has weights older than `required`, or of unknown
    version. None: nothing is checked.
    """
    named = sum(count for _, count in answer.versions)
    if required is not None and named != answer.num_tokens:
        raise RuntimeError(
            f"engine {number} has sampled {answer.num_tokens} tokens, but names the version of the"
            f" weights for {named}; they are not trained on"
        )
    oldest = min((version for version, _ in answer.versions), default=required)
    if required is not None and oldest is not None and oldest < required:
        raise RuntimeError(
            f"engine {number} has sampled tokens with weights of version {oldest}, although version"
            f" {required} was on every engine when it was asked; it is not trained on"
        )
