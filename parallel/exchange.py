"""Messages between the ranks of one axis, as the attention schedules of `megarl.kernels` ask for
them (`kernels/exchange.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.parallel.collectives import gather_parts
from megarl.parallel.mesh import Axis


@dataclass
class InFlight:
    """A message on its way; holds what is sent until it has arrived."""

    received: torch.Tensor
    sent: torch.Tensor | None
    works: list[dist.Work]

    def wait(self) -> torch.Tensor:
        """The tensor that arrived. Raises after the group's deadline."""
        for work in self.works:
            work.wait()
        self.works, self.sent = [], None
        return self.received


class RingExchange:
    """The ranks of `axes[0]` in a ring. Further axes are the same ranks in groups of their own: one
    a channel.
    """

    def __init__(self, *axes: Axis) -> None:
        if any(axis.ranks != axes[0].ranks for axis in axes):
            raise ValueError(
                f"channels of one exchange are the same ranks, not {[axis.ranks for axis in axes]}"
            )
        self.axes, self.rank, self.size = axes, axes[0].rank, axes[0].size

    def shift(
        self, tensor: torch.Tensor, shape: Sequence[int], *, channel: int = 0, offset: int = 1
    ) -> InFlight:
        """Send `tensor` to the rank `offset` places on and expect one of `shape` (same dtype) from
        as far back.

        Leave `tensor` alone until `wait` has returned. Channels do not wait for each other.
        """
        if offset % self.size == 0:
            return InFlight(tensor, tensor, [])
        axis = self.axes[channel % len(self.axes)]
        sent, received = tensor.contiguous(), tensor.new_empty(tuple(shape))
        target, source = (
            axis.ranks[(self.rank + offset) % self.size],
            axis.ranks[(self.rank - offset) % self.size],
        )
        # An empty message is none: both ends know its length.
        asked = [dist.P2POp(dist.isend, sent, target, axis.group)] if sent.numel() else []
        asked += [dist.P2POp(dist.irecv, received, source, axis.group)] if received.numel() else []
        works = dist.batch_isend_irecv(asked) if asked else []
        return InFlight(received, sent, list(works))

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Every rank's tensor, in their order; they differ in length (dimension 0) only, which is
        `lengths`.
        """
        return gather_parts(tensor, self.axes[0], lengths)

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over ranks of their `pieces[self.rank]`; pieces differ in length (dimension 0)
        only.
        """
        if self.size == 1:
            return pieces[0]
        mine, longest = pieces[self.rank], max(piece.shape[0] for piece in pieces)
        padded = mine.new_zeros((self.size * longest, *mine.shape[1:]))
        for rank, piece in enumerate(pieces):
            padded[rank * longest : rank * longest + piece.shape[0]] = piece
        found = mine.new_empty((longest, *mine.shape[1:]))
        if longest:
            dist.reduce_scatter_single(found, padded, group=self.axes[0].group)
        return found[: mine.shape[0]]

    def all_to_all(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Piece r goes to rank r; returns what each rank sent here, of these shapes."""
        if self.size == 1:
            return [pieces[0]]
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        sizes = [torch.Size(shape).numel() for shape in shapes]
        found = flat.new_empty(sum(sizes))
        dist.all_to_all_single(
            found, flat, sizes, [piece.numel() for piece in pieces], group=self.axes[0].group
        )
        return [
            part.view(tuple(shape)) for part, shape in zip(found.split(sizes), shapes, strict=True)
        ]
