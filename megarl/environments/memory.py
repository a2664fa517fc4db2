"""A limit on the memory of a worker process, kept by the kernel (Linux)."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

ROOM_LEFT = 0.25
"""A worker process is replaced before its next request once less than this fraction is left of
the memory that it could still allocate when its limit was set."""


class MemoryLimit:
    """Limits what this process may allocate from now on, so that it does not hold more than
    `limit_mib` MiB in memory. An allocation beyond raises `MemoryError`.
    """

    def __init__(self, limit_mib: int | None) -> None:
        """`limit_mib` None is no limit; elsewhere than on Linux there is none either."""
        self.limit_mib = limit_mib if sys.platform == "linux" else None
        self._room = 0
        if self.limit_mib is None:
            return
        resident, data = _used()
        self._room = self.limit_mib * 2**20 - resident
        if self._room <= 0:
            raise ValueError(
                f"environment.memory_limit_mib is {self.limit_mib}, but the verifier's process"
                f" holds {resident / 2**20:.0f} MiB once it has loaded; raise it"
            )
        # Not the address space: libraries reserve much more of that than they use. What is
        # reserved already is not used again, so the limit counts from here.
        self._most = data + self._room
        resource.setrlimit(resource.RLIMIT_DATA, (self._most, self._most))

    def is_tight(self) -> bool:
        """Whether most of the room is used, by what earlier requests left behind."""
        return self.limit_mib is not None and self._most - _used()[1] < ROOM_LEFT * self._room


def _used() -> tuple[int, int]:
    """Bytes of this process (in memory, private and writable: used or reserved)."""
    pages = Path("/proc/self/statm").read_text().split()
    size = os.sysconf("SC_PAGE_SIZE")
    return int(pages[1]) * size, int(pages[5]) * size
