"""The contract of block attention: some queries attend to some keys, masked by token positions.

    query i attends to key j where  first[i] <= index[j] <= index[i]

`index` is a token's position in the packed sequence, `first` that of its document's first token or,
with a sliding window, of the first token in the window. Contiguous, zigzag and striped splits,
packed documents and each step of ring attention differ in these arrays only. To add an
implementation, write a class with the three methods of `Block` and list it in
`megarl.kernels.attention_plan.BLOCKS`.

A document may continue another one, its parent, as the responses of a group continue their prompt.
Its tokens then attend to the parent's tokens too, all of them or only the first ones, and to those
that the parent attends to. For each of these levels a block is called once more, with the positions
that `Positions.views` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch


@dataclass(frozen=True)
class Positions:
    """For L tokens of a packed sequence, used as queries or keys of attention, as int64 CPU
    tensors: the position of each token (`index` [L]) and the first position of its document
    (`first` [L]). Block attention kernels make their work lists from these. `Positions.of` makes
    it.

    A document is one of the packed texts; its ancestors are the documents that it continues, as a
    response continues its prompt. `levels` is a tuple of one `Level` (positions of ancestors) for
    each level of ancestors; empty where no document continues another.
    """

    index: torch.Tensor
    """[L] int64: position in the packed sequence, all different, in any order. In a view (see
    `views`): the last position that each query attends to, in which many may agree."""
    first: torch.Tensor
    """[L] int64: position in the packed sequence of the first token of the token's document. In a
    view: the first position that each query attends to."""
    levels: tuple[Level, ...] = ()
    """For each level of ancestors (documents that a token's document continues), the farthest back
    first: the ancestor of each token's document."""

    @staticmethod
    def of(
        index: torch.Tensor,
        starts: torch.Tensor,
        parents: Sequence[int] = (),
        begins: Sequence[int] = (),
    ) -> Positions:
        """Positions of some tokens of a packed sequence that consists of D documents.

        Args:
            index: [L] int positions of the tokens in the sequence, all different.
            starts: [D + 1] int first position of each document; the last entry is the length of the
                sequence.
            parents: [D] for each document, the number of the document that it continues, or -1;
                empty where no document continues another. A parent comes before its children, and
                between them only its other descendants (depth-first order).
            begins: [D] for each document, the number of tokens before it that it continues: those
                before its parent, and the first ones of the parent, at least one. Empty where
                documents continue all tokens of their parents.
        """
        edges = starts.to(device="cpu", dtype=torch.int64)
        index = index.to(device="cpu", dtype=torch.int64)
        # `right` skips empty documents that begin at the same position.
        document = torch.searchsorted(edges, index.contiguous(), right=True) - 1
        depth = torch.tensor(begins) if len(begins) else _sample_positions(edges, parents)
        levels, above = [], ancestors(parents)
        for level, ancestor in enumerate(above):
            mine = ancestor[document]
            has_one = mine >= 0
            # The document of the same sample that continues the ancestor.
            below = above[level + 1][document] if level + 1 < len(above) else mine.new_tensor(-1)
            below = torch.where(below >= 0, below, document)
            first = torch.where(has_one, edges[mine], index + 1)
            distance = index - edges[document] + depth[document] - depth[mine]
            levels.append(
                Level(
                    first,
                    torch.where(has_one, first + depth[below] - depth[mine] - 1, index),
                    torch.where(has_one, first + distance, index),
                )
            )
        return Positions(index, edges[document], tuple(levels))

    def views(self, window: int | None = None) -> list[Positions]:
        """The same L tokens as queries, once for each set of keys that they attend to: first for
        the keys of their own documents, then for those of each level of documents that they
        continue.

        In each of the returned `Positions` query i attends to the keys at positions first[i] to
        index[i], so that `index` is the last key's position and no longer the token's; first[i] >
        index[i] for a query without keys in this set. Together these are all keys that a query
        attends to, and each key occurs once. `window`: a query attends to at most so many tokens of
        its sample (its document and those that it continues), itself included; None for all tokens
        before it.
        """
        own = Level(self.first, self.index, self.index)
        return [
            Positions(last, first if window is None else first.maximum(as_if - window + 1))
            for first, last, as_if in (own, *self.levels)
        ]


class Level(NamedTuple):
    """For L tokens, the positions [L] int64 of an ancestor of each token's document: its first
    token (`first`) and the last one that it attends to (`last`). An ancestor is a document that the
    token's document continues, directly or through others. `as_if` is the token's own position if
    the tokens that it attends to followed each other without a gap from `first` on; a sliding
    window ends there. Without an ancestor `first` is `last` + 1, so that no key is attended to.

    There is one `Level` for each level of ancestors; level 0 has the documents that continue no
    other.
    """

    first: torch.Tensor
    """[L] int64 position of the ancestor's first token; where there is no ancestor, the position
    after the token's own."""
    last: torch.Tensor
    """[L] int64 position of the ancestor's last token that the token attends to; without an
    ancestor the token's own."""
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
    """The ancestors of each of D documents (those that it continues, directly or through others),
    as one tensor [D] int64 for each level: the number of the document's ancestor at this level, or
    -1 if it has none. Level 0 has the ancestors that continue no other, level 1 those that continue
    these, and so on. A document is no ancestor of its own.

    `parents` [D]: for each document the number of the document that it continues, smaller than its
    own number, or -1. An empty list is returned if all are -1.
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
    """A block attention kernel: attention of Lq queries to Lk keys, merged into the results over
    other keys. Implementations are listed in `attention_plan.BLOCKS`.

    First `prepare` makes a work list from positions, once for a micro-batch; then every layer calls
    `forward` and `backward` with the work list. Shapes: Hq query heads and Hkv KV heads, where Hkv
    divides Hq; D is the head width. Sums are float32, or float64 for float64 inputs.
    """

    def prepare(self, queries: Positions, keys: Positions, device: torch.device) -> Any:
        """The work list for these queries and keys (query i attends to key j where queries.first[i]
        <= keys.index[j] <= queries.index[i]) with tensors on `device`, or None where no query
        attends to any key.

        It is made once for a micro-batch, and every layer passes it to `forward` and `backward`;
        each implementation has its own type.
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

        q is [Lq, Hq, D], k and v are [Lk, Hkv, D], last dimension contiguous. `work` is what
        `prepare` returned for them. `scale` multiplies the scores. `out` is the normalised output
        over the keys seen so far and `lse` the log-sum-exp of the scaled scores over them; before
        the first block they are 0 and -inf. With `cap` a scaled score s becomes cap tanh(s / cap).
        `ValueError` where the implementation lacks the dtype, the head width or the cap.
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
        """Add the gradients from these queries and keys to `grad_q`, `grad_k` and `grad_v`, in
        place.

        `grad_q` has the shape of q [Lq, Hq, D], the other two that of k and v [Lk, Hkv, D].
        `grad_out` [Lq, Hq, D] is the gradient of the output; `out` [Lq, Hq, D] and `lse` [Hq, Lq]
        are the final ones, over all keys. With them each block's gradients are exact, and the
        gradients of all blocks add up (FlashAttention-2, arXiv:2307.08691). `work` is what
        `prepare` returned for these queries and keys; `scale` multiplies the scores; `cap` is their
        soft cap or None. `ValueError` as in `forward`.
        """
        ...
