"""What keeps a run going when engines die or hang: who publishes again while ranks wait, where
requests go, and when an engine is taken for hung. tests/system/test_lost_engine.py has real engines.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorUnavailableError
from support.commands import python, started, until
from support.rollouts import requested

from megarl.cluster import answers as answers_module
from megarl.cluster import asking, rollout_client
from megarl.cluster import engines as engines_module
from megarl.cluster import supervisor as supervisor_module
from megarl.cluster.asking import ActorDied
from megarl.cluster.engines import EngineGroup
from megarl.cluster.processes import end, is_alive, is_tracker, with_descendants
from megarl.cluster.supervisor import EngineSupervisor, Watched
from megarl.errors import EngineLost, EngineUnreachable, UserError
from megarl.rollout.config import ENGINE_STARTS, RolloutConfig
from megarl.rollout.inference_engine import Pauses, Pulse
from megarl.rollout.requests import MOST_LOSSES, EnginePool, RequestRoute
from megarl.rollout.waits import PublishAgain, Rejoins, WaitProgress, Waits
from megarl.schema import replace
from megarl.types import Prompt, Segment

PROMPT = Prompt(3, "p", [1, 2], "a")


# ------------------------------------------------------------------------------ publishing again


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 4), waits=st.integers(1, 4))
def test_all_ranks_publish_alike(seed: int, ranks: int, waits: int) -> None:
    """Ranks ask in any order, while engines and results become ready. A publication, and the end of
    a wait's step, go on only once every rank is there: no rank may be alone.
    """
    draw, rejoins = random.Random(seed), Rejoins()
    position, publications = [0] * ranks, [0] * ranks
    publishes: list[bool] = [False] * ranks
    said: dict[int, list[int]] = {}
    is_ready, brought, ready_engines = False, 0, 0
    for _ in range(2000):
        if min(position) == waits:
            break
        if draw.random() < 0.1 and ready_engines < 5:
            rejoins.engines.add(ready_engines)
            ready_engines += 1
        current = min(position)
        is_ready = is_ready or draw.random() < 0.05
        rank = draw.randrange(ranks)
        if publishes[rank]:
            if all(publishes) and len(set(position)) == 1:  # the collective happens
                publishes, brought = [False] * ranks, brought + 1
            continue
        if position[rank] > current:  # at the step's end, where the ranks meet
            continue
        name = f"step {position[rank]}"
        if is_ready:
            rejoins.close(name)
        elif not rejoins.is_due(name, publications[rank]):
            continue
        if rejoins.next(name, publications[rank]):
            publications[rank] += 1
            publishes[rank] = True
        else:
            said.setdefault(position[rank], []).append(publications[rank])
            position[rank] += 1
            publications[rank] = 0
            if min(position) == max(position):
                is_ready = False
    assert min(position) == waits, "a rank waits for others that do something else"
    assert all(len(set(counts)) == 1 and len(counts) == ranks for counts in said.values())
    assert brought == sum(counts[0] for counts in said.values())


async def test_a_failure_ends_every_wait() -> None:
    """And a new engine wakes a waiting rank, which is to publish again."""
    waits = Waits()

    async def forever() -> None:
        await asyncio.sleep(60)

    first = asyncio.create_task(waits.until("eval 3", 0, lambda: False))
    await asyncio.sleep(0.01)
    waits.rejoins.engines.add(1)
    await waits.notify()
    assert await asyncio.wait_for(first, 1) == PublishAgain()
    first = asyncio.create_task(waits.until("step 1", 0, lambda: False))
    second = asyncio.create_task(waits.result(forever))
    await asyncio.sleep(0.01)
    assert not first.done() and not second.done()
    await waits.fail(RuntimeError("no engine starts"))
    assert await asyncio.wait_for(first, 1) is None
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

    async def generate(self, *arguments: Any, seed: int, **rest: Any) -> Segment:
        self.seeds.append(seed)
        if self.errors:
            raise self.errors.pop(0)
        if self.gate is not None:
            await self.gate.wait()
        count = sum(number for _, number in self.spans)
        return Segment("model", count, None, self.spans, "stop")


async def test_requests_of_a_lost_engine_go_to_another_with_their_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or to the next one, where no engine lives; to the same one, where that was out of reach."""
    monkeypatch.setattr("megarl.rollout.requests.UNREACHABLE_S", 0.01)
    away = EngineUnreachable("blip")
    engines = [Engine(EngineLost("gone")), Engine(away, away)]
    pool, route = EnginePool(engines, RolloutConfig()), RequestRoute(0)
    await requested(pool, PROMPT, 7, route)
    assert (engines[0].seeds, engines[1].seeds, route.engine) == ([7], [7, 7, 7], 1)
    await requested(pool, PROMPT, 8)
    assert engines[0].seeds == [7], "a lost engine gets no request"
    engines[1].errors = [EngineLost("gone")]
    running = asyncio.create_task(requested(pool, PROMPT, 9))
    await asyncio.sleep(0.05)
    assert not running.done()
    pool.replace(0, fresh := Engine())
    await asyncio.wait_for(running, 1)
    pool._lose(0, engines[0])  # a late loss, of the engine before
    await asyncio.wait_for(requested(pool, PROMPT, 10), 1)
    assert fresh.seeds == [9, 10]
    doomed = [Engine(EngineLost("gone")) for _ in range(MOST_LOSSES + 1)]
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
    assert pool._load == [16, 8]
    assert engines[0].seeds == [*range(8), *range(20, 28)]
    assert engines[1].seeds == [*range(10, 18)]
    # The next samples of the first group find its engine too far ahead.
    more = asyncio.create_task(requested(pool, replace(PROMPT, index=0), 99))
    await asyncio.sleep(0.01)
    assert engines[1].seeds[-1] == 99
    for engine in engines:
        engine.gate.set()
    await asyncio.gather(*running, more)
    assert pool._load == [0, 0] and not pool._homes


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
    monkeypatch.setattr("megarl.rollout.inference_engine.time.monotonic", lambda: now[0])
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


