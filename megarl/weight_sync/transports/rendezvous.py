"""The key-value store at which trainer ranks and engine ranks meet, and the attempts to send a
version.

Trainer rank 0 hosts the store. Each `Sender.begin` is an attempt with a number; whoever gives it up
says so in the store, and every wait of the attempt ends.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.weight_sync.transports.base import GIVEN_UP, Aborted, Watch
from megarl.weight_sync.transports.secret_store import SecretServer, SecretStore
from megarl.weight_sync.transports.shared_counters import wait_until

CONNECT_TIMEOUT_S = 20.0
"""Seconds to connect to the store, and to the ranks of a group."""

ABORT_POLL_S = 0.05
"""Seconds between two checks of the store for an abort, among up to `FEW` processes."""

FEW, MANY_PAUSE_S = 64, 0.5
"""More processes than `FEW` ask the store proportionally less often, so that its load does not
grow; but for other ranks at least every `MANY_PAUSE_S` seconds."""


def short(error: BaseException) -> str:
    """torch's error message without its source position and general advice."""
    return str(error).split("] ", 1)[-1].split(". This is ")[0].splitlines()[0]


class Rendezvous:
    """This process's connection to the store, and the present attempt."""

    def __init__(self, host: str, port: int, secret: str, members: int) -> None:
        """Connect to the store.

        Args:
            host, port: address of the store; port 0 hosts the store here, at that address only and
                on a free port.
            secret: what all processes that use the store know, in hexadecimal digits.
            members: number of these processes.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        self.host, self.port, self.secret = host, port, secret
        self._server = None
        if port == 0:
            self._server = SecretServer(host, bytes.fromhex(secret))
            self.host, self.port = self._server.host, self._server.port
        self._store = self.open()
        self._next_poll = 0.0
        self._poll_s = ABORT_POLL_S * max(1.0, members / FEW)
        self.pause_s = min(self._poll_s / 2, MANY_PAUSE_S)
        """Longest pause between two questions to the store whether other ranks are there."""
        self.progress_s = self._poll_s if members > FEW else 0.0
        """Seconds between two reports of a receiver's progress."""
        self.attempt = 0
        """Number of the present `Sender.begin`; entries of the store about earlier attempts are
        ignored."""

    def open(self) -> SecretStore:
        """Open a connection to the store. A thread that waits needs a connection of its own."""
        try:
            return SecretStore(self.host, self.port, bytes.fromhex(self.secret), CONNECT_TIMEOUT_S)
        except RuntimeError as error:
            where = f"{self.host}:{self.port}"
            raise RuntimeError(
                f"{socket.gethostname()} cannot reach trainer rank 0's store at {where}:"
                f" {short(error)}"
            ) from error

    def close(self) -> None:
        """End this process's connection, and the store where it is hosted here."""
        self._store.close()
        if self._server is not None:
            self._server.close()

    def set(self, key: str, value: int) -> None:
        """Store an integer for all ranks to read."""
        self._store.set(key, str(value))

    def get(self, key: str) -> int | None:
        """The integer stored under `key`, or None; never waits."""
        return int(self._store.get(key)) if self.has([key]) else None

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all keys are in the store; raises `RuntimeError` if trainer rank 0 is gone."""
        try:
            return self._store.check(list(keys))
        except RuntimeError as error:
            raise RuntimeError(
                f"trainer rank 0 is gone: its store at {self.host}:{self.port} does not answer"
            ) from error

    def until(self, ready: Callable[[], bool], watch: Watch, pause_s: float = 2e-3) -> None:
        """Poll until `ready()` is true, with pauses of at most `pause_s` seconds. Raises `Aborted`
        if the attempt was aborted, or what `watch` raises.
        """

        def aborted() -> bool:
            now = time.monotonic()
            if now < self._next_poll:
                return False
            self._next_poll = now + self._poll_s
            return self.is_aborted()

        wait_until(ready, aborted, watch, longest_pause_s=pause_s)

    def abort(self) -> None:
        """Make every rank that waits in this attempt raise `Aborted`."""
        # Without trainer rank 0, which has the store, the others notice by themselves.
        with contextlib.suppress(RuntimeError):
            self.set(f"aborted/{self.attempt}", 1)

    def is_aborted(self) -> bool:
        """Whether some rank has aborted this attempt."""
        return self.has([f"aborted/{self.attempt}"])

    def lose(self, engine: int) -> None:
        """Abort the attempt because the connection to `engine` has ended."""
        with contextlib.suppress(RuntimeError):
            self.set(f"lost/{self.attempt}", engine)
        self.abort()

    def lost(self) -> int | None:
        """The engine that another has lost in this attempt, or None."""
        with contextlib.suppress(RuntimeError):
            return self.get(f"lost/{self.attempt}")
        return None

    def refuse_aborted(self, error: BaseException) -> None:
        """Raise `Aborted` instead of `error` if the attempt was aborted, which ends all
        messages.
        """
        if self.is_aborted():
            raise Aborted(GIVEN_UP) from error


def own_address() -> str:
    """This host's address as other hosts reach it: the launcher's, unless that is a loopback or an
    address of something before this host.
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
    """The address of the network interface through which this host reaches `host`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"  # no network


def network_place() -> str:
    """Names this process's host and network namespace: processes of the same one share a
    loopback.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
