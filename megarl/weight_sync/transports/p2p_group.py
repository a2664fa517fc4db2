"""Where trainer ranks and engine ranks of the transport `point_to_point` meet: a key-value store,
the attempts to send a weight version, and process groups in which every wait can be ended.

Trainer rank 0 hosts the store. Each `Sender.begin` is an attempt with a number; whoever gives it up
says so in the store, and every wait of the attempt ends. Ranks make new groups after an engine was
replaced or a version aborted.

torch's own store (TCPStore) serves whoever connects, and who can write to it decides where ranks
send weights. This one is a ZeroMQ socket under CurveZMQ, as the rollout service has: only who knows
the server's public key, a random one which reaches the engines through Ray, can connect, and what
is sent is encrypted.

Three facts about gloo (torch 2.13) shape the groups. A message counts as completed only once it was
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zmq
from torch._C._distributed_c10d import PrefixStore, Store

from megarl.files import in_thread
from megarl.weight_sync.transports.base import GIVEN_UP, Aborted, Watch, wait_until

CONNECT_TIMEOUT_S = 20.0
"""Seconds to connect to the store, in which it answers, and to connect to the ranks of a group."""

ABORT_POLL_S = 0.05
"""Seconds between two checks whether the version was given up: of the store, among up to `FEW`
processes, and by a relay thread that waits for a bucket."""

FEW, MANY_PAUSE_S = 64, 0.5
"""More processes than `FEW` ask the store proportionally less often, so that its load does not
grow; but for other ranks at least every `MANY_PAUSE_S` seconds."""


def short(error: BaseException) -> str:
    """The text of a torch error, one line, without its source position and general advice."""
    return str(error).split("] ", 1)[-1].split(". This is ")[0].splitlines()[0]


class StoreServer:
    """Serves a key-value store, through which trainer and engine ranks find each other, from a
    thread of this process, encrypted by ZeroMQ's CurveZMQ. Clients connect by `Rendezvous`, with
    the server's `address` (such as tcp://10.0.0.5:4321) and public `key`.
    """

    def __init__(self, host: str) -> None:
        """Start the server in a thread. It listens on `host`, an IP address of this machine, at a
        port that the system chooses. A client needs the attributes `address` and `key`.

        Raises `zmq.ZMQError` if `host` is no address of this machine.
        """
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.REP)
        key, secret = zmq.curve_keypair()
        self._socket.linger, self._socket.ipv6 = 0, ":" in host
        self._socket.curve_server, self._socket.curve_secretkey = 1, secret
        self._socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        """Where the server listens, such as tcp://10.0.0.5:4321."""
        self.key = key.decode()
        """The server's public key; who knows it may connect."""
        threading.Thread(target=self._serve, name="weights: store", daemon=True).start()

    def close(self) -> None:
        """End the thread that serves the key-value store, and all connections to the store."""
        self._context.term()

    def _serve(self) -> None:
        values: dict[str, str] = {}

        def add(key: str, count: int) -> int:
            values[key] = str(int(values.get(key, "0")) + count)
            return int(values[key])

        operations: dict[str, Callable[..., Any]] = {
            "set": values.__setitem__,
            "get": values.get,
            "add": add,
            "delete": lambda key: values.pop(key, None) is not None,
            "check": lambda *keys: all(key in values for key in keys),
        }
        with contextlib.suppress(zmq.ContextTerminated), self._socket:
            while True:
                answer = None
                with contextlib.suppress(ValueError, KeyError, TypeError):  # no request of ours
                    what, *arguments = self._socket.recv_json()
                    answer = operations[what](*arguments)
                self._socket.send_json(answer)


