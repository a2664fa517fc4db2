"""Counters that the processes of one host share: how far each sender has written, how far each
receiver has read, and a stop.

An anonymous memory file, reached through its maker's /proc entry: nothing is left behind however a
run ends. Each counter has one writer and a cache line of its own.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from megarl.weight_sync.transports.base import GIVEN_UP, Aborted, Watch

LINE = 8
"""Counters (int64) of which one is used: 64 bytes, so that two writers never share a cache line."""

NOT_HERE = (
    "is not the trainer's memory, or not on this host or in this container; set"
    " weight_sync.transport to 'point_to_point' where engines run elsewhere"
)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2e-5, 2e-4


def wait_until(
    ready: Callable[[], bool],
    aborted: Callable[[], bool],
    watch: Watch,
    *,
    longest_pause_s: float = LONGEST_PAUSE_S,
) -> None:
    """Wait for `ready`. Raises `Aborted` where another process gave up, and whatever `watch`
    raises.
    """
    pause = FIRST_PAUSE_S
    while not ready():
        if aborted():
            raise Aborted(GIVEN_UP)
        watch()
        time.sleep(pause)
        pause = min(pause * 1.5, longest_pause_s)


class SharedCounters:
    """`senders` + `receivers` counters and `num_bytes` of memory behind them."""

    def __init__(self, senders: int, receivers: int, num_bytes: int, path: str = "") -> None:
        """Make one, or open another process's at `path`. Raises `RuntimeError` where something else
        lies there.
        """
        self._senders, self._receivers = senders, receivers
        head = (1 + senders + receivers) * LINE * 8
        self._head = -(-head // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self._head + num_bytes
        place, _, key = path.partition("#")
        self._fd = _open(place, size) if path else os.memfd_create("megarl-weights", os.MFD_CLOEXEC)
        if not path:
            os.ftruncate(self._fd, size)
            place, key = f"/proc/{os.getpid()}/fd/{self._fd}", str(secrets.randbits(62))
        self._map = mmap.mmap(self._fd, size)
        first_line = np.frombuffer(self._map, dtype=np.int64, count=LINE)
        if not path:
            first_line[1] = int(key)
        elif first_line[1] != int(key):
            self.close()
            raise RuntimeError(f"what lies at {place} {NOT_HERE}")
        self.path = f"{place}#{key}"
        """Where others open it: a process's file, and a number by which they know that it is this
        one.
        """
        self._counters = np.frombuffer(self._map, dtype=np.int64, count=head // 8)[::LINE]
        self._fence = threading.Lock()

    def memory(self) -> torch.Tensor:
        """The bytes behind the counters, shared, [num_bytes]."""
        return torch.frombuffer(self._map, dtype=torch.uint8)[self._head :]

    def clear(self) -> None:
        """Everything back to 0; only while nobody else is at it."""
        self._counters[:] = 0

    def abort(self) -> None:
        """Have everybody who waits give up."""
        self._set(0, 1)

    def write(self, sender: int, count: int) -> None:
        """Sender `sender` has written `count` buckets."""
        self._set(1 + sender, count)

    def read(self, receiver: int, count: int) -> None:
        """Receiver `receiver` has read `count` buckets."""
        self._set(1 + self._senders + receiver, count)

    def written(self) -> int:
        """Buckets that every sender has written."""
        return int(self._counters[1 : 1 + self._senders].min())

    def all_read(self) -> int:
        """Buckets that every receiver has read."""
        return int(self._counters[1 + self._senders :].min())

    def was_read(self, receiver: int) -> int:
        """Buckets that one receiver has read."""
        return int(self._counters[1 + self._senders + receiver])

    def until(self, ready: Callable[[], bool], watch: Watch) -> None:
        """Wait for `ready`. Raises `Aborted` where another process gave up, and whatever `watch`
        raises.
        """
        wait_until(ready, lambda: bool(self._counters[0]), watch)
        self._order()

    def close(self) -> None:
        """Let go of the memory; others keep their view until they let go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _set(self, place: int, value: int) -> None:
        self._order()
        self._counters[place] = value

    def _order(self) -> None:
        """What was written before is seen before what is written after: a lock's two instructions
        are barriers everywhere.
        """
        with self._fence:
            pass


def _open(place: str, size: int) -> int:
    try:
        found = os.open(place, os.O_RDWR)
    except OSError as error:
        raise RuntimeError(
            f"the trainer's memory at {place} cannot be opened ({error.strerror}): it {NOT_HERE}"
        ) from error
    if os.fstat(found).st_size != size:
        os.close(found)
        raise RuntimeError(f"what lies at {place} {NOT_HERE}")
    return found