# ------------------------------------------------------------------------- when an engine is hung


def pulse(steps: int, requests: int = 1, *, paused: bool = False, dead: bool = False) -> Pulse:
    return Pulse(steps, 0, 0, 0, requests, paused, dead)


def test_an_engine_is_hung_if_it_has_requests_and_makes_no_step() -> None:
    """Not one without work, or paused on purpose; silence and death are told apart."""
    engine = Watched("handle", moved_at=0.0)
    assert engine.hears(pulse(5), 1.0) == 5
    assert engine.hears(pulse(5), 10.0) == 0
    assert engine.problem(11.0, 10.0) == ""
    assert engine.problem(11.1, 10.0) == "has made no step for 10 s, with 1 requests open"
    assert engine.hears(pulse(6), 12.0) == 1
    assert engine.problem(22.0, 10.0) == ""
    for now, calm in ((100.0, pulse(6, 0)), (200.0, pulse(6, paused=True))):
        engine.hears(calm, now)
        engine.hears(pulse(6), now + 5)
        assert engine.problem(now + 5, 10.0) == "" != engine.problem(now + 11, 10.0)
    for way in ({"asked": "reference"}, {"is_away": True}):
        silent = Watched("handle", moved_at=0.0, **way)
        assert silent.problem(9.0, 10.0) == ""
        assert silent.problem(11.0, 10.0) == "has not said for 11 s that it lives"
    engine.hears(pulse(0, dead=True), 224.0)
    assert engine.problem(224.0, 10.0) == "has lost one of vLLM's processes"


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

    def wait(references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
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
        assert client.take(4, lambda: None) is None
        assert clock.now > 3
    else:
        with pytest.raises(RuntimeError, match=r"no engine has made a step .* rollouts of step 5"):
            client.take(4, lambda: None)
        assert clock.now < 2


def test_silence_counts_from_the_last_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the question that has found it."""
    now = [100.0]
    monkeypatch.setattr("megarl.rollout.waits.time.monotonic", lambda: now[0])
    moved = WaitProgress()
    now[0] = 103.0
    assert moved.silent_s == 3.0
    assert moved.add(2, 5) == 7 and moved.silent_s == 0.0
    now[0] = 110.0
    assert moved.add(0, 5) == 7 and moved.silent_s == 7.0
    assert moved.add(0, 6) == 8 and moved.silent_s == 0.0


@pytest.mark.parametrize(("data_rank", "questions"), [(0, 24), (1, 4)])
def test_other_ranks_ask_less_often_for_progress(
    data_rank: int, questions: int, clock: Any
) -> None:
    """In a wait of 120 s, of a run that allows 1,800 s of silence."""
    clock.answers_s, clock.silent = 121.0, lambda: 1.0
    assert rollout_client.RolloutClient(data_rank, silence_s=1800.0).take(4, lambda: None) is None
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


# ------------------------------------------------------------------------- the engines of a group


class Call:
    """A method of a fake Ray actor: its calls return a reference that `Actor.result` answers."""

    def __init__(self, actor: Actor, name: str) -> None:
        self.actor, self.name = actor, name

    def remote(self, *arguments: Any) -> tuple[Actor, str]:
        self.actor.calls.append((self.name, *arguments))
        return self.actor, self.name


class Actor:
    """A fake Ray actor of an engine, or of the service."""

    def __init__(self, *, is_ready: bool = True, error: Exception | None = None) -> None:
        self.is_ready, self.error, self.calls = is_ready, error, list[tuple[Any, ...]]()

    def __getattr__(self, name: str) -> Call:
        return Call(self, name)


class FakeRay:
    """`ray.wait`, `ray.get` and `ray.kill` for `Actor`s."""

    @staticmethod
    def wait(references: list[Any], timeout: float = 0.0, **_: Any) -> tuple[list[Any], list[Any]]:
        done = [one for one in references if one[0].is_ready]
        return done, [one for one in references if one not in done]

    @staticmethod
    def get(reference: tuple[Actor, str], timeout: float = 0.0) -> Any:
        actor, name = reference
        if actor.error is not None:
            raise actor.error
        return {"start": {"processes": [], "seconds": 1.0}, "process": ("elsewhere", 1, 1.0)}.get(
            name
        )

    @staticmethod
    def kill(actor: Actor) -> None:
        actor.is_ready = True


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group of two engines; `actors` has every actor that was started for it."""
    for module in (engines_module, answers_module, asking):
        monkeypatch.setattr(module, "ray", FakeRay)
    monkeypatch.setattr(supervisor_module, "ray_problem", str)
    actors: list[Actor] = []

    def start(number: int) -> Actor:
        actors.append(Actor())
        return actors[-1]

    made = EngineGroup(2, start, timeout_s=5.0)
    made.wait()
    made.actors = actors  # type: ignore[attr-defined]
    return made


def test_a_publication_has_engines_in_the_place_of_the_dead(group: Any) -> None:
    """Also where the first start fails. Only those that are ready get requests; where Ray fails,
    the wait for an engine ends.
    """
    old = group.handles[1]
    group.kill(1, old)
    assert group.dead == {1} and group.hold() == [1]
    group.kill(1, old)  # late
    assert group.dead == set() and group.handles[1] is group.actors[2]
    group.restart([1])
    group.handles[1].error = RuntimeError("no memory left")
    assert group.hold() == [1], "the second start succeeds"
    group.service = Actor()
    group.restart([0, 1])
    group.finish_start(0, 1.0)
    group.admit()
    assert [call[:2] for call in group.service.calls] == [("use_engine", 0)]
    assert group.fresh == {1}
    group.handles[1].is_ready = False
    group.broken = "Ray's head (GCS) has not answered for 20 s"
    with pytest.raises(RuntimeError, match=r"an engine cannot start: Ray's head"):
        group.hold()


@pytest.fixture
def quorum(group: Any) -> Any:
    """As `group`; a publication needs one engine."""
    group._fewest = 1
    return group


@pytest.fixture
def supervisor(quorum: Any, monkeypatch: pytest.MonkeyPatch) -> EngineSupervisor:
    """That of `quorum`, without its thread: a test lets it replace engines."""
    monkeypatch.setattr(supervisor_module, "ray", FakeRay)
    quorum.broken = "by the test, so that its thread ends at once"
    made = EngineSupervisor(quorum, stall_s=60.0, loads=False)
    made.close(5.0)
    made._close.clear()
    quorum.broken, quorum.service = "", Actor()
    return made


def test_a_publication_does_not_wait_for_an_engine_that_starts(quorum: Any) -> None:
    quorum.restart([1])
    quorum.handles[1].is_ready = False
    assert quorum.hold() == [] and quorum.members == [0] and quorum.missing == 1
    quorum.update(3, timeout_s=1.0)
    assert ("update", 3, 1.0) in quorum.actors[0].calls
    assert ("update", 3, 1.0) not in quorum.handles[1].calls
    quorum.service = Actor()
    quorum.admit()
    assert quorum.service.calls == [] and quorum.fresh == {1}
    quorum.let_go()
    quorum.handles[1].is_ready = True
    assert quorum.hold() == [1] and quorum.members == [0, 1] and quorum.missing == 0
    quorum.admit()
    assert [call[:2] for call in quorum.service.calls] == [("use_engine", 1)]


def test_an_engine_that_is_lost_in_a_publication_joins_at_the_next(
    quorum: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quorum.hold()
    plain = quorum._start

    def slow(number: int) -> Any:
        made = plain(number)
        made.is_ready = False
        return made

    quorum._start = slow
    quorum.replace([0])
    assert quorum.members == [1] and quorum.missing == 1
    quorum.connect(lambda position: {"engine": position}, timeout_s=1.0)
    assert ("connect", {"engine": 0}) in quorum.handles[1].calls, "positions among the members"
    # Without any engine there is nothing to publish to.
    quorum._timeout_s = 0.3
    monkeypatch.setattr(engines_module, "POLL_S", 0.01)
    monkeypatch.setattr(FakeRay, "kill", lambda actor: None)
    with pytest.raises(RuntimeError, match=r"no engine is ready within 0\.3 s"):
        quorum.replace([1])


def test_a_run_goes_on_without_an_engine_that_cannot_start(
    quorum: Any, supervisor: EngineSupervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    """The supervisor gives it up after three failures in a row, and ends the run with the last."""
    plain = quorum._start

    def fails(number: int) -> Any:
        made = plain(number)
        made.error = RuntimeError("no memory left")
        return made

    quorum._start = fails
    quorum.kill(1, quorum.handles[1])
    for _ in range(6):
        supervisor._replace()
    assert quorum.given_up == {1} and len(quorum.actors) == 2 + ENGINE_STARTS
    assert quorum.hold() == [] and quorum.members == [0] and quorum.missing == 1
    quorum.let_go()
    (told,) = [one for one in capsys.readouterr().err.splitlines() if "warning" in one]
    assert "3 starts of engine 1 failed; the last: " in told and "no memory left" in told
    assert told.endswith("the run goes on with 1 of 2 engines")
    quorum.kill(0, quorum.handles[0])
    for _ in range(2):
        supervisor._replace()
    with pytest.raises(RuntimeError, match=r"3 starts of engine 0 failed; the last: .*no memory"):
        supervisor._replace()


def test_the_supervisor_follows_an_engine_that_a_publication_started(
    quorum: Any, supervisor: EngineSupervisor
) -> None:
    """It is not late at once, and the service hears of it though it heard of one before."""
    for _ in range(2):
        quorum.kill(1, quorum.handles[1])
        plain, quorum._start = quorum._start, lambda number: Actor(is_ready=False)
        quorum.hold()
        quorum.let_go()
        quorum._start, handle = plain, quorum.handles[1]
        supervisor._replace()
        assert quorum.handles[1] is handle, "it has time to start"
        handle.is_ready = True
        supervisor._replace()
    assert quorum.service.calls == [("engine_is_ready", 1)] * 2


@pytest.mark.parametrize("has_stopped", [True, False])
def test_a_service_that_a_signal_has_ended_is_no_error(
    has_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sends SIGTERM to Ray's processes too, which may end before the ranks."""

    def dead(*_: Any) -> list[Any]:
        raise ActorDied("the rollout service died")

    monkeypatch.setattr(rollout_client.ray, "get_actor", lambda name: Actor())
    monkeypatch.setattr(rollout_client.ray, "wait", lambda found, timeout: (found, []))
    monkeypatch.setattr(rollout_client, "ask", dead)
    monkeypatch.setattr(rollout_client, "ask_service", dead)
    client = rollout_client.RolloutClient(0, silence_s=1.0)
    client.stop.number = 15 if has_stopped else 0
    if has_stopped:
        assert client.take(4, lambda: None) is None and not client.is_early_stop()
    else:
        for call in (lambda: client.take(4, lambda: None), client.is_early_stop):
            with pytest.raises(ActorDied):
                call()


def test_ray_that_hangs_does_not_hang_the_end_of_an_engine(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray.kill` has no deadline: where a raylet is stopped, it may never return."""
    never = threading.Event()
    monkeypatch.setattr(FakeRay, "kill", lambda actor: never.wait())
    monkeypatch.setattr(engines_module, "KILL_S", 0.1)
    began = time.monotonic()
    group.kill(1, group.handles[1])
    assert group.dead == {1} and time.monotonic() - began < 60
    never.set()


def test_ray_that_hangs_ends_a_wait_for_an_engine(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's health is watched by a thread of its own, which no other call of Ray keeps waiting."""
    never = threading.Event()
    monkeypatch.setattr(supervisor_module, "ray", FakeRay)
    monkeypatch.setattr(supervisor_module, "BEAT_S", 0.01)
    monkeypatch.setattr(FakeRay, "wait", lambda *rest, **more: never.wait())
    monkeypatch.setattr(supervisor_module, "ray_problem", lambda: "Ray's head (GCS) hangs")
    supervisor = EngineSupervisor(group, stall_s=60.0, loads=False)
    until(lambda: group.broken)
    assert group.broken.startswith("Ray's head (GCS) hangs; `--resume auto` goes on")
    never.set()
    supervisor.close(5.0)


def test_a_raylet_that_hangs_is_killed(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has declared the node dead: calls that wait for the stopped raylet would never end."""
    node = SimpleNamespace(get_node_id=lambda: f"node{os.getpid()}")
    monkeypatch.setattr(FakeRay, "get_runtime_context", lambda: node, raising=False)
    monkeypatch.setattr(supervisor_module, "ray", FakeRay)
    monkeypatch.setattr(supervisor_module, "BEAT_S", 0.01)
    monkeypatch.setattr(supervisor_module, "ray_problem", lambda: supervisor_module.NODE_DEAD)
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        subprocess.Popen([*sleeper, f"--node_id=node{os.getpid()}"]) as raylet,
        subprocess.Popen([*sleeper, "--node_id=another"]) as other,
    ):
        raylet.send_signal(signal.SIGSTOP)
        supervisor = EngineSupervisor(group, stall_s=60.0, loads=False)
        assert raylet.wait(60) == -signal.SIGKILL and other.poll() is None
        supervisor.close(5.0)
        other.kill()


def test_a_service_that_is_away_for_a_moment_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asking, "ray", FakeRay)
    monkeypatch.setattr(asking, "POLL_S", 0.01)
    away = ActorUnavailableError("The actor is temporarily unavailable", b"0" * 16)
    errors: list[Exception | None] = [away, away, None]
    service = Actor()

    def call() -> Any:
        service.error = errors.pop(0)
        return service.progress.remote()

    assert asking.ask_service(call, "asking") is None
    assert errors == [] and len(service.calls) == 3
    monkeypatch.setattr(asking, "UNREACHABLE_S", 0.05)
    service.error = away
    with pytest.raises(ActorDied, match="the rollout service cannot be reached"):
        asking.ask_service(service.progress.remote, "asking")


CLOSES = """
import os, signal, sys
from megarl import signals
from megarl.cluster.ray_cluster import Cluster

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
