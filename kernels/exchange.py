"""Communication that sequence attention needs between the ranks that share a packed sequence.

`megarl.parallel.exchange.RingExchange` implements it with torch.distributed; tests use threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Pending(Protocol):
    """A message that is being received."""

    def wait(self) -> torch.Tensor:
        """Wait for the message and return the tensor; to be called once."""
        ...


class Exchange(Protocol):
    """The ranks of one axis in a ring. All of them call the same methods in the same order."""

    rank: int
    """This rank's number in the ring of ranks, from 0."""
    size: int
    """Number of ranks in the ring."""

    def shift(
        self, tensor: torch.Tensor, shape: Sequence[int], *, channel: int = 0, offset: int = 1
    ) -> Pending:
        """Send `tensor` to rank + `offset` and receive from rank - `offset`, modulo the size.

        The received tensor has `shape` and the dtype of `tensor`, which must not change before
        `wait` has returned. Channels are independent of each other.
        """
        ...

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """The tensors of all ranks, as a list by rank. `lengths`: sizes in dimension 0; the other
        dimensions are equal.
        """
        ...

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum over all ranks of their tensors `pieces[self.rank]`. The pieces of a rank may differ
        in the size of dimension 0 only.
        """
        ...

    def all_to_all(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Send `pieces[r]` to each rank r. Returns the tensors received, as a list by rank;
        `shapes` are their shapes.
        """
        ...
