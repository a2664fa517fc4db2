"""Requests to engines through relays, with actors that are no Ray actors."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ObjectLostError

from megarl.cluster import relay
from megarl.cluster.inbox import Inbox
from megarl.cluster.mailbox import Pace, StoredArrays
from megarl.cluster.relay import (
    ALIVE_BEATS,
    QUIET_BEATS,
    RelayActor,
    RelayedEngine,
    close_relays,
    remote_engines,
    replaced,
)
from megarl.cluster.remote import GenerateRequest, RemoteEngine
from megarl.errors import EngineLost, EngineUnreachable
from megarl.rollout.config import RolloutConfig
from megarl.types import Segment, TokenArrays

PROMPT = np.arange(3, dtype=np.int32)


class Engine(Inbox):
    """Answers with as many tokens as it is asked for, once `opened`."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.opened.set()
        self.served = self.cancelled = 0

    async def serve(self, request: GenerateRequest, arrays: list[TokenArrays]) -> Segment:
        self.served += 1
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if request.max_tokens == 13:
            raise ValueError("thirteen")
        length, before = request.max_tokens, sum(len(one.token_ids) for one in arrays)
        made = TokenArrays(np.full(length, before, np.int32), np.zeros(length, np.float32))
        return Segment("model", length, made)


class Actor:
    """Ray's part: calls the object of an actor, until that dies."""

    def __init__(self, made: Any) -> None:
        self.made, self.calls, self.hangs = made, Counter[str](), False
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            if name != "collect":
                return asyncio.ensure_future(self._run(name, *arguments))
            ref = asyncio.get_running_loop().create_future()
            return asyncio.ensure_future(self._collect(ref, *arguments)), ref

        method = SimpleNamespace(remote=call)
        method.options = lambda num_returns: method
        return method

    async def _collect(self, ref: asyncio.Future[Any], *arguments: Any) -> Any:
        answers, arrays = await self._run("collect", *arguments)
        ref.set_result(arrays)
        return answers

    async def _never(self, call: Coroutine[Any, Any, Any]) -> None:
        call.close()
        await asyncio.sleep(60)

    async def _run(self, name: str, *arguments: Any) -> Any:
        if name == "submit":
            arguments = (*arguments[:2], *[await one for one in arguments[2:]])
        call: Coroutine[Any, Any, Any] = getattr(self.made, name)(*arguments)
        work = asyncio.ensure_future(self._never(call) if self.hangs else call)
        await asyncio.wait([work, self.death], return_when=asyncio.FIRST_COMPLETED)
        if self.death.done():
            work.cancel()
            raise ActorDiedError
        return await work


def stored(arrays: Sequence[TokenArrays]) -> list[StoredArrays]:
    """The arrays as objects that are there already."""
    ref: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    ref.set_result([tuple(one) for one in arrays])
    return [StoredArrays(ref, position) for position in range(len(arrays))]


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def remote(kind: Callable[..., Any]) -> Any:
        made = SimpleNamespace(remote=lambda *arguments: Actor(kind(*arguments)))
        return SimpleNamespace(options=lambda **_: made)

    def kill(handle: Actor) -> None:
        if not handle.death.done():
            handle.death.get_loop().call_soon_threadsafe(handle.death.set_result, None)

    context = SimpleNamespace(get_node_id=lambda: "0" * 56)
    monkeypatch.setattr(
        relay, "ray", SimpleNamespace(remote=remote, get_runtime_context=lambda: context)
    )
    monkeypatch.setattr(relay, "kill_actor", kill)
    monkeypatch.setattr(relay, "end", lambda processes, patience_s: None)
    monkeypatch.setattr(relay, "die_with_raylet", lambda: None)
    monkeypatch.setattr(relay, "store", stored)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 90))


def engines(
    count: int, each: int, pace: Pace | None = None
) -> tuple[list[Actor], list[RelayedEngine]]:
    """(actors, engines as the service calls them) of a run with relays."""
    handles = [Actor(Engine()) for _ in range(count)]
    made = remote_engines(handles, pace or Pace(), RolloutConfig(engines_per_relay=each))
    assert all(isinstance(one, RelayedEngine) for one in made)
    return handles, made  # pyright: ignore[reportReturnType]


async def generate(engine: RemoteEngine, tokens: int, segments: Sequence[Segment] = ()) -> Segment:
    return await engine.generate(PROMPT, segments, seed=0, max_tokens=tokens, temperature=1.0)


