"""The naive ways of tools/bench/publish.py: each parameter gathered whole on rank 0, and sent to
every reader before the next.

Of its argument `case` each takes `wire` (rank 0 and the readers), `rank`, and `largest` (elements
of the largest parameter).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megarl.parallel.collectives import broadcast_object
from megarl.parallel.mesh import Axis
from megarl.weight_sync.transports.shared_counters import SharedCounters, wait_until

DTYPE, ITEMSIZE = torch.bfloat16, 2
LONGEST_PAUSE_S = 5e-5
"""Between two looks, of which every parameter needs several."""


class Gloo:
    """A broadcast of each parameter from rank 0, and a word from each reader when it is used."""

    def __init__(self, case: Any) -> None:
        self.axis, self.whole, self.word = (
            case.wire,
            torch.zeros(case.largest, dtype=DTYPE),
            torch.zeros(1),
        )

    def send(self, whole: torch.Tensor) -> None:
        dist.broadcast(whole, 0, group=self.axis.group)
        for reader in self.axis.ranks[1:]:
            dist.recv(self.word, reader, group=self.axis.group)

    def receive(self, numel: int) -> torch.Tensor:
        dist.broadcast(self.whole[:numel], 0, group=self.axis.group)
        return self.whole[:numel]

    def used(self) -> None:
        dist.send(self.word, 0, group=self.axis.group)


class Shared:
    """Memory for one whole parameter, which every reader sees."""

    def __init__(self, case: Any) -> None:
        readers, self.number, self.count = case.wire.size - 1, case.wire.rank - 1, 0
        mine = SharedCounters(1, readers, case.largest * ITEMSIZE) if case.rank == 0 else None
        path = broadcast_object(mine.path if mine else "", case.wire)
        self.board = mine or SharedCounters(1, readers, case.largest * ITEMSIZE, path)
        self.whole = self.board.memory().view(DTYPE)

    def send(self, whole: torch.Tensor) -> None:
        if whole.data_ptr() != self.whole.data_ptr():
            self.whole[: whole.numel()].copy_(whole)
        self.count += 1
        self.board.write(0, self.count)
        self._until(lambda: self.board.all_read() >= self.count)

    def receive(self, numel: int) -> torch.Tensor:
        self.count += 1
        self._until(lambda: self.board.written() >= self.count)
        return self.whole[:numel]

    def used(self) -> None:
        self.board.read(self.number, self.count)

    def _until(self, ready: Callable[[], bool]) -> None:
        wait_until(ready, lambda: False, lambda: None, longest_pause_s=LONGEST_PAUSE_S)
        self.board.until(ready, lambda: None)


def gather(whole: torch.Tensor, part: torch.Tensor, axis: Axis) -> None:
    """All-gather: writes the `part` of every rank of `axis` into `whole`, in the order of ranks.
    All parts have the same size.

    It uses isend and irecv, because gloo's all-gather allocates a second buffer for all parts in
    every call.
    """
    places = whole.view(axis.size, -1)
    others = [(place, other) for place, other in enumerate(axis.ranks) if place != axis.rank]
    work = [dist.irecv(places[place], other, group=axis.group) for place, other in others]
    work += [dist.isend(part, other, group=axis.group) for _, other in others]
    places[axis.rank].copy_(part)
    for one in work:
        assert one is not None
        one.wait()


THROUGH = {"gloo": Gloo, "shared memory": Shared}
