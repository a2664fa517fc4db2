"""Transport `shared_memory`: trainer ranks and engines of one host share memory.

    trainer ranks write their regions -> shared memory -> engine ranks read

Two buckets are in memory at once: while engines read one, trainer ranks write the next. Tensor rank
r of every engine reads the same memory, so the bytes written do not grow with the number of
engines.

On a GPU machine every process registers the memory with CUDA (`Pinned`), and copies between it
and its GPU run while the process goes on. They are waited for before a bucket counts as written or
as read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megarl.console import say
from megarl.parallel.collectives import barrier, broadcast_object
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy
from megarl.weight_sync.route import Route
from megarl.weight_sync.transports.base import Direct, Watch
from megarl.weight_sync.transports.shared_counters import SharedCounters

SLOTS = 2
"""Number of weight buckets that are in shared memory at the same time."""


def memory_bytes(route: Route) -> int:
    """Bytes of shared memory for one engine rank: `SLOTS` times the largest bucket."""
    return SLOTS * route.largest_bytes


def block_of(memory: torch.Tensor, route: Route, bucket: Bucket) -> torch.Tensor:
    """The block of a bucket, uint8 [bucket.num_bytes], in an engine rank's shared memory."""
    first = bucket.number % SLOTS * route.largest_bytes
    return memory[first : first + bucket.num_bytes]


def open_counters(route: Route, senders: int, num_bytes: int, path: str = "") -> SharedCounters:
    """Shared counters of all senders and engine ranks, with `num_bytes` of shared memory.

    Opens those of another process where `path` is given, else makes new ones.
    """
    return SharedCounters(senders, route.spec.engines * route.spec.engine_tensor, num_bytes, path)


class Sender(Direct):
    """Trainer rank's half of the transport `shared_memory`; rank 0 makes the memory."""

    SHARED = True
    LOCAL = False

    def __init__(self, route: Route, axis: Axis, folder: str) -> None:
        """Make or open the shared memory. Collective over `axis`, the trainer's world.

        `folder` is unused.
        """
        self._route, self._axis = route, axis
        num_bytes = self._host_bytes()
        own = open_counters(route, axis.size, num_bytes) if axis.rank == 0 else None
        path = broadcast_object(own.path if own else "", axis)
        self._counters = own or open_counters(route, axis.size, num_bytes, path)
        self._memories = self._open()
        self._pinned = Pinned(self._counters.memory())

    def init_info(self) -> dict[str, Any]:
        """Path of the shared memory and number of senders, for receivers."""
        return {"path": self._counters.path, "senders": self._axis.size}

    def begin(self, version: int) -> None:
        """Prepare to send a weight version: reset the counters of written and read buckets."""
        if self._axis.rank == 0:
            self._counters.clear()
        barrier(self._axis)

    def reserve(self, bucket: Bucket, watch: Watch) -> list[tuple[Copy, torch.Tensor]]:
        """Where this rank must write its part of a bucket in shared memory.

        Waits until all engine ranks have read the bucket that had the same memory before.
        """
        self._counters.until(lambda: self._counters.all_read() > bucket.number - SLOTS, watch)
        copies, memories = self._route.copies[bucket.number], self._memories
        buffers = {
            number: bucket.buffers(
                block_of(memories[number], self._route, bucket), self._route.dtype
            )
            for number in {copy.destination for copy in copies}
        }
        return [
            (copy, copy.put.view(buffers[copy.destination][copy.put.buffer])) for copy in copies
        ]

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        """Wait for this rank's copies, and count the bucket as written by it; engine ranks read it
        once all ranks wrote it.
        """
        self._pinned.wait()
        self._counters.write(self._axis.rank, bucket.number + 1)

    def abort(self) -> None:
        """Set the stop flag in shared memory, which ends all waiting."""
        self._counters.abort()

    def progress(self, engine: int) -> int:
        """Number of buckets of this version that all ranks of an engine have read."""
        tensor = self._route.spec.engine_tensor
        return min(self._counters.was_read(engine * tensor + rank) for rank in range(tensor))

    def close(self) -> None:
        """Unregister and unmap the shared memory."""
        try:
            self._pinned.release()
        finally:
            self._counters.close()

    def _host_bytes(self) -> int:
        """Bytes of shared host memory for all engine ranks."""
        return self._route.spec.num_destinations * memory_bytes(self._route)

    def _open(self) -> dict[int, torch.Tensor]:
        """The memory through which each engine rank receives its buckets: {number of the engine
        rank over all engines: uint8 [memory_bytes]}. It has at least the engine ranks that this
        trainer rank writes to.
        """
        return dict(enumerate(self._counters.memory().split(memory_bytes(self._route))))


