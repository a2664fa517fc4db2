"""What a schedule asks of the ranks that share a row. The real one is in
`megarl.parallel.exchange`; tests use threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> torch.Tensor:
        """The tensor that arrived; to be called once."""
        ...


class Exchange(Protocol):
    """Some ranks in a ring. All of them call the same methods in the same order."""

    rank: int
    size: int

    def shift(
        self, tensor: torch.Tensor, shape: Sequence[int], *, channel: int = 0, offset: int = 1
    ) -> Pending:
        """Send `tensor` to the rank `offset` places on (any integer) and expect one of `shape`
        (same dtype) from as far back.

        The sender must leave `tensor` alone until `wait` has returned. Channels do not wait for
        each other.
        """
        ...

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Every rank's tensor, in their order; they differ in length (dimension 0) only, which is
        `lengths`.
        """
        ...

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over ranks of their `pieces[self.rank]`; pieces differ in length (dimension 0)
        only.
        """
        ...

    def all_to_all(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Piece r goes to rank r; returns what each rank sent here, of these shapes."""
        ...
