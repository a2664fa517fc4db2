"""Requests and answers in batches, with an actor that is no Ray actor."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ObjectLostError, RayTaskError

from megarl.activity.recording import POLL_S, Recording
from megarl.cluster import asking, remote_environment
from megarl.cluster.inbox import Inbox
from megarl.cluster.mailbox import MAX_BATCH, Mailbox, Pace, StoredArrays, fetch
from megarl.cluster.remote import GenerateRequest, RemoteEngine
from megarl.cluster.remote_environment import RemoteEnvironment
from megarl.cluster.service_process import ServiceActor
from megarl.environments.config import EnvironmentConfig
from megarl.environments.workers import GRACE_S, START_WITHIN_S
from megarl.errors import ArraysLost, EngineLost, EngineUnreachable, SessionLost
from megarl.rollout.config import RolloutConfig
from megarl.rollout.pauses import Pauses
from megarl.rollout.requests import EnginePool, Route
from megarl.schema import replace
from megarl.types import Prompt, Segment, TokenArrays, Verdict


class Echo(Inbox):
    """Answers n with a segment of n tokens, negative n with an error, 0 never."""

    ended = 0

    async def serve(self, request: int, arrays: list[TokenArrays]) -> Segment | int:
        if request == 0:
            try:
                await asyncio.sleep(60)
            finally:
                self.ended += 1
        if request == -1:
            raise ValueError("minus one")
        if request == -2:
            raise type("EngineDeadError", (Exception,), {})("gone")
        if request == -3:
            raise KeyError("three")
        if arrays:
            return sum(len(one.token_ids) for one in arrays)
        made = TokenArrays(np.full(request, request, np.int32), np.zeros(request, np.float32))
        return Segment("model", request, made)


class Method:
    """A method of an actor that is called as Ray's are."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def options(self, num_returns: int) -> Method:
        assert num_returns == 2
        return self

    def remote(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class Handle:
    """Ray's part: what the second return value is becomes a reference to it."""

    start: Any = None
    process: Any = None
    paused_s: Any = None

    def __init__(self) -> None:
        self.inbox, self.calls, self.dead = Echo(), 0, False
        self.submit, self.collect = Method(self._submit), Method(self._collect)
        self.drop = Method(self._drop)
        self.stored: dict[str, Any] = {}

    def _drop(self, mailbox: str, numbers: list[int]) -> None:
        self.calls += 1
        self.dropping = asyncio.ensure_future(self.inbox.drop(mailbox, numbers))

    def _submit(self, mailbox: str, requests: Any, *refs: str) -> Any:
        self.calls += 1
        return self.inbox.submit(mailbox, requests, *(self.stored[ref] for ref in refs))

    def _collect(self, mailbox: str, linger_s: float, collection: int) -> Any:
        self.calls += 1
        ref = f"stored {self.calls}"

        async def answers() -> Any:
            found, self.stored[ref] = await self.inbox.collect(mailbox, linger_s, collection)
            return found

        return answers(), ref


def serving(handle: Handle) -> list[int]:
    """Numbers of the requests that are being served."""
    return [
        number for box in getattr(handle.inbox, "_boxes", {}).values() for number in box.serving
    ]


def test_two_mailboxes_of_one_actor_get_their_own_answers() -> None:
    """Both number their requests from 0, and one has collected more often than the other."""

    async def go() -> None:
        handle = Handle()
        first, second = Mailbox(handle, Pace()), Mailbox(handle, Pace())
        for number in (1, 2, 3):
            assert (await first.ask(number)).num_tokens == number
        asked = [box.ask(n) for n in range(1, 40) for box in (first, second)]
        made = await asyncio.gather(*asked)
        assert [one.num_tokens for one in made] == [n for n in range(1, 40) for _ in range(2)]
        given_up = asyncio.create_task(first.ask(0))
        await asyncio.sleep(0.05)
        assert (await asyncio.wait_for(second.ask(9), 5)).num_tokens == 9
        given_up.cancel()

    asyncio.run(asyncio.wait_for(go(), 30))


def test_an_actor_that_answers_with_nothing_is_not_asked_without_end() -> None:
    async def go() -> None:
        handle = Handle()

        async def nothing_yet() -> Any:
            return []

        def collect(*_: Any) -> Any:
            handle.calls += 1
            return nothing_yet(), ""

        handle.collect = Method(collect)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Mailbox(handle, Pace()).ask(1), 0.5)
        assert handle.calls < 60, "at most one call in `Pace.linger_s`"

    asyncio.run(asyncio.wait_for(go(), 30))