class Rendezvous(Store):
    """This process's connection to the key-value store of trainer rank 0 (`StoreServer`), as a
    torch `Store`. It also has the number of the present attempt to send a weight version, which any
    rank can abort here. Threads may share it.

    Methods raise `RuntimeError` where the server is gone, unless they say otherwise. Of torch's
    `Store` it has only the methods that process groups of gloo and NCCL call.
    """

    def __init__(self, address: str, key: str, members: int) -> None:
        """Connect to the store.

        Args:
            address, key: those of its `StoreServer`.
            members: number of the processes that use the store.

        Raises:
            RuntimeError: the store cannot be reached, or has another key.
        """
        super().__init__()
        self.address, self.key, self._lock = address, key, threading.Lock()
        self.host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        """Address of the store's machine."""
        self._socket = zmq.Context.instance().socket(zmq.REQ)
        self._socket.linger, self._socket.ipv6 = 0, ":" in self.host
        self._socket.rcvtimeo = self._socket.sndtimeo = round(1000 * CONNECT_TIMEOUT_S)
        self._socket.curve_serverkey = key.encode()
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.connect(address)
        self._next_poll = 0.0
        self._poll_s = ABORT_POLL_S * max(1.0, members / FEW)
        self.pause_s = min(self._poll_s / 2, MANY_PAUSE_S)
        """Longest pause between two questions to the store whether other ranks are there."""
        self.progress_s = self._poll_s if members > FEW else 0.0
        """Seconds between two reports of a receiver's progress."""
        self.attempt = 0
        """Number of the present `Sender.begin`; entries of the store about earlier attempts are
        ignored."""
        self.check([])

    def set(self, key: str, value: str | bytes) -> None:
        """Store `value` under `key` in the key-value store of trainer rank 0."""
        self._ask("set", key, value if isinstance(value, str) else value.decode("latin-1"))

    def get(self, key: str) -> bytes:
        """The value under `key` in the key-value store of trainer rank 0, as bytes. Waits until
        there is one; raises `RuntimeError` after `CONNECT_TIMEOUT_S` (20) seconds without.
        """
        self.wait([key])
        return self._ask("get", key).encode("latin-1")

    def add(self, key: str, count: int) -> int:
        """Add `count` to the number under `key`, at first 0, in the key-value store of trainer rank
        0; returns the sum. One atomic step.
        """
        return self._ask("add", key, count)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all `keys` have values in the key-value store of trainer rank 0; never waits."""
        return self._ask("check", *keys)

    def wait(
        self, keys: Sequence[str], timeout: timedelta = timedelta(seconds=CONNECT_TIMEOUT_S)
    ) -> None:
        """Wait until all `keys` have values in the key-value store of trainer rank 0. Raises
        `RuntimeError` after `timeout`, by default 20 seconds.
        """
        seconds, started_at = timeout.total_seconds(), time.monotonic()

        def watch() -> None:
            if time.monotonic() > started_at + seconds:
                raise RuntimeError(f"no rank has set {', '.join(keys)} within {seconds:g} s")

        wait_until(lambda: self.check(keys), lambda: False, watch, longest_pause_s=self.pause_s)

    def delete_key(self, key: str) -> bool:
        """Remove `key` from the key-value store of trainer rank 0; returns whether it was there."""
        return self._ask("delete", key)

    def clone(self) -> Rendezvous:
        """This same object: torch copies the stores of process groups."""
        return self

    def has_extended_api(self) -> bool:
        """Always False: torch asks whether the store has methods for several keys at once."""
        return False

    def _ask(self, *request: Any) -> Any:
        """The server's answer; without one the connection is closed."""
        with self._lock:
            try:
                self._socket.send_json(request)
                return self._socket.recv_json()
            except zmq.ZMQError as error:
                self._socket.close()
                raise RuntimeError(
                    f"{socket.gethostname()} cannot reach trainer rank 0's store at {self.address}:"
                    f" it does not answer within {CONNECT_TIMEOUT_S:g} s, or trainer rank 0 is gone"
                ) from error

    def close(self) -> None:
        """End this process's connection; methods that ask the store raise `RuntimeError` then."""
        with self._lock:
            self._socket.close()

    def number(self, key: str) -> int | None:
        """The integer under `key` in trainer rank 0's key-value store, or None; never waits."""
        found = self._ask("get", key)
        return None if found is None else int(found)

    def until(self, ready: Callable[[], bool], watch: Watch, pause_s: float = 2e-3) -> None:
        """Poll until `ready()` is true, with pauses of at most `pause_s` seconds; calls `watch`
        each time. Raises `Aborted` if some rank has aborted the present attempt to send a version,
        or what `watch` raises.
        """

        def aborted() -> bool:
            now = time.monotonic()
            if now < self._next_poll:
                return False
            self._next_poll = now + self._poll_s
            return self.is_aborted()

        wait_until(ready, aborted, watch, longest_pause_s=pause_s)

    def abort(self) -> None:
        """Abort the present attempt to send a version: every rank that waits in it raises
        `Aborted`. Does nothing where the store is gone.
        """
        # Without trainer rank 0, which has the store, the others notice by themselves.
        with contextlib.suppress(RuntimeError):
            self.set(f"aborted/{self.attempt}", "1")

    def is_aborted(self) -> bool:
        """Whether some rank has aborted the present attempt to send a version."""
        return self.check([f"aborted/{self.attempt}"])

    def lose(self, engine: int) -> None:
        """Abort the present attempt to send a version because the connection to the engine at
        position `engine` has ended, and note that engine. Raises nothing where the store is gone.
        """
        with contextlib.suppress(RuntimeError):
            self.set(f"lost/{self.attempt}", str(engine))
        self.abort()

    def lost(self) -> int | None:
        """The position of the engine that a rank has noted by `lose` in the present attempt to send
        a version; None if there is none or the store is gone.
        """
        with contextlib.suppress(RuntimeError):
            return self.number(f"lost/{self.attempt}")
        return None

    def refuse_aborted(self, error: BaseException) -> None:
        """Raise `Aborted` if some rank has aborted the present attempt to send a version. Otherwise
        do nothing: the caller raises `error`. `error`: the failure of a message, for which an abort
        is a sufficient reason, since it cancels all messages.
        """
        if self.is_aborted():
            raise Aborted(GIVEN_UP) from error


