"""Transport `shared_memory`: trainer ranks and engines of one host share memory.

    trainer ranks write their regions -> shared memory -> engine ranks read

While engines read one bucket, trainer ranks write the next. Tensor rank r of every engine reads the
same memory. It is an anonymous file (memfd), opened through /proc/<pid>/fd, so nothing is left
behind however a run ends. With GPUs, every process registers the memory with CUDA (`Pinned`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from typing import Any

import numpy as np
import torch

from megarl.parallel.collectives import broadcast_object
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy
from megarl.system.console import say
from megarl.weights.route import Route
from megarl.weights.transports import base

SLOTS = 2
"""Buckets that are in memory at the same time."""

LINE = 8
"""int64 numbers in a cache line; one is a counter, the others are padding."""

NOT_HERE = (
    "is not the trainer's memory, or not on this host or in this container; set"
    " weight_sync.transport to 'point_to_point' where engines run elsewhere"
)


class SharedCounters:
    """A stop flag, the number of buckets that each sender and receiver has finished, and memory for
    weights.
    """

    def __init__(self, senders: int, receivers: int, num_bytes: int, path: str = "") -> None:
        """Make new memory, or open that with attribute `path` in another process. Raises
        `RuntimeError` if that is not such memory of this size.
        """
        self._senders, self._receivers = senders, receivers
        head = (1 + senders + receivers) * LINE * 8
        self._head = -(-head // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self._head + num_bytes
        if path:
            self._file = _open(path, size)
        else:
            descriptor = os.memfd_create("megarl-weights", os.MFD_CLOEXEC)
            self._file = FileIO(descriptor, "r+")
            self._file.truncate(size)
        self._map = mmap.mmap(self._file.fileno(), size)
        self.path = path or f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        self._counters = np.frombuffer(self._map, dtype=np.int64, count=head // 8)[::LINE]
        self._fence = threading.Lock()

    def memory(self) -> torch.Tensor:
        """uint8 [num_bytes] for weights, not a copy."""
        return torch.frombuffer(self._map, dtype=torch.uint8)[self._head :]

    def clear(self) -> None:
        """Only while no other process uses the counters."""
        self._counters[:] = 0

    def abort(self) -> None:
        """Make every process that waits in `until` raise `Aborted`."""
        self._set(0, 1)

    def write(self, sender: int, count: int) -> None:
        """Set a sender's count; whoever sees it also sees earlier writes to the memory."""
        self._set(1 + sender, count)

    def read(self, receiver: int, count: int) -> None:
        """Set a receiver's count."""
        self._set(1 + self._senders + receiver, count)

    def written(self) -> int:
        """Buckets that every sender has written."""
        return int(self._counters[1 : 1 + self._senders].min())

    def all_read(self) -> int:
        """Buckets that every receiver has read."""
        return int(self._counters[1 + self._senders :].min())

    def was_read(self, receiver: int) -> int:
        """Buckets that this receiver has read."""
        return int(self._counters[1 + self._senders + receiver])

    def until(self, ready: Callable[[], bool], watch: base.Watch) -> None:
        """Poll until `ready()`. Raises `Aborted` at the stop flag, or what `watch` raises."""
        base.wait_until(ready, lambda: bool(self._counters[0]), watch)
        self._memory_barrier()

    def close(self) -> None:
        self._file.close()

    def _set(self, index: int, value: int) -> None:
        self._memory_barrier()
        self._counters[index] = value

    def _memory_barrier(self) -> None:
        """Order memory accesses: acquiring and releasing a lock is a barrier."""
        with self._fence:
            pass


def _open(file: str, size: int) -> FileIO:
    """Raises `RuntimeError` if there is no such file of this size."""
    try:
        memory_file = FileIO(file, "r+")
    except OSError as error:
        raise RuntimeError(
            f"the trainer's memory at {file} cannot be opened ({error.strerror}): it {NOT_HERE}"
        ) from error
    if os.fstat(memory_file.fileno()).st_size != size:
        memory_file.close()
        raise RuntimeError(f"what lies at {file} {NOT_HERE}")
    return memory_file


def memory_bytes(route: Route) -> int:
    """Bytes through which one engine rank receives: two of the largest bucket."""
    return SLOTS * route.largest_bytes


def block_of(memory: torch.Tensor, route: Route, bucket: Bucket) -> torch.Tensor:
    """A bucket's half of `memory`, uint8 [bucket.num_bytes]: the next one can be written
    meanwhile.
    """
    first = bucket.number % SLOTS * route.largest_bytes
    return memory[first : first + bucket.num_bytes]