class Losing(Handle):
    """Ray fails a call whose arguments are lost, and those of no other."""

    def _submit(self, mailbox: str, requests: Any, *refs: str) -> Any:
        if "gone" in refs:
            return self.loses()
        return super()._submit(mailbox, requests, *refs)

    async def loses(self) -> None:
        raise RayTaskError("submit", "Traceback", lost_object())


def lost_object() -> ObjectLostError:
    return ObjectLostError("00ff", "an address", "a call site")


def test_lost_arrays_fail_only_their_own_requests() -> None:
    async def go() -> None:
        handle = Losing()
        handle.stored["kept"] = [(np.zeros(3, np.int32), np.zeros(3, np.float32))]
        box = Mailbox(handle, Pace())
        asked = [box.ask(1, [StoredArrays(ref, 0)]) for ref in ("kept", "gone", "kept")]
        found = await asyncio.gather(*asked, box.ask(5), return_exceptions=True)
        assert found[0] == found[2] == 3 and found[3].num_tokens == 5
        assert isinstance(found[1], ArraysLost)
        assert "`--resume auto` goes on" in str(found[1])
        assert (await box.ask(7)).num_tokens == 7, "the mailbox goes on"

    asyncio.run(asyncio.wait_for(go(), 30))


def test_lost_answers_of_a_living_actor_are_asked_for_again() -> None:
    async def go() -> None:
        handle = Handle()

        async def loses() -> Any:
            raise lost_object()

        handle.collect = Method(lambda *_: (loses(), ""))
        with pytest.raises(EngineUnreachable):
            await Mailbox(handle, Pace()).ask(1)

    asyncio.run(asyncio.wait_for(go(), 30))


def test_a_rank_says_whose_arrays_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(refs: Any, timeout: float) -> Any:
        if refs != "kept":
            raise lost_object()

    monkeypatch.setattr("megarl.cluster.mailbox.ray.get", get)
    arrays = [StoredArrays("kept", 0), StoredArrays("gone", 0), StoredArrays("gone", 1)]
    wanted = r"of 2 of 3 segments of step 7 were lost with the node .*`--resume auto` goes on"
    with pytest.raises(ArraysLost, match=wanted):
        fetch(arrays, 1.0, "segments of step 7")


def test_an_engine_that_is_named_twice_keeps_its_mailbox() -> None:
    """Rank 0 asks again where it does not know whether the first call was heard."""
    handles, used = [Handle(), Handle()], []
    actor = ServiceActor.__new__(ServiceActor)
    engines = [RemoteEngine(handles[0], Pace())]

    def use_engine(number: int, engine: RemoteEngine) -> None:
        engines[number] = engine
        used.append(engine)

    actor._environment = SimpleNamespace(pace=Pace())  # pyright: ignore
    actor._service = SimpleNamespace(  # pyright: ignore
        engines=SimpleNamespace(engines=engines),
        config=SimpleNamespace(request_timeout_s=60.0),
        use_engine=use_engine,
    )
    for _ in range(2):
        asyncio.run(actor.use_engine(0, handles[1]))
    assert len(used) == 1 and used[0].handle is handles[1]