async def generate_again(engine: RemoteEngine, tokens: int) -> Segment:
    """The answer, after one more question if the engine could not be reached, as of a pool."""
    try:
        return await generate(engine, tokens)
    except EngineUnreachable:
        return await generate(engine, tokens)


async def tokens_of(answer: Segment) -> list[int]:
    """The token ids of an answer, read from where the service finds them."""
    return (await answer.arrays.ref)[answer.arrays.position][0].tolist()


@pytest.mark.parametrize(("each", "relays"), [(0, 0), (2, 3), (5, 1), (6, 0)])
def test_runs_of_many_engines_have_relays(each: int, relays: int) -> None:
    async def go() -> None:
        handles = [Actor(Engine()) for _ in range(5)]
        made = remote_engines(handles, Pace(), RolloutConfig(engines_per_relay=each))
        assert [one.handle for one in made] == handles
        assert [one.number for one in made] == list(range(5))
        assert len({one.relay for one in made if isinstance(one, RelayedEngine)}) == relays

    run(go)


def test_a_relay_gathers_the_answers_of_its_engines() -> None:
    """The service calls the relay a few times, whatever the number of engines, and gets what each
    engine has answered: tokens, tokens after earlier segments, and errors.
    """

    async def go() -> None:
        handles, made = engines(8, 8)
        answers = await asyncio.gather(
            *(generate(made[n % 8], n) for n in range(1, 200) if n != 13)
        )
        assert [one.num_tokens for one in answers] == [n for n in range(1, 200) if n != 13]
        assert [len(await tokens_of(one)) for one in answers] == [one.num_tokens for one in answers]
        assert await tokens_of(await generate(made[3], 2, answers[:3])) == [1 + 2 + 3] * 2
        with pytest.raises(ValueError, match="thirteen"):
            await generate(made[5], 13)
        actor = made[0].relay.handle
        assert actor.calls["submit"] + actor.calls["collect"] < 30
        assert all(handle.calls["submit"] <= 8 for handle in handles)
        await close_relays(made)

    run(go)


def test_an_answer_waits_for_no_timer_if_no_other_comes() -> None:
    """Although others would be held back for 100 s."""

    async def go() -> None:
        pace = Pace()
        _, made = engines(2, 2, pace)
        for n in (1, 2):
            started_at, pace.linger_s = time.monotonic(), 100.0
            await generate(made[n - 1], n)
            assert time.monotonic() - started_at < 60
        await close_relays(made)

    run(go)


def test_a_lost_engine_is_told_at_once() -> None:
    """Requests of other engines are under way, and their answers are held back for 100 s."""

    async def go() -> None:
        pace = Pace()
        handles, made = engines(3, 3, pace)
        pace.linger_s = 100.0
        for handle in handles:
            handle.made.opened.clear()
        asked = [asyncio.ensure_future(generate(one, 5)) for one in made]
        while not all(handle.made.served for handle in handles):
            await asyncio.sleep(0.01)
        started_at = time.monotonic()
        handles[1].death.set_result(None)
        with pytest.raises(EngineLost, match="its process died"):
            await asked[1]
        assert time.monotonic() - started_at < 60
        assert not made[1].relay.is_lost
        for handle in handles:
            handle.made.opened.set()
        await asyncio.gather(asked[0], asked[2])
        fresh = Actor(Engine())
        again = await replaced(made[1], fresh, pace)
        assert (await generate(again, 4)).num_tokens == 4 and fresh.calls["submit"] == 1
        assert isinstance(again, RelayedEngine) and again.relay is made[0].relay
        assert again.handle is fresh and again.number == 1
        await close_relays(made)

    run(go)


