"""Requests to actors over a channel, with actors that are no Ray actors."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from ray.exceptions import ActorDiedError, ActorUnavailableError
from support.rollouts import requested, segment

from megarl.engines import channel as channel_module
from megarl.engines.channel import Channel, ChannelActor, ChannelPlace, Remote, packed
from megarl.engines.interface import Pauses
from megarl.engines.remote import GenerateRequest, RemoteEngine
from megarl.errors import ActorUnreachable, ProcessLost
from megarl.rollout.requests import EnginePool
from megarl.settings.rollout import RolloutConfig
from megarl.settings.schema import replace
from megarl.system.spans import Requests
from megarl.types import Prompt, Segment

PROMPT = Prompt(3, "p", [1, 2], "a")


class Echo(ChannelActor):
    """Answers n with a segment of n tokens, negative n with an error, 0 never, an array with its
    sum.
    """

    began = ended = 0

    async def serve(self, request: Any) -> Any:
        if isinstance(request, np.ndarray):
            return int(request.sum()), request
        if request == 0:
            self.began += 1
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
        if request == -4:
            return lambda: "cannot be pickled"
        return segment([request] * request)


class Method:
    """A method of an actor that is called as Ray's are."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def remote(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class Handle:
    """Ray's part: calls the object of an actor, until that dies."""

    start: Any = None
    process: Any = None
    paused_s: Any = None

    def __init__(self, actor: Any = None) -> None:
        self.actor, self.calls, self.attach = actor or Echo(), 0, Method(self._attach)
        self.loop = asyncio.get_running_loop()
        self.end: asyncio.Future[None] = self.loop.create_future()

    def _attach(self, place: ChannelPlace, route: bytes) -> Any:
        self.calls += 1
        return asyncio.ensure_future(self._run(place, route))

    async def _run(self, place: ChannelPlace, route: bytes) -> None:
        work = asyncio.ensure_future(self.actor.attach(place, route))
        try:
            await asyncio.wait([work, self.end], return_when=asyncio.FIRST_COMPLETED)
            await (self.end if self.end.done() else work)
        finally:
            work.cancel()

    def die(self, error: Exception | None = None) -> None:
        """What Ray raises, from now on, in whoever waits for the actor."""
        if not self.end.done():
            self.end.set_exception(error or ActorDiedError())


@contextlib.contextmanager
def channel(host: str = "") -> Iterator[Channel]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        made = Channel("" if host else folder, host)
        try:
            yield made
        finally:
            made.socket.close()


def echo(made: Channel, handle: Any) -> Remote:
    return Remote(made, handle, Requests("answers", kind="wait"))


async def until(true: Any) -> None:
    while not true():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("host", ["", "127.0.0.1", "::1"])
async def test_every_request_gets_its_own_answer(host: str) -> None:
    """Through the socket of a folder, and through a port. One Ray call serves for all."""
    with channel(host) as made:
        handle = Handle()
        remote = echo(made, handle)
        found = await asyncio.gather(*(remote.ask(n) for n in range(1, 301)))
        for number, segment in enumerate(found, start=1):
            assert segment.num_tokens == number
            assert segment.arrays.token_ids.tolist() == [number] * number
            assert segment.arrays.logprobs.tolist() == [0.0] * number
        large = np.arange(2**22, dtype=np.int32)
        total, same = await remote.ask(large)
        assert total == large.sum(dtype=np.int64).astype(int) and np.array_equal(same, large)
        other = Handle()
        both = await asyncio.gather(remote.ask(5), echo(made, other).ask(6))
        assert [one.num_tokens for one in both] == [5, 6]
        assert handle.calls == other.calls == 1


async def test_the_end_of_a_channel_leaves_the_next_alone() -> None:
    """All sockets of a process share a thread of ZeroMQ, which no end of a connection may block."""
    for _ in range(8):
        with channel() as made:
            remotes = [echo(made, Handle()) for _ in range(4)]
            await asyncio.wait_for(asyncio.gather(*(remote.ask(2) for remote in remotes)), 20)


