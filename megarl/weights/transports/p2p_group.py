"""Where the ranks of `point_to_point` meet: torch's key-value store, and process groups in which
every wait can be ended.

Each `Sender.begin` is an attempt; whoever gives it up writes so to the store of trainer rank 0, and
every wait of the attempt ends.

Three facts about gloo (torch 2.13) shape the groups. A message counts as completed only once it was
waited for. A wait that times out cancels every message of its group for good. A peer that dies ends
every message to and from it. So a thread waits without a limit, and to cancel, a short wait times
out.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megarl.errors import ProcessLost
from megarl.system.files import in_thread
from megarl.weights.transports.base import GIVEN_UP, Aborted, Watch, wait_until

CONNECT_TIMEOUT_S = 20.0
"""To connect to the store or to a group's ranks, and for the store's answers."""

FEW = 64
"""Of more processes each asks the store less often whether the version was given up."""


def short(error: BaseException) -> str:
    """A torch error in one line, without source position and advice."""
    return str(error).split("] ", 1)[-1].split(". This is ")[0].splitlines()[0]


class Rendezvous:
    """A connection to trainer rank 0's store, and the present attempt. Methods raise `RuntimeError`
    where the store is gone.
    """

    def __init__(self, host: str, port: int, members: int) -> None:
        """Connect to the store at IP address `host`; with port 0 serve one there. `members`: number
        of processes that use it.
        """
        listener = -1
        if not port:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            server = socket.create_server((host, 0), family=family)
            port, listener = server.getsockname()[1], server.detach()
        try:
            self.store = TCPStore(
                host,
                port,
                is_master=listener >= 0,
                timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
                wait_for_workers=False,
                master_listen_fd=listener if listener >= 0 else None,
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"{socket.gethostname()} cannot reach trainer rank 0's store at {host} port {port}"
                f" within {CONNECT_TIMEOUT_S:g} s; nodes of a run must reach each other at every"
                " port"
            ) from error
        self.host, self.port = host, port
        self.poll_s = 0.05 * max(1.0, members / FEW)
        self.report_s = self.poll_s if members > FEW else 0.0
        """Seconds between two reports of progress."""
        self.attempt, self.group = 0, 0
        """Numbers of the present attempt and of its process group."""
        self._next_poll = 0.0

    def begin(self, attempt: int, group: int) -> None:
        self.store.set("attempt", f"{attempt} {group}")
        self.follow()

    def follow(self) -> None:
        """Take part in the attempt that trainer rank 0 has begun last."""
        self.attempt, self.group = map(int, self.store.get("attempt").split())

    def report(self, name: str, count: int) -> None:
        """Note that the rank called `name` has received `count` buckets in this attempt."""
        self.store.set(f"received/{name}", f"{self.attempt} {count}")

    def reported(self, name: str) -> int:
        """The count reported by `name` in this attempt, or -1."""
        if not self.store.check([f"received/{name}"]):
            return -1
        attempt, count = map(int, self.store.get(f"received/{name}").split())
        return count if attempt == self.attempt else -1

    def until(self, ready: Callable[[], bool], watch: Watch, pause_s: float = 2e-3) -> None:
        """Poll until `ready()`. Raises `Aborted`, or what `watch` raises."""

        def aborted() -> bool:
            now = time.monotonic()
            if now < self._next_poll:
                return False
            self._next_poll = now + self.poll_s
            return self.is_aborted()

        wait_until(ready, aborted, watch, longest_pause_s=pause_s)

    def abort(self) -> None:
        """End every wait of this attempt; nothing happens if the store is gone."""
        with contextlib.suppress(RuntimeError):  # ranks notice by themselves that rank 0 is gone
            self.store.set(f"aborted/{self.attempt}", "")

    def is_aborted(self) -> bool:
        return self.store.check([f"aborted/{self.attempt}"])


WATCHDOG_OFF = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""The constructor of an NCCL group reads them. They must not hold for the trainer's own groups,
whose watchdog ends a rank that waits for a dead one.
"""


