"""Memory of this machine: how much is free, and whether malloc keeps what is freed."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

OWN, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""Control groups of this process, and their limits."""
NAMES = {
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}
"""{version: (file of the limit, of what is used, keys in memory.stat)}"""


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""From glibc's <malloc.h>."""
OWN_MAPPING_BYTES = 32 * 2**20
"""Allocations of this size get mappings of their own; malloc's largest value."""
KEEPS_FREED_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(2**62),
    "MALLOC_MMAP_THRESHOLD_": str(OWN_MAPPING_BYTES),
}
"""Variables that do for a new process what `keep_freed_memory` does."""


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory for later allocations.

    By default a step's activations go back to the system, which clears every page for the next
    step. That made a step of 3.5 s on two cores an eighth slower after a wait of seven seconds.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)
        mallopt(M_TRIM_THRESHOLD, -1)  # never


def free_memory() -> tuple[int, int]:
    """(free, total) bytes of the host, within the container's limits; cached files count as
    free.
    """
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    for version, folder in control_groups("memory"):
        limit_file, used_file, cached = NAMES[version]
        with contextlib.suppress(OSError, ValueError):  # "max", or no such file
            limit = int((folder / limit_file).read_text())
            used = int((folder / used_file).read_text())
            for line in (folder / "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                used -= int(value) if name in cached else 0
            free, total = min(free, limit - used), min(total, limit)
    return free, total


def control_groups(controller: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each control group of this process for "memory" or "cpu", and those
    above. A folder need not exist.
    """
    yield 2, ROOT
    yield 1, ROOT / controller
    with contextlib.suppress(OSError):
        for line in OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            version, top = (1, ROOT / controller) if controllers else (2, ROOT)
            for group in (Path(path), *Path(path).parents):
                yield version, top / str(group).lstrip("/")
