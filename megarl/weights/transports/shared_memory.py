"""Transport `shared_memory`: trainer ranks and engines of one host share memory.

    trainer ranks write their regions -> shared memory -> engine ranks read

Two buckets are in memory at once: while engines read one, trainer ranks write the next. Tensor rank
r of every engine reads the same memory, so the bytes written do not grow with the number of
engines. The memory is an anonymous file (memfd) that other processes open through /proc/<pid>/fd,
so nothing is left behind however a run ends.

On a GPU machine every process registers the memory with CUDA (`Pinned`), and copies between it
and its GPU run while the process goes on. They are waited for before a bucket counts as written or
as read.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
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
"""Number of weight buckets (blocks that are sent at once) that are in shared memory at the same
time."""

LINE = 8
"""int64 numbers in a cache line of 64 bytes; one of them is a counter, the others are padding."""

NOT_HERE = (
    "is not the trainer's memory, or not on this host or in this container; set"
    " weight_sync.transport to 'point_to_point' where engines run elsewhere"
)


class SharedCounters:
    """Shared memory of trainer and engine processes of one host: a stop flag, a counter for each
    sender (trainer rank) and receiver (engine rank), and `num_bytes` for weights.

    A counter says how many buckets of the current weight version were written or read.
    """

    def __init__(self, senders: int, receivers: int, num_bytes: int, path: str = "") -> None:
        """Make new shared memory, or open that of another process, whose attribute `path` is given
        as `path`.

        Raises `RuntimeError` where `path` cannot be opened or is not such memory of this size.
        """
        self._senders, self._receivers = senders, receivers
        head = (1 + senders + receivers) * LINE * 8
        self._head = -(-head // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self._head + num_bytes
        file, _, key = path.partition("#")
        if path:
            self._file = _open(file, size)
        else:
            made = os.memfd_create("megarl-weights", os.MFD_CLOEXEC)
            self._file = FileIO(made, "r+")
            self._file.truncate(size)
            file, key = f"/proc/{os.getpid()}/fd/{made}", str(secrets.randbits(62))
        self._map = mmap.mmap(self._file.fileno(), size)
        first_line = np.frombuffer(self._map, dtype=np.int64, count=LINE)
        if not path:
            first_line[1] = int(key)
        elif first_line[1] != int(key):
            self.close()
            raise RuntimeError(f"what lies at {file} {NOT_HERE}")
        self.path = f"{file}#{key}"
        """Text of the form FILE#NUMBER: the file to open from other processes, and a random number
        that identifies the memory."""
        self._counters = np.frombuffer(self._map, dtype=np.int64, count=head // 8)[::LINE]
        self._fence = threading.Lock()

    def memory(self) -> torch.Tensor:
        """The part of the shared memory that is for weights, uint8 [num_bytes]; not a copy."""
        return torch.frombuffer(self._map, dtype=torch.uint8)[self._head :]

    def clear(self) -> None:
        """Set all counters of buckets and the stop flag to 0; only while no other process uses
        them.
        """
        self._counters[:] = 0

    def abort(self) -> None:
        """Set the stop flag: every process that waits in `until` raises `Aborted`."""
        self._set(0, 1)

    def write(self, sender: int, count: int) -> None:
        """Set the counter of the sender with number `sender` to `count`, the buckets that it has
        written. Earlier writes to the memory are visible to whoever sees the counter.
        """
        self._set(1 + sender, count)

    def read(self, receiver: int, count: int) -> None:
        """Set the counter of the receiver with number `receiver` to `count`, the buckets that it
        has read.
        """
        self._set(1 + self._senders + receiver, count)

    def written(self) -> int:
        """Number of buckets that every sender has written."""
        return int(self._counters[1 : 1 + self._senders].min())

    def all_read(self) -> int:
        """Number of buckets that every receiver has read."""
        return int(self._counters[1 + self._senders :].min())

    def was_read(self, receiver: int) -> int:
        """Number of buckets that the receiver with this number has read."""
        return int(self._counters[1 + self._senders + receiver])

    def until(self, ready: Callable[[], bool], watch: base.Watch) -> None:
        """Poll until `ready()` is true; calls `watch` each time, which raises to end the wait.
        Raises `Aborted` if the stop flag is set.
        """
        base.wait_until(ready, lambda: bool(self._counters[0]), watch)
        self._memory_barrier()

    def close(self) -> None:
        """Close the shared memory's file; the memory is freed when no process maps it."""
        self._file.close()

    def _set(self, index: int, value: int) -> None:
        self._memory_barrier()
        self._counters[index] = value

    def _memory_barrier(self) -> None:
        """Order memory accesses before and after: acquiring and releasing a lock is a barrier."""
        with self._fence:
            pass


