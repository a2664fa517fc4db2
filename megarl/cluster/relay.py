"""Relays between the rollout service and many engines.

    RolloutService  --Mailbox-->  RelayActor  --Mailbox-->  `rollout.engines_per_relay` engines

A Ray call costs the service more than a millisecond, and an engine of a large run finishes a
response every few seconds. A relay asks each of its engines as soon as it has an answer, and gives
the service those of all its engines in one call. It copies their token arrays into the object store
of the service's node: as those of an engine that is asked directly, they belong to the service and
outlive the actor that made them. If a relay dies or hangs, its engines are asked directly, and
unanswered requests are sent to them again, with their seeds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ObjectLostError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.activity.busy import Busy
from megarl.cluster.asking import kill_actor
from megarl.cluster.deaths import DEATHS, why_dead
from megarl.cluster.inbox import Inbox
from megarl.cluster.mailbox import Mailbox, Pace, store
from megarl.cluster.processes import Process, end
from megarl.cluster.remote import GenerateRequest, RemoteEngine, die_with_raylet, own_process
from megarl.console import say
from megarl.errors import EngineLost, EngineUnreachable
from megarl.rollout.config import RolloutConfig
from megarl.types import Segment, TokenArrays

BEAT_S = 1.0
"""Seconds between two looks whether a relay answers."""

QUIET_BEATS, ALIVE_BEATS = 5, 15
"""A relay that has open requests is asked for a sign of life after so many looks without an answer,
and has so many to give it."""


class AtOnce(Pace):
    """The pace of a mailbox that holds back neither requests nor answers."""

    linger_s = 0.0


class RelayActor(Inbox):
    """Ray actor that passes requests on to engines."""

    def __init__(self, name: str, handles: Mapping[int, Any]) -> None:
        """`name`: that of its mailboxes. `handles`: {number of an engine: its actor}."""
        die_with_raylet()
        self._name = name
        self._mailboxes = {number: self._mailbox(handle) for number, handle in handles.items()}

    def _mailbox(self, handle: Any) -> Mailbox:
        return Mailbox(handle, AtOnce(), drops=True, name=self._name)

    async def connect(self, number: int, handle: Any) -> None:
        """From now on engine `number` is the actor `handle`."""
        self._mailboxes[number] = self._mailbox(handle)

    async def process(self) -> Process:
        """The actor's process."""
        return own_process()

    async def serve(self, request: tuple[int, GenerateRequest], arrays: list[TokenArrays]) -> Any:
        """The answer of an engine to (engine number, request), or the exception that its
        `Mailbox` raises.
        """
        number, asked = request
        try:
            answer = await self._mailboxes[number].ask(asked, store(arrays))
        except Exception as error:
            return error
        try:
            batch = await answer.arrays.ref
        except ObjectLostError as error:  # lost with the engine's node; the request can be repeated
            return EngineUnreachable(f"its answer was lost ({str(error).splitlines()[0]})")
        return replace(answer, arrays=TokenArrays(*batch[answer.arrays.position]))


