"""A process group of some trainer ranks and engine ranks, in which every wait can be ended.

The ranks meet at the store of `rendezvous.py`, and make new groups after an engine was replaced or
a weight version aborted.

Three facts about gloo (torch 2.13) shape this file. A message counts as completed only once it was
waited for. A wait that times out cancels every message of its group for good. A peer that dies ends
every message to and from it at once. So a thread waits without a limit for each transfer, and to
cancel one this process makes a short wait time out. Rarely (once in 60 aborted versions) a thread
still does not return; it is abandoned, and owns nothing but a closed connection.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from megarl.weight_sync.transports.base import Watch
from megarl.weight_sync.transports.rendezvous import (
    CONNECT_TIMEOUT_S,
    Rendezvous,
    address_toward,
    short,
)
from megarl.weight_sync.transports.secret_store import SecretStore

WATCHDOG_OFF = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""What a group's constructor reads. It must not hold for the trainer's own groups, whose watchdog
ends a rank that waits for a dead one."""

ENVIRONMENT = threading.Lock()
"""Held while the environment is changed: several threads of a process make groups at once."""


def nccl_group(
    store: Store, rank: int, size: int, device: torch.device, *, timeout_s: float
) -> Any:
    """Make the group of `size` ranks and its communicator; blocks until all ranks take part.

    `timeout_s`: of a message. Call it in a thread that nobody waits for without a deadline.
    """
    torch.cuda.set_device(device)  # the current device is per thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with ENVIRONMENT, environment(WATCHDOG_OFF):
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


@contextlib.contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables until the end of the block."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


NO_TIMEOUT_S, CANCEL_TIMEOUT_S, ABORT_TIMEOUT_S = 86400.0, 0.2, 10.0
"""Time-outs in seconds: for a message, which `watch` limits instead; for a cancelled thread; for
NCCL's end of a communicator, which itself would wait as long as for a message."""


class PeerGone(RuntimeError):
    """The connection to another rank of the group has ended, though nobody aborted the attempt."""

    def __init__(self, reason: str, peer: int) -> None:
        """`peer`: the other rank's number in the group."""
        super().__init__(reason)
        self.peer = peer


class BlockingTask:
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

    def join(self, within_s: float = CANCEL_TIMEOUT_S) -> None:
        """Wait for the thread to end, at most `within_s` seconds."""
        self._thread.join(within_s)


class InFlight(BlockingTask):
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
        """Wait for all messages; raises `PeerGone`."""
        for peer, work in self.works.items():
            try:
                while self._on_gpu and not self._cancelled and not work.is_completed():
                    time.sleep(2e-4)
                if not self._on_gpu:
                    work.wait(timedelta(seconds=NO_TIMEOUT_S))
                elif (error := work.exception()) is not None:  # NCCL's count as completed too
                    raise RuntimeError(str(error))
            except RuntimeError as error:
                raise PeerGone(f"{self._name(peer)} is gone: {short(error)}", peer) from error

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
    """This process's membership in one group of ranks."""

    def __init__(
        self,
        meeting: Rendezvous,
        key: str,
        size: int,
        rank: int,
        name: Callable[[int], str],
        device: torch.device,
    ) -> None:
        """Nothing is connected before `join`.

        Args:
            meeting: this process's connection to the store.
            key: name of the group in the store.
            size: number of ranks in the group.
            rank: this process's rank in the group.
            name: what a rank of the group is called in error messages.
            device: CPU for gloo, a GPU for NCCL.
        """
        self._meeting, self._key, self.size, self.rank = meeting, key, size, rank
        self._name, self._device = name, device
        self._number, self._group, self._store = 0, None, None
        self._in_flight: list[InFlight] = []

    def join(self, number: int, watch: Watch) -> None:
        """Join group number `number` of this name; the call waits for all its ranks. Does nothing
        in the group that was joined last.
        """
        if number == self._number:
            return
        self.leave()
        meeting, joined = self._meeting, f"{number}/{self._key}/joined"
        meeting.set(f"{joined}/{self.rank}", 1)
        everybody = [f"{joined}/{rank}" for rank in range(self.size)]
        meeting.until(lambda: meeting.has(everybody), watch, meeting.pause_s)
        creating = BlockingTask(lambda: self._connect(f"{number}/{self._key}/group"))
        meeting.until(creating.done, watch)
        self._group, self._store = creating.result()
        self._number = number

    def send(
        self, messages: Mapping[int, torch.Tensor], memory: torch.Tensor, tag: int
    ) -> InFlight:
        """Start sending {rank in the group: flat tensor}; the tensors are parts of `memory`."""
        assert self._group is not None
        return self._start(self._group.send, messages, memory, tag)

    def receive(
        self, messages: Mapping[int, torch.Tensor], memory: torch.Tensor, tag: int
    ) -> InFlight:
        """Start receiving {rank in the group: flat tensor}; the tensors are parts of `memory`."""
        assert self._group is not None
        return self._start(self._group.recv, messages, memory, tag)

    def wait(self, transfer: InFlight, watch: Watch) -> None:
        """Wait for a transfer. Raises `PeerGone`, or `Aborted`."""
        self._meeting.until(transfer.done, watch)
        try:
            transfer.check()
        except RuntimeError as error:
            self._meeting.refuse_aborted(error)
            raise
        self._in_flight.remove(transfer)

    def leave(self) -> None:
        """Leave the group; messages in flight end, here and at the other ranks."""
        transfers, self._in_flight = self._in_flight, []
        if self._group is not None and self._device.type == "cuda":
            BlockingTask(self._group.abort).join(ABORT_TIMEOUT_S)
        for transfer in transfers:
            transfer.cancel()
        self._number, self._group, store, self._store = 0, None, self._store, None
        if store is not None:
            store.close()

    def _connect(self, prefix: str) -> tuple[Any, SecretStore]:
        """Make the process group, with a connection to the store of its own, which torch must not
        outlive.
        """
        store = self._meeting.open()
        of_group = PrefixStore(prefix, store)
        made = _group(of_group, self.rank, self.size, self._meeting.host, self._device)
        return made, store

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
                self._meeting.refuse_aborted(error)
                raise PeerGone(f"{self._name(peer)} is gone: {short(error)}", peer) from error
        self._in_flight.append(InFlight(works, memory, self._name))
        return self._in_flight[-1]


def _group(store: Store, rank: int, size: int, host: str, device: torch.device) -> Any:
    """Make a process group of `size` ranks, by NCCL where `device` is a GPU and else by gloo; waits
    until all of them have called this function. `store`: where they find each other, used for this
    group alone. `host`: address of the host that serves the store, by which gloo chooses its
    network interface.
    """
    if device.type == "cuda":
        return nccl_group(store, rank, size, device, timeout_s=NO_TIMEOUT_S)
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    # "lo" is for other groups, of the ranks of one host: these may be on several.
    by_name = name not in ("", "lo")
    device_options = {"interface": name} if by_name else {"hostname": address_toward(host)}
    options._devices = [dist.ProcessGroupGloo.create_device(**device_options)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def local_device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