@pytest.mark.parametrize("hangs", [False, True])
def test_engines_of_a_lost_relay_are_asked_directly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hangs: bool
) -> None:
    """A relay that dies, or hangs, takes no request with it; engines stop to serve its requests."""

    async def go() -> None:
        monkeypatch.setattr(relay, "BEAT_S", 0.02)
        handles, made = engines(4, 2)
        for handle in handles:
            handle.made.opened.clear()
        asked = [asyncio.ensure_future(generate_again(made[n % 4], n)) for n in range(1, 9)]
        while not all(handle.made.served == 2 for handle in handles):
            await asyncio.sleep(0.01)
        actor, started_at = made[0].relay.handle, time.monotonic()
        if hangs:
            actor.hangs = True
        else:
            actor.death.set_result(None)
        while not all(handle.made.served == 4 for handle in handles[:2]):
            await asyncio.sleep(0.01)
        assert not hangs or time.monotonic() - started_at > 0.02 * (ALIVE_BEATS + QUIET_BEATS) / 2
        for handle in handles:
            handle.made.opened.set()
        assert [one.num_tokens for one in await asyncio.gather(*asked)] == list(range(1, 9))
        assert [handle.made.cancelled for handle in handles] == [2, 2, 0, 0]
        assert [handle.calls["leave"] for handle in handles] == [1, 1, 0, 0]
        assert [one.relay.is_lost for one in made] == [True, True, False, False]
        again = await replaced(made[0], Actor(Engine()), Pace())
        assert (await generate(again, 3)).num_tokens == 3
        await close_relays(made)

    run(go)
    assert capsys.readouterr().err.count("relay 0 was lost") == 1


def test_a_relay_at_work_is_not_asked_whether_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is, where requests are open and nothing is answered; its answer keeps it."""

    async def go() -> None:
        monkeypatch.setattr(relay, "BEAT_S", 0.02)
        handles, made = engines(2, 2)
        actor = made[0].relay.handle
        for n in range(20, 40):
            await generate(made[0], n)
            await asyncio.sleep(0.02)
        assert actor.calls["process"] == 1  # as it was made
        handles[1].made.opened.clear()
        asked = asyncio.ensure_future(generate(made[1], 3))
        await asyncio.sleep(0.02 * 4 * (ALIVE_BEATS + QUIET_BEATS))
        assert actor.calls["process"] > 2 and not made[0].relay.is_lost
        handles[1].made.opened.set()
        await asked
        await close_relays(made)

    run(go)


def test_a_relay_that_hangs_is_given_up_wherever_it_hangs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before its process has a name, and while it is told of a fresh engine without being asked for
    answers: neither waits without end.
    """

    async def go() -> None:
        monkeypatch.setattr(relay, "BEAT_S", 0.02)
        _, made = engines(2, 2)
        made[0].relay.handle.hangs = True
        made[0].relay._process = asyncio.get_running_loop().create_future()
        assert (await generate_again(made[0], 3)).num_tokens == 3
        await close_relays(made)
        _, made = engines(2, 2)
        made[0].relay.handle.hangs = True
        again = await replaced(made[0], Actor(Engine()), Pace())
        assert made[0].relay.is_lost and (await generate(again, 3)).num_tokens == 3
        await close_relays(made)

    run(go)
    assert capsys.readouterr().err.count("was lost") == 2


def test_an_answer_that_is_lost_on_its_way_is_asked_for_again() -> None:
    """The engine's node dies after its answer and before the relay has read the token arrays."""

    async def go() -> None:
        _, made = engines(1, 1)
        lost = asyncio.get_running_loop().create_future()
        lost.set_exception(ObjectLostError("00ff", "", ""))
        answer = Segment("model", 3, StoredArrays(lost, 0))

        class Answers:
            async def ask(self, *_: Any) -> Segment:
                return answer

        made[0].relay.handle.made._mailboxes[0] = Answers()
        with pytest.raises(EngineUnreachable, match="its answer was lost"):
            await generate(made[0], 3)
        assert not made[0].relay.is_lost
        await close_relays(made)

    run(go)


def test_cancelled_requests_end_in_the_engine() -> None:
    async def go() -> None:
        handles, made = engines(2, 2)
        handles[1].made.opened.clear()
        asked = [asyncio.ensure_future(generate(made[1], 3)) for _ in range(5)]
        while handles[1].made.served < 5:
            await asyncio.sleep(0.01)
        for one in asked[:4]:
            one.cancel()
        while handles[1].made.cancelled < 4:
            await asyncio.sleep(0.01)
        handles[1].made.opened.set()
        assert (await asked[4]).num_tokens == 3
        await close_relays(made)

    run(go)


def test_a_relay_asks_what_it_was_asked() -> None:
    """The exception of a request that cannot be served is an answer, not the relay's failure."""

    async def go() -> None:
        actor = RelayActor("relay 0", {})
        request = GenerateRequest(PROMPT, 0, 3, 1.0)
        assert isinstance(await actor.serve((7, request), []), KeyError)

    run(go)