WATCHDOG_OFF = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Environment variables, read by the constructor of an NCCL process group, that switch its watchdog
off. They must not hold for the trainer's own groups, whose watchdog ends a rank that waits for a
dead one."""

ENVIRONMENT = threading.Lock()
"""Held while the environment is changed: several threads of a process make groups at once."""


def _nccl_group(store: Store, rank: int, size: int, device: torch.device) -> Any:
    """Make the group of `size` ranks and its communicator; blocks until all ranks take part. Call
    it in a thread that nobody waits for without a deadline.
    """
    torch.cuda.set_device(device)  # the current device is per thread
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=NO_TIMEOUT_S)
    with ENVIRONMENT:
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


NO_TIMEOUT_S, CANCEL_TIMEOUT_S, ABORT_TIMEOUT_S = 86400.0, 0.2, 10.0
"""Time-outs in seconds: for a message, which `watch` limits instead; for a cancelled thread; for
NCCL's end of a communicator, which itself would wait as long as for a message."""


class PeerGone(RuntimeError):
    """Raised where the connection to another rank of a process group has ended, though nobody
    aborted the attempt to send a version.
    """


class InFlight:
    """Messages that are being sent or received by one rank of a process group, and a thread that
    waits for them. Poll the future `ended`, and call `check` once it is done, or give the messages
    up by `cancel`. Keeps their buffers alive.
    """

    def __init__(
        self, works: Mapping[int, dist.Work], memory: torch.Tensor, names: Sequence[str]
    ) -> None:
        """`works`: {rank in the group: torch's work for the message}. `memory`: the tensor of which
        the messages' buffers are parts. `names`: of the group's ranks, for error messages.
        """
        self._works, self._memory, self._names, self._on_gpu = works, memory, names, memory.is_cuda
        self._cancelled = False
        self.ended = in_thread("NCCL", self._wait)
        """Future of the thread that waits for the messages; done when all have ended."""

    def _wait(self) -> None:
        """Wait for all messages; raises `PeerGone`."""
        for peer, work in self._works.items():
            try:
                while self._on_gpu and not self._cancelled and not work.is_completed():
                    time.sleep(2e-4)
                if not self._on_gpu:
                    work.wait(timedelta(seconds=NO_TIMEOUT_S))
                elif (error := work.exception()) is not None:  # NCCL's count as completed too
                    raise RuntimeError(str(error))
            except RuntimeError as error:
                raise PeerGone(f"{self._names[peer]} is gone: {short(error)}") from error

    def check(self) -> None:
        """Raise `PeerGone` if a message has failed. Blocks until the future `ended` is done. On a
        GPU, work that is submitted to the current stream afterwards runs after the messages.
        """
        self.ended.result()
        for work in self._works.values() if self._on_gpu else ():
            work.wait()

    def cancel(self) -> None:
        """Cancel these messages; returns after at most about 0.2 seconds. Under gloo
        this permanently ends every message of the group.
        """
        self._cancelled = True
        # Of every message: timing out on one that has completed cancels no other.
        for work in self._works.values():
            with contextlib.suppress(RuntimeError):  # the time-out, which is intended
                if not self._on_gpu and not self.ended.done():
                    work.wait(timedelta(milliseconds=1))
        wait([self.ended], CANCEL_TIMEOUT_S)


