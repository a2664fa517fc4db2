"""The contract of block attention: some queries attend to some keys, masked by token positions.

    query i attends to key j where  first[i] <= index[j] <= index[i]

`index` is a token's position in the packed sequence, `first` that of its document's first token or
of its window. Splits, packed documents and steps of ring attention differ in these only.

A document may continue another, as responses continue their prompt: its tokens also attend to the
parent's first tokens, and to those that these attend to. Each such level is one more call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch


@dataclass(frozen=True)
class Positions:
    """Where L tokens are in a packed sequence, as queries or keys; int64 on the CPU."""

    index: torch.Tensor
    """[L] positions, all different, in any order. In a view: the last position that each query
    attends to.
    """
    first: torch.Tensor
    """[L] positions of the first tokens of their documents. In a view: the first that a query
    attends to.
    """
    levels: tuple[Level, ...] = ()
    """The ancestors of each token's document, the farthest back first."""

    @staticmethod
    def of(
        index: torch.Tensor,
        starts: torch.Tensor,
        parents: Sequence[int] = (),
        begins: Sequence[int] = (),
    ) -> Positions:
        """Positions of tokens at `index` [L], all different.

        Args:
            index: [L] int positions.
            starts: [D + 1] int first position of each document, then the sequence's length.
            parents: [D] the document that each continues, or -1; empty for none. Depth first.
            begins: [D] number of tokens that each document continues, at least one of them the
                parent's; empty for all.
        """
        edges = starts.to(device="cpu", dtype=torch.int64)
        index = index.to(device="cpu", dtype=torch.int64)
        # `right` skips empty documents that begin at the same position.
        document = torch.searchsorted(edges, index.contiguous(), right=True) - 1
        depth = torch.tensor(begins) if len(begins) else _sample_positions(edges, parents)
        levels, above = [], ancestors(parents)
        for level, ancestor in enumerate(above):
            start = ancestor[document]
            has_one = start >= 0
            # The document of the same sample that continues the ancestor.
            below = above[level + 1][document] if level + 1 < len(above) else start.new_tensor(-1)
            below = torch.where(below >= 0, below, document)
            first = torch.where(has_one, edges[start], index + 1)
            distance = index - edges[document] + depth[document] - depth[start]
            levels.append(
                Level(
                    first,
                    torch.where(has_one, first + depth[below] - depth[start] - 1, index),
                    torch.where(has_one, first + distance, index),
                )
            )
        return Positions(index, edges[document], tuple(levels))

    def views(self, window: int | None = None) -> list[Positions]:
        """These tokens as queries of each set of keys: those of their own documents, then of each
        level; a query without keys has `first` above `index`. `window`: most tokens that a query
        attends to, itself included; None for all.
        """
        level = Level(self.first, self.index, self.index)
        return [
            Positions(last, first if window is None else first.maximum(as_if - window + 1))
            for first, last, as_if in (level, *self.levels)
        ]


class Level(NamedTuple):
    """Which positions of an ancestor of its document each of L tokens attends to; level 0 continues
    no other.
    """

    first: torch.Tensor
    """[L] int64: the ancestor's first token; without one, the position after the token's own."""
    last: torch.Tensor
    """[L] int64: the last one attended to; without an ancestor, the token's own."""
    as_if: torch.Tensor
    """[L] int64: the token's position if its sample went on from `first` without a gap, for
    windows.
    """


def _sample_positions(edges: torch.Tensor, parents: Sequence[int]) -> torch.Tensor:
    """[D] position of each document's first token in its sample."""
    lengths, begins = edges.diff().tolist(), [0] * (len(edges) - 1)
    for document, parent in enumerate(parents):
        if parent >= 0:
            begins[document] = begins[parent] + lengths[parent]
    return torch.tensor(begins)


def ancestors(parents: Sequence[int]) -> list[torch.Tensor]:
    """By level, the ancestor [D] int64 of each document, or -1. `parents` as in `Positions.of`."""
    chains: list[list[int]] = []
    for parent in parents:
        chains.append([] if parent < 0 else [*chains[parent], parent])
    depth = max((len(chain) for chain in chains), default=0)
    return [
        torch.tensor([chain[level] if level < len(chain) else -1 for chain in chains])
        for level in range(depth)
    ]


class Block(Protocol):
    """Hkv KV heads divide Hq query heads. Sums are float32, or float64 for float64 inputs."""

    def prepare(self, queries: Positions, keys: Positions, device: torch.device) -> Any:
        """The work list with tensors on `device`, made once for a micro-batch; None where no query
        attends to any key.
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
        """Merge attention to these keys into `out` [Lq, Hq, D] and `lse` [Hq, Lq], in place: the
        normalised output and the log-sum-exp of the scaled scores so far, at first 0 and -inf.

        q is [Lq, Hq, D], k and v are [Lk, Hkv, D], last dimension contiguous. With `cap` a scaled
        score s becomes cap tanh(s / cap). `ValueError` where the dtype, head width or cap is not
        supported.
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
        """Add to `grad_q`, `grad_k` and `grad_v`, in place. `out` and `lse` are over all keys, so
        that the blocks' gradients add up (FlashAttention-2, arXiv:2307.08691).
        """
        ...