class Paused(Inbox):
    """An engine that is paused for the first second of a request. It answers `answers_s` later."""

    def __init__(self, answers_s: float) -> None:
        self.answers_s, self.pauses = answers_s, Pauses()

    async def serve(self, request: GenerateRequest, arrays: list[TokenArrays]) -> Segment:
        self.pauses.begin()
        await asyncio.sleep(1.0)
        self.pauses.end()
        await asyncio.sleep(self.answers_s)
        return Segment("model", 1, TokenArrays(np.ones(1, np.int32), np.zeros(1, np.float32)))

    async def paused_s(self, last_s: float) -> float:
        return self.pauses.within(last_s)


async def one_token(pool: EnginePool) -> Segment:
    """The answer of an engine of the pool to prompt 3."""
    return await pool.generate(
        Prompt(3, "p", [1, 2], "a"),
        np.array([1, 2], np.int32),
        [],
        seed=1,
        max_tokens=1,
        temperature=1.0,
        route=Route(),
    )


@pytest.mark.parametrize("is_late", [False, True])
def test_a_report_counts_an_engines_pauses_as_the_deadline_does(
    is_late: bool, tmp_path: Path
) -> None:
    """A request has 0.6 s without the engine's pause of 1 s. One that is not late is not reported,
    as it would be if the pause counted; a late one is, with the deadline that it had.
    """
    recording = Recording.of(tmp_path, "run", enabled=True)
    assert recording is not None
    recording.make(keep=False)

    def reports() -> list[str]:
        return [path.read_text() for path in tmp_path.glob("waits-*.txt")]

    async def go() -> None:
        handle, inbox = Handle(), Paused(60.0 if is_late else 0.1)
        handle.inbox, handle.paused_s = inbox, Method(inbox.paused_s)  # pyright: ignore
        config = replace(RolloutConfig(), request_timeout_s=0.6)
        engine = RemoteEngine(handle, Pace(), deadline_s=config.request_timeout_s)
        asked = one_token(EnginePool([engine], config))
        if not is_late:
            assert (await asked).num_tokens == 1
        else:
            with pytest.raises(RuntimeError, match=r"did not answer prompt 3 within 0\.6 s"):
                await asked
        await asyncio.sleep(3 * POLL_S)

    close = recording.open("service")
    try:
        asyncio.run(asyncio.wait_for(go(), 30))
    finally:
        close()
    if is_late:
        (text,) = reports()
        waited_s, deadline_s = re.findall(
            r"waited ([\d.]+) s for responses.*deadline ([\d.]+) s", text
        )[0]
        assert float(waited_s) >= float(deadline_s) >= 1.5
    else:
        assert reports() == []


class Stopped(Inbox):
    """An engine whose process is stopped: it takes a request, and nothing comes of any call."""

    async def serve(self, request: GenerateRequest, arrays: list[TokenArrays]) -> Segment:
        await asyncio.sleep(600)
        raise AssertionError

    async def paused_s(self, last_s: float) -> float:
        await asyncio.sleep(600)
        return 0.0


def test_a_stopped_engine_is_named_soon_after_the_deadline_of_its_request(tmp_path: Path) -> None:
    """Although it may take longer to say whether it was paused before it is given up, and once."""
    recording = Recording.of(tmp_path, "run", enabled=True)
    assert recording is not None
    recording.make(keep=False)

    async def go() -> float:
        handle, inbox, deadline_s = Handle(), Stopped(), 0.5
        handle.inbox, handle.paused_s = inbox, Method(inbox.paused_s)  # pyright: ignore
        engine = RemoteEngine(handle, Pace(), number=3, deadline_s=deadline_s)
        pool = EnginePool([engine], RolloutConfig(request_timeout_s=deadline_s))
        asked = asyncio.ensure_future(one_token(pool))
        began = time.monotonic()
        while not list(tmp_path.glob("waits-*.txt")):
            assert not asked.done()
            await asyncio.sleep(0.02)
        named_s = time.monotonic() - began
        with pytest.raises(RuntimeError, match="did not answer prompt 3 within"):
            await asked
        await asyncio.sleep(3 * POLL_S)
        return named_s - deadline_s

    close = recording.open("service")
    try:
        late_s = asyncio.run(asyncio.wait_for(go(), 120))
    finally:
        close()
    (report,) = tmp_path.glob("waits-*.txt")
    assert " s for responses of engine3 (deadline 0.5 s)" in report.read_text()
    assert late_s < 60


