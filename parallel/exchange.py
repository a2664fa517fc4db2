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
class ExchangeInFlight:
    """A tensor that is being received from another rank, and the tensors that must live until it
    has arrived. Made by `RingExchange.shift`; call `wait` for the tensor.
    """

    received: torch.Tensor
    sent: torch.Tensor | None
    works: list[dist.Work]
    axis: Axis

    def wait(self) -> torch.Tensor:
        """Block until the tensor has arrived, and return it. Raises `RuntimeError` after the
        process group's timeout. A second call returns the tensor at once.
        """
        if self.works:
            with waits("ring", self.axis):
                for work in self.works:
                    work.wait()
        self.works, self.sent = [], None
        return self.received


class RingExchange:
    """Communication that attention over split sequences needs: `shift` around a ring of ranks, and
    the collectives `all_gather`, `reduce_scatter` and `all_to_all`. Made as `RingExchange(*axes)`
    of one or more `Axis` objects with the same ranks but process groups of their own: one for each
    channel of messages, which do not wait for each other. All ranks call its methods in the same
    order.
    """

    def __init__(self, *axes: Axis) -> None:
        """`axes`: one axis for each channel of messages, with the same ranks but different process
        groups, so that messages on different channels do not wait for each other.
        """
        assert all(axis.ranks == axes[0].ranks for axis in axes)
        self.axes, self.rank, self.size = axes, axes[0].rank, axes[0].size

    def shift(
        self, tensor: torch.Tensor, shape: Sequence[int], *, channel: int = 0, offset: int = 1
    ) -> ExchangeInFlight:
        """Send `tensor` to rank + `offset` and start to receive a tensor from rank - `offset`,
        modulo the size. Returns at once; `wait` of the result blocks and returns the tensor.

        The received tensor has `shape` and the dtype of `tensor`. Do not change `tensor` before
        `wait` has returned. `channel`: index of the axis that carries the message, modulo their
        number.
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
        asked = [dist.P2POp(dist.isend, sent, target, axis.group)] if sent.numel() else []
        asked += [dist.P2POp(dist.irecv, received, source, axis.group)] if received.numel() else []
        works = dist.batch_isend_irecv(asked) if asked else []
        return ExchangeInFlight(received, sent, list(works), axis)

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """The tensors of all ranks, as a list by rank; blocks. `lengths`: by rank, its tensor's
        size in dimension 0; the other dimensions and the dtype are equal.
        """
        return gather_parts(tensor, self.axes[0], lengths)

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over all ranks of their `pieces[self.rank]`, where `self.rank` is this rank's
        number. `pieces`: one tensor for each rank; these may differ in the size of dimension 0
        only. Blocks.
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
        """Send `pieces[r]` to each rank r; all have one dtype. Returns the tensors received, as a
        list by rank. `shapes`: by rank, the shape of the tensor received from it. Blocks.
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
