"""What a block of attention is: every token knows its position, and positions make the mask.

    query i attends to key j where  doc_start[i] <= index[j] <= index[i]

Contiguous, zigzag and striped cuts, packed documents and each step of a ring are only different
index arrays. To add an implementation, write a class with the three methods of `Block` and list it
in `megarl.kernels.blocks.BLOCKS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Places:
    """Where some tokens sit in the whole packed row. On the CPU: work lists are made from it once
    per micro-batch.
    """

    index: torch.Tensor
    """[L] int64: position in the whole row, no two alike; any order."""
    doc_start: torch.Tensor
    """[L] int64: position in the whole row of the first token of the document this one belongs to.
    """

    @staticmethod
    def of(index: torch.Tensor, starts: torch.Tensor) -> Places:
        """Places of the tokens at `index` of a row whose documents begin at `starts` ([D + 1], the
        last is the row's length).
        """
        edges = starts.to(device="cpu", dtype=torch.int64)
        index = index.to(device="cpu", dtype=torch.int64)
        # Of empty documents the last one counts: `right` finds the document that holds the
        # position.
        return Places(index, edges[torch.searchsorted(edges, index, right=True) - 1])


class Block(Protocol):
    """Attention of some queries to some keys, summed into what other blocks have found.

    Letters: Lq queries, Lk keys, Hq and Hkv heads (Hkv divides Hq), D head width. Sums are float32
    (float64 from float64).
    """

    def prepare(self, queries: Places, keys: Places, device: torch.device) -> Any:
        """The work list of this pair, made once and used by every layer; None where no query sees
        any key.
        """
        ...

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: Any,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Merge this block into `out` [Lq, Hq, D] and `lse` [Hq, Lq], in place; they begin as 0 and
        -inf.

        q [Lq, Hq, D]; k and v [Lk, Hkv, D], last dimension contiguous.
        """
        ...

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        work: Any,
        scale: float,
        grad_q: torch.Tensor,
        grad_k: torch.Tensor,
        grad_v: torch.Tensor,
    ) -> None:
        """Add this block's gradients to `grad_q` [Lq, Hq, D], `grad_k` and `grad_v` [Lk, Hkv, D],
        in place.

        `out` and `lse` are those over all keys: with them each block's gradients are exact and
        simply add up.
        """
        ...
