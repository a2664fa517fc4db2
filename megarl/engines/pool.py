"""The engines of a run, in the process of the rollout service, which owns them.

    starting -> ready, without weights -> serving -> lost -> ended -> starting ...

A coroutine for each engine starts it, asks for signs of life, and replaces it when it dies or
hangs, while the others go on. A new engine serves once a publication has reached it. The run ends
with its last engine that has weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError

from megarl.engines.interface import Pulse
from megarl.engines.remote import EngineActor
from megarl.errors import ProcessLost
from megarl.settings.rollout import ENGINE_STARTS
from megarl.system.console import say
from megarl.system.deaths import DEATHS, why_dead
from megarl.system.placement import Seat, kept_engines
from megarl.system.process_env import KEPT_ENGINES
from megarl.system.processes import Process, end, with_descendants
from megarl.system.ray_calls import (
    GOES_ON,
    KILL_S,
    CallOutcome,
    await_answer,
    done_within,
)

ActorHandle = Any
"""Ray creates its methods at run time."""

BEAT_S, MOST_BEATS = 1.0, 32
"""Least seconds between two signs of life of an engine, and most signs of all in that time."""
FIRST_PULSE = Pulse(-1, 0, 0, 0, requests=0, is_paused=False, is_dead=False)
"""In the place of that before an engine's first one."""
LOOK_S = 0.05
"""Between two looks at engines that a call waits for."""


@dataclass(frozen=True)
class EngineStarts:
    """How the engines are started. `make_actor` makes another actor for an engine."""

    seats: Sequence[Seat]
    """Where each engine runs."""
    arguments: dict[str, Any]
    """Of `EngineActor`, the same for all."""
    timeout_s: float
    """Seconds that a start may take."""
    stall_s: float
    """Seconds without progress after which an engine is taken for hung."""
    takes_turns: bool = False
    """Whether engines sleep and wake with a colocated trainer: none starts meanwhile, and a
    publication waits for all.
    """
    namespace: str | None = field(default_factory=lambda: os.environ.get(KEPT_ENGINES))
    """Ray namespace of engines that stay after the run."""
    actors: list[ActorHandle] = field(default_factory=list)
    """One actor for each engine; Ray ends them with these handles."""

    def begin(self) -> EngineStarts:
        """Begin to start all engines, on actors that earlier runs kept or new ones. Returns self;
        `EngineManager` waits.
        """
        kept = kept_engines(self.arguments["recording"])
        for number in range(len(self.seats)):
            self.actors.append(kept[number] if number in kept else self.make_actor(number))
            self.actors[number].start.remote()
        return self

    @property
    def serves_at_once(self) -> bool:
        """Whether a ready engine has its weights, from disk."""
        return self.arguments["load"] and not self.arguments["adapter_rank"]

    def make_actor(self, number: int) -> ActorHandle:
        """The Ray actor of engine `number`, not started."""
        seat = self.seats[number]
        options: dict[str, Any] = {"max_concurrency": 100_000} | seat.options
        if self.namespace:
            name = f"{number}-{secrets.token_hex(4)}"
            options |= {"name": name, "namespace": self.namespace, "lifetime": "detached"}
        environment = self.arguments["environment"] | seat.environment
        arguments = self.arguments | {"number": number, "environment": environment}
        return ray.remote(EngineActor).options(**options).remote(**arguments)


@dataclass(eq=False)
class ManagedEngine:
    """One engine, which keeps its number when its actor is replaced."""

    number: int
    handle: ActorHandle
    state: Literal["starting", "ready", "lost", "ended", "given up"] = "starting"
    """A "lost" engine may still hold its memory, an "ended" one does not."""
    has_weights: bool = False
    """Whether the service sends it requests."""
    born: asyncio.Future[Any] | None = None
    """The actor's process."""
    processes: list[Process] = field(default_factory=list)
    """This process and all below it, once the engine is ready."""
    watch: asyncio.Task[str] | None = None
    """Ends with the reason why the engine is to be replaced."""
    problem: str = ""
    """Why it was lost last, until it has weights again."""
    member: ActorHandle | None = None
    """The actor that takes part in the present publication."""
    call: asyncio.Future[Any] | None = None
    """The newest call to it."""


