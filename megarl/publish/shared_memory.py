"""Weights through memory that the trainer ranks and the engines of one host share. Both ends are in this file.

    trainer ranks: their regions -> image of a bucket, one for each engine rank's place       engine rank: reads its own image

Two buckets are on their way at once: while engines read one, trainer ranks write the next. Engines read the same images
(rank r of each wants the same), so what is written does not grow with their number.
"""

from __future__ import annotations

from typing import Any

import torch

from megarl.parallel.collectives import barrier, broadcast_object
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy
from megarl.publish.board import Board
from megarl.publish.carrier import Watch
from megarl.publish.route import Route

SLOTS = 2
"""Buckets in memory at once."""


class _Memory:
    """What both ends know of the memory: image i of the bucket in slot s is bytes [(i * SLOTS + s) * largest, ...)."""

    def __init__(self, route: Route, senders: int, path: str = "") -> None:
        spec, self.largest = route.spec, route.largest_bytes
        self.board = Board(senders, spec.engines * spec.engine_tensor, spec.num_images * SLOTS * self.largest, path)
        self._bytes = self.board.memory()

    def image(self, image: int, bucket: Bucket) -> torch.Tensor:
        """Bytes [bucket.num_bytes]."""
        first = (image * SLOTS + bucket.number % SLOTS) * self.largest
        return self._bytes[first : first + bucket.num_bytes]


class Sender:
    """A trainer rank's end; rank 0 owns the memory."""

    SHARED = True
    """Engines share images."""

    def __init__(self, route: Route, axis: Axis, folder: str) -> None:
        """All ranks of `axis`, the trainer's world, make theirs together; `folder` is for carriers that write files."""
        self._route, self._axis = route, axis
        mine = _Memory(route, axis.size) if axis.rank == 0 else None
        path = broadcast_object(mine.board.path if mine else "", axis)
        self._memory = mine or _Memory(route, axis.size, path)
        self._board = self._memory.board

    def invitation(self) -> dict[str, Any]:
        return {"path": self._board.path, "senders": self._axis.size}

    def begin(self, version: int) -> None:
        if self._axis.rank == 0:
            self._board.clear()
        barrier(self._axis)

    def reserve(self, bucket: Bucket, watch: Watch) -> list[tuple[Copy, torch.Tensor]]:
        self._board.until(lambda: self._board.all_read() > bucket.number - SLOTS, watch)
        images = [
            bucket.buffers(self._memory.image(image, bucket), self._route.dtype) for image in range(self._route.spec.num_images)
        ]
        mine = [copy for copy in self._route.copies[bucket.number] if copy.source == self._axis.rank]
        return [(copy, copy.put.view(images[copy.destination][copy.put.buffer])) for copy in mine]

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        self._board.write(self._axis.rank, bucket.number + 1)

    def end(self, watch: Watch) -> None:
        """Engines may still read; the memory is written again only after `begin`."""

    def abort(self) -> None:
        self._board.abort()

    def progress(self, engine: int) -> int:
        tensor = self._route.spec.engine_tensor
        return min(self._board.was_read(engine * tensor + rank) for rank in range(tensor))

    def close(self) -> None:
        self._board.close()


class Receiver:
    """An engine rank's end."""

    def __init__(self, route: Route, engine: int, rank: int, invitation: dict[str, Any]) -> None:
        self._memory = _Memory(route, invitation["senders"], invitation["path"])
        self._image = route.spec.image(engine, rank)
        self._number = engine * route.spec.engine_tensor + rank

    def begin(self, version: int) -> None:
        """The counters are the sender's to clear."""

    def wait(self, bucket: Bucket, watch: Watch) -> torch.Tensor:
        board = self._memory.board
        board.until(lambda: board.written() > bucket.number, watch)
        return self._memory.image(self._image, bucket)

    def release(self, bucket: Bucket) -> None:
        self._memory.board.read(self._number, bucket.number + 1)

    def close(self) -> None:
        self._memory.board.close()
