"""Messages between ranks that know nothing of each other, on a process group of their own; every
wait can be ended.

Everybody meets at a store that trainer rank 0 opens, and meets again after an engine was replaced
or a version given up.

What gloo does was found by trying it (torch 2.13): a message is "completed" only once it was waited
for, a wait that times out ends every message of the group for good, and a peer that dies ends every
message to and from it at once. So threads wait, without a limit, and whoever gives up lets one wait
time out. Rarely (one in 60 versions given up) a thread sleeps through even that; it is left behind
with nothing but its connection, which is closed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megarl.weight_sync.route import Route
from megarl.weight_sync.transports.base import GIVEN_UP, Aborted, Watch
from megarl.weight_sync.transports.shared_counters import wait_until

MEET_S, FOREVER_S, CUT_S = 20.0, 86400.0, 0.2
"""Patience with the store and with connecting; with a message, whose deadline is `watch`'s; with
threads that were cut off.
"""

LOOK_S = 0.05
"""Between two looks at whether somebody gave up."""


class Task:
    """Something that blocks, in a thread, so that its caller need not."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._done = work, threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # whoever asks for the result gets it
            self._error = error
        self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def join(self) -> None:
        self._thread.join(CUT_S)


def _plain(error: RuntimeError) -> str:
    """What gloo says, without its source file and its advice."""
    return str(error).split("] ", 1)[-1].split(". This is ")[0].splitlines()[0]


class InFlight(Task):
    """Messages under way: peer -> work. Keeps their memory."""

    def __init__(
        self, works: Mapping[int, dist.Work], memory: torch.Tensor, name: Callable[[int], str]
    ) -> None:
        self.works, self.memory, self._name, self._on_gpu = works, memory, name, memory.is_cuda
        self._cut = False
        super().__init__(self._wait)

    def _wait(self) -> None:
        for peer, work in self.works.items():
            try:
                while self._on_gpu and not self._cut and not work.is_completed():
                    time.sleep(2e-4)
                if not self._on_gpu:
                    work.wait(timedelta(seconds=FOREVER_S))
            except RuntimeError as error:
                raise RuntimeError(f"{self._name(peer)} is gone: {_plain(error)}") from error

    def arrived(self) -> None:
        """Raise what went wrong; what is computed on a GPU from now on comes after the messages."""
        self.result()
        for work in self.works.values():
            if self._on_gpu:
                work.wait()

    def cut(self) -> None:
        """End the messages, for good and with them all of their group."""
        self._cut = True
        for work in self.works.values():  # all of them: one that had ended before ends no other
            with contextlib.suppress(RuntimeError):  # which is what was wanted
                if not self._on_gpu and not self.done():
                    work.wait(timedelta(milliseconds=1))
        self.join()