class EngineManager:
    """Starts, watches and replaces the engines, and calls them for rank 0, in one event loop."""

    def __init__(
        self,
        starts: EngineStarts,
        *,
        use: Callable[[int, ActorHandle], None],
        fail: Callable[[str], Awaitable[None]],
    ) -> None:
        """`use(number, actor)`: a replacement can serve. `fail(reason)`: ends the run."""
        self._starts, self._use, self._fail = starts, use, fail
        self.engines = [ManagedEngine(*pair) for pair in enumerate(starts.actors)]
        self.moved_at = time.monotonic()
        """When an engine last made a step."""
        self.failure = ""
        """Why no engine can be used any more."""
        self._deadline = time.monotonic() + starts.timeout_s
        """Until when all engines must have been ready once."""
        self._all_were_ready = self._is_published = self._is_publishing = False
        """Whether all engines have been ready once, some got weights, and some are getting them."""
        self._notices = list[str]()
        """Lines that rank 0 has not shown yet."""
        self._replaced = self._preemptions = 0
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._beat_s = BEAT_S * max(1.0, len(self.engines) / MOST_BEATS)
        self._lives = [asyncio.create_task(self._keep(engine)) for engine in self.engines]

    # ------------------------------------------------------------------------ the life of an engine

    async def _keep(self, engine: ManagedEngine) -> None:
        """Start, watch and replace an engine, until the run or the engine cannot go on."""
        failures = 0
        try:
            while failures < ENGINE_STARTS and not self.failure:
                if problem := await self._start(engine):
                    failures += 1
                    fate = "it is started again"
                else:
                    failures, problem = 0, await self._lost(engine)
                    fate = "it is replaced"
                engine.state, engine.has_weights, engine.problem = "lost", False, problem
                await self._end(engine)
                engine.state = "ended"
                if failures == ENGINE_STARTS:
                    self._give_up(engine, problem)
                    return
                self._say(f"megarl: {problem}; {fate}")
                self._replaced += 1
                if self._is_published and not self._is_publishing:
                    self._require_weights()
                await self._may_start.wait()
                engine.handle, engine.state = self._starts.make_actor(engine.number), "starting"
        except Exception as error:
            self.failure = self.failure or str(error) or repr(error)
            await self._fail(self.failure)

    def _require_weights(self) -> None:
        has_weights = any(engine.has_weights for engine in self.engines)
        self._require(has_weights, "no engine is left that has weights")

    def _require(self, can_go_on: bool, problem: str) -> None:
        """Raise `ProcessLost`, with why the engines were lost, unless the run can go on."""
        if self.failure or not can_go_on:
            causes = "; ".join(engine.problem for engine in self.engines if engine.problem)
            causes = f" ({causes})" if causes else ""
            self.failure = self.failure or f"{problem}{causes}; {GOES_ON}"
            raise ProcessLost(self.failure)

    def _serve(self, engine: ManagedEngine) -> None:
        engine.has_weights, engine.problem = True, ""
        self._use(engine.number, engine.handle)

    async def _start(self, engine: ManagedEngine) -> str:
        """Wait for a start; returns why it failed, or "". Raises `RuntimeError` at the start of the
        run if the process lives.
        """
        began, timeout_s = time.monotonic(), self._starts.timeout_s
        if not self._all_were_ready:
            timeout_s = self._deadline - began
        fix, name = "raise rollout.engine.start_timeout_s", f"engine {engine.number}"
        engine.born = asyncio.ensure_future(engine.handle.process.remote())
        try:
            started = engine.handle.start.remote()
            engine.processes = await await_answer(name, started, timeout_s, "starting", fix)
        except RuntimeError as error:
            if not self._all_were_ready and not isinstance(error, ProcessLost):
                raise
            return str(error)
        engine.state = "ready"
        if self._starts.serves_at_once:
            self._serve(engine)
        if self._all_were_ready:
            self._say(f"megarl: {name} is ready again after {time.monotonic() - began:.0f} s")
        self._all_were_ready |= all(engine.state == "ready" for engine in self.engines)
        return ""

    async def _lost(self, engine: ManagedEngine) -> str:
        """Wait until a ready engine is lost, and return why."""
        engine.watch = asyncio.create_task(self._watch(engine))
        await asyncio.wait([engine.watch])
        name = f"engine {engine.number}"
        if engine.watch.cancelled():
            return engine.problem or f"{name} is lost"
        return f"{name} {engine.watch.result()}"

    async def _watch(self, engine: ManagedEngine) -> str:
        """Ask for signs of life until the engine dies or hangs; returns a phrase that continues
        "engine 3".
        """
        last, moved_at, stall_s = FIRST_PULSE, time.monotonic(), self._starts.stall_s
        while True:
            try:
                async with asyncio.timeout(stall_s):  # `wait_for` may lose a cancellation
                    pulse = await engine.handle.pulse.remote()
            except (TimeoutError, ActorUnavailableError):  # the latter may be for a moment
                pulse = None
            except DEATHS as error:
                problem = f"is dead ({why_dead(error)})"
                if isinstance(error, OutOfMemoryError):  # another one would be ended as well
                    reason = f"engine {engine.number} {problem}; {GOES_ON}"
                    raise RuntimeError(reason) from error
                return problem
            now = time.monotonic()
            if pulse is not None:
                if pulse.is_dead:
                    return "has lost one of vLLM's processes"
                has_moved = pulse.steps != last.steps
                self.moved_at = now if has_moved else self.moved_at
                if has_moved or pulse.is_paused or not pulse.requests:
                    moved_at = now
                self._preemptions += pulse.preemptions - last.preemptions
                last = pulse
            if now - moved_at > stall_s:
                silent = f"for {now - moved_at:.0f} s"
                if pulse is None:
                    return f"has not said {silent} that it lives"
                return f"has made no step {silent}, with {pulse.requests} requests open"
            await asyncio.sleep(self._beat_s)

    async def _end(self, engine: ManagedEngine) -> None:
        """Kill the engine's processes; those of other hosts by Ray alone."""
        processes, engine.processes = engine.processes, []
        if not processes and engine.born is not None:
            born = CallOutcome.of(engine.born).answer
            processes = with_descendants(born) if born is not None else []

        def kill() -> None:
            done_within(KILL_S, partial(ray.kill, engine.handle))
            end(processes, patience_s=0.0)

        await asyncio.to_thread(kill)

    def _give_up(self, engine: ManagedEngine, problem: str) -> None:
        """Go on without an engine; raises `RuntimeError` if that is impossible."""
        engine.state = "given up"
        reason = f"{ENGINE_STARTS} starts of engine {engine.number} failed; the last: {problem}"
        usable = sum(engine.state != "given up" for engine in self.engines)
        if not usable or self._starts.takes_turns or not self._all_were_ready:
            raise RuntimeError(reason)
        count = len(self.engines)
        self._say(f"megarl: warning: {reason}; the run goes on with {usable} of {count} engines")

    def _say(self, line: str) -> None:
        """To this process's log, and to the user by rank 0."""
        say(line)
        self._notices.append(line)

    # ---------------------------------------------------------------------------- calls of rank 0

    async def ready(self) -> str:
        """Wait until every engine has been ready once. Returns "", or why the run cannot start;
        `_start` has the deadline.
        """
        with contextlib.suppress(ProcessLost):
            await self._until(lambda: self._all_were_ready, math.inf)
        return self.failure

    async def hold(self, lost: Sequence[int] = ()) -> tuple[list[int], bool, list[str]]:
        """Begin an attempt to publish; the engines `lost` are replaced. Returns (numbers of the
        ready engines, whether some have no weights, lines for the user). Raises `ProcessLost` if
        none is ready.
        """
        for number in lost:
            self._lose(self.engines[number])
        self._may_start.set()
        if self._starts.takes_turns:
            await self._until_all("ready")
        members = self._take_members()
        self._is_publishing = True
        notices, self._notices = self._notices, []
        has_new = not all(engine.has_weights for engine in members)
        return [engine.number for engine in members], has_new, notices

    async def admit(self) -> dict[str, float]:
        """Let members serve. Returns metrics of the engines. Raises `ProcessLost` if none has
        weights.
        """
        self._is_published, self._is_publishing = True, False
        for engine in self._members:
            is_present = engine.handle is engine.member and engine.state == "ready"
            if is_present and not engine.has_weights:
                self._serve(engine)
        self._require_weights()
        return {
            "engines/replaced": float(self._replaced),
            "engines/missing": float(len(self.engines) - len(self._members)),
            "rollout/preemptions": float(self._preemptions),
        }

    @property
    def _members(self) -> list[ManagedEngine]:
        """Those in the present publication."""
        return [engine for engine in self.engines if engine.member is not None]

    def _take_members(self) -> list[ManagedEngine]:
        for engine in self.engines:
            engine.member = engine.handle if engine.state == "ready" else None
        self._require(bool(self._members), "no engine is left")
        return self._members

    async def connect(self, infos: list[dict[str, Any]], timeout_s: float) -> list[CallOutcome]:
        """`infos`: by member. Waits for all: a healthy engine that is still at it when another
        fails would count as late.
        """
        arguments = [(info,) for info in infos]
        return await self._call("connect", arguments, timeout_s, asyncio.ALL_COMPLETED)

    async def call(
        self, method: str, arguments: tuple[Any, ...], timeout_s: float
    ) -> list[CallOutcome]:
        """Call a method of each member, until one fails or `timeout_s`."""
        every = [arguments] * len(self._members)
        return await self._call(method, every, timeout_s, asyncio.FIRST_EXCEPTION)

    async def _call(
        self, method: str, arguments: list[tuple[Any, ...]], timeout_s: float, until: str
    ) -> list[CallOutcome]:
        for engine, words in zip(self._members, arguments, strict=True):
            engine.call = asyncio.ensure_future(getattr(engine.member, method).remote(*words))
        return await self.settled(timeout_s, until)

    async def settled(
        self, timeout_s: float, until: str = asyncio.ALL_COMPLETED
    ) -> list[CallOutcome]:
        """Wait until the newest call has ended on all members."""
        calls = [engine.call for engine in self._members if engine.call is not None]
        await asyncio.wait(calls, timeout=timeout_s, return_when=until)
        return [CallOutcome.of(call) for call in calls]

    async def sleep(self, timeout_s: float) -> list[str]:
        """Free all engines' GPU memory; one that dies or is late is killed, and replaced after the
        next `hold`. Returns errors of engines that live. Raises `ProcessLost` if none is left.
        """
        self._may_start.clear()
        await self._until_all("ready", "lost", "ended", "given up")
        failed = await self._each("sleep", timeout_s)
        # The trainer takes the memory of all of them next.
        await self._until_all("ready", "ended")
        return failed

    async def wake(self, timeout_s: float) -> list[str]:
        """Allocate memory for weights; otherwise as `sleep`."""
        return await self._each("wake", timeout_s)

    async def _each(self, method: str, timeout_s: float) -> list[str]:
        members = self._take_members()
        nothing = [()] * len(members)
        outcomes = await self._call(method, nothing, timeout_s, asyncio.ALL_COMPLETED)
        failed = list[str]()
        for engine, outcome in zip(members, outcomes, strict=True):
            if outcome.is_lost:
                self._lose(engine, f"engine {engine.number} is lost ({outcome.problem})")
            elif outcome.problem:
                failed.append(f"engine {engine.number} failed: {outcome.problem}")
        return failed

    def _lose(self, engine: ManagedEngine, problem: str = "") -> None:
        """Have a member replaced, unless it was already."""
        if engine.handle is engine.member and engine.watch is not None:
            engine.state, engine.has_weights, engine.problem = "lost", False, problem
            engine.watch.cancel()

    async def _until_all(self, *states: str) -> None:
        await self._until(
            lambda: all(engine.state in states for engine in self.engines), self._starts.timeout_s
        )

    async def _until(self, is_met: Callable[[], bool], timeout_s: float) -> None:
        """Raises `ProcessLost` after `timeout_s`, and if no engine can be used any more."""
        end = time.monotonic() + timeout_s
        while not is_met():
            if self.failure:
                raise ProcessLost(self.failure)
            if time.monotonic() > end:
                states = ", ".join(f"engine {e.number} is {e.state}" for e in self.engines)
                raise ProcessLost(
                    f"after {timeout_s:g} s {states}; raise rollout.engine.start_timeout_s"
                )
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Stop the engines that do not stay after the run."""
        for task in [*self._lives, *(engine.watch for engine in self.engines if engine.watch)]:
            task.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        if self._starts.namespace is None and self.engines:
            stops = [asyncio.ensure_future(engine.handle.stop.remote()) for engine in self.engines]
            await asyncio.wait(stops)