def _open(file: str, size: int) -> FileIO:
    """Open the file of shared memory that another process made, of `size` bytes. Raises
    `RuntimeError` if there is no such file, or one of another size.
    """
    try:
        found = FileIO(file, "r+")
    except OSError as error:
        raise RuntimeError(
            f"the trainer's memory at {file} cannot be opened ({error.strerror}): it {NOT_HERE}"
        ) from error
    if os.fstat(found.fileno()).st_size != size:
        found.close()
        raise RuntimeError(f"what lies at {file} {NOT_HERE}")
    return found


def memory_bytes(route: Route) -> int:
    """Bytes of memory through which one engine rank receives weights: two of the largest bucket."""
    return SLOTS * route.largest_bytes


def block_of(memory: torch.Tensor, route: Route, bucket: Bucket) -> torch.Tensor:
    """The part of `memory`, uint8 [memory_bytes(route)], in which `bucket` goes from trainer ranks,
    which write it, to an engine rank, which reads it: a view, uint8 [bucket.num_bytes]. Buckets
    with an even number are in the first half and those with an odd one in the second, so that one
    can be written while the one before it is read.
    """
    first = bucket.number % SLOTS * route.largest_bytes
    return memory[first : first + bucket.num_bytes]


def open_counters(route: Route, senders: int, path: str = "") -> SharedCounters:
    """Make or open the shared memory of a transfer, a `SharedCounters`. By its counters `senders`
    trainer ranks and all engine ranks tell each other how many buckets each has written or read. It
    also has room for the weights, `memory_bytes(route)` for each rank of one engine, which that
    rank of every engine reads. If each engine rank receives in memory of its own
    (`route.spec.local`), it has no such room.

    `route`: this process's part in the plan of the transfer, from which the number of engine ranks
    and the size of the memory follow. `path`: the attribute `SharedCounters.path` of the process
    that made the memory, to open it; "" to make new memory. Raises `RuntimeError` where it cannot
    be opened.
    """
    spec = route.spec
    num_bytes = 0 if spec.local else spec.num_destinations * memory_bytes(route)
    return SharedCounters(senders, spec.engines * spec.engine_tensor, num_bytes, path)


class _End:
    """What both ends have: the counters, and the memory as CUDA knows it."""

    _counters: SharedCounters
    _pinned: Pinned

    def close(self) -> None:
        """End this rank's part: undo the registration with CUDA, close the shared memory."""
        try:
            self._pinned.release()
        finally:
            self._counters.close()