async def test_failures_are_told_apart() -> None:
    with channel() as made:
        remote = echo(made, Handle())
        asked = (remote.ask(-n) for n in (1, 2, 3, 4))
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(error) for error in found] == [
            *(ValueError, ProcessLost, RuntimeError, RuntimeError)
        ]
        assert "KeyError: 'three'" in str(found[2]) and "pickle" in str(found[3])
        assert (await remote.ask(3)).num_tokens == 3


async def test_cancelled_requests_end_in_the_actor() -> None:
    """Also one whose caller is cancelled before the actor is connected; others go on."""
    with channel() as made:
        handle = Handle()
        actor, remote = handle.actor, echo(made, handle)
        waiting = [asyncio.create_task(remote.ask(0)) for _ in range(5)]
        await asyncio.sleep(0)
        waiting.pop().cancel()
        await until(lambda: actor.began == 4)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(remote.ask(0), 0.1)
        waiting.pop().cancel()
        await until(lambda: actor.ended == 2)
        assert (await remote.ask(7)).num_tokens == 7
        assert actor.began - actor.ended == 3 == len(waiting)


@pytest.mark.parametrize("is_dead", [True, False])
async def test_what_ray_says_of_an_actor_reaches_every_request(is_dead: bool) -> None:
    """A dead one stays dead. One that was away for a moment is connected anew, and stops to serve
    what nobody waits for.
    """
    with channel() as made:
        handle = Handle()
        actor, remote = handle.actor, echo(made, handle)
        waiting = [asyncio.create_task(remote.ask(0)) for _ in range(3)]
        await until(lambda: actor.began == 3)
        kind = ProcessLost if is_dead else ActorUnreachable
        handle.die(None if is_dead else ActorUnavailableError("for a moment", None))
        for found in await asyncio.gather(*waiting, return_exceptions=True):
            assert type(found) is kind
        if is_dead:
            with pytest.raises(ProcessLost, match="its process died"):
                await remote.ask(1)
        else:
            handle.end = handle.loop.create_future()
            assert (await remote.ask(1)).num_tokens == 1 and handle.calls == 2
        await until(lambda: actor.ended == 3)


async def test_a_connection_that_is_asked_for_again_replaces_the_one_before() -> None:
    """Ray may say that an actor is away which still serves its former connection."""
    with channel() as made:
        actor, calls = Echo(), list[asyncio.Future[None]]()

        def attach(place: ChannelPlace, route: bytes) -> Any:
            calls.append(asyncio.ensure_future(actor.attach(place, route)))
            return away() if len(calls) == 1 else calls[1]

        async def away() -> None:
            await until(lambda: actor.began)
            raise ActorUnavailableError("for a moment", None)

        remote = echo(made, SimpleNamespace(attach=Method(attach)))
        with pytest.raises(ActorUnreachable, match="for a moment"):
            await remote.ask(0)
        assert not calls[0].done()
        assert (await remote.ask(2)).num_tokens == 2
        await calls[0]
        assert actor.ended == 1 and not calls[1].done()


async def test_a_connection_that_breaks_is_made_again() -> None:
    """A router between two machines drops it; both processes live."""
    with channel("127.0.0.1") as made:
        port, open_ = int(made.place.address.rpartition(":")[2]), list[Any]()

        async def pump(reader: Any, writer: Any) -> None:
            while data := await reader.read(2**16):
                writer.write(data)

        async def forward(reader: Any, writer: Any) -> None:
            far = await asyncio.open_connection("127.0.0.1", port)
            open_.extend((writer, far[1]))
            with contextlib.suppress(OSError):
                await asyncio.gather(pump(reader, far[1]), pump(far[0], writer))

        between = await asyncio.start_server(forward, "127.0.0.1", 0)
        address = f"tcp://127.0.0.1:{between.sockets[0].getsockname()[1]}"
        made.place = replace(made.place, address=address)
        handle = Handle()
        remote = echo(made, handle)
        assert (await remote.ask(4)).num_tokens == 4
        waiting = asyncio.create_task(remote.ask(0))
        await until(lambda: handle.actor.began)
        for writer in open_:
            writer.close()
        with pytest.raises(ActorUnreachable, match="its connection broke"):
            await waiting
        assert handle.actor.ended == 1
        assert (await remote.ask(5)).num_tokens == 5 and handle.calls == 2
        between.close()


