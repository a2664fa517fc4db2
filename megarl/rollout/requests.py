"""Generation requests to the engines: spread over the engines, each with a deadline, and sent to
another engine where one is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from megarl.errors import EngineLost, EngineUnreachable
from megarl.settings.rollout import RolloutConfig
from megarl.types import Prompt, Segment

T = TypeVar("T")

MOST_LOSSES = 5
"""Number of engines that may be lost while they answer the same request, before the request counts
as the cause and ends the run."""

UNREACHABLE_S = 1.0
"""Seconds to wait before a request is sent again after its engine could not be reached."""

LOOKS = 20
"""After the deadline of a request whose engine was paused, the engine is asked again at the
earliest after this fraction of the deadline."""


class EngineHandle(Protocol):
    """Interface of one inference engine as the rollout service calls it; the engine may run in
    another process.
    """

    async def generate(
        self,
        prompt_ids: np.ndarray,
        segments: Sequence[Segment],
        *,
        seed: int,
        max_tokens: int,
        temperature: float,
        stop: tuple[str, ...] = (),
    ) -> Segment:
        """Generate the model segment that follows the prompt ([P] int32 token ids) and the
        rollout's earlier `segments`, of at most `max_tokens` tokens, and up to one of the texts
        `stop`. `seed` decides the sampling; `temperature` 0 is greedy. Raises `EngineLost` if a
        process of the engine is dead, and `EngineUnreachable` if the engine may still be alive.
        """
        ...

    async def paused_s(self, last_s: float) -> float:
        """For how many of the last `last_s` seconds the engine's generation was paused on purpose,
        because weights arrived or it slept. Raises `EngineLost` if the engine is dead, and
        `EngineUnreachable` if it may still be alive.
        """
        ...


@dataclass
class RequestRoute:
    """Which engine the requests of one rollout go to, as long as that engine lives: its prefix
    cache has the tokens of the rollout's earlier turns. Make one for each rollout;
    `EnginePool.generate` fills it in.
    """

    engine: int | None = None
    """Number of the engine; None before the first request."""


@dataclass
class _Home:
    """The engine that the newest request of a prompt went to."""

    engine: int
    requests: int = 0
    """Open requests of the prompt, on all engines."""


class EnginePool:
    """All engines of a run, over which generation requests are spread. All requests of a rollout go
    to one engine, as long as that lives. It is the engine that answers other rollouts of the same
    prompt, whose prefix cache has the prompt; or the least busy living engine, if there is no such
    engine or it has at least `rollout.group_size` more open requests than the least busy one. All
    calls must come from one event loop.
    """

    def __init__(self, engines: Sequence[EngineHandle], config: RolloutConfig) -> None:
        self.engines, self._config = list(engines), config
        # An engine's own queue stays short, so that a request's deadline is about the engine and
        # not about the queue.
        limit = config.engine.max_num_sequences + config.engine.max_num_sequences // 4
        self._slots = [asyncio.Semaphore(limit) for _ in self.engines]
        self._load = [0] * len(self.engines)
        self._homes: dict[int, _Home] = {}
        """{prompt index: the engine of its group}, while the group has open requests."""
        self._lost: set[int] = set()
        """Numbers of the engines that are dead and not yet replaced."""
        self._has_living = asyncio.Event()
        self._has_living.set()
        self.version: int | None = None
        """Version that the weights of every engine have at least; None if unknown."""

    def replace(self, number: int, engine: EngineHandle) -> None:
        """Send the requests for engine number `number` to `engine` from now on, a new engine that
        has the current weights.
        """
        self.engines[number] = engine
        self._lost.discard(number)
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
        """Generate the next model segment of a rollout of `prompt`. `prompt_ids`: its [P] int32
        tokens. `segments`: the rollout's segments so far. `route`: which engine the rollout uses;
        the same object for all requests of a rollout. `temperature` 0 is greedy. `stop`: texts at
        which the segment ends, beside those of the recipe.

        A request whose engine is lost is sent again, with the same seed, to another engine, or to
        the first one that replaces a lost engine. Raises `RuntimeError` if an engine does not
        answer within `rollout.request_timeout_s`, in which its pauses do not count, if
        5 engines were lost while they answered, or if an engine has sampled with older
        weights than it had when it was asked.
        """
        deadline, losses = self._config.request_timeout_s, 0
        while True:
            number = await self._choose(route, prompt)
            self._load[number] += 1
            self._homes[prompt.index].requests += 1
            try:
                async with self._slots[number]:
                    engine = self.engines[number]
                    if number in self._lost:
                        continue
                    wanted = self.version
                    generated = engine.generate(
                        prompt_ids,
                        segments,
                        seed=seed,
                        max_tokens=max_tokens,
                        temperature=temperature,
                        **({"stop": stop} if stop else {}),
                    )
                    answer = await before_deadline(generated, deadline, engine)
                refuse_older(answer, wanted, number)
                return answer
            except EngineUnreachable:
                await asyncio.sleep(UNREACHABLE_S)
            except EngineLost as lost:
                self._lose(number, engine)
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
                self._load[number] -= 1
                self._homes[prompt.index].requests -= 1
                if not self._homes[prompt.index].requests:
                    del self._homes[prompt.index]

    async def _choose(self, route: RequestRoute, prompt: Prompt) -> int:
        """Number of the engine to send the next request of a rollout to. It is the engine that
        `route` names, which has the rollout's tokens in its cache, if that is alive; otherwise the
        engine of the rollout's group or, if that has much more to do, the one with the fewest open
        requests, which `route` names from then on. Waits while no engine is alive.
        """
        # Whoever replaces engines ends the run where none can be started.
        await self._has_living.wait()
        if route.engine is None or route.engine in self._lost:
            living = range(len(self.engines))
            if self._lost:
                living = [number for number in living if number not in self._lost]
            route.engine = min(living, key=self._load.__getitem__)
            home = self._homes.get(prompt.index)
            if home is not None and home.engine in living:
                ahead = self._load[home.engine] - self._load[route.engine]
                if ahead < self._config.group_size:
                    route.engine = home.engine
        self._homes.setdefault(prompt.index, _Home(route.engine)).engine = route.engine
        return route.engine

    def _lose(self, number: int, engine: EngineHandle) -> None:
        """Note that engine `number` is lost, so that no request is sent to it any more. Does
        nothing if another engine than `engine` has that number by now: `engine` was replaced.
        """
        if self.engines[number] is engine:
            self._lost.add(number)
            if len(self._lost) == len(self.engines):
                self._has_living.clear()


async def before_deadline(answer: Awaitable[T], deadline_s: float, engine: EngineHandle) -> T:
    """Wait for `answer`, the result of a request to `engine`, and return it. Raises `TimeoutError`,
    and cancels `answer`, once the engine has had `deadline_s` seconds in which its generation was
    not paused. The engine is asked for its pauses only once `deadline_s` have passed; errors of
    this call of `engine.paused_s` are raised too.
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


def refuse_older(answer: Segment, wanted: int | None, number: int) -> None:
    """Raise `RuntimeError` if engine `number` has sampled a token of `answer` with weights of an
    older version than `wanted`, the version that every engine had when the request was sent; None
    if that is not known, and nothing is raised. Such tokens must not be trained on as if they were
    of that version. Raises it too if the engine does not name the version of every token.
    """
    named = sum(count for _, count in answer.versions)
    if wanted is not None and named != answer.num_tokens:
        raise RuntimeError(
            f"engine {number} has sampled {answer.num_tokens} tokens, but names the version of the"
            f" weights for {named}; they are not trained on"
        )
    oldest = min((version for version, _ in answer.versions), default=wanted)
    if wanted is not None and oldest is not None and oldest < wanted:
        raise RuntimeError(
            f"engine {number} has sampled tokens with weights of version {oldest}, although version"
            f" {wanted} was on every engine when it was asked; it is not trained on"
        )
