"""The most memory that a piece of code used, in two independent ways on CPU; both are checked
against tensors of known size.

    allocated   every allocation and release of torch's CPU allocator, as the profiler writes them
                down, summed in their order: exact to the byte, and blind to what is not a tensor
                (scratch memory of libraries, Python's objects, sockets)
    resident    VmHWM, reset through /proc/self/clear_refs, minus what was resident before: sees
                everything, in pages

What is resident follows what is allocated only where malloc gives every tensor a mapping of its
own, so that what is freed goes back at once: `return_freed_memory(True)`. On CUDA both are
torch.cuda.max_memory_allocated.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

KNOWN_BYTES = 32 * 2**20
METHOD_AGREES = 0.02
MALLOPT_TRIM_THRESHOLD, MALLOPT_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Peak:
    """Bytes beyond those used before."""

    allocated: int
    resident: int | None
    """None where this system does not let a process reset its VmHWM."""


def return_freed_memory(at_once: bool) -> None:
    """Whether tensors of 64 KiB or more get mappings of their own (slower), or malloc keeps what is
    freed for the next.
    """
    libc = ctypes.CDLL(None)
    # As malloc itself settles after large blocks have been freed.
    libc.mallopt(MALLOPT_MMAP_THRESHOLD, 64 * 2**10 if at_once else 32 * 2**20)
    libc.mallopt(MALLOPT_TRIM_THRESHOLD, 128 * 2**10 if at_once else 64 * 2**20)
    libc.malloc_trim(0)


def resident(field: str = "VmRSS") -> int:
    """Bytes of VmRSS, or of VmHWM, its largest value since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def reset_resident_peak() -> bool:
    """Begin VmHWM anew; False where that is not permitted."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_of(body: Callable[[], Any], device: torch.device | None = None) -> tuple[Peak, Any]:
    """The peak while `body` ran, and what it returned. Tensors that are there before should outlive
    it.
    """
    gc.collect()
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = body()
        most = torch.cuda.max_memory_allocated(device) - before
        return Peak(most, most), result
    ctypes.CDLL(None).malloc_trim(0)  # or small tensors would sit in what malloc kept of others
    permitted, before = reset_resident_peak(), resident()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
        result = body()
        most = resident("VmHWM") - before
    return Peak(_allocated(profiler), most if permitted else None), result


def _allocated(profiler: Any) -> int:
    """The largest sum of allocations and releases."""
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    owned = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        owned += event.nbytes()
        most = max(most, owned)
    return most


def own_bytes(process: psutil.Process | None = None) -> int:
    """Resident memory of a process, this one if none is given, that no other shares."""
    found = (process or psutil.Process()).memory_info()
    return found.rss - found.shared


class Sampled:
    """Context manager: `most` is the largest value of `look()` inside it, seen every 4 ms."""

    def __init__(self, look: Callable[[], int]) -> None:
        self._look, self._ended = look, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.begin = self.most = look()

    def _watch(self) -> None:
        while not self._ended.wait(0.004):
            self.most = max(self.most, self._look())

    def __enter__(self) -> Sampled:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.end = self._look()
        self.most = max(self.most, self.end)


def check() -> None:
    """Two tensors at a time of three, one after the other: the peak is known. Raises `RuntimeError`
    where it is not found.
    """

    def body() -> None:
        numel = KNOWN_BYTES // 4
        first, second = torch.ones(numel), torch.ones(numel)
        del first
        third = torch.ones(numel)
        assert second is not third

    peak_of(body)  # the profiler's own memory comes with its first use
    for _ in range(2):  # the second time shows that the first left nothing
        peak, _ = peak_of(body)
        for way, found in (("allocated", peak.allocated), ("resident", peak.resident)):
            if found is not None and abs(found / (2 * KNOWN_BYTES) - 1) > METHOD_AGREES:
                wrong = f"{found:,} bytes {way} were found where {2 * KNOWN_BYTES:,} were used"
                raise RuntimeError(f"the memory measurement is wrong here: {wrong}")