class Receiver:
    """Engine rank's half of the transport `shared_memory`."""

    def __init__(self, route: Route, engine: int, rank: int, init_info: dict[str, Any]) -> None:
        """Open the trainer's shared memory.

        Raises `RuntimeError` where this process cannot open it.
        """
        self._route, self._destination = route, route.spec.destination(engine, rank)
        self._counters = open_counters(
            route, init_info["senders"], self._host_bytes(), init_info["path"]
        )
        self._number = engine * route.spec.engine_tensor + rank
        self._slots = self._open(init_info)
        self._pinned = Pinned(self._counters.memory())

    def receive(self, version: int, watch: Watch) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Each bucket of a version with its block in shared memory, once all senders wrote it."""
        for bucket in self._route.buckets:
            self._counters.until(
                lambda number=bucket.number: self._counters.written() > number, watch
            )
            yield bucket, block_of(self._slots, self._route, bucket)
            self._finish_reading()
            self._counters.read(self._number, bucket.number + 1)

    def close(self) -> None:
        """Unregister and unmap the shared memory."""
        try:
            self._pinned.release()
        finally:
            self._counters.close()

    def _finish_reading(self) -> None:
        """Wait until a block has been read, also by copies to the GPU that were only started."""
        self._pinned.wait()

    def _host_bytes(self) -> int:
        """Bytes of shared host memory for all engine ranks."""
        return self._route.spec.num_destinations * memory_bytes(self._route)

    def _open(self, init_info: dict[str, Any]) -> torch.Tensor:
        """The memory through which this engine rank receives its buckets, uint8 [memory_bytes]."""
        return self._counters.memory().split(memory_bytes(self._route))[self._destination]


class Pinned:
    """The registration of a tensor's memory with CUDA, and the wait for copies. In a process that
    does not use a GPU nothing is registered, and there is nothing to wait for.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """Register `memory`, uint8 on the host. If the driver refuses, one warning is written, and
        the memory stays pageable: all that works, and is slower.
        """
        self._memory, self.is_registered = memory, False
        # Asking for the device of a process that has no use for it would cost memory there.
        uses_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._device = torch.device("cuda", torch.cuda.current_device()) if uses_gpu else None
        if self._device is None or not memory.numel():
            return
        cuda: Any = torch.cuda.cudart()
        problem = cuda.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        self.is_registered = problem == cuda.cudaError.success
        if not self.is_registered:
            self._forget_refusal()
            why = cuda.cudaGetErrorString(problem)  # torch names no error but success
            say(
                "megarl: warning: weight_sync.transport shared_memory: the driver does not pin the"
                f" {memory.numel() / 2**20:.0f} MiB of weights on their way ({why}), so that"
                " copies between them and the GPU are slower; raise the job's limit of locked"
                " memory (ulimit -l)"
            )

    def wait(self) -> None:
        """Return once the GPU has done what this thread has asked it for on the current stream."""
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def release(self) -> None:
        """Wait, and undo the registration; a second call does nothing. Raises what the GPU's last
        work has failed with, after the registration is undone.
        """
        if not self.is_registered:
            return
        self.is_registered = False
        try:
            self.wait()
        finally:
            cuda: Any = torch.cuda.cudart()
            cuda.cudaHostUnregister(self._memory.data_ptr())

    def _forget_refusal(self) -> None:
        """Clear the error that CUDA keeps of a refused call: the next kernel would be blamed."""
        with contextlib.suppress(RuntimeError):  # torch reads the error, and CUDA forgets it
            torch.ones(1, device=self._device)