def _nccl_group(store: Store, rank: int, size: int, device: torch.device) -> Any:
    """Make a group and its communicator, in a thread; blocks until all ranks take part."""
    torch.cuda.set_device(device)  # the current device is per thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)  # `watch` limits a message
    before = {name: os.environ.pop(name, None) for name in WATCHDOG_OFF}
    os.environ.update(WATCHDOG_OFF)
    try:
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
    group.eager_connect_single_device(device)
    return group


ABORT_TIMEOUT_S = 10.0
"""Of NCCL's end of a communicator."""


Peer = tuple[str, tuple[int, ...]]
"""A rank of a group: its name, and the number of the engine that is lost with it, if any."""


def _lost(peer: Peer, error: RuntimeError) -> ProcessLost:
    name, engines = peer
    return ProcessLost(f"{name} is gone: {short(error)}", engines)


class InFlight:
    """Messages of one rank, and a thread that waits for them: poll `ended`, then `check`, or
    `cancel`.
    """

    def __init__(
        self, works: Mapping[int, dist.Work], memory: torch.Tensor, peers: Sequence[Peer]
    ) -> None:
        """`works`: {rank in the group: torch's work}. `memory`: has the messages' buffers."""
        self._works, self._memory, self._peers, self._on_gpu = works, memory, peers, memory.is_cuda
        self._is_cancelled = False
        self.ended = in_thread("weights: messages", self._wait)
        """Future, done when all messages have ended."""

    def _wait(self) -> None:
        """Raises `ProcessLost`."""
        for peer, work in self._works.items():
            try:
                while self._on_gpu and not self._is_cancelled and not work.is_completed():
                    time.sleep(2e-4)
                if not self._on_gpu:
                    work.wait(timedelta(days=1))
                elif (error := work.exception()) is not None:  # NCCL's count as completed too
                    raise RuntimeError(str(error))
            except RuntimeError as error:
                raise _lost(self._peers[peer], error) from error

    def check(self) -> None:
        """Raise `ProcessLost` if a message failed; blocks until `ended`. On a GPU, later work of
        the current stream runs after the messages.
        """
        self.ended.result()
        for work in self._works.values() if self._on_gpu else ():
            work.wait()

    def cancel(self) -> None:
        """Takes at most about 0.2 seconds. Under gloo it ends every message of the group for
        good.
        """
        self._is_cancelled = True
        # Of every message: timing out on one that has completed cancels no other.
        for work in self._works.values():
            with contextlib.suppress(RuntimeError):  # the time-out, which is intended
                if not self._on_gpu and not self.ended.done():
                    work.wait(timedelta(milliseconds=1))
        wait([self.ended], timeout=0.2)


