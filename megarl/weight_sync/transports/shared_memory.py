"""Transport `shared_memory`: trainer ranks and engines of one host share memory.

    trainer ranks write their regions -> image of a bucket <- engine ranks read their own image

Two buckets are in memory at once: while engines read one, trainer ranks write the next. Tensor rank
r of every engine reads the same image, so the bytes written do not grow with the number of engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megarl.parallel.collectives import barrier, broadcast_object
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy
from megarl.weight_sync.route import Route
from megarl.weight_sync.transports.base import Watch
from megarl.weight_sync.transports.shared_counters import SharedCounters

SLOTS = 2
"""Buckets in memory at once."""


def image_bytes(route: Route) -> int:
    """Bytes of one destination's memory: `SLOTS` slots, each as large as the largest bucket."""
    return SLOTS * route.largest_bytes


def image_of(memory: torch.Tensor, route: Route, bucket: Bucket) -> torch.Tensor:
    """A bucket's image, uint8 [bucket.num_bytes], in its slot of a destination's memory."""
    first = bucket.number % SLOTS * route.largest_bytes
    return memory[first : first + bucket.num_bytes]


def open_counters(route: Route, senders: int, num_bytes: int, path: str = "") -> SharedCounters:
    """Shared counters of all senders and engine ranks, with `num_bytes` of shared memory.

    Opens those of another process where `path` is given, else makes new ones.
    """
    return SharedCounters(senders, route.spec.engines * route.spec.engine_tensor, num_bytes, path)


class Sender:
    """A trainer rank's half of the transport; rank 0 makes the shared memory."""

    SHARED = True
    LOCAL = False

    def __init__(self, route: Route, axis: Axis, folder: str) -> None:
        """Collective over `axis`, the trainer's world. `folder` is unused."""
        self._route, self._axis = route, axis
        num_bytes = self._host_bytes()
        own = open_counters(route, axis.size, num_bytes) if axis.rank == 0 else None
        path = broadcast_object(own.path if own else "", axis)
        self._counters = own or open_counters(route, axis.size, num_bytes, path)
        self._images = self._open()

    def init_info(self) -> dict[str, Any]:
        """Path of the shared memory, and the number of senders."""
        return {"path": self._counters.path, "senders": self._axis.size}

    def begin(self, version: int) -> None:
        """Reset the counters."""
        if self._axis.rank == 0:
            self._counters.clear()
        barrier(self._axis)

    def reserve(self, bucket: Bucket, watch: Watch) -> list[tuple[Copy, torch.Tensor]]:
        """Wait until all engine ranks have read the bucket before the last; returns the targets."""
        self._counters.until(lambda: self._counters.all_read() > bucket.number - SLOTS, watch)
        images = [
            bucket.buffers(image_of(memory, self._route, bucket), self._route.dtype)
            for memory in self._images
        ]
        own = [copy for copy in self._route.copies[bucket.number] if copy.source == self._axis.rank]
        return [(copy, copy.put.view(images[copy.destination][copy.put.buffer])) for copy in own]

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        """Count the bucket as written. The memory is not written again before `begin`."""
        self._counters.write(self._axis.rank, bucket.number + 1)

    def abort(self) -> None:
        """Set the stop flag in shared memory."""
        self._counters.abort()

    def progress(self, engine: int) -> int:
        """Buckets that all ranks of the engine have read."""
        tensor = self._route.spec.engine_tensor
        return min(self._counters.was_read(engine * tensor + rank) for rank in range(tensor))

    def close(self) -> None:
        """Unmap the shared memory."""
        self._counters.close()

    def _host_bytes(self) -> int:
        """Bytes of host memory that the images need."""
        return self._route.spec.num_images * image_bytes(self._route)

    def _open(self) -> list[torch.Tensor]:
        """By destination, its memory: uint8 [image_bytes]."""
        return list(self._counters.memory().split(image_bytes(self._route)))


class Receiver:
    """An engine rank's half of the transport."""

    def __init__(self, route: Route, engine: int, rank: int, init_info: dict[str, Any]) -> None:
        """Raises `RuntimeError` where the trainer's memory cannot be opened from this process."""
        self._route, self._image = route, route.spec.image(engine, rank)
        self._counters = open_counters(
            route, init_info["senders"], self._host_bytes(), init_info["path"]
        )
        self._number = engine * route.spec.engine_tensor + rank
        self._slots = self._open(init_info)

    def receive(self, version: int, watch: Watch) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Each bucket once all senders have written it, with its image in shared memory."""
        for bucket in self._route.buckets:
            self._counters.until(
                lambda number=bucket.number: self._counters.written() > number, watch
            )
            yield bucket, image_of(self._slots, self._route, bucket)
            self._finish_reading()
            self._counters.read(self._number, bucket.number + 1)

    def close(self) -> None:
        """Unmap the shared memory."""
        self._counters.close()

    def _finish_reading(self) -> None:
        """Wait until the image has been read; reads of host memory are synchronous."""

    def _host_bytes(self) -> int:
        """Bytes of host memory that the images need."""
        return self._route.spec.num_images * image_bytes(self._route)

    def _open(self, init_info: dict[str, Any]) -> torch.Tensor:
        """This rank's memory: uint8 [image_bytes]."""
        return self._counters.memory().split(image_bytes(self._route))[self._image]