class Sender(_End, base.Sender):
    """Trainer rank's half of the transport `shared_memory`: writes its part of the weights to
    memory that engine ranks of the same host read. Rank 0 makes the memory.
    """

    def __init__(self, route: Route, axis: Axis) -> None:
        """Make or open the shared memory. Collective over `axis`, the process group of all trainer
        ranks.

        `route`: which regions of tensors this trainer rank writes, and in which bucket.
        """
        self._route, self._axis = route, axis
        own = open_counters(route, axis.size) if axis.rank == 0 else None
        path = broadcast_object(own.path if own else "", axis)
        self._counters = own or open_counters(route, axis.size, path)
        self._memories = self._open()
        self._pinned = Pinned(self._counters.memory())

    def init_info(self) -> dict[str, Any]:
        """What receivers need, a dict: "path" of the shared memory, and "senders", their number."""
        return {"path": self._counters.path, "senders": self._axis.size}

    def begin(self, attempt: int, *, anew: bool = False) -> None:
        """Prepare to send a weight version: rank 0 resets all counters of written and read
        buckets.
        """
        if self._axis.rank == 0:
            self._counters.clear()

    def reserve(self, bucket: Bucket, watch: base.Watch) -> list[tuple[Copy, torch.Tensor]]:
        """The shared memory to which this rank must write its part of a bucket. Returns a list of
        (copy, view): a `Copy` says which region of which tensor to write, and the view [rows,
        columns] is where to write it.

        Waits until all engine ranks have read the bucket two before this one, which had the same
        memory. `watch` is called while waiting and raises to end that; raises `Aborted` if the stop
        flag is set.
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

    def commit(self, bucket: Bucket, watch: base.Watch) -> None:
        """Note that this rank has written its part of a bucket, after a wait until the GPU has
        finished its copies to shared memory. Engine ranks read the bucket once all trainer ranks
        have written theirs.
        """
        self._pinned.wait()
        self._counters.write(self._axis.rank, bucket.number + 1)

    def abort(self) -> None:
        """Set the stop flag in shared memory, which ends all waiting."""
        self._counters.abort()

    def progress(self, engine: int) -> int:
        """Number of buckets of this version that all ranks of the engine at position `engine` have
        read.
        """
        tensor = self._route.spec.engine_tensor
        return min(self._counters.was_read(engine * tensor + rank) for rank in range(tensor))

    def _open(self) -> dict[int, torch.Tensor]:
        """The memory through which each engine rank receives its buckets: {number of the engine
        rank over all engines: uint8 [memory_bytes]}. It has at least the engine ranks that this
        trainer rank writes to.
        """
        return dict(enumerate(self._counters.memory().split(memory_bytes(self._route))))


class Receiver(_End):
    """Engine rank's half of the transport `shared_memory`: reads weights from memory that trainer
    ranks of the same host write.
    """

    def __init__(self, route: Route, engine: int, rank: int, init_info: dict[str, Any]) -> None:
        """Open the trainer's shared memory, for rank `rank` of the engine at position `engine`.
        `route`: which regions of tensors this engine rank receives, and in which bucket.
        `init_info`: what `Sender.init_info` returned at the trainer.

        Raises `RuntimeError` where this process cannot open it.
        """
        self._route, self._destination = route, route.spec.destination(engine, rank)
        self._counters = open_counters(route, init_info["senders"], init_info["path"])
        self._number = engine * route.spec.engine_tensor + rank
        self._slots = self._open(init_info)
        self._pinned = Pinned(self._counters.memory())

    def receive(self, watch: base.Watch) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Iterate over the buckets of a version, each once all trainer ranks have written theirs:
        (bucket, its part of shared memory, uint8 [bucket.num_bytes], valid until the next). `watch`
        is called while waiting and raises to end that; raises `Aborted` if a trainer rank gave up.
        """
        for bucket in self._route.buckets:
            self._counters.until(
                lambda number=bucket.number: self._counters.written() > number, watch
            )
            yield bucket, block_of(self._slots, self._route, bucket)
            self._finish_reading()
            self._counters.read(self._number, bucket.number + 1)

    def _finish_reading(self) -> None:
        """Wait until a block has been read, also by copies to the GPU that were only started."""
        self._pinned.wait()

    def _open(self, init_info: dict[str, Any]) -> torch.Tensor:
        """The memory through which this engine rank receives its buckets, uint8 [memory_bytes]."""
        return self._counters.memory().split(memory_bytes(self._route))[self._destination]


class Pinned:
    """Page-locks a tensor's host memory for CUDA until `release`, so that copies between it and the
    GPU run while the process goes on; `wait` blocks until they are done. In a process that does not
    use a GPU nothing is registered, and there is nothing to wait for.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        """Register `memory`, uint8 on the host, with CUDA. If the driver refuses, one warning is
        written, and the memory stays pageable: all that works, and is slower.
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
        """Block until the GPU has finished all work on this thread's current stream."""
        if self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def release(self) -> None:
        """Wait for the GPU, and undo the registration; a second call does nothing. Raises the error
        of the GPU's last work, if it failed, after the registration is undone.
        """
        if not self.is_registered:
            return
        self.is_registered = False
        try:
            self.wait()
        finally:
            cuda: Any = torch.cuda.cudart()
            cuda.cudaHostUnregister(self._memory.data_ptr())