class P2PGroup:
    """One rank's place in the group: trainer ranks first, then destinations."""

    def __init__(
        self, route: Route, senders: int, place: int, host: str, port: int, device: torch.device
    ) -> None:
        """`port` 0 opens the store here, on a free port."""
        spec = route.spec
        self.size, self.place, self._senders, self._tensor = (
            senders + spec.num_images,
            place,
            senders,
            spec.engine_tensor,
        )
        self.host, self.port, self.device = host, port, device
        self._store = self._open()
        self.port = self._store.port
        self.attempt = 0
        """Number of the `begin` that is under way: what was said about an earlier one is not meant.
        """
        self._connection, self._group = 0, None
        self._flights: list[InFlight] = []
        self._next_look = 0.0

    def _open(self) -> TCPStore:
        """The store itself, or a connection of its own to it: one that waits would keep others
        waiting.
        """
        timeout = timedelta(seconds=MEET_S)
        try:
            return TCPStore(
                self.host,
                self.port,
                is_master=self.port == 0,
                wait_for_workers=False,
                timeout=timeout,
            )
        except RuntimeError as error:
            where = f"{self.host}:{self.port}"
            raise RuntimeError(
                f"{socket.gethostname()} cannot reach trainer rank 0's store at {where}:"
                f" {_plain(error)}"
            ) from error

    def tell(self, key: str, value: int) -> None:
        self._store.set(key, str(value))

    def told(self, key: str) -> int | None:
        """What somebody told under `key`, if anybody has."""
        return int(self._store.get(key)) if self._has([key]) else None

    def join(self, watch: Watch) -> None:
        """Be in the group that this attempt uses; where it is a new one, meet everybody and make
        it.
        """
        key = f"connection/{self.attempt}"
        self.until(lambda: self._has([key]), watch, LOOK_S / 2)
        connection = self.told(key)
        assert connection
        if connection == self._connection:
            return
        self.cut()
        here = f"{connection}/here"
        self.tell(f"{here}/{self.place}", 1)
        self.until(
            lambda: self._has([f"{here}/{place}" for place in range(self.size)]), watch, LOOK_S / 2
        )
        making = Task(
            lambda: _group(self._open(), connection, self.place, self.size, self.host, self.device)
        )
        self.until(making.done, watch)
        self._group, self._connection = making.result(), connection

    def send(
        self, messages: Mapping[int, torch.Tensor], memory: torch.Tensor, tag: int
    ) -> InFlight:
        """Messages to destinations."""
        assert self._group is not None
        return self._fly(
            self._group.send,
            {self._senders + to: flat for to, flat in messages.items()},
            memory,
            tag,
        )

    def receive(
        self, messages: Mapping[int, torch.Tensor], memory: torch.Tensor, tag: int
    ) -> InFlight:
        """Messages from trainer ranks."""
        assert self._group is not None
        return self._fly(self._group.recv, messages, memory, tag)

    def land(self, flight: InFlight, watch: Watch) -> None:
        """Wait for messages. Raises `RuntimeError` with the name of a peer that is gone."""
        self.until(flight.done, watch)
        try:
            flight.arrived()
        except RuntimeError as error:
            self._refuse_aborted(error)
            raise
        self._flights.remove(flight)

    def abort(self) -> None:
        """Have everybody who waits give up this attempt, and leave the group."""
        with contextlib.suppress(
            RuntimeError
        ):  # trainer rank 0, who keeps the store, is gone: the others find out themselves
            self.tell(f"aborted/{self.attempt}", 1)
        self.cut()

    def cut(self) -> None:
        """Leave the group; what is under way ends, here and at the other ends."""
        flights, self._flights = self._flights, []
        if self._group is not None and self.device.type == "cuda":
            self._group.abort()
        for flight in flights:
            flight.cut()
        self._connection, self._group = 0, None

    def until(self, ready: Callable[[], bool], watch: Watch, longest_pause_s: float = 2e-3) -> None:
        """Wait for `ready`. Raises `Aborted` where another process gave up, and whatever `watch`
        raises.
        """

        def aborted() -> bool:
            now = time.monotonic()
            if now < self._next_look:
                return False
            self._next_look = now + LOOK_S
            return self._aborted()

        wait_until(ready, aborted, watch, longest_pause_s=longest_pause_s)

    def _aborted(self) -> bool:
        return self._has([f"aborted/{self.attempt}"])

    def _has(self, keys: list[str]) -> bool:
        try:
            return self._store.check(keys)
        except RuntimeError as error:
            raise RuntimeError(
                f"trainer rank 0 is gone: its store at {self.host}:{self.port} does not answer"
            ) from error

    def _refuse_aborted(self, error: RuntimeError) -> None:
        """Whoever gives up ends the messages of others: then that is what happened, not `error`."""
        if self._aborted():
            raise Aborted(GIVEN_UP) from error

    def _fly(
        self, start: Any, messages: Mapping[int, torch.Tensor], memory: torch.Tensor, tag: int
    ) -> InFlight:
        works: dict[int, dist.Work] = {}
        for peer, flat in messages.items():
            try:
                works[peer] = start([flat], peer, tag)
            except RuntimeError as error:  # the connection was lost before
                self._flights.append(InFlight(works, memory, self._name))
                self._refuse_aborted(error)
                raise RuntimeError(f"{self._name(peer)} is gone: {_plain(error)}") from error
        self._flights.append(InFlight(works, memory, self._name))
        return self._flights[-1]

    def _name(self, place: int) -> str:
        if place < self._senders:
            return f"trainer rank {place}"
        engine, rank = divmod(place - self._senders, self._tensor)
        return f"rank {rank} of engine {engine}"


def _group(
    store: Store, connection: int, place: int, size: int, host: str, device: torch.device
) -> Any:
    """A process group of everybody; blocks until all are in it."""
    store = PrefixStore(f"{connection}/group", store)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # this is a thread of its own
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=FOREVER_S)
        return dist.ProcessGroupNCCL(store, place, size, options)
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=MEET_S)
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    found = {"interface": name} if name else {"hostname": _address_toward(host)}
    options._devices = [dist.ProcessGroupGloo.create_device(**found)]
    return dist.ProcessGroupGloo(store, place, size, options)


def own_address() -> str:
    """This host's address as other hosts see it; rank 0 only, where the launcher's is its own."""
    launcher = os.environ.get("MASTER_ADDR", "")
    try:
        if (
            launcher
            and not ipaddress.ip_address(socket.getaddrinfo(launcher, None)[0][4][0]).is_loopback
        ):
            return launcher
    except OSError:
        pass  # a name that nobody knows
    return _address_toward("192.0.2.1")  # an address that is nobody's (RFC 5737); no packet is sent


def _address_toward(host: str) -> str:
    """The address of the interface through which this host reaches `host`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"  # no network at all


def local_device() -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
