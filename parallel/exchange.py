"""Messages between the ranks of an axis, for attention over split sequences: the protocol
`megarl.kernels.kv_transports.Exchange` with torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.parallel.collectives import all_to_all, gather_parts, waits
from megarl.parallel.mesh import Axis


@dataclass
class ExchangeInFlight:
    """A tensor that is being received, and those that must live until it has arrived."""

    received: torch.Tensor
    sent: torch.Tensor | None
    works: list[dist.Work]
    axis: Axis

    def wait(self) -> torch.Tensor:
        """Blocks; may be called again. Raises `RuntimeError` after the group's timeout."""
        if self.works:
            with waits("ring", self.axis):
                for work in self.works:
                    work.wait()
        self.works, self.sent = [], None
        return self.received


class RingExchange:
    """All ranks call its methods in the same order."""

    def __init__(self, *axes: Axis) -> None:
        """`axes`: one for each channel, with the same ranks but different process groups, so that
        channels do not wait for each other.
        """
        assert all(axis.ranks == axes[0].ranks for axis in axes)
        self.axes, self.rank, self.size = axes, axes[0].rank, axes[0].size

    def shift(
        self, tensor: torch.Tensor, shape: Sequence[int], *, channel: int = 0, offset: int = 1
    ) -> ExchangeInFlight:
        """Send `tensor` to rank + `offset` and receive a tensor of `shape` from rank - `offset`,
        modulo the size. Does not block; do not change `tensor` before `wait` of the result has
        returned. `channel` is modulo the number of axes.
        """
        if offset % self.size == 0:
            return ExchangeInFlight(tensor, tensor, [], self.axes[0])
        axis = self.axes[channel % len(self.axes)]
        sent, received = tensor.contiguous(), tensor.new_empty(tuple(shape))
        target, source = (
            axis.ranks[(self.rank + offset) % self.size],
            axis.ranks[(self.rank - offset) % self.size],
        )
        # Empty messages are not sent: sender and receiver both know the length.
        calls = [dist.P2POp(dist.isend, sent, target, axis.group)] if sent.numel() else []
        calls += [dist.P2POp(dist.irecv, received, source, axis.group)] if received.numel() else []
        works = dist.batch_isend_irecv(calls) if calls else []
        return ExchangeInFlight(received, sent, list(works), axis)

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """The tensors by rank, of sizes `lengths` in dimension 0. Collective."""
        return gather_parts(tensor, self.axes[0], lengths)

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over ranks of `pieces[self.rank]`. Pieces may differ in the size of dimension 0.
        Collective.
        """
        if self.size == 1:
            return pieces[0]
        local, longest = pieces[self.rank], max(piece.shape[0] for piece in pieces)
        padded = local.new_zeros((self.size * longest, *local.shape[1:]))
        for rank, piece in enumerate(pieces):
            padded[rank * longest : rank * longest + piece.shape[0]] = piece
        out = local.new_empty((longest, *local.shape[1:]))
        if longest:
            with waits("reduce-scatter", self.axes[0]):
                dist.reduce_scatter_single(out, padded, group=self.axes[0].group)
        return out[: local.shape[0]]

    def all_to_all(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Send `pieces[r]` to each rank r. Returns the tensors received, by rank, of these
        `shapes`. Collective.
        """
        if self.size == 1:
            return [pieces[0]]
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        sizes = [torch.Size(shape).numel() for shape in shapes]
        out = all_to_all(flat, [piece.numel() for piece in pieces], sizes, self.axes[0])
        return [
            piece.view(tuple(shape)) for piece, shape in zip(out.split(sizes), shapes, strict=True)
        ]
