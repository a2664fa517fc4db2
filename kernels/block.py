"""The contract of block attention: some queries attend to some keys, masked by token positions.

    query i attends to key j where  first[i] <= index[j] <= index[i]

`index` is a token's position in the packed sequence, `first` that of its document's first token or,
with a sliding window, of the first token in the window. Contiguous, zigzag and striped splits,
packed documents and each step of ring attention differ in these arrays only. To add an
implementation, write a class with the three methods of `Block` and list it in
`megarl.kernels.attention_plan.BLOCKS`.

A document may continue another one, its parent, as the responses of a group continue their prompt.
Its tokens then attend to the parent's tokens too, and to those of the parent's parent. For each of
these levels a block is called once more, with the positions that `Positions.views` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch


@dataclass(frozen=True)
class Positions:
    """Positions of some tokens in a packed sequence.

    CPU tensors, from which work lists are made.
    """

    index: torch.Tensor
    """[L] int64: position in the packed sequence, all different, in any order. In a view (see
    `views`): the last position that each query attends to, in which many may agree."""
    first: torch.Tensor
    """[L] int64: position in the packed sequence of the first token of the token's document. In a
    view: the first position that each query attends to."""
    levels: tuple[Level, ...] = ()
    """For each level of ancestors, the roots first, those of each token's document."""

    @staticmethod
    def of(index: torch.Tensor, starts: torch.Tensor, parents: Sequence[int] = ()) -> Positions:
        """Positions of the tokens at `index` [L] of a packed sequence with given document `starts`.

        Args:
            index: [L] positions.
            starts: [D + 1] for D documents; its last entry is the length of the sequence.
            parents: [D] for each document, the number of the one that it continues, or -1; empty
                where no document continues another. A parent comes before its children, and
                between them only its other descendants (depth-first order).
        """
        edges = starts.to(device="cpu", dtype=torch.int64)
        index = index.to(device="cpu", dtype=torch.int64)
        # `right` skips empty documents that begin at the same position.
        document = torch.searchsorted(edges, index.contiguous(), right=True) - 1
        begins = _sample_positions(edges, parents)
        levels = []
        for ancestor in ancestors(parents):
            mine = ancestor[document]
            has_one = mine >= 0
            first = torch.where(has_one, edges[mine], index + 1)
            distance = index - edges[document] + begins[document] - begins[mine]
            levels.append(
                Level(
                    first,
                    torch.where(has_one, edges[mine + 1] - 1, index),
                    torch.where(has_one, first + distance, index),
                )
            )
        return Positions(index, edges[document], tuple(levels))

    def views(self, window: int | None = None) -> list[Positions]:
        """Positions of the same tokens as queries: first for the keys of their own documents, then
        for those of each level of ancestors. Together they are all keys that a query attends to;
        each key is in one view.

        `window`: a query attends to so many tokens of its sample at most, itself included; None
        for all before it.
        """
        if window is None:
            return [
                Positions(self.index, self.first),
                *(Positions(level.last, level.first) for level in self.levels),
            ]
        own = Positions(self.index, self.first.maximum(self.index - window + 1))
        return [
            own,
            *(
                Positions(level.last, level.first.maximum(level.as_if - window + 1))
                for level in self.levels
            ),
        ]


class Level(NamedTuple):
    """For some tokens, the ancestor of each one's document at one level."""

    first: torch.Tensor
    """[L] int64 position of the ancestor's first token; where there is no ancestor, the position
    after the token's own."""
    last: torch.Tensor
    """[L] int64 position of the ancestor's last token; without an ancestor the token's own."""
    as_if: torch.Tensor
    """[L] int64 position that the token would have if its sample went on from the ancestor's first
    token without a gap; without an ancestor the token's own."""


def _sample_positions(edges: torch.Tensor, parents: Sequence[int]) -> torch.Tensor:
    """[D] position of each document's first token in its sample. `edges`: starts of documents."""
    lengths, begins = edges.diff().tolist(), [0] * (len(edges) - 1)
    for document, parent in enumerate(parents):
        if parent >= 0:
            begins[document] = begins[parent] + lengths[parent]
    return torch.tensor(begins)


def ancestors(parents: Sequence[int]) -> list[torch.Tensor]:
    """For each level of ancestors, the roots first: [D] int64, for each document the number of its
    ancestor at that level, or -1. `parents`: as in `Positions.of`.
    """
    chains: list[list[int]] = []
    for parent in parents:
        chains.append([] if parent < 0 else [*chains[parent], parent])
    depth = max((len(chain) for chain in chains), default=0)
    return [
        torch.tensor([chain[level] if level < len(chain) else -1 for chain in chains])
        for level in range(depth)
    ]


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
        cap: float | None = None,
    ) -> None:
        """Merge attention to these keys into `out` [Lq, Hq, D] and `lse` [Hq, Lq], in place.

        q is [Lq, Hq, D], k and v are [Lk, Hkv, D], last dimension contiguous. `out` is the
        normalised output over the keys seen so far and `lse` its log-sum-exp of the scaled scores;
        before the first block they are 0 and -inf. With `cap` a scaled score s becomes
        cap tanh(s / cap).
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
        cap: float | None = None,
    ) -> None:
        """Add this block's gradients to `grad_q`, `grad_k` and `grad_v`, in place.

        They have the shapes of q [Lq, Hq, D], k and v [Lk, Hkv, D]. `out` and `lse` are the final
        ones, over all keys. With them each block's gradients are exact, and the gradients of all
        blocks add up (FlashAttention-2, arXiv:2307.08691).
        """
        ...
