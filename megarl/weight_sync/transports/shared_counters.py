"""Memory shared by the processes of one host, with a counter for each sender and receiver.

The memory is an anonymous file (memfd) that other processes open through /proc/<pid>/fd, so nothing
is left behind however a run ends. Each counter has one writer and a cache line of its own.
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
"""int64 numbers in a cache line of 64 bytes; one of them is a counter, the others are padding."""

NOT_HERE = (
    "is not the trainer's memory, or not on this host or in this container; set"
    " weight_sync.transport to 'point_to_point' where engines run elsewhere"
)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2e-5, 2e-4
"""Seconds between two polls of a condition: the first pause, which grows by half, and the
longest."""


def wait_until(
    ready: Callable[[], bool],
    aborted: Callable[[], bool],
    watch: Watch,
    *,
    longest_pause_s: float = LONGEST_PAUSE_S,
) -> None:
    """Poll until `ready()` is true. Raises `Aborted` once `aborted()` is true, or what `watch`
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
    """A stop flag, a counter for each sender and receiver, and `num_bytes` of shared memory.

    A counter says how many buckets of the current weight version were written or read.
    """

    def __init__(self, senders: int, receivers: int, num_bytes: int, path: str = "") -> None:
        """Make new shared memory, or open that of another process at its `path`.

        Raises `RuntimeError` where `path` cannot be opened or is not such memory of this size.
        """
        self._senders, self._receivers = senders, receivers
        head = (1 + senders + receivers) * LINE * 8
        self._head = -(-head // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self._head + num_bytes
        file, _, key = path.partition("#")
        self._fd = _open(file, size) if path else os.memfd_create("megarl-weights", os.MFD_CLOEXEC)
        if not path:
            os.ftruncate(self._fd, size)
            file, key = f"/proc/{os.getpid()}/fd/{self._fd}", str(secrets.randbits(62))
        self._map = mmap.mmap(self._fd, size)
        first_line = np.frombuffer(self._map, dtype=np.int64, count=LINE)
        if not path:
            first_line[1] = int(key)
        elif first_line[1] != int(key):
            self.close()
            raise RuntimeError(f"what lies at {file} {NOT_HERE}")
        self.path = f"{file}#{key}"
        """File to open from other processes, and a random number that identifies the memory."""
        self._counters = np.frombuffer(self._map, dtype=np.int64, count=head // 8)[::LINE]
        self._fence = threading.Lock()

    def memory(self) -> torch.Tensor:
        """The shared memory after the counters, uint8 [num_bytes]."""
        return torch.frombuffer(self._map, dtype=torch.uint8)[self._head :]

    def clear(self) -> None:
        """Set all counters and the stop flag to 0; only while no other process uses them."""
        self._counters[:] = 0

    def abort(self) -> None:
        """Set the stop flag: every process in `until` raises `Aborted`."""
        self._set(0, 1)

    def write(self, sender: int, count: int) -> None:
        """Record that sender number `sender` has written `count` buckets."""
        self._set(1 + sender, count)

    def read(self, receiver: int, count: int) -> None:
        """Record that receiver number `receiver` has read `count` buckets."""
        self._set(1 + self._senders + receiver, count)

    def written(self) -> int:
        """Number of buckets that every sender has written."""
        return int(self._counters[1 : 1 + self._senders].min())

    def all_read(self) -> int:
        """Number of buckets that every receiver has read."""
        return int(self._counters[1 + self._senders :].min())

    def was_read(self, receiver: int) -> int:
        """Number of buckets that one receiver has read."""
        return int(self._counters[1 + self._senders + receiver])

    def until(self, ready: Callable[[], bool], watch: Watch) -> None:
        """Poll until `ready()` is true. Raises `Aborted` if the stop flag is set, or what `watch`
        raises.
        """
        wait_until(ready, lambda: bool(self._counters[0]), watch)
        self._memory_barrier()

    def close(self) -> None:
        """Close the file; the memory is freed when no process maps it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _set(self, index: int, value: int) -> None:
        self._memory_barrier()
        self._counters[index] = value

    def _memory_barrier(self) -> None:
        """Order memory accesses before and after: acquiring and releasing a lock is a barrier."""
        with self._fence:
            pass


def _open(file: str, size: int) -> int:
    """A descriptor of another process's memory file. Raises `RuntimeError` if it is not that."""
    try:
        found = os.open(file, os.O_RDWR)
    except OSError as error:
        raise RuntimeError(
            f"the trainer's memory at {file} cannot be opened ({error.strerror}): it {NOT_HERE}"
        ) from error
    if os.fstat(found).st_size != size:
        os.close(found)
        raise RuntimeError(f"what lies at {file} {NOT_HERE}")
    return found
