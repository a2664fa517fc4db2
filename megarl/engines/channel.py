"""Requests of the rollout service to Ray actors, and their answers, over ZeroMQ.

    Remote(channel, handle).ask(request)  ------>  ChannelActor.serve(request)  (in the actor)
                                  answer  <------

A message costs tens of microseconds, a Ray call more than a millisecond. The service listens; each
actor connects by the Ray call `attach`, which ends when the actor is dead or the connection broke.

Actors of the same machine use a socket in the run's private folder, others a port encrypted by
CurveZMQ, whose key only the actors get: messages are pickled, so nobody else may send one.
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

from megarl.errors import ActorUnreachable, ProcessLost
from megarl.settings.limits import POLL_S
from megarl.system.deaths import DEATHS, ENGINE_DEAD, why_dead
from megarl.system.spans import Requests

MAX_AT_ONCE = 64
"""Messages that are handled before the event loop does other work."""


CONNECT_S = 60.0
"""Seconds that an actor has to connect."""

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
    """How an actor connects to a `Channel`."""

    path: str
    """Absolute path of the Unix socket, for actors of its machine; may be empty."""
    address: str
    """Of the TCP port, such as tcp://10.0.0.5:4321; may be empty."""
    key: bytes
    """The port's public CurveZMQ key."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of `serve`, as text, since the caller may be unable to import its class."""

    class_name: str
    message: str

    def exception(self) -> Exception:
        """`ProcessLost` if a process of vLLM is dead, `ValueError`, or else `RuntimeError`."""
        if self.class_name == ENGINE_DEAD:
            return ProcessLost("one of its processes died")
        if self.class_name == "ValueError":
            return ValueError(self.message)
        return RuntimeError(f"{self.class_name}: {self.message}")


def packed(message: Any) -> list[Any]:
    """Frames of a message: the pickled object, then its numpy arrays, without a copy."""
    arrays: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
    return [body, *(array.raw() for array in arrays)]


def unpacked(frames: list[bytes]) -> Any:
    """Inverse of `packed`; arrays are read-only views. Unpickles, so the sender must be trusted."""
    return pickle.loads(frames[0], buffers=frames[1:])  # noqa: S301 - see the top of the file


class EventSocket:
    """A ZeroMQ socket `plain` whose messages are handled in the running event loop: `hear` gets the
    frames of each.
    """

    def __init__(self, socket_type: int, hear: Callable[[list[bytes]], None]) -> None:
        self.plain = zmq.Context.instance().socket(socket_type)
        for option, value in OPTIONS.items():
            self.plain.set(option, value)
        self._hear, self._loop, self._is_due = hear, asyncio.get_running_loop(), False
        self._loop.add_reader(self.plain.fileno(), self._read)

    def send(self, frames: list[Any]) -> None:
        """Hand a message to ZeroMQ's thread; after `close` it is dropped."""
        if not self.plain.closed:
            self.plain.send_multipart(frames, zmq.NOBLOCK)
            if not self._is_due and self._has_message:  # else nothing tells of it any more
                self._read_in(0.0)

    @property
    def _has_message(self) -> bool:
        return bool(self.plain.get(zmq.EVENTS) & zmq.POLLIN)

    def _read_in(self, seconds: float) -> None:
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
            # Seconds later, all that has come by then: a wake-up for each message costs more.
            self._read_in(0.02 if count < MAX_AT_ONCE else 0.0)
        elif self._is_due:
            self._is_due = False
            self._loop.add_reader(self.plain.fileno(), self._read)

    def close(self) -> None:
        if not self.plain.closed:
            self._loop.remove_reader(self.plain.fileno())
            # Else ZeroMQ's thread waits without end to report an event that nobody reads any more.
            self.plain.disable_monitor()
            self.plain.close(linger=0)


