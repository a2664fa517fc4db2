"""What keeps a run going when engines die or hang: where requests go, when an engine is taken for
hung, and who takes part in a publication. tests/system/test_lost_engine.py has real engines.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayTaskError
from support.commands import python, started, until
from support.rollouts import requested

from megarl.engines import pool as engines_module
from megarl.engines.interface import Pauses, Pulse
from megarl.engines.pool import EngineManager, EngineStarts
from megarl.errors import ActorUnreachable, ProcessLost, UserError
from megarl.rollout import client as rollout_client
from megarl.rollout.requests import MOST_LOSSES, EnginePool, RequestRoute
from megarl.rollout.waits import Waits
from megarl.settings.rollout import ENGINE_STARTS, RolloutConfig
from megarl.settings.schema import replace
from megarl.system import ray_calls as asking
from megarl.system.processes import end, is_alive, is_tracker, with_descendants
from megarl.system.ray_calls import CallOutcome
from megarl.types import Prompt, Segment
from megarl.weights import engine_client
from megarl.weights.engine_client import EngineCall, EngineClient
from megarl.weights.transports.base import GIVEN_UP, Aborted

PROMPT = Prompt(3, "p", [1, 2], "a")


async def test_a_failure_ends_every_wait() -> None:
    waits = Waits()

    async def forever() -> None:
        await asyncio.sleep(60)

    first = asyncio.create_task(waits.until(lambda: False))
    second = asyncio.create_task(waits.result(forever))
    await asyncio.sleep(0.01)
    assert not first.done() and not second.done()
    await waits.fail(RuntimeError("no engine starts"))
    await asyncio.wait_for(first, 1)
    with pytest.raises(RuntimeError, match="rollouts stopped: no engine starts"):
        await asyncio.wait_for(second, 1)
    await waits.fail(UserError("later"))
    with pytest.raises(RuntimeError, match="no engine starts"):
        waits.raise_failure()


# ---------------------------------------------------------------------------------- where requests go


class Engine:
    """An engine that raises the errors it is given, one a request, and answers afterwards; where it
    has a gate, once that is open.
    """

    def __init__(self, *errors: Exception, spans: Any = ((0, 1),)) -> None:
        self.errors, self.seeds, self.spans = list(errors), list[int](), list(spans)
        self.gate: asyncio.Event | None = None
        self.fails: Exception | None = None

    async def generate(self, *arguments: Any, seed: int, **rest: Any) -> Segment:
        self.seeds.append(seed)
        if self.errors:
            raise self.errors.pop(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.fails:
            raise self.fails
        count = sum(number for _, number in self.spans)
        return Segment("model", count, None, self.spans, "stop")


async def test_requests_of_a_lost_engine_go_to_another_with_their_seed() -> None:
    """Or to the next one, where no engine lives; to the same one, where that was out of reach."""
    away = ActorUnreachable("blip")
    engines = [Engine(ProcessLost("gone")), Engine(away, away)]
    pool, route = EnginePool(engines, RolloutConfig()), RequestRoute(0)
    await requested(pool, PROMPT, 7, route)
    assert (engines[0].seeds, engines[1].seeds, route.engine) == ([7], [7, 7, 7], 1)
    await requested(pool, PROMPT, 8)
    assert engines[0].seeds == [7], "a lost engine gets no request"
    engines[1].errors = [ProcessLost("gone")]
    running = asyncio.create_task(requested(pool, PROMPT, 9))
    await asyncio.sleep(0.05)
    assert not running.done()
    pool.replace(0, fresh := Engine())
    await asyncio.wait_for(running, 1)
    await asyncio.wait_for(requested(pool, PROMPT, 10), 1)
    assert fresh.seeds == [9, 10]
    late = asyncio.create_task(requested(pool, PROMPT, 11, RequestRoute(0)))
    fresh.gate, fresh.fails = asyncio.Event(), ProcessLost("gone")
    await asyncio.sleep(0.01)
    pool.replace(0, Engine())
    fresh.gate.set()
    await asyncio.wait_for(late, 1)
    assert not pool.engines[0].is_lost, "the late loss is of the engine before"
    doomed = [Engine(ProcessLost("gone")) for _ in range(MOST_LOSSES + 1)]
    with pytest.raises(RuntimeError, match=rf"{MOST_LOSSES} engines were lost .* prompt 3,"):
        await asyncio.wait_for(requested(EnginePool(doomed, RolloutConfig()), PROMPT, 7), 5)


async def test_a_group_goes_to_one_engine_unless_that_has_a_group_more_than_another() -> None:
    """Three groups of eight on two engines: whole groups while loads allow, and nothing is kept of
    a group that has ended.
    """
    engines = [Engine(), Engine()]
    for engine in engines:
        engine.gate = asyncio.Event()
    pool = EnginePool(engines, RolloutConfig(group_size=8))
    running = []
    for index in range(3):
        prompt = replace(PROMPT, index=index)
        running += [asyncio.create_task(requested(pool, prompt, 10 * index + n)) for n in range(8)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [engine.load for engine in pool.engines] == [16, 8]
    assert engines[0].seeds == [*range(8), *range(20, 28)]
    assert engines[1].seeds == [*range(10, 18)]
    # The next samples of the first group find its engine too far ahead.
    more = asyncio.create_task(requested(pool, replace(PROMPT, index=0), 99))
    await asyncio.sleep(0.01)
    assert engines[1].seeds[-1] == 99
    for engine in engines:
        engine.gate.set()
    await asyncio.gather(*running, more)
    assert [engine.load for engine in pool.engines] == [0, 0] and not pool._homes


class Held(Engine):
    """An engine that is held for a publication and answers after `hold_s`, or that never answers;
    its pauses are those of real engines.
    """

    def __init__(self, hold_s: float, *, answers: bool = True) -> None:
        super().__init__()
        self.hold_s, self.answers, self.asked = hold_s, answers, 0
        self.pauses = Pauses()

    async def generate(self, *arguments: Any, **rest: Any) -> Segment:
        self.pauses.begin()
        await asyncio.sleep(self.hold_s)
        self.pauses.end()
        await asyncio.sleep(0.02 if self.answers else 60)
        return await super().generate(*arguments, **rest)

    async def paused_s(self, last_s: float) -> float:
        self.asked += 1
        return self.pauses.within(last_s)


async def test_a_deadline_does_not_count_the_time_of_a_publication() -> None:
    config = replace(RolloutConfig(), request_timeout_s=0.2)
    engine = Held(0.7)
    assert (
        await asyncio.wait_for(requested(EnginePool([engine], config), PROMPT, 7), 60)
    ).num_tokens == 1
    assert 1 <= engine.asked <= 20, "not asked without end"
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"engine 0 did not answer prompt 3 within 0.2 s"):
        await requested(EnginePool([Held(0.7, answers=False)], config), PROMPT, 7)
    assert 0.8 < time.monotonic() - began < 60, "held 0.7 s, and 0.2 s more"


def test_pauses_are_summed_over_the_time_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses = [0.0], Pauses()
    monkeypatch.setattr("megarl.engines.interface.time.monotonic", lambda: now[0])
    for began, ended in ((10.0, 12.0), (20.0, 25.0)):
        now[0] = began
        pauses.begin()
        now[0] = began + 1
        pauses.begin()  # a version that is sent again
        now[0] = ended
        pauses.end()
    now[0] = 30.0
    assert [pauses.within(last_s) for last_s in (5, 7, 10, 19, 30)] == [0, 2, 5, 6, 7]
    pauses.begin()
    now[0] = 33.0
    assert pauses.is_paused and pauses.within(1.0) == 1 and pauses.within(20.0) == 8
    had = [at for at in range(35) if pauses.had(at)]
    assert had == [*range(10, 13), *range(20, 26), *range(30, 35)]


# ------------------------------------------------------------------------- how long a rank waits


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Time of a rank, and a fake service: it answers `answers_s` seconds after the clock began, and
    says whenever it is asked for how long nothing has happened, by `silent`.
    """
    made = SimpleNamespace(now=0.0, answers_s=3.0, silent=lambda: 0.0, asked=[])

    def silent() -> float:
        made.asked.append(made.now)
        return made.silent()

    def wait(
        references: list[Any], num_returns: int, timeout: float
    ) -> tuple[list[Any], list[Any]]:
        made.now += timeout
        return (references, []) if made.now > made.answers_s else ([], references)

    calls = SimpleNamespace(
        silent_s=SimpleNamespace(remote=silent), take=SimpleNamespace(remote=lambda *_: "reference")
    )
    monkeypatch.setattr(rollout_client.ray, "get_actor", lambda name: calls)
    monkeypatch.setattr(rollout_client.ray, "wait", wait)
    monkeypatch.setattr(rollout_client.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(rollout_client, "ask", lambda *asked: None)
    monkeypatch.setattr(rollout_client, "ask_service", lambda call, *rest: call())
    return made


@pytest.mark.parametrize("moves", [True, False])
def test_a_rank_waits_as_long_as_there_is_progress(
    moves: bool, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service answers after 3 s by a clock of the test; the rank allows 1 s of silence."""
    clock.silent = lambda: 0.0 if moves else clock.now
    monkeypatch.setattr(rollout_client, "PROGRESS_POLL_S", 0.3)
    client = rollout_client.RolloutClient(0, silence_s=1.0)
    if moves:
        assert client.take(4) is None
        assert clock.now > 3
    else:
        with pytest.raises(RuntimeError, match=r"no engine has made a step .* rollouts of step 5"):
            client.take(4)
        assert clock.now < 2


@pytest.mark.parametrize(("data_rank", "questions"), [(0, 24), (1, 4)])
def test_other_ranks_ask_less_often_for_progress(
    data_rank: int, questions: int, clock: Any
) -> None:
    """In a wait of 120 s, of a run that allows 1,800 s of silence."""
    clock.answers_s, clock.silent = 121.0, lambda: 1.0
    assert rollout_client.RolloutClient(data_rank, silence_s=1800.0).take(4) is None
    assert abs(len(clock.asked) - questions) <= 1


# --------------------------------------------------------------------- which weights have sampled


@pytest.mark.parametrize(
    ("versions", "on_engines", "is_refused"),
    [
        ((4,), 4, False),
        ((4, 5), 4, False),
        ((5,), 4, False),
        ((-1,), None, False),
        ((3,), 4, True),
        ((3, 4), 4, True),
        ((-1,), 0, True),
    ],
)
async def test_tokens_of_older_weights_than_were_sent_are_refused(
    versions: tuple[int, ...], on_engines: int | None, is_refused: bool
) -> None:
    """An engine that was left on an old version, or was never published to."""
    engine = Engine(spans=[(version, 2) for version in versions])
    pool = EnginePool([engine], RolloutConfig())
    pool.version = on_engines
    if is_refused:
        with pytest.raises(RuntimeError, match=r"engine 0 has sampled .* it is not trained on"):
            await requested(pool, PROMPT, 7)
    else:
        assert (await requested(pool, PROMPT, 7)).versions[0][0] == versions[0]


# ------------------------------------------------------------------------- the engines of a run


class Actor:
    """A fake Ray actor of an engine: `start` ends once `is_ready`, and calls raise `error`, those of
    the methods in `refuses` another one; those in `waits` do not end.
    """

    def __init__(self, *, is_ready: bool = True, error: Exception | None = None) -> None:
        self.is_ready, self.error, self.calls = is_ready, error, list[tuple[Any, ...]]()
        self.refuses: dict[str, Exception] = {}
        self.waits = set[str]()
        self.says = Pulse(0, 0, 0, 0, requests=0, is_paused=False, is_dead=False)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self.answer(name, arguments))

    async def answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self.calls.append((name, *arguments))
        while (name == "start" and not self.is_ready) or name in self.waits:
            await asyncio.sleep(0.002)
        if error := self.refuses.get(name, self.error):
            raise error
        return {"start": [], "process": ("elsewhere", 1, 1.0), "pulse": self.says}.get(name)


class Starts(EngineStarts):
    """Makes fake actors, as `make` says."""

    def make_actor(self, number: int) -> Actor:
        self.actors.append(self.arguments["make"]())
        return self.actors[-1]


class Run:
    """A manager of two engines, and what it has told the service."""

    def __init__(self, first: list[Actor], **settings: Any) -> None:
        self.used, self.failures, self.actors = list[int](), list[str](), first
        self.arguments: dict[str, Any] = {"make": Actor, "load": False, "adapter_rank": 0}
        settings = {"timeout_s": 5.0, "stall_s": 60.0} | settings
        self.arguments["load"] = settings.pop("load", False)
        starts = Starts((), self.arguments, namespace=None, actors=first, **settings)
        self.manager = EngineManager(
            starts, use=lambda number, _: self.used.append(number), fail=self.fail
        )

    async def fail(self, reason: str) -> None:
        self.failures.append(reason)

    async def serves(self) -> None:
        """Both engines have weights."""
        assert await self.manager.ready() == ""
        assert (await self.manager.hold())[:2] == ([0, 1], True)
        await self.manager.admit()

    async def until(self, *states: str) -> None:
        """Wait for the states of the engines."""
        for _ in range(2000):
            if tuple(engine.state for engine in self.manager.engines) == states:
                return
            await asyncio.sleep(0.005)
        raise AssertionError([engine.state for engine in self.manager.engines])


@asynccontextmanager
async def managed(*first: Actor, **settings: Any) -> AsyncIterator[Run]:
    run = Run(list(first) or [Actor(), Actor()], **settings)
    yield run
    await run.manager.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_module, "BEAT_S", 0.005)
    monkeypatch.setattr(engines_module, "LOOK_S", 0.002)
    monkeypatch.setattr(engines_module, "ray", SimpleNamespace(kill=lambda actor: None))


DEAD = ActorDiedError()
FULL = RayTaskError("start", "", RuntimeError("no memory left"))


async def test_an_engine_in_the_place_of_a_dead_one_serves_after_the_next_publication() -> None:
    """A publication does not wait for it while it starts, also where the first start fails."""
    made = [Actor(error=FULL), slow := Actor(is_ready=False)]
    async with managed() as run:
        await run.serves()
        run.arguments["make"] = lambda: made.pop(0)
        run.actors[1].error = DEAD
        await run.until("ready", "starting")
        while made:
            await asyncio.sleep(0.002)
        members, has_new, notices = await run.manager.hold()
        assert (members, has_new) == ([0], False) and "engine 1 is dead" in notices[0]
        assert "no memory left; it is started again" in notices[1]
        await run.manager.admit()
        slow.is_ready = True
        await run.until("ready", "ready")
        assert run.used == [0, 1]
        members, has_new, (line,) = await run.manager.hold()
        assert (members, has_new) == ([0, 1], True) and "engine 1 is ready again" in line
        metrics = await run.manager.admit()
        assert (metrics["engines/replaced"], metrics["engines/missing"]) == (2, 0)
        assert run.used == [0, 1, 1] and run.failures == []


async def test_an_engine_that_is_lost_in_a_publication_joins_a_later_one() -> None:
    async with managed() as run:
        await run.serves()
        await run.manager.hold()
        run.actors[1].refuses["update"] = RuntimeError("no room")
        run.arguments["make"] = lambda: Actor(is_ready=False)
        _, bad = await run.manager.call("update", (3, 1.0), 5.0)
        assert bad == CallOutcome(None, "no room") and ("update", 3, 1.0) in run.actors[0].calls
        assert (await run.manager.hold([1]))[:2] == ([0], False)
        await run.until("ready", "starting")
        assert (await run.manager.hold([1]))[:2] == ([0], False), "it is not ended again"
        assert len(run.actors) == 3 and run.failures == []


async def test_a_run_whose_last_engine_with_weights_is_lost_ends() -> None:
    async with managed() as run:
        await run.serves()
        run.actors[1].error = DEAD
        while len(run.actors) < 3:
            await asyncio.sleep(0.005)
        await run.until("ready", "ready")
        run.actors[0].error = DEAD
        while not run.failures:
            await asyncio.sleep(0.005)
        assert run.failures[0].startswith("no engine is left that has weights (engine 0 is dead")
        assert "; `--resume auto`" in run.failures[0]
        with pytest.raises(ProcessLost, match="no engine is left"):
            await run.manager.hold()


async def test_an_engine_that_is_getting_weights_counts_when_the_last_other_is_lost() -> None:
    """Engine 1 is new; engine 0, which had weights, is lost in the publication that reaches it."""
    async with managed() as run:
        await run.serves()
        run.actors[1].error = DEAD
        while len(run.actors) < 3:
            await asyncio.sleep(0.005)
        await run.until("ready", "ready")
        assert (await run.manager.hold())[:2] == ([0, 1], True)
        run.arguments["make"] = lambda: Actor(is_ready=False)
        assert (await run.manager.hold([0]))[:2] == ([1], True)
        await run.until("starting", "ready")
        await run.manager.admit()
        assert run.used == [0, 1, 1] and run.failures == []


async def test_a_publication_that_leaves_no_engine_with_weights_ends_the_run() -> None:
    """The only one dies behind its last answer."""
    async with managed(Actor()) as run:
        assert await run.manager.ready() == ""
        await run.manager.hold()
        run.actors[0].error = DEAD
        while len(run.actors) < 2:
            await asyncio.sleep(0.005)
        with pytest.raises(ProcessLost, match=r"that has weights \(engine 0 is dead .*; `--resume"):
            await run.manager.admit()


async def test_a_publication_that_finds_no_engine_says_why() -> None:
    async with managed(Actor()) as run:
        assert await run.manager.ready() == ""
        run.arguments["make"] = lambda: Actor(is_ready=False)
        run.actors[0].error = DEAD
        await run.until("starting")
        with pytest.raises(
            ProcessLost, match=r"no engine is left \(engine 0 is dead .*; `--resume"
        ):
            await run.manager.hold()


async def test_an_engine_that_dies_as_it_connects_costs_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one that is healthy and takes longer."""
    loop = asyncio.get_running_loop()
    async with managed() as run:
        await run.serves()
        client = EngineClient(None, run.manager._starts.timeout_s)

        def ask(method: str, *arguments: Any, timeout_s: float) -> Any:
            call = getattr(run.manager, method)(*arguments)
            return asyncio.run_coroutine_threadsafe(call, loop).result(timeout_s)

        monkeypatch.setattr(client, "ask", ask)
        run.actors[0].waits.add("connect")
        run.actors[1].refuses["connect"] = DEAD
        loop.call_later(0.2, run.actors[0].waits.clear)
        with pytest.raises(ProcessLost) as lost:
            await asyncio.to_thread(client.connect, {0: {}, 1: {}}, timeout_s=20.0)
        assert lost.value.engines == (1,)


async def test_the_trainer_waits_for_the_memory_of_an_engine_that_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends, is_killed = threading.Event(), threading.Event()

    def kill(actor: Actor) -> None:
        ends.wait(10)
        is_killed.set()

    monkeypatch.setattr(engines_module, "ray", SimpleNamespace(kill=kill))
    async with managed(takes_turns=True) as run:
        await run.serves()
        run.actors[1].waits.add("sleep")
        asleep = asyncio.create_task(run.manager.sleep(0.05))
        await run.until("ready", "lost")
        await asyncio.sleep(0.05)
        assert not asleep.done()
        ends.set()
        assert await asleep == [] and is_killed.is_set()


async def test_an_engine_that_never_ends_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    monkeypatch.setattr(engines_module, "ray", SimpleNamespace(kill=lambda actor: ends.wait(10)))
    async with managed(takes_turns=True, timeout_s=0.3) as run:
        await run.serves()
        run.actors[1].error = DEAD
        await run.until("ready", "lost")
        with pytest.raises(ProcessLost, match=r"engine 1 is lost; raise .*start_timeout_s"):
            await run.manager.sleep(5.0)
        ends.set()


async def test_without_an_engine_sleep_and_wake_say_why() -> None:
    async with managed(Actor(), takes_turns=True) as run:
        assert await run.manager.ready() == ""
        await run.manager.hold()
        await run.manager.admit()
        assert await run.manager.sleep(5.0) == []
        run.actors[0].error = DEAD
        while not run.failures:
            await asyncio.sleep(0.005)
        for call in (run.manager.wake, run.manager.sleep):
            with pytest.raises(ProcessLost, match=r"has weights \(engine 0 is dead"):
                await call(5.0)


async def test_engines_that_load_their_weights_serve_as_soon_as_they_are_ready() -> None:
    async with managed(Actor(), load=True) as run:
        assert await run.manager.ready() == "" and run.used == [0]
        run.actors[0].error = DEAD
        while len(run.used) < 2:
            await asyncio.sleep(0.005)
        assert run.failures == []


async def test_a_run_goes_on_without_an_engine_that_cannot_start() -> None:
    """And ends where that is the last one."""
    async with managed() as run:
        await run.serves()
        run.arguments["make"] = lambda: Actor(error=FULL)
        run.actors[1].error = DEAD
        await run.until("ready", "given up")
        assert len(run.actors) == 2 + ENGINE_STARTS
        members, _, notices = await run.manager.hold()
        assert members == [0]
        assert "3 starts of engine 1 failed; the last: " in notices[-1]
        assert notices[-1].endswith("no memory left; the run goes on with 1 of 2 engines")
        assert run.failures == []


@pytest.mark.parametrize("dies", [True, False])
async def test_at_the_start_only_an_engine_that_dies_is_started_again(dies: bool) -> None:
    failing = Actor(error=DEAD if dies else FULL)
    async with managed(Actor(), failing) as run:
        problem = await run.manager.ready()
        assert problem == ("" if dies else "engine 1 failed (starting): no memory left")
        assert len(run.actors) == 2 + dies


async def test_engines_that_take_turns_with_the_trainer_start_when_weights_are_sent() -> None:
    """Not while the trainer has their memory; and the publication waits for all of them."""
    async with managed(takes_turns=True) as run:
        await run.serves()
        run.actors[1].error = DEAD
        assert await run.manager.sleep(5.0) == [] == await run.manager.wake(5.0)
        await asyncio.sleep(0.1)
        assert len(run.actors) == 2
        run.arguments["make"] = lambda: Actor(is_ready=False)
        held = asyncio.create_task(run.manager.hold())
        await run.until("ready", "starting")
        assert not held.done()
        run.actors[2].is_ready = True
        assert (await asyncio.wait_for(held, 5))[:2] == ([0, 1], True)
        run.actors[0].refuses["sleep"] = RuntimeError("no")
        assert await run.manager.sleep(5.0) == ["engine 0 failed: no"]


def pulse(steps: int, requests: int = 1, *, paused: bool = False, dead: bool = False) -> Pulse:
    return Pulse(steps, 0, 0, 0, requests, paused, dead)


@pytest.mark.parametrize(("says", "problem"), [
    (pulse(5), "has made no step for 0 s, with 1 requests open"),
    (pulse(5, 0), ""), (pulse(5, paused=True), ""),
    (pulse(5, dead=True), "has lost one of vLLM's processes"),
    (ActorUnavailableError("away", b"0" * 16), "has not said for 0 s that it lives"),
])  # fmt: skip
async def test_an_engine_is_hung_if_it_has_requests_and_makes_no_step(
    says: Any, problem: str
) -> None:
    """Not one without work, or paused on purpose; silence and death are told apart."""
    async with managed(stall_s=0.2) as run:
        await run.serves()
        before = run.manager.moved_at
        run.actors[1].says = run.actors[1].error = None
        setattr(run.actors[1], "says" if isinstance(says, Pulse) else "error", says)
        await asyncio.sleep(0.6)
        *_, notices = await run.manager.hold()
        lines = [f"megarl: engine 1 {problem}; it is replaced"] if problem else []
        assert [line for line in notices if "ready again" not in line] == lines
        assert run.manager.moved_at > before or not isinstance(says, Pulse) or says.is_dead


async def test_a_full_memory_ends_the_run() -> None:
    """Another engine would be ended as well."""
    async with managed() as run:
        await run.serves()
        run.actors[1].error = OutOfMemoryError("full")
        while not run.failures:
            await asyncio.sleep(0.005)
        assert run.failures == ["engine 1 is dead (full); `--resume auto` goes on from the newest"
                                " checkpoint"]  # fmt: skip


async def test_ray_that_hangs_does_not_hang_the_end_of_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ray.kill` has no deadline: where a raylet is stopped, it may never return."""
    never = threading.Event()
    monkeypatch.setattr(engines_module, "ray", SimpleNamespace(kill=lambda actor: never.wait()))
    monkeypatch.setattr(engines_module, "KILL_S", 0.1)
    async with managed() as run:
        await run.serves()
        run.actors[1].error = DEAD
        while len(run.actors) < 3:
            await asyncio.sleep(0.005)
        never.set()


LATE = CallOutcome(None, "late", is_lost=True)
FAILED, GONE = CallOutcome(None, "no room"), CallOutcome(None, "its process died (x)", is_lost=True)
GAVE_UP = CallOutcome(None, f"rank 0: {GIVEN_UP}")


@pytest.mark.parametrize(("outcomes", "error", "lost", "unsettled"), [
    ([CallOutcome(1), CallOutcome(2)], None, (), []),
    ([LATE, FAILED], ProcessLost, (1,), [0, 1]), ([CallOutcome(1), LATE], ProcessLost, (1,), [1]),
    ([GAVE_UP, GONE], ProcessLost, (1,), [1]), ([GAVE_UP, LATE], Aborted, (), [1]),
])  # fmt: skip
def test_a_call_to_all_engines_names_those_that_failed(
    outcomes: list[CallOutcome], error: Any, lost: tuple[int, ...], unsettled: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It ends with the first failure: engines that have no answer by then are not late."""
    monkeypatch.setattr(engine_client.ray, "wait", lambda references, timeout: (references, []))
    engines: Any = SimpleNamespace(ask=lambda *_, **__: outcomes, answer=lambda *_: outcomes)
    call = EngineCall(engines, "reference")
    assert call.settle(timeout_s=1.0) == unsettled
    if error is None:
        assert call.result(timeout_s=1.0) == [1, 2]
        return
    for ask in (call.poll, lambda: call.result(timeout_s=1.0)):
        with pytest.raises(error) as found:
            ask()
        assert getattr(found.value, "engines", ()) == lost


# ------------------------------------------------------------------------------- calls of the service


@pytest.mark.parametrize("has_stopped", [True, False])
def test_a_service_that_a_signal_has_ended_is_no_error(
    has_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sends SIGTERM to Ray's processes too, which may end before the ranks."""

    def dead(*_: Any) -> list[Any]:
        raise ProcessLost("the rollout service died")

    calls = {
        name: SimpleNamespace(remote=lambda *_: "reference") for name in ("take", "is_early_stop")
    }
    service = SimpleNamespace(**calls)
    monkeypatch.setattr(rollout_client.ray, "get_actor", lambda name: service)
    monkeypatch.setattr(rollout_client.ray, "wait", lambda found, **_: (found, []))
    monkeypatch.setattr(rollout_client, "ask", dead)
    monkeypatch.setattr(rollout_client, "ask_service", dead)
    client = rollout_client.RolloutClient(0, silence_s=1.0)
    client.stop.number = 15 if has_stopped else 0
    if has_stopped:
        assert client.take(4) is None and not client.is_early_stop()
    else:
        for call in (lambda: client.take(4), client.is_early_stop):
            with pytest.raises(ProcessLost):
                call()


def test_a_service_that_is_away_for_a_moment_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away = ActorUnavailableError("The actor is temporarily unavailable", b"0" * 16)
    errors: list[Exception] = [away, away]

    def get(reference: str, timeout: float) -> str:
        if errors:
            raise errors.pop()
        return reference

    monkeypatch.setattr(asking, "ray", SimpleNamespace(get=get))
    assert asking.ask_service(lambda: "answer", "asking") == "answer" and not errors
    monkeypatch.setattr(asking, "UNREACHABLE_S", 0.05)
    errors += [away] * 1000
    with pytest.raises(ProcessLost, match="the rollout service cannot be reached"):
        asking.ask_service(lambda: "answer", "asking")


CLOSES = """
import os, signal, sys
from megarl.system import signals
from megarl.rollout.ray_cluster import Cluster

class Closing(Cluster):
    def __init__(self): pass
    def close(self, *, stop_timeout_s):
        os.kill(os.getpid(), signal.SIGTERM)
        print("closed", flush=True)

signals.handle()
try:
    with Closing():
        raise RuntimeError("first")
except RuntimeError as error:
    print(error, flush=True)
"""


def test_a_signal_does_not_interrupt_the_end_of_a_run_that_has_failed() -> None:
    """The other ranks fail once the service is gone, and torchrun then sends SIGTERM."""
    done = python("-c", CLOSES)
    assert (done.returncode, done.stdout) == (0, "closed\nfirst\n"), done.stderr


def test_a_killed_process_leaves_no_shared_memory() -> None:
    """Python's resource tracker, a process below it, removes it once the others are gone."""
    code = "from multiprocessing.shared_memory import SharedMemory as S; import time\n"
    code += "made = S(create=True, size=16); print(made.name, flush=True); time.sleep(60)"
    with started(code) as (one, said):
        segment = Path("/dev/shm") / said  # noqa: S108
        assert segment.exists()
        born = psutil.Process(one.pid).create_time()
        processes = with_descendants((socket.gethostname(), one.pid, born))
        assert len(processes) == 2
        until(lambda: any(map(is_tracker, processes)))  # forked, but not yet another program
        end(processes, patience_s=0.0)
        until(lambda: not any(map(is_alive, processes)))
        assert not segment.exists()