def test_every_request_gets_its_own_answer_in_few_calls() -> None:
    async def go() -> None:
        handle = Handle()
        box = Mailbox(handle, Pace())
        made = await asyncio.gather(*(box.ask(n) for n in range(1, 301)))
        for number, segment in enumerate(made, start=1):
            assert segment.num_tokens == number
            kept = handle.stored[segment.arrays.ref][segment.arrays.position]
            assert kept[0].tolist() == [number] * number
        assert handle.calls < 300 / MAX_BATCH * 4 + 5
        several: list[StoredArrays] = [made[4].arrays, made[200].arrays, made[299].arrays]
        assert await box.ask(1, several) == 5 + 201 + 300

    asyncio.run(asyncio.wait_for(go(), 30))


@pytest.mark.parametrize(("more", "held_s"), [(0, 0.2), (5, 1.2), (100, 2.5)])
def test_requests_are_held_until_no_more_come(
    monkeypatch: pytest.MonkeyPatch, more: int, held_s: float
) -> None:
    """Ten requests at once, and then one in each of `more` ticks of 0.2 s, travel together; none is
    held for more than a quarter of `Pace.linger_s`, which is 10 s. The clock is the test's own.
    """
    now, sent, sleep = [0.0], list[tuple[float, int]](), asyncio.sleep

    async def go() -> None:
        handle, pace, left = Handle(), Pace(), [more]
        pace.linger_s = 10.0
        asked: list[asyncio.Task[Any]] = []

        async def tick(seconds: float) -> None:
            now[0] += seconds
            if seconds and left[0] and not sent:
                left[0] -= 1
                asked.append(asyncio.ensure_future(box.ask(1)))
            await sleep(0)

        def submit(mailbox: str, requests: Any, *refs: str) -> Any:
            sent.append((now[0], len(requests)))
            return handle.inbox.submit(mailbox, requests, *refs)

        handle.submit = Method(submit)
        box = Mailbox(handle, pace)
        monkeypatch.setattr(asyncio, "sleep", tick)
        monkeypatch.setattr("megarl.cluster.mailbox.time.monotonic", lambda: now[0])
        await asyncio.gather(*(box.ask(1) for _ in range(10)))
        await asyncio.gather(*asked)

    asyncio.run(go())
    at, count = sent[0]
    assert at == pytest.approx(held_s)
    assert count >= 10 + min(more, int(held_s / 0.2) - 1)


def test_failures_are_told_apart() -> None:
    async def go() -> None:
        box = Mailbox(Handle(), Pace())
        made = await asyncio.gather(*(box.ask(-n) for n in (1, 2, 3)), return_exceptions=True)
        assert [type(error) for error in made] == [ValueError, EngineLost, RuntimeError]
        assert "KeyError: 'three'" in str(made[2])

    asyncio.run(asyncio.wait_for(go(), 30))


def test_a_request_that_is_given_up_does_not_stop_the_others() -> None:
    async def go() -> None:
        box = Mailbox(Handle(), Pace())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.ask(0), 0.1)
        assert (await asyncio.wait_for(box.ask(2), 5)).num_tokens == 2

    asyncio.run(asyncio.wait_for(go(), 30))


