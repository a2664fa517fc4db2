"""A process group of trainer ranks and engine ranks, in which every wait can be ended.

The ranks meet at a TCP store that trainer rank 0 hosts, and make a new group after an engine was
replaced or a weight version aborted.

Three facts about gloo (torch 2.13) shape this file. A message counts as completed only once it was
waited for. A wait that times out cancels every message of its group for good. A peer that dies ends
every message to and from it at once. So a thread waits without a limit for each transfer, and to
cancel one this process makes a short wait time out. Rarely (once in 60 aborted versions) a thread
still does not return; it is abandoned, and owns nothing but a closed connection.
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

CONNECT_TIMEOUT_S, NO_TIMEOUT_S, CANCEL_TIMEOUT_S = 20.0, 86400.0, 0.2
"""Time-outs in seconds: for the store and for connecting; for a message, which `watch` limits
instead; for a cancelled thread."""

ABORT_POLL_S = 0.05
"""Seconds between two checks of the store for an abort."""


class Task:
    """A blocking function that runs in a thread of its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._done = work, threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Run the function and keep its result or error."""
        try:
            self._result = self._work()
        except BaseException as error:  # raised again by `result`
            self._error = error
        self._done.set()

    def done(self) -> bool:
        """Whether the thread's function has returned or raised."""
        return self._done.is_set()

    def result(self) -> Any:
        """Return the result of the thread's function, or raise its error. Call it only once `done`
        is true.
        """
        if self._error is not None:
            raise self._error
        return self._result

    def join(self) -> None:
        """Wait for the thread to end, at most `CANCEL_TIMEOUT_S`."""
        self._thread.join(CANCEL_TIMEOUT_S)


def _short(error: RuntimeError) -> str:
    """gloo's error message without its source position and general advice."""
    return str(error).split("] ", 1)[-1].split(". This is ")[0].splitlines()[0]


class InFlight(Task):
    """Messages that are being sent or received: {rank in the group: work}.

    Keeps their buffers alive.
    """

    def __init__(
        self, works: Mapping[int, dist.Work], memory: torch.Tensor, name: Callable[[int], str]
    ) -> None:
        self.works, self.memory, self._name, self._on_gpu = works, memory, name, memory.is_cuda
        self._cancelled = False
        super().__init__(self._wait)

    def _wait(self) -> None:
        """Wait for all messages; raises `RuntimeError` naming the peer that is gone."""
        for peer, work in self.works.items():
            try:
                while self._on_gpu and not self._cancelled and not work.is_completed():
                    time.sleep(2e-4)
                if not self._on_gpu:
                    work.wait(timedelta(seconds=NO_TIMEOUT_S))
            except RuntimeError as error:
                raise RuntimeError(f"{self._name(peer)} is gone: {_short(error)}") from error

    def check(self) -> None:
        """Raise the error of a failed message; on a GPU, order later work after the messages."""
        self.result()
        for work in self.works.values():
            if self._on_gpu:
                work.wait()

    def cancel(self) -> None:
        """Cancel these messages. Under gloo this permanently ends every message of the group."""
        self._cancelled = True
        # Of every message: timing out on one that has completed cancels no other.
        for work in self.works.values():
            with contextlib.suppress(RuntimeError):  # the time-out, which is intended
                if not self._on_gpu and not self.done():
                    work.wait(timedelta(milliseconds=1))
        self.join()