class P2PGroup:
    """This process's membership in a process group of trainer and engine ranks (gloo or NCCL) that
    send each other weights. Each wait ends when the attempt to send a version is aborted. The group
    can be left and joined anew.
    """

    def __init__(
        self, meeting: Rendezvous, key: str, rank: int, names: Sequence[str], device: torch.device
    ) -> None:
        """Nothing is connected before `join`.

        Args:
            meeting: this process's connection to the key-value store.
            key: name of the group in the store.
            rank: this process's rank in the group.
            names: what each rank of the group is called in error messages; its length is the size.
            device: CPU for gloo, a GPU for NCCL.
        """
        self._meeting, self._key, self._rank = meeting, key, rank
        self._names, self._device = names, device
        self._number, self._group = 0, None
        self._in_flight: dict[int, InFlight] = {}
        """{tag: transfer that was started and not waited for}."""

    def join(self, number: int, watch: Watch) -> None:
        """Join the group that is made anew for `number`; blocks until all its ranks have called
        this with the same `number`. A group of another number is left first; if this process is in
        the group of `number` already, nothing is done. `watch`: called while waiting, raises to end
        that. Raises `Aborted` if the attempt to send a version is aborted.
        """
        if number == self._number:
            return
        self.leave()
        meeting, joined = self._meeting, f"{number}/{self._key}/joined"
        meeting.set(f"{joined}/{self._rank}", "1")
        everybody = [f"{joined}/{rank}" for rank in range(len(self._names))]
        meeting.until(lambda: meeting.check(everybody), watch, meeting.pause_s)
        store = PrefixStore(f"{number}/{self._key}/group", meeting)
        creating = in_thread(
            "NCCL", lambda: _group(store, self._rank, len(everybody), meeting.host, self._device)
        )
        meeting.until(creating.done, watch)
        self._group, self._number = creating.result(), number

    def send(self, messages: Mapping[int, torch.Tensor], memory: torch.Tensor, tag: int) -> None:
        """Start to send `messages`, {rank in the group: flat tensor}, and return at once. The
        tensors are parts of `memory`, and must not change until `wait(tag)` has returned. `tag`:
        number of the transfer, the same at the receiving ranks. Raises `PeerGone` if a connection
        has ended, or `Aborted`.
        """
        assert self._group is not None
        self._start(self._group.send, messages, memory, tag)

    def receive(self, messages: Mapping[int, torch.Tensor], memory: torch.Tensor, tag: int) -> None:
        """Start to receive into `messages`, {rank in the group: flat tensor}, and return at once.
        The tensors are parts of `memory`, and are filled once `wait(tag)` has returned. `tag`:
        number of the transfer, the same at the sending ranks. Raises `PeerGone` if a connection has
        ended, or `Aborted`.
        """
        assert self._group is not None
        self._start(self._group.recv, messages, memory, tag)

    def wait(self, tag: int, watch: Watch) -> None:
        """Wait until the messages that were started with this tag have been transferred; returns at
        once if there are none. `watch`: called while waiting, raises to end that. Raises `PeerGone`
        if the connection to a rank has ended, and `Aborted` if the attempt was aborted.
        """
        if tag not in self._in_flight:
            return
        self._meeting.until(self._in_flight[tag].ended.done, watch)
        try:
            self._in_flight[tag].check()
        except RuntimeError as error:
            self._meeting.refuse_aborted(error)
            raise
        del self._in_flight[tag]

    def leave(self) -> None:
        """Leave the group; messages in flight are cancelled, here and at the other ranks. Does
        nothing if there is no group.
        """
        transfers, self._in_flight = self._in_flight, {}
        if self._group is not None and self._device.type == "cuda":
            wait([in_thread("NCCL", self._group.abort)], ABORT_TIMEOUT_S)
        for transfer in transfers.values():
            transfer.cancel()
        self._number, self._group = 0, None

    def _start(
        self, operation: Any, messages: Mapping[int, torch.Tensor], memory: torch.Tensor, tag: int
    ) -> None:
        """Start one operation for each {rank in the group: flat tensor}."""
        works: dict[int, dist.Work] = {}
        try:
            for peer, flat in messages.items():
                works[peer] = operation([flat], peer, tag)
        except RuntimeError as error:  # the connection was already lost
            peer = next(peer for peer in messages if peer not in works)
            self._meeting.refuse_aborted(error)
            raise PeerGone(f"{self._names[peer]} is gone: {short(error)}") from error
        finally:
            self._in_flight[tag] = InFlight(works, memory, self._names)


