"""Memory of this machine: how much is free, and whether malloc keeps memory that is freed."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

OWN, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""Where Linux tells the control groups of this process, and their limits."""
NAMES = {
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}
"""{version of control groups: (file of the limit, file of what is used, keys in memory.stat)}"""


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's settings of malloc, from <malloc.h>."""
OWN_MAPPING_BYTES = 32 * 2**20
"""Allocations of this size get mappings of their own; malloc allows no larger value."""
KEEPS_FREED_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(2**62),
    "MALLOC_MMAP_THRESHOLD_": str(OWN_MAPPING_BYTES),
}
"""Environment variables {name: value} that do in a new process what `keep_freed_memory` does."""


def keep_freed_memory() -> None:
    """Make malloc (glibc) keep the memory that this process frees for its next allocations, as a
    GPU's caching allocator does; for the rest of the process.

    By default malloc gives the memory of a step's activations back to the system and asks for it
    again in the next step, where the system clears every page. That made a training step of 3.5 s
    on two cores an eighth slower if the process had waited for seven seconds before. Without glibc
    nothing is done.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)
        mallopt(M_TRIM_THRESHOLD, -1)  # never


def free_memory() -> tuple[int, int]:
    """(free, total) bytes of the host's memory, within the limits of the container or control
    group. Memory in which files are cached counts as free.
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
    """Iterate over (version 1 or 2, folder below /sys/fs/cgroup) of each control group that this
    process is in for `controller`, "memory" or "cpu": its own and all above it. A folder need not
    exist: in a container the path is often that of the host.
    """
    yield 2, ROOT
    yield 1, ROOT / controller
    with contextlib.suppress(OSError):
        for line in OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            version, top = (1, ROOT / controller) if controllers else (2, ROOT)
            for place in (Path(path), *Path(path).parents):
                yield version, top / str(place).lstrip("/")
