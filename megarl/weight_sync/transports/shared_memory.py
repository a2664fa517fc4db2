"""Weights through memory that the trainer ranks and the engines of one host share. Both ends are in
this file.

    trainer ranks: their regions -> image of a bucket, one for each engine rank's place       engine
    rank: reads its own image

Two buckets are on their way at once: while engines read one, trainer ranks write the next. Engines
that want the same (tensor rank r of each) read the same image, so what is written does not grow
with their number.
"""

from __future__ import annotations

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
    """Memory of one image's slots: bucket b's is bytes [(b % SLOTS) * largest, ...)."""
    return SLOTS * route.largest_bytes


def image_of(memory: torch.Tensor, route: Route, bucket: Bucket) -> torch.Tensor:
    """A bucket's image in its slots' memory: bytes [bucket.num_bytes]."""
    first = bucket.number % SLOTS * route.largest_bytes
    return memory[first : first + bucket.num_bytes]


def open_counters(route: Route, senders: int, num_bytes: int, path: str = "") -> SharedCounters:
    """The counters of everybody on a route, and memory behind them; another process's at `path`."""
    return SharedCounters(senders, route.spec.engines * route.spec.engine_tensor, num_bytes, path)


class Sender:
    """A trainer rank's end; rank 0 owns the memory."""

    SHARED = True
    """Engines share images."""
    LOCAL = False

    def __init__(self, route: Route, axis: Axis, folder: str) -> None:
        """All ranks of `axis`, the trainer's world, make theirs together; `folder` is for
        transports that write files.
        """
        self._route, self._axis = route, axis
        num_bytes = self._host_bytes()
        mine = open_counters(route, axis.size, num_bytes) if axis.rank == 0 else None
        path = broadcast_object(mine.path if mine else "", axis)
        self._counters_memory = mine or open_counters(route, axis.size, num_bytes, path)
        self._images = self._open()

    def init_info(self) -> dict[str, Any]:
        return {"path": self._counters_memory.path, "senders": self._axis.size}

    def begin(self, version: int) -> None:
        if self._axis.rank == 0:
            self._counters_memory.clear()
        barrier(self._axis)

    def reserve(self, bucket: Bucket, watch: Watch) -> list[tuple[Copy, torch.Tensor]]:
        self._counters_memory.until(
            lambda: self._counters_memory.all_read() > bucket.number - SLOTS, watch
        )
        images = [
            bucket.buffers(image_of(memory, self._route, bucket), self._route.dtype)
            for memory in self._images
        ]
        mine = [
            copy for copy in self._route.copies[bucket.number] if copy.source == self._axis.rank
        ]
        return [(copy, copy.put.view(images[copy.destination][copy.put.buffer])) for copy in mine]

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        self._counters_memory.write(self._axis.rank, bucket.number + 1)

    def end(self, watch: Watch) -> None:
        """Engines may still read; the memory is written again only after `begin`."""

    def abort(self) -> None:
        self._counters_memory.abort()

    def progress(self, engine: int) -> int:
        tensor = self._route.spec.engine_tensor
        return min(self._counters_memory.was_read(engine * tensor + rank) for rank in range(tensor))

    def close(self) -> None:
        self._counters_memory.close()

    def _host_bytes(self) -> int:
        """Memory behind the counters."""
        return self._route.spec.num_images * image_bytes(self._route)

    def _open(self) -> list[torch.Tensor]:
        """Each image's slots."""
        return list(self._counters_memory.memory().split(image_bytes(self._route)))


class Receiver:
    """An engine rank's end."""

    def __init__(self, route: Route, engine: int, rank: int, init_info: dict[str, Any]) -> None:
        self._route, self._image = route, route.spec.image(engine, rank)
        self._counters_memory = open_counters(
            route, init_info["senders"], self._host_bytes(), init_info["path"]
        )
        self._number = engine * route.spec.engine_tensor + rank
        self._slots = self._open(init_info)

    def begin(self, version: int) -> None:
        """The counters are the sender's to clear."""

    def wait(self, bucket: Bucket, watch: Watch) -> torch.Tensor:
        self._counters_memory.until(lambda: self._counters_memory.written() > bucket.number, watch)
        return image_of(self._slots, self._route, bucket)

    def release(self, bucket: Bucket) -> None:
        self._counters_memory.read(self._number, bucket.number + 1)

    def close(self) -> None:
        self._counters_memory.close()

    def _host_bytes(self) -> int:
        """Memory behind the counters."""
        return self._route.spec.num_images * image_bytes(self._route)

    def _open(self, init_info: dict[str, Any]) -> torch.Tensor:
        """This rank's image's slots."""
        return self._counters_memory.memory().split(image_bytes(self._route))[self._image]