class Relay:
    """A relay as the rollout service calls it. All calls must come from one event loop."""

    def __init__(self, number: int, handles: Mapping[int, Any], pace: Pace) -> None:
        """`handles`: {number of an engine: its actor}."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"num_cpus": 0, "max_concurrency": 100_000, "scheduling_strategy": here}
        self.name = f"relay {number}"
        self.handle: Any = (
            ray.remote(RelayActor).options(**options).remote(self.name, dict(handles))
        )
        self._mailbox = Mailbox(self.handle, pace, drops=True)
        self.is_lost = False
        self._process: Any = self.handle.process.remote()
        self._open = self._answers = 0
        self._watcher: asyncio.Task[None] | None = None

    async def ask(self, number: int, request: Any, arrays: Sequence[Any], busy: Busy) -> Segment:
        """The answer of engine `number`. Raises like `Mailbox.ask` of that engine, and
        `EngineUnreachable` if the relay is dead: the request is to be sent again, with a deadline
        of its own.
        """
        with self._watched():
            try:
                answer = await self._mailbox.ask((number, request), arrays, busy)
            except EngineLost as error:
                self._lose(str(error))
                raise EngineUnreachable(f"its relay was lost ({error})") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def connect(self, number: int, handle: Any) -> None:
        """From now on engine `number` is the actor `handle`."""
        if not self.is_lost:
            try:
                with self._watched():
                    await self.handle.connect.remote(number, handle)
            except DEATHS as error:  # its engines would not be those of the service
                await self._end(why_dead(error))

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """A block that waits for the relay, which is ended if it hangs."""
        self._watcher = self._watcher or asyncio.create_task(self._watch())
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self._answers += 1

    async def _watch(self) -> None:
        """End the relay if it hangs. The looks are counted, since a service that was stopped itself
        must not blame the relay for it.
        """
        quiet, answers = 0, -1
        while not self.is_lost:
            await asyncio.sleep(BEAT_S)
            quiet = quiet + 1 if self._open and answers == self._answers else 0
            answers = self._answers
            if quiet < QUIET_BEATS:
                continue
            quiet, asked = 0, asyncio.ensure_future(self._lives())
            for _ in range(ALIVE_BEATS):
                if (await asyncio.wait([asked], timeout=BEAT_S))[0]:
                    break
            else:
                asked.cancel()
                await self._end(f"it has not said for {ALIVE_BEATS * BEAT_S:g} s that it lives")

    async def _lives(self) -> None:
        """Wait until the relay answers, or is dead, which is seen elsewhere."""
        with contextlib.suppress(*DEATHS):
            await self.handle.process.remote()

    async def _end(self, why: str) -> None:
        """Kill the relay and end its requests."""
        self._lose(why)
        await self._kill()
        self._mailbox.fail(EngineLost(why))

    async def _kill(self) -> None:
        """Have Ray kill the relay, and kill its process, since Ray cannot if that is stopped. One
        that has not named its process yet is left to Ray.
        """
        kill = asyncio.ensure_future(asyncio.to_thread(kill_actor, self.handle))
        named = asyncio.ensure_future(self._process)
        if (await asyncio.wait([named], timeout=BEAT_S))[0] and named.exception() is None:
            await asyncio.to_thread(end, [named.result()], patience_s=0.0)
        await kill

    def _lose(self, why: str) -> None:
        if not self.is_lost:
            self.is_lost = True
            say(f"megarl: warning: {self.name} was lost ({why}); its engines are asked directly")

    async def close(self) -> None:
        """End the actor."""
        if self._watcher is not None:
            self._watcher.cancel()
        self.is_lost = True
        await self._kill()


class RelayedEngine(RemoteEngine):
    """An engine actor whose requests go through a relay as long as that lives."""

    def __init__(self, handle: Any, pace: Pace, relay: Relay, **options: Any) -> None:
        """`options`: those of `RemoteEngine`."""
        super().__init__(handle, pace, **options)
        self.relay, self._has_left = relay, False

    async def _ask(self, request: GenerateRequest, arrays: Sequence[Any]) -> Segment:
        if not self.relay.is_lost:
            return await self.relay.ask(self.number, request, arrays, self._busy)
        if not self._has_left:  # nobody waits for what the relay has asked
            self._has_left = True
            self.handle.leave.remote(self.relay.name)
        return await super()._ask(request, arrays)


def remote_engines(handles: Sequence[Any], pace: Pace, config: RolloutConfig) -> list[RemoteEngine]:
    """The engine actors as the rollout service calls them; it must run in this process. A run of
    `rollout.engines_per_relay` engines or more has relays.
    """
    each, deadline_s = config.engines_per_relay, config.request_timeout_s
    if not 0 < each <= len(handles):
        return [
            RemoteEngine(handle, pace, number=number, deadline_s=deadline_s)
            for number, handle in enumerate(handles)
        ]
    numbered = list(enumerate(handles))
    found: list[RemoteEngine] = []
    for first in range(0, len(handles), each):
        some = dict(numbered[first : first + each])
        relay = Relay(first // each, some, pace)
        found += [
            RelayedEngine(handle, pace, relay, number=number, deadline_s=deadline_s)
            for number, handle in some.items()
        ]
    return found


async def replaced(known: RemoteEngine, handle: Any, pace: Pace) -> RemoteEngine:
    """The actor `handle`, which takes the place of the engine `known`, as the service calls it."""
    options = {"number": known.number, "deadline_s": known.deadline_s}
    if not isinstance(known, RelayedEngine):
        return RemoteEngine(handle, pace, **options)
    await known.relay.connect(known.number, handle)
    return RelayedEngine(handle, pace, known.relay, **options)


async def close_relays(engines: Sequence[Any]) -> None:
    """End the relays of these engines."""
    relays = {one.relay for one in engines if isinstance(one, RelayedEngine)}
    await asyncio.gather(*(relay.close() for relay in relays))