def _group(store: Store, rank: int, size: int, host: str, device: torch.device) -> Any:
    """Make a process group of `size` ranks, by NCCL where `device` is a GPU and else by gloo; waits
    until all of them have called this function. `store`: where they find each other, used for this
    group alone. `host`: address of the host that serves the store, by which gloo chooses its
    network interface.
    """
    if device.type == "cuda":
        return _nccl_group(store, rank, size, device)
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    # "lo" is for other groups, of the ranks of one host: these may be on several.
    by_name = name not in ("", "lo")
    device_options = {"interface": name} if by_name else {"hostname": address_toward(host)}
    options._devices = [dist.ProcessGroupGloo.create_device(**device_options)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def group_device() -> torch.device:
    """The device for messages between ranks: the current GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def own_address() -> str:
    """This host's IP address as other hosts reach it: that of MASTER_ADDR where it names this host
    and no loopback, else the address of the network interface with the default route.
    """
    launcher = os.environ.get("MASTER_ADDR", "")
    try:
        family, _, _, _, address = socket.getaddrinfo(launcher, 0, type=socket.SOCK_STREAM)[0]
        if launcher and not ipaddress.ip_address(address[0]).is_loopback:
            socket.create_server(address[:2], family=family).close()
            return str(address[0])
    except OSError:
        pass  # the name does not resolve, or not to this host
    return address_toward("192.0.2.1")  # reserved address (RFC 5737); UDP connect sends nothing


def address_toward(host: str) -> str:
    """IP address of the network interface through which this host reaches `host`, a name or
    address; 127.0.0.1 if there is no network. Nothing is sent.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"  # no network


def network_place() -> str:
    """A text that is the same for all processes of one host and network namespace, which can reach
    each other at 127.0.0.1, and different for all others.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
