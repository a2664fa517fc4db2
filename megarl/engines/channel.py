"""Requests of the rollout service to Ray actors, and their answers, over ZeroMQ.

    Remote(channel, handle).ask(request)  ------>  ChannelActor.serve(request)  (in the actor)
                                  answer  <------

A message costs tens of microseconds, a Ray call more than a millisecond. The service listens, and
has each actor connect by the Ray call `attach`. That call lasts as long as the connection does, so
its end tells that the actor is dead or that the connection broke. Arrays in requests and answers
travel as frames of their own.

Actors of the service's machine connect to a socket in the run's private folder. Those of other
machines connect to a port, encrypted by CurveZMQ, whose key only the actors are told. Messages are
pickled, so nobody else may be able to send one.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
import os
import pickle
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from ray.exceptions import ActorUnavailableError
from zmq.utils.monitor import recv_monitor_message

from megarl.errors import EngineLost, EngineUnreachable
from megarl.system.deaths import DEATHS, ENGINE_DEAD, why_dead
from megarl.system.spans import Requests

MAX_AT_ONCE = 64
"""Messages that are handled before the event loop does other work."""

TICK_S = 0.02
"""Seconds after which a socket is read again while messages come, all that have come by then: to
wake an event loop for each message costs more than the message."""

LOOK_S = 0.5
"""Seconds between two checks by an actor whether its connection to the service lasts."""

CONNECT_S = 60.0
"""Seconds that an actor has to connect to the service."""

OPTIONS = {
    zmq.IPV6: 1,
    # No limit of queues: the requests under way are limited elsewhere.
    zmq.SNDHWM: 0,
    zmq.RCVHWM: 0,
    # A connection that was idle through a long training step is not dropped on the way.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 60,
    zmq.TCP_KEEPALIVE_INTVL: 10,
}


@dataclass(frozen=True, slots=True)
class ChannelPlace:
    """How an actor connects to a `Channel`, the ZeroMQ socket of the rollout service: the path of a
    Unix socket, the address of an encrypted TCP port, and that port's public key. Sent to an actor
    in the Ray call `attach`.
    """

    path: str
    """Absolute path of its Unix socket, for actors of its machine; empty if it has none."""
    address: str
    """Address of its TCP port, such as tcp://10.0.0.5:4321; empty if it has none."""
    key: bytes
    """Public CurveZMQ key of the port, which is told to the actors only."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What an actor sends in place of an answer when its method `serve` (see `ChannelActor`) raised
    an exception: class name and message as text, since the caller may be unable to import the
    class.
    """

    kind: str
    message: str

    def exception(self) -> Exception:
        """The exception to raise in the caller: `EngineLost` if a process of vLLM is dead,
        `ValueError` if the actor raised `ValueError`, and otherwise `RuntimeError` with the
        original class's name.
        """
        if self.kind == ENGINE_DEAD:
            return EngineLost("one of its processes died")
        if self.kind == "ValueError":
            return ValueError(self.message)
        return RuntimeError(f"{self.kind}: {self.message}")


def packed(message: Any) -> list[Any]:
    """Convert a Python object to the frames of a ZeroMQ message: the pickled object, then the
    memory of each numpy array in it, without a copy. `unpacked` is the inverse.
    """
    arrays: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
    return [body, *(one.raw() for one in arrays)]


def unpacked(frames: list[bytes]) -> Any:
    """The Python object of which `packed` made these `frames`; its numpy arrays are read-only views
    of the frames. Unpickles, so the sender must be trusted.
    """
    return pickle.loads(frames[0], buffers=frames[1:])  # noqa: S301 - see the top of the file