def open_counters(route: Route, senders: int, path: str = "") -> SharedCounters:
    """Make the memory of a transfer, or open it by `path`. There is room for each rank of one
    engine, or none with `spec.local`. Raises `RuntimeError`.
    """
    spec = route.spec
    num_bytes = 0 if spec.local else spec.num_destinations * memory_bytes(route)
    return SharedCounters(senders, spec.engines * spec.engine_tensor, num_bytes, path)


class _End:
    """Counters, and the memory as CUDA knows it."""

    _counters: SharedCounters
    _pinned: Pinned

    def close(self) -> None:
        try:
            self._pinned.release()
        finally:
            self._counters.close()


class Sender(_End, base.Sender):
    """Writes to memory that rank 0 makes and engine ranks of the host read."""

    def __init__(self, route: Route, axis: Axis) -> None:
        """Collective over `axis`."""
        self._route, self._axis = route, axis
        counters = open_counters(route, axis.size) if axis.rank == 0 else None
        path = broadcast_object(counters.path if counters else "", axis)
        self._counters = counters or open_counters(route, axis.size, path)
        self._memories = self._open()
        self._pinned = Pinned(self._counters.memory())

    def init_info(self) -> dict[str, Any]:
        """ "path" of the memory, and "senders", their number."""
        return {"path": self._counters.path, "senders": self._axis.size}

    def begin(self, attempt: int, *, anew: bool = False) -> None:
        if self._axis.rank == 0:
            self._counters.clear()

    def reserve(self, bucket: Bucket, watch: base.Watch) -> list[tuple[Copy, torch.Tensor]]:
        """As `base.Sender.reserve`; waits until engines have read the bucket two before."""
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

    def commit(self, bucket: Bucket, watch: base.Watch) -> None:
        """Count this rank's part as written, once the GPU has finished its copies."""
        self._pinned.wait()
        self._counters.write(self._axis.rank, bucket.number + 1)

    def abort(self) -> None:
        self._counters.abort()

    def progress(self, engine: int) -> int:
        """As `base.Sender.progress`."""
        tensor = self._route.spec.engine_tensor
        return min(self._counters.was_read(engine * tensor + rank) for rank in range(tensor))

    def _open(self) -> dict[int, torch.Tensor]:
        """{engine rank over all engines: uint8 [memory_bytes]}, at least those to which this rank
        writes.
        """
        return dict(enumerate(self._counters.memory().split(memory_bytes(self._route))))


class Receiver(_End):
    """Reads weights from memory that trainer ranks write."""

    def __init__(self, route: Route, engine: int, rank: int, init_info: dict[str, Any]) -> None:
        """Raises `RuntimeError` where this process cannot open the memory."""
        self._route, self._destination = route, route.spec.destination(engine, rank)
        self._counters = open_counters(route, init_info["senders"], init_info["path"])
        self._number = engine * route.spec.engine_tensor + rank
        self._slots = self._open(init_info)
        self._pinned = Pinned(self._counters.memory())

    def receive(self, watch: base.Watch) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """As `base.Receiver.receive`, each bucket once all trainer ranks have written theirs."""
        for bucket in self._route.buckets:
            self._counters.until(
                lambda number=bucket.number: self._counters.written() > number, watch
            )
            yield bucket, block_of(self._slots, self._route, bucket)
            self._finish_reading()
            self._counters.read(self._number, bucket.number + 1)

    def _finish_reading(self) -> None:
        """Wait for copies to the GPU."""
        self._pinned.wait()

    def _open(self, init_info: dict[str, Any]) -> torch.Tensor:
        """uint8 [memory_bytes]."""
        return self._counters.memory().split(memory_bytes(self._route))[self._destination]


class Pinned:
    """Page-locks host memory for CUDA until `release`, so that copies run while the process goes
    on. Does nothing in a process without a GPU.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """`memory`: uint8 on the host. If the driver refuses, warns once; the memory stays
        pageable.
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
            # CUDA keeps the error of a refused call, and the next kernel would be blamed for it.
            with contextlib.suppress(RuntimeError):  # torch reads the error, and CUDA forgets it
                torch.ones(1, device=self._device)
            why = cuda.cudaGetErrorString(problem)  # torch names no error but success
            say(
                "megarl: warning: weight_sync.transport shared_memory: the driver does not pin the"
                f" {memory.numel() / 2**20:.0f} MiB of weights on their way ({why}), so that"
                " copies between them and the GPU are slower; raise the job's limit of locked"
                " memory (ulimit -l)"
            )

    def wait(self) -> None:
        """Wait for this thread's current stream."""
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def release(self) -> None:
        """Wait and undo the registration, once. Then raises the error of the GPU's last work, if it
        failed.
        """
        if not self.is_registered:
            return
        self.is_registered = False
        try:
            self.wait()
        finally:
            cuda: Any = torch.cuda.cudart()
            cuda.cudaHostUnregister(self._memory.data_ptr())