async def test_an_address_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "CONNECT_S", 0.6)
    with channel() as made:
        made.place = replace(made.place, path="", address="tcp://127.0.0.1:1")
        with pytest.raises(RuntimeError, match=r"rollout service at tcp://127.0.0.1:1 within"):
            await echo(made, Handle()).ask(1)


@pytest.mark.parametrize("knows", ["nothing", "another key", "the key"])
async def test_strangers_are_not_heard(knows: str) -> None:
    """Somebody who reaches the port, and even has the route of a connection, is not heard without
    the key; with the key, an answer counts.
    """
    with (
        channel("127.0.0.1") as made,
        zmq.Context() as context,
        contextlib.ExitStack() as stack,
    ):
        heard = list[bytes]()
        made.hearers[b"a route"] = heard.extend
        stranger = stack.enter_context(context.socket(zmq.DEALER))
        stranger.linger, stranger.routing_id = 0, b"a route"
        if knows != "nothing":
            other = zmq.curve_keypair()[0]
            stranger.curve_serverkey = made.place.key if knows == "the key" else other
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.connect(made.place.address)
        stranger.send_multipart([b"1", *packed("an answer")])
        if knows == "the key":
            await until(lambda: heard)
        else:
            await asyncio.sleep(0.5)
            assert not heard
        assert (await echo(made, Handle()).ask(1)).num_tokens == 1


ACTOR = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from megarl.engines.channel import ChannelActor, ChannelPlace

class Doubles(ChannelActor):
    async def serve(self, request):
        await asyncio.sleep(0.05)
        return 2 * request

path, route = sys.argv[2:]
asyncio.run(Doubles().attach(ChannelPlace(path, "", b""), route.encode()))
"""


async def test_a_process_that_is_stopped_goes_on_with_its_requests() -> None:
    root, processes = str(Path(__file__).parents[2]), list[subprocess.Popen[bytes]]()

    def attach(place: ChannelPlace, route: bytes) -> Any:
        command = [sys.executable, "-c", ACTOR, root, place.path, route.decode()]
        processes.append(subprocess.Popen(command))
        return asyncio.ensure_future(asyncio.to_thread(processes[0].wait))

    with channel() as made:
        remote = echo(made, SimpleNamespace(attach=Method(attach)))
        try:
            assert await remote.ask(1) == 2
            asked = [asyncio.create_task(remote.ask(n)) for n in range(100)]
            await asyncio.sleep(0.02)
            processes[0].send_signal(signal.SIGSTOP)
            more = [asyncio.create_task(remote.ask(n)) for n in range(100, 200)]
            await asyncio.sleep(2.0)
            assert not any(one.done() for one in more)
            processes[0].send_signal(signal.SIGCONT)
            found = await asyncio.gather(*asked, *more)
            assert found == [2 * n for n in range(200)] and len(processes) == 1
        finally:
            processes[0].kill()


class Paused(ChannelActor):
    """An engine that is paused for the first second of a request. It answers `answers_s` later."""

    def __init__(self, answers_s: float) -> None:
        self.answers_s, self.pauses = answers_s, Pauses()

    async def serve(self, request: GenerateRequest) -> Segment:
        self.pauses.begin()
        await asyncio.sleep(1.0)
        self.pauses.end()
        await asyncio.sleep(self.answers_s)
        return segment([1])

    async def paused_s(self, last_s: float) -> float:
        return self.pauses.within(last_s)


@pytest.mark.parametrize("is_late", [False, True])
async def test_the_deadline_of_a_request_does_not_count_an_engines_pauses(is_late: bool) -> None:
    """A request has 0.6 s, and the engine pauses for 1 s."""
    handle = Handle(actor := Paused(60.0 if is_late else 0.1))
    handle.paused_s = Method(actor.paused_s)
    config = replace(RolloutConfig(), request_timeout_s=0.6)
    with channel() as made:
        engine = RemoteEngine(handle, made)
        asked = requested(EnginePool([engine], config), PROMPT, 1)
        if not is_late:
            assert (await asked).num_tokens == 1
        else:
            with pytest.raises(RuntimeError, match=r"did not answer prompt 3 within 0\.6 s"):
                await asked