class EventSocket:
    """A ZeroMQ socket whose messages are handled in the running event loop. The constructor takes
    `kind`, such as `zmq.ROUTER`, and `hear`, a function that is called in the event loop with the
    frames (a list of bytes) of each message that comes. The socket itself is `plain`, which the
    caller binds or connects.
    """

    def __init__(self, kind: int, hear: Callable[[list[bytes]], None]) -> None:
        self.plain = zmq.Context.instance().socket(kind)
        for option, value in OPTIONS.items():
            self.plain.set(option, value)
        self._hear, self._loop, self._is_due = hear, asyncio.get_running_loop(), False
        self._loop.add_reader(self.plain.fileno(), self._read)

    def send(self, frames: list[Any]) -> None:
        """Hand a message of these frames (bytes or buffers) to ZeroMQ's thread, without waiting.
        After `close` the message is dropped.
        """
        if not self.plain.closed:
            self.plain.send_multipart(frames, zmq.NOBLOCK)
            if not self._is_due and self._has_message:  # else nothing tells of it any more
                self._read_in(0.0)

    @property
    def _has_message(self) -> bool:
        return bool(self.plain.get(zmq.EVENTS) & zmq.POLLIN)

    def _read_in(self, seconds: float) -> None:
        """Read what has come after this time."""
        if not self._is_due:
            self._is_due = True
            self._loop.remove_reader(self.plain.fileno())
        self._loop.call_later(seconds, self._read)

    def _read(self) -> None:
        if self.plain.closed:
            return
        count = 0
        while count < MAX_AT_ONCE and self._has_message:
            self._hear(self.plain.recv_multipart(zmq.NOBLOCK))
            count += 1
        if count:
            self._read_in(TICK_S if count < MAX_AT_ONCE else 0.0)
        elif self._is_due:
            self._is_due = False
            self._loop.add_reader(self.plain.fileno(), self._read)

    def close(self) -> None:
        """Close the socket, which ends its connections. A second call does nothing."""
        if not self.plain.closed:
            self._loop.remove_reader(self.plain.fileno())
            # Else ZeroMQ's thread waits without end to report an event that nobody reads any more.
            self.plain.disable_monitor()
            self.plain.close(linger=0)


class Channel:
    """The rollout service's ZeroMQ socket to the actors that it sends requests to. The constructor
    opens the socket; actors connect to it at the addresses in `place`. One `Channel` serves all
    actors: make one `Remote` per actor, which sends requests through it. Create and use it in one
    event loop.
    """

    def __init__(self, folder: str, host: str = "") -> None:
        """Open the socket. `folder`: absolute path of the run's private folder, in which the socket
        gets a file; empty for none, as where Ray was started by hand. `host`: address at which
        other machines reach this one, for an encrypted TCP port; empty for no port.
        """
        self.socket = EventSocket(zmq.ROUTER, self._hear)
        """Its messages begin with a frame that names the connection, its route."""
        self.hearers: dict[bytes, Callable[[list[bytes]], None]] = {}
        """{route of a connection: function that gets the frames of a message from there, without
        the route}. Messages of other connections are dropped."""
        plain, path, address = self.socket.plain, "", ""
        if folder:
            path = f"{folder}/{secrets.token_hex(4)}"
            plain.bind(f"ipc://{path}")
        key, secret = zmq.curve_keypair()
        if host:
            plain.curve_server, plain.curve_secretkey = 1, secret  # of what is bound from here on
            plain.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
            address = plain.get_string(zmq.LAST_ENDPOINT)
        self.place = ChannelPlace(path, address, key)

    def _hear(self, frames: list[bytes]) -> None:
        if hear := self.hearers.get(frames[0]):
            hear(frames[1:])


class Remote:
    """Sends requests to one Ray actor, whose class is a `ChannelActor`, by ZeroMQ messages instead
    of Ray calls: `await ask(request)`. The constructor takes this process's socket (a `Channel`)
    and the actor's Ray handle. It has the actor connect at the first request, and again at the next
    request after the connection has ended.
    """

    def __init__(self, channel: Channel, handle: Any, requests: Requests) -> None:
        """`channel`: this process's socket. `handle`: Ray handle of the actor, whose class is a
        `ChannelActor`. `requests`: records that this process waits for answers.
        """
        self.channel, self._handle, self._requests = channel, handle, requests
        self._numbers = itertools.count(1)
        self._pending: dict[bytes, asyncio.Future[Any]] = {}
        """{number of a request: its answer}."""
        self._unsent: list[list[Any]] = []
        """Messages that wait for the connection."""
        self._route, self._is_connected = b"", False
        self._connection: asyncio.Task[None] | None = None

    async def ask(self, request: Any) -> Any:
        """Coroutine: have the actor run `serve(request)` and return the result, without a time
        limit. If the caller is cancelled, the actor is told to stop.

        Raises `EngineLost` if the actor, or a process that the actor depends on, is dead, and
        `EngineUnreachable` if the actor may still be alive. Raises `ValueError` if `serve` raised
        `ValueError`, and `RuntimeError` for any other exception of `serve`.
        """
        loop = asyncio.get_running_loop()
        number = next(self._numbers).to_bytes(8, "big")
        self._connection = self._connection or loop.create_task(self._connect())
        self._send([number, *packed(request)])
        answer = self._pending[number] = loop.create_future()
        try:
            with self._requests:
                return await answer
        except asyncio.CancelledError:
            self._send([number])
            raise
        finally:
            del self._pending[number]

    def _send(self, frames: list[Any]) -> None:
        if self._is_connected:
            self.channel.socket.send([self._route, *frames])
        else:
            self._unsent.append(frames)

    def _hear(self, frames: list[bytes]) -> None:
        number, *rest = frames
        if not rest:  # the first message
            self._is_connected, unsent, self._unsent = True, self._unsent, []
            for one in unsent:
                self._send(one)
        elif (waiting := self._pending.get(number)) is not None and not waiting.done():
            answer = unpacked(rest)
            if isinstance(answer, Failure):
                waiting.set_exception(answer.exception())
            else:
                waiting.set_result(answer)

    async def _connect(self) -> None:
        """Have the actor connect, and end every open request when the connection ends; the next
        request makes another one.
        """
        self._route = secrets.token_hex(16).encode()
        self.channel.hearers[self._route] = self._hear
        error: Exception = EngineUnreachable("its connection broke")
        try:
            await self._handle.attach.remote(self.channel.place, self._route)
        except ActorUnavailableError as found:
            error = EngineUnreachable(f"it could not be reached ({str(found).splitlines()[0]})")
        except DEATHS as found:
            error = EngineLost(f"its process died ({why_dead(found)})")
        except Exception as found:
            error = RuntimeError(str(getattr(found, "cause", found)))
        del self.channel.hearers[self._route]
        self._connection, self._is_connected, self._unsent = None, False, []
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_exception(error)


