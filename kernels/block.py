"""The contract of block attention: some queries attend to some keys, masked by token positions.

    query i attends to key j where  doc_start[i] <= index[j] <= index[i]

`index` is a token's position in the packed sequence, `doc_start` that of its document's first
token. Contiguous, zigzag and striped splits, packed documents and each step of ring attention
differ in these arrays only. To add an implementation, write a class with the three methods of
`Block` and list it in `megarl.kernels.blocks.BLOCKS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Positions:
    """Positions of some tokens in a packed sequence.

    CPU tensors, from which work lists are made.
    """

    index: torch.Tensor
    """[L] int64: position in the packed sequence; all different, in any order."""
    doc_start: torch.Tensor
    """[L] int64: position in the packed sequence of the first token of the token's document."""

    @staticmethod
    def of(index: torch.Tensor, starts: torch.Tensor) -> Positions:
        """Positions of the tokens at `index` [L] of a packed sequence with given document `starts`.

        `starts` is [D + 1] for D documents; its last entry is the length of the sequence.
        """
        edges = starts.to(device="cpu", dtype=torch.int64)
        index = index.to(device="cpu", dtype=torch.int64)
        # `right` skips empty documents that begin at the same position.
        return Positions(index, edges[torch.searchsorted(edges, index, right=True) - 1])


class Block(Protocol):
    """Attention of Lq queries to Lk keys, merged into the results of other blocks of keys.

    Shapes: Hq query heads and Hkv KV heads, where Hkv divides Hq; D is the head width. Sums are
    float32, or float64 for float64 inputs.
    """

    def prepare(self, queries: Positions, keys: Positions, device: torch.device) -> Any:
        """Work list for these queries and keys, or None where no query attends to any key.

        It is made once per micro-batch and used by every layer.
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
        """Merge attention to these keys into `out` [Lq, Hq, D] and `lse` [Hq, Lq], in place.

        q is [Lq, Hq, D], k and v are [Lk, Hkv, D], last dimension contiguous. `out` is the
        normalised output over the keys seen so far and `lse` its log-sum-exp of the scaled scores;
        before the first block they are 0 and -inf.
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
        """Add this block's gradients to `grad_q`, `grad_k` and `grad_v`, in place.

        They have the shapes of q [Lq, Hq, D], k and v [Lk, Hkv, D]. `out` and `lse` are the final
        ones, over all keys. With them each block's gradients are exact, and the gradients of all
        blocks add up (FlashAttention-2, arXiv:2307.08691).
        """
        ...