class Channel:
    """The rollout service's socket, at the addresses in `place`; one `Remote` for each actor uses
    it.
    """

    def __init__(self, folder: str, host: str = "") -> None:
        """`folder`: the run's private folder; empty for no Unix socket. `host`: address for the TCP
        port; empty for none.
        """
        self.socket = EventSocket(zmq.ROUTER, self._hear)
        """Messages begin with a frame that names the connection, its route."""
        self.hearers: dict[bytes, Callable[[list[bytes]], None]] = {}
        """{route: function of a message's other frames}; other messages are dropped."""
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
    """Sends requests to one Ray actor. It connects at the first request, and again after the
    connection ended.
    """

    def __init__(self, channel: Channel, handle: Any, requests: Requests) -> None:
        """`handle`: of a `ChannelActor`. `requests`: records the waits for answers."""
        self.channel, self._handle, self._requests = channel, handle, requests
        self._numbers = itertools.count(1)
        self._pending: dict[bytes, asyncio.Future[Any]] = {}
        """{number of a request: its answer}."""
        self._unsent: list[list[Any]] = []
        """Messages that wait for the connection."""
        self._route, self._is_connected = b"", False
        self._connection: asyncio.Task[None] | None = None

    async def ask(self, request: Any) -> Any:
        """The result of the actor's `serve(request)`, which stops if the caller is cancelled.

        Raises `ProcessLost` if the actor is dead, `ActorUnreachable` if it may be alive, or what
        `Failure` says.
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
            for message in unsent:
                self._send(message)
        elif (waiting := self._pending.get(number)) is not None and not waiting.done():
            answer = unpacked(rest)
            if isinstance(answer, Failure):
                waiting.set_exception(answer.exception())
            else:
                waiting.set_result(answer)

    async def _connect(self) -> None:
        """Ask the actor to connect, and wait until the connection ends. Open requests then fail
        with `ActorUnreachable`, or with `ProcessLost` if the actor has died.
        """
        self._route = secrets.token_hex(16).encode()
        self.channel.hearers[self._route] = self._hear
        error: Exception = ActorUnreachable("its connection broke")
        try:
            await self._handle.attach.remote(self.channel.place, self._route)
        except ActorUnavailableError as found:
            error = ActorUnreachable(f"it could not be reached ({str(found).splitlines()[0]})")
        except DEATHS as found:
            error = ProcessLost(f"its process died ({why_dead(found)})")
        except Exception as found:
            error = RuntimeError(str(getattr(found, "cause", found)))
        del self.channel.hearers[self._route]
        self._connection, self._is_connected, self._unsent = None, False, []
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_exception(error)


class ChannelActor(abc.ABC):
    """A Ray actor that answers requests over ZeroMQ by `serve`; the other side is `Remote`."""

    _socket: EventSocket | None = None

    @abc.abstractmethod
    async def serve(self, request: Any) -> Any:
        """The answer to one request; many calls run in one event loop."""

    async def attach(self, place: ChannelPlace, route: bytes) -> None:
        """Connect to a `Channel` and answer its requests, until the connection breaks or another
        `attach`. Raises `ConnectionError` after `CONNECT_S`.
        """
        requests, serving = (
            Requests("responses", kind="generate"),
            dict[bytes, asyncio.Task[None]](),
        )

        async def answer(number: bytes, frames: list[bytes]) -> None:
            """Serve a request; send the answer, or the failure, under the request's `number`."""
            try:
                with requests:  # one span while any is open
                    reply = packed(await self.serve(unpacked(frames)))
            except Exception as error:
                reply = packed(Failure(type(error).__name__, str(error)))
            finally:
                serving.pop(number, None)  # no longer to be cancelled
            socket.send([number, *reply])

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
    """Connect; returns when the connection breaks or the socket is closed."""
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
            await asyncio.sleep(POLL_S)
            while monitor.poll(0):
                is_connected = recv_monitor_message(monitor)["event"] != zmq.EVENT_DISCONNECTED
                if not is_connected:
                    return
            if plain.closed:
                return
            if not is_connected and look * POLL_S > CONNECT_S:
                raise ConnectionError(
                    f"{os.uname().nodename} cannot connect to the rollout service at {address}"
                    f" within {CONNECT_S:g} s; nodes of a run must reach each other at every port"
                )
    finally:
        socket.close()
        monitor.close()