class ChannelActor(abc.ABC):
    """Base class of a Ray actor that answers requests over ZeroMQ instead of Ray calls. A subclass
    defines `serve`; the process that asks uses `Remote`.
    """

    _socket: EventSocket | None = None

    @abc.abstractmethod
    async def serve(self, request: Any) -> Any:
        """Coroutine, defined by the subclass: the answer to one request. Request and answer are any
        objects that can be pickled. Many calls run at the same time in one event loop, so a call
        must not block. An exception is sent to the caller as text.
        """

    async def attach(self, place: ChannelPlace, route: bytes) -> None:
        """Called as a Ray method by the process that sends requests: connect to it, and answer its
        requests by `serve`. The coroutine ends when the connection breaks, or when `attach` is
        called again; by its end the caller learns that the connection is gone. `place`: addresses
        to connect to. `route`: random bytes that name the connection. Raises `ConnectionError` if
        there is no connection within `CONNECT_S` (60) seconds.
        """
        requests, serving = (
            Requests("responses", kind="generate"),
            dict[bytes, asyncio.Task[None]](),
        )

        async def answer(number: bytes, frames: list[bytes]) -> None:
            try:
                with requests:
                    made = packed(await self.serve(unpacked(frames)))
            except Exception as error:
                made = packed(Failure(type(error).__name__, str(error)))
            finally:
                serving.pop(number, None)
            socket.send([number, *made])

        def hear(frames: list[bytes]) -> None:
            number, *rest = frames
            if rest:
                serving[number] = asyncio.create_task(answer(number, rest))
            elif (task := serving.pop(number, None)) is not None:  # its caller is cancelled
                task.cancel()

        older, self._socket = self._socket, EventSocket(zmq.DEALER, hear)
        if older is not None:
            older.close()
        socket = self._socket
        try:
            await _connected(socket, place, route)
        finally:
            for task in list(serving.values()):
                task.cancel()


async def _connected(socket: EventSocket, place: ChannelPlace, route: bytes) -> None:
    """Connect to a channel; returns when the connection breaks, or the socket is closed, which it
    is afterwards.
    """
    plain, is_connected, address = socket.plain, False, f"ipc://{place.path}"
    plain.routing_id = route
    if not Path(place.path).is_socket():  # on another machine
        address, plain.curve_serverkey = place.address, place.key
        plain.curve_publickey, plain.curve_secretkey = zmq.curve_keypair()
    monitor = plain.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    try:
        plain.connect(address)
        socket.send([b""])
        # The looks are counted: an actor that was stopped must not blame the connection.
        for look in itertools.count():
            await asyncio.sleep(LOOK_S)
            while monitor.poll(0):
                is_connected = recv_monitor_message(monitor)["event"] != zmq.EVENT_DISCONNECTED
                if not is_connected:
                    return
            if plain.closed:
                return
            if not is_connected and look * LOOK_S > CONNECT_S:
                raise ConnectionError(
                    f"{os.uname().nodename} cannot connect to the rollout service at {address}"
                    f" within {CONNECT_S:g} s; nodes of a run must reach each other at every port"
                )
    finally:
        socket.close()
        monitor.close()
