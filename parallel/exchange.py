"""Ring and all-to-all messages between the ranks of one axis, for attention over split sequences.

Implements the protocol `megarl.kernels.kv_transports.Exchange` with torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.parallel.collectives import gather_parts, waits
from megarl.parallel.mesh import Axis


@dataclass
class InFlight:
    """A message that is being received, with the buffers that must live until it has arrived."""

    received: torch.Tensor
    sent: torch.Tensor | None
    works: list[dist.Work]
    axis: Axis

    def wait(self) -> torch.Tensor:
        """The received tensor. Raises `RuntimeError` after the process group's timeout."""
        if self.works:
            with waits("ring", self.axis):
                for work in self.works:
                    work.wait()
        self.works, self.sent = [], None
        return self.received


class RingExchange:
    """The ranks of `axes[0]` in a ring, with one independent channel for each axis given."""

    def __init__(self, *axes: Axis) -> None:
        """`axes`: one process group for each channel, all of the same ranks. Raises `ValueError` if
        the ranks differ.
        """
        if any(axis.ranks != axes[0].ranks for axis in axes):
            raise ValueError(
                f"the axes of one exchange must have the same ranks, found"
                f" {[axis.ranks for axis in axes]}"
            )
        self.axes, self.rank, self.size = axes, axes[0].rank, axes[0].size

    def shift(
        self, tensor: torch.Tensor, shape: Sequence[int], *, channel: int = 0, offset: int = 1
    ) -> InFlight:
        """Send `tensor` to rank + `offset` and receive from rank - `offset`, modulo the size.

        The received tensor has `shape` and the dtype of `tensor`. Do not change `tensor` before
        `wait` has returned. Channels are independent of each other.
        """
        if offset % self.size == 0:
            return InFlight(tensor, tensor, [], self.axes[0])
        axis = self.axes[channel % len(self.axes)]
        sent, received = tensor.contiguous(), tensor.new_empty(tuple(shape))
        target, source = (
            axis.ranks[(self.rank + offset) % self.size],
            axis.ranks[(self.rank - offset) % self.size],
        )
        # Empty messages are not sent: sender and receiver both know the length.
        asked = [dist.P2POp(dist.isend, sent, target, axis.group)] if sent.numel() else []
        asked += [dist.P2POp(dist.irecv, received, source, axis.group)] if received.numel() else []
        works = dist.batch_isend_irecv(asked) if asked else []
        return InFlight(received, sent, list(works), axis)

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """The tensors of all ranks, as a list by rank. `lengths`: sizes in dimension 0; the other
        dimensions are equal.
        """
        return gather_parts(tensor, self.axes[0], lengths)

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum over all ranks of their tensors `pieces[self.rank]`. The pieces of a rank may differ
        in the size of dimension 0 only.
        """
        if self.size == 1:
            return pieces[0]
        own, longest = pieces[self.rank], max(piece.shape[0] for piece in pieces)
        padded = own.new_zeros((self.size * longest, *own.shape[1:]))
        for rank, piece in enumerate(pieces):
            padded[rank * longest : rank * longest + piece.shape[0]] = piece
        found = own.new_empty((longest, *own.shape[1:]))
        if longest:
            with waits("reduce-scatter", self.axes[0]):
                dist.reduce_scatter_single(found, padded, group=self.axes[0].group)
        return found[: own.shape[0]]

    def all_to_all(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Send `pieces[r]` to each rank r. Returns the tensors received, as a list by rank;
        `shapes` are their shapes.
        """
        if self.size == 1:
            return [pieces[0]]
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        sizes = [torch.Size(shape).numel() for shape in shapes]
        found = flat.new_empty(sum(sizes))
        given = [piece.numel() for piece in pieces]
        with waits("all-to-all", self.axes[0]):
            dist.all_to_all_single(found, flat, sizes, given, group=self.axes[0].group)
        return [
            part.view(tuple(shape)) for part, shape in zip(found.split(sizes), shapes, strict=True)
        ]
