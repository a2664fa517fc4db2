"""Free memory of this machine."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
"""Where Linux tells the limits of the container that this process is in."""


def free_memory() -> tuple[int, int]:
    """(free bytes, all bytes) of the host's memory, within the container's limit. Memory in which
    files are cached counts as free.
    """
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    with contextlib.suppress(OSError, ValueError):
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        for line in (CGROUP / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            used -= int(value) if name in ("inactive_file", "active_file") else 0
        free, total = min(free, limit - used), min(total, limit)
    return free, total