class P2PGroup:
    """This process's membership in the group: trainer ranks come first, then destinations."""

    def __init__(
        self, route: Route, senders: int, rank: int, host: str, port: int, device: torch.device
    ) -> None:
        """Connect to the store.

        Args:
            route: gives the number of destinations.
            senders: number of trainer ranks.
            rank: this process's rank in the group.
            host, port: address of the store; port 0 hosts the store here, on a free port.
            device: CPU for gloo, a GPU for NCCL.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        spec = route.spec
        self.size, self.rank, self._senders, self._tensor = (
            senders + spec.num_destinations,
            rank,
            senders,
            spec.engine_tensor,
        )
        self.host, self.port, self.device = host, port, device
        self._store = self._open()
        self.port = self._store.port
        self.attempt = 0
        """Number of the current `Sender.begin`; entries of the store about earlier attempts are
        ignored."""
        self._group_number, self._group = 0, None
        self._in_flight: list[InFlight] = []
        self._next_poll = 0.0

    def _open(self) -> TCPStore:
        """Host the store, or open a connection to it.

        A thread that waits needs a connection of its own.
        """
        timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
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
                f" {_short(error)}"
            ) from error

    def set(self, key: str, value: int) -> None:
        """Store an integer for all ranks to read."""
        self._store.set(key, str(value))

    def get(self, key: str) -> int | None:
        """The integer stored under `key`, or None; never waits."""
        return int(self._store.get(key)) if self._has([key]) else None

    def join(self, watch: Watch) -> None:
        """Join the process group of this attempt. If the group is a new one, the call waits for all
        its ranks.
        """
        key = f"group/{self.attempt}"
        self.until(lambda: self._has([key]), watch, ABORT_POLL_S / 2)
        number = self.get(key)
        assert number
        if number == self._group_number:
            return
        self.leave()
        joined = f"{number}/joined"
        self.set(f"{joined}/{self.rank}", 1)
        self.until(
            lambda: self._has([f"{joined}/{rank}" for rank in range(self.size)]),
            watch,
            ABORT_POLL_S / 2,
        )
        creating = Task(
            lambda: _group(self._open(), number, self.rank, self.size, self.host, self.device)
        )
        self.until(creating.done, watch)
        self._group, self._group_number = creating.result(), number

    def send(
        self, messages: Mapping[int, torch.Tensor], memory: torch.Tensor, tag: int
    ) -> InFlight:
        """Start sending {destination: flat tensor} to engine ranks; the tensors are parts of
        `memory`."""
        assert self._group is not None
        return self._start(
            self._group.send,
            {self._senders + to: flat for to, flat in messages.items()},
            memory,
            tag,
        )

    def receive(
        self, messages: Mapping[int, torch.Tensor], memory: torch.Tensor, tag: int
    ) -> InFlight:
        """Start receiving {trainer rank: flat tensor}; the tensors are parts of `memory`."""
        assert self._group is not None
        return self._start(self._group.recv, messages, memory, tag)

    def wait(self, transfer: InFlight, watch: Watch) -> None:
        """Wait for a transfer. Raises `RuntimeError` naming a peer that is gone, or `Aborted`."""
        self.until(transfer.done, watch)
        try:
            transfer.check()
        except RuntimeError as error:
            self._refuse_aborted(error)
            raise
        self._in_flight.remove(transfer)

    def abort(self) -> None:
        """Make every rank that waits in this attempt raise `Aborted`, and leave the group."""
        # Without trainer rank 0, which has the store, the others notice by themselves.
        with contextlib.suppress(RuntimeError):
            self.set(f"aborted/{self.attempt}", 1)
        self.leave()

    def leave(self) -> None:
        """Leave the group; messages in flight end, here and at the other ranks."""
        transfers, self._in_flight = self._in_flight, []
        if self._group is not None and self.device.type == "cuda":
            self._group.abort()
        for transfer in transfers:
            transfer.cancel()
        self._group_number, self._group = 0, None

    def until(self, ready: Callable[[], bool], watch: Watch, longest_pause_s: float = 2e-3) -> None:
        """Poll until `ready()` is true. Raises `Aborted` if the attempt was aborted, or what
        `watch` raises.
        """

        def aborted() -> bool:
            now = time.monotonic()
            if now < self._next_poll:
                return False
            self._next_poll = now + ABORT_POLL_S
            return self._aborted()

        wait_until(ready, aborted, watch, longest_pause_s=longest_pause_s)

    def _aborted(self) -> bool:
        """Whether some rank has aborted this attempt."""
        return self._has([f"aborted/{self.attempt}"])

    def _has(self, keys: list[str]) -> bool:
        """Whether all keys are in the store; raises `RuntimeError` if trainer rank 0 is gone."""
        try:
            return self._store.check(keys)
        except RuntimeError as error:
            raise RuntimeError(
                f"trainer rank 0 is gone: its store at {self.host}:{self.port} does not answer"
            ) from error

    def _refuse_aborted(self, error: RuntimeError) -> None:
        """Raise `Aborted` instead of `error` if the attempt was aborted, which ends all
        messages."""
        if self._aborted():
            raise Aborted(GIVEN_UP) from error

    def _start(
        self, operation: Any, messages: Mapping[int, torch.Tensor], memory: torch.Tensor, tag: int
    ) -> InFlight:
        """Start one operation for each {rank in the group: flat tensor}."""
        works: dict[int, dist.Work] = {}
        for peer, flat in messages.items():
            try:
                works[peer] = operation([flat], peer, tag)
            except RuntimeError as error:  # the connection was already lost
                self._in_flight.append(InFlight(works, memory, self._name))
                self._refuse_aborted(error)
                raise RuntimeError(f"{self._name(peer)} is gone: {_short(error)}") from error
        self._in_flight.append(InFlight(works, memory, self._name))
        return self._in_flight[-1]

    def _name(self, rank: int) -> str:
        """Name of a rank of the group for error messages, for example "rank 0 of engine 1"."""
        if rank < self._senders:
            return f"trainer rank {rank}"
        engine, rank = divmod(rank - self._senders, self._tensor)
        return f"rank {rank} of engine {engine}"


def _group(store: Store, number: int, rank: int, size: int, host: str, device: torch.device) -> Any:
    """Make process group number `number`; blocks until all `size` ranks take part."""
    store = PrefixStore(f"{number}/group", store)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the current device is per thread
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=NO_TIMEOUT_S)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    device_options = {"interface": name} if name else {"hostname": _address_toward(host)}
    options._devices = [dist.ProcessGroupGloo.create_device(**device_options)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def own_address() -> str:
    """This host's address as other hosts reach it; the launcher's, unless it is a loopback."""
    launcher = os.environ.get("MASTER_ADDR", "")
    try:
        if (
            launcher
            and not ipaddress.ip_address(socket.getaddrinfo(launcher, None)[0][4][0]).is_loopback
        ):
            return launcher
    except OSError:
        pass  # the name does not resolve
    return _address_toward("192.0.2.1")  # reserved address (RFC 5737); UDP connect sends nothing


def _address_toward(host: str) -> str:
    """The address of the network interface through which this host reaches `host`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"  # no network


def local_device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