class P2PGroup:
    """Membership in a gloo or NCCL group, which can be left and joined anew."""

    def __init__(
        self, meeting: Rendezvous, rank: int, peers: Sequence[Peer], device: torch.device
    ) -> None:
        """`peers`: of the whole group. `device`: CPU for gloo, a GPU for NCCL."""
        self._meeting, self._rank, self._peers, self._device = meeting, rank, peers, device
        self._number, self._group = 0, None
        self._in_flight: dict[int, InFlight] = {}
        """{tag: transfer that nobody has waited for}."""

    def join(self, watch: Watch) -> None:
        """Join the present attempt's group. Collective over the group. Raises `Aborted`, or
        `ProcessLost` of a rank that has not come.
        """
        meeting = self._meeting
        if meeting.group == self._number:
            return
        self.leave()
        meeting.store.set(f"joined/{meeting.group}/{self._rank}", "")
        everybody = [f"joined/{meeting.group}/{rank}" for rank in range(len(self._peers))]
        meeting.until(lambda: meeting.store.check(everybody), watch, meeting.poll_s / 2)
        # A connection of its own: while a thread waits for a key, others cannot ask on it.
        store = PrefixStore(f"group/{meeting.group}", meeting.store.clone())  # pyright: ignore[reportAttributeAccessIssue]
        # Trainer ranks give up first: they know which engine to replace.
        limit_s = (2 if self._peers[self._rank][1] else 1) * CONNECT_TIMEOUT_S
        creating = in_thread(
            "weights: group",
            lambda: _group(store, self._rank, len(everybody), meeting.host, self._device, limit_s),
        )
        meeting.until(creating.done, watch)
        try:
            self._group, self._number = creating.result(), meeting.group
        except dist.DistStoreError as error:  # "wait timeout ..., keys: /group/1/0/3": of rank 3
            peer = self._peers[int(short(error).rpartition("/")[2])]
            raise self._explained(_lost(peer, error)) from error

    def send(self, messages: Mapping[int, torch.Tensor], memory: torch.Tensor, tag: int) -> None:
        """Start to send {rank: flat tensor}, parts of `memory`, not to be changed until
        `wait(tag)`. Raises `ProcessLost` or `Aborted`.
        """
        assert self._group is not None
        self._start(self._group.send, messages, memory, tag)

    def receive(self, messages: Mapping[int, torch.Tensor], memory: torch.Tensor, tag: int) -> None:
        """Start to receive; the tensors are filled once `wait(tag)` has returned."""
        assert self._group is not None
        self._start(self._group.recv, messages, memory, tag)

    def wait(self, tag: int, watch: Watch) -> None:
        """Wait for the messages with this tag, if any. Raises `ProcessLost` or `Aborted`."""
        if tag not in self._in_flight:
            return
        self._meeting.until(self._in_flight[tag].ended.done, watch)
        try:
            self._in_flight[tag].check()
        except ProcessLost as error:
            raise self._explained(error) from error
        del self._in_flight[tag]

    def leave(self) -> None:
        transfers, self._in_flight = self._in_flight, {}
        if self._group is not None and self._device.type == "cuda":
            wait([in_thread("weights: group", self._group.abort)], ABORT_TIMEOUT_S)
        for transfer in transfers.values():
            transfer.cancel()
        self._number, self._group = 0, None

    def _start(
        self, operation: Any, messages: Mapping[int, torch.Tensor], memory: torch.Tensor, tag: int
    ) -> None:
        works: dict[int, dist.Work] = {}
        try:
            for peer, flat in messages.items():
                works[peer] = operation([flat], peer, tag)
        except RuntimeError as error:  # the connection was already lost
            peer = next(peer for peer in messages if peer not in works)
            raise self._explained(_lost(self._peers[peer], error)) from error
        finally:
            self._in_flight[tag] = InFlight(works, memory, self._peers)

    def _explained(self, error: ProcessLost) -> RuntimeError:
        return Aborted(GIVEN_UP) if self._meeting.is_aborted() else error


def _group(
    store: Store, rank: int, size: int, host: str, device: torch.device, limit_s: float
) -> Any:
    """NCCL where `device` is a GPU, else gloo. Collective over the group. `host`: by the way to it
    gloo chooses its network interface.
    """
    if device.type == "cuda":
        return _nccl_group(store, rank, size, device)
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=limit_s)
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    # "lo" is for other groups, of the ranks of one host: these may be on several.
    by_name = name not in ("", "lo")
    device_options = {"interface": name} if by_name else {"hostname": address_toward(host)}
    options._devices = [dist.ProcessGroupGloo.create_device(**device_options)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def group_device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def own_address() -> str:
    """This host's IP address toward MASTER_ADDR or, if that is a loopback, on the default route."""
    address = address_toward(os.environ.get("MASTER_ADDR", "localhost"))
    # A reserved address (RFC 5737), to which nothing is sent.
    return address_toward("192.0.2.1") if ipaddress.ip_address(address).is_loopback else address


def address_toward(host: str) -> str:
    """IP address from which this host reaches `host`; 127.0.0.1 without a network."""
    try:
        family, socket_type, protocol, _, address = socket.getaddrinfo(
            host, 9, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket_type, protocol) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"


def network_place() -> str:
    """Equal for processes of one host and network namespace, which share 127.0.0.1."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