def test_cancelled_requests_end_in_the_actor() -> None:
    """In one call, and those that were not sent yet without any."""

    async def go() -> None:
        handle = Handle()
        box = Mailbox(handle, Pace(), drops=True)
        waiting = [asyncio.create_task(box.ask(0)) for _ in range(5)]
        kept = asyncio.create_task(box.ask(7))
        while len(serving(handle)) < 5:
            await asyncio.sleep(0.01)
        assert (await kept).num_tokens == 7
        calls = handle.calls
        late = asyncio.create_task(box.ask(0))
        await asyncio.sleep(0)  # it is not sent yet
        for task in (*waiting, late):
            task.cancel()
        await asyncio.gather(*waiting, late, return_exceptions=True)
        for _ in range(5):
            await asyncio.sleep(0)
        assert handle.inbox.ended == 5 and not serving(handle)
        assert handle.calls == calls + 1
        await asyncio.sleep(0.1)
        assert handle.calls <= calls + 2 and not serving(handle), "the late one was sent"
        assert (await asyncio.wait_for(box.ask(3), 5)).num_tokens == 3

    asyncio.run(asyncio.wait_for(go(), 30))


def test_the_death_of_the_actor_reaches_every_request() -> None:
    from ray.exceptions import RayActorError

    async def go() -> None:
        handle = Handle()
        box = Mailbox(handle, Pace())
        waiting = [asyncio.create_task(box.ask(0)) for _ in range(3)]

        async def dies(linger_s: float) -> Any:
            raise RayActorError

        handle.collect._call = lambda _, linger_s, __: (dies(linger_s), "")
        for found in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(found, EngineLost)

    asyncio.run(asyncio.wait_for(go(), 30))


async def nothing() -> Any:
    return None


async def sources() -> dict[str, bytes]:
    return {"own.py": b"as it was"}


class Place:
    """Ray's part for an environment: hands out actors, one after another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Handle] = []
        monkeypatch.setattr(remote_environment, "ray", self)
        monkeypatch.setattr(asking, "ray", self)
        monkeypatch.setattr(remote_environment, "BEAT_S", 0.005)

    def remote(self, actor: Any) -> Any:
        return self

    def options(self, **_: Any) -> Any:
        made = type("Made", (), {})()
        made.remote = self._make
        return made

    def _make(self, *_: Any, **known: Any) -> Handle:
        handle = Handle()
        self.known = known
        handle.start, handle.process = Method(sources), Method(nothing)
        handle.inbox.serve = self.serve  # pyright: ignore[reportAttributeAccessIssue]
        self.made.append(handle)
        return handle

    async def serve(self, request: tuple[str, dict[str, Any]], arrays: Any) -> Any:
        """The first environment gives no answer."""
        if len(self.made) == 1:
            await asyncio.sleep(60)
        return Verdict(reward=len(self.made), correct=True, metrics={})

    async def never(self) -> None:
        await asyncio.sleep(60)

    def kill(self, handle: Handle) -> None:
        from ray.exceptions import RayActorError

        async def dies() -> Any:
            raise RayActorError

        # The call that waits for answers fails as Ray has it fail.
        for box in handle.inbox._boxes.values():
            box.serving.clear()
            box.ready.set()
            box.answers = []
        handle.inbox.collect = lambda *_: dies()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("sessions", "is_stopped", "why"),
    [
        (False, False, "has given no verdict for"),
        (False, True, "has not said for 0.05 s that it lives"),
        (True, True, ""),
    ],
)
def test_an_environment_that_gives_no_answer_is_replaced(
    sessions: bool, is_stopped: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        place = Place(monkeypatch)
        config = EnvironmentConfig()
        environment = RemoteEnvironment(config, None, Pace())  # pyright: ignore[reportArgumentType]
        assert environment.limit_s == config.time_limit_s + GRACE_S
        assert environment.silence_s >= 2 * config.time_limit_s + START_WITHIN_S + GRACE_S
        environment.limit_s, environment.has_start = 0.1, sessions
        if is_stopped:
            monkeypatch.setattr(remote_environment, "ALIVE_S", 0.05)
            place.made[0].process = Method(place.never)
        else:
            environment.silence_s = 0.2
        asked_process, place.made[0].process = place.made[0].process, Method(nothing)
        await environment.start()
        place.made[0].process = asked_process
        await asyncio.sleep(0.3)
        assert len(place.made) == 1, "nothing was asked: there is no silence"
        asked = [environment.cut_off(str(number), 3) for number in range(4)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert len(place.made) == 2, "one environment takes the place, whoever asks"
        assert place.known == {"known": {"own.py": b"as it was"}}
        if sessions:
            assert all(isinstance(one, SessionLost) for one in found), found
            return
        assert [one.reward for one in found if isinstance(one, Verdict)] == [2] * 4
        told = [one.warning for one in found if isinstance(one, Verdict) and one.warning]
        assert len(told) == 1 and why in told[0], "told once"

    asyncio.run(asyncio.wait_for(go(), 30))


def test_environments_that_die_over_the_same_request_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.exceptions import RayActorError

    async def dies(linger_s: float) -> Any:
        raise RayActorError

    async def go() -> None:
        place = Place(monkeypatch)
        plain = place._make

        def make(*_: Any, **known: Any) -> Handle:
            handle = plain()
            handle.collect._call = lambda _, linger_s, __: (dies(linger_s), "")
            return handle

        place._make = make
        environment = RemoteEnvironment(EnvironmentConfig(), None, Pace())  # pyright: ignore[reportArgumentType]
        with pytest.raises(RuntimeError, match=r"lost 5 times while .* its process died"):
            await environment.texts([Segment("model", 1, None)])  # pyright: ignore[reportArgumentType]
        assert len(place.made) == 5

    asyncio.run(asyncio.wait_for(go(), 30))


def test_an_environment_that_does_not_load_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three starts, whatever they raise, and the last reason; the watcher goes on."""
    from ray.exceptions import RayActorError, RayTaskError

    starts = []

    async def breaks() -> Any:
        starts.append(1)
        raise RayTaskError("start", "Traceback", ValueError("no such column"))

    async def dies(linger_s: float) -> Any:
        raise RayActorError

    async def go() -> None:
        place = Place(monkeypatch)
        environment = RemoteEnvironment(EnvironmentConfig(), None, Pace())  # pyright: ignore[reportArgumentType]
        await environment.start()
        place.made[0].collect._call = lambda _, linger_s, __: (dies(linger_s), "")
        monkeypatch.setattr(Handle, "start", Method(breaks))
        plain = place._make

        def make(*_: Any, **known: Any) -> Handle:
            handle = plain(**known)
            handle.start = Method(breaks)
            return handle

        environment._make = make
        with pytest.raises(RuntimeError, match="3 starts failed; the last: no such column"):
            await environment.texts([Segment("model", 1, None)])  # pyright: ignore[reportArgumentType]
        assert len(starts) == 3 and environment._watcher is not None
        assert not environment._watcher.done()

    asyncio.run(asyncio.wait_for(go(), 30))


def test_a_superseded_collection_that_lingers_takes_no_answer() -> None:
    async def scene() -> None:
        inbox = Echo()
        await inbox.submit("a", [(4, 0, []), (5, 3, [])])  # one is served for ever
        orphan = asyncio.create_task(inbox.collect("a", 0.3, 1))
        await asyncio.sleep(0.05)
        newer = asyncio.create_task(inbox.collect("a", 0.6, 2))
        assert await asyncio.wait_for(orphan, 5) == ([], [])
        answers, _ = await asyncio.wait_for(newer, 5)
        assert [number for number, *_ in answers] == [5]

    asyncio.run(scene())


def test_a_collection_that_nobody_waits_for_takes_no_answer() -> None:
    """A connection that breaks leaves the caller's former call open in the actor."""

    async def scene() -> None:
        inbox = Echo()
        orphan = asyncio.create_task(inbox.collect("a", 0.0, 1))
        await asyncio.sleep(0)
        newer = asyncio.create_task(inbox.collect("a", 0.0, 2))
        await asyncio.sleep(0)
        await inbox.submit("a", [(5, 3, [])])
        assert await asyncio.wait_for(orphan, 5) == ([], [])
        answers, _ = await asyncio.wait_for(newer, 5)
        assert [number for number, *_ in answers] == [5]

    asyncio.run(scene())
