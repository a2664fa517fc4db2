"""Splits of a packed sequence over the ranks of the sequence axis (context parallelism).

    starts [D + 1] of D documents, P ranks -> P arrays of positions, every position exactly once

Ranks may have different numbers of tokens, and nothing is padded, because attention is masked by
position. To add a split, add an entry to `CUTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megarl.parallel.balance import ATTENTION_TOKENS

Cut = Callable[[list[int], int], list[torch.Tensor]]
"""Function of (document starts [D + 1], number of ranks) -> each rank's positions [L_r] int64."""


def _edges(first: int, last: int, parts: int) -> list[int]:
    """`parts` + 1 boundaries that split the range [first, last) as evenly as whole tokens allow."""
    return [first + (last - first) * part // parts for part in range(parts + 1)]


def _join(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)


def contiguous(starts: list[int], size: int) -> list[torch.Tensor]:
    """Split a packed sequence over `size` = P ranks into P parts of lengths that differ by at most
    one token; rank r gets part r. Over one document the last rank has the most causal attention to
    compute. `starts` [D + 1]: first position of each document, then the length. Returns for each
    rank its positions [L_r] int64.
    """
    edges = _edges(0, starts[-1], size)
    return [torch.arange(edges[rank], edges[rank + 1]) for rank in range(size)]


def zigzag(starts: list[int], size: int) -> list[torch.Tensor]:
    """Split a packed sequence over `size` = P ranks into 2 P parts of lengths that differ by at
    most one token; rank r gets parts r and 2 P - 1 - r. The causal attention of a single document
    is then divided evenly. `starts` [D + 1]: first position of each document, then the length.
    Returns for each rank its positions [L_r] int64.
    """
    edges = _edges(0, starts[-1], 2 * size)
    pieces = [torch.arange(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return [torch.cat([pieces[rank], pieces[2 * size - 1 - rank]]) for rank in range(size)]


def zigzag_document(starts: list[int], size: int) -> list[torch.Tensor]:
    """Split a packed sequence over `size` = P ranks, each document by itself into 2 P parts of
    lengths that differ by at most one token. Of these a rank gets one from the front and the
    matching one from the back, so that ranks get about the same amount of causal attention for
    documents of any lengths. `starts` [D + 1]: first position of each document, then the length.
    Returns for each rank its positions [L_r] int64, document after document.
    """
    owned: list[list[torch.Tensor]] = [[] for _ in range(size)]
    for number, (first, last) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        edges = _edges(first, last, 2 * size)
        # Shift the parts from document to document, so that the larger ones go to all ranks.
        for rank in range(size):
            place = (rank + number) % size
            for piece in (place, 2 * size - 1 - place):
                if edges[piece] < edges[piece + 1]:
                    owned[rank].append(torch.arange(edges[piece], edges[piece + 1]))
    return [_join(pieces) for pieces in owned]


def striped(starts: list[int], size: int) -> list[torch.Tensor]:
    """Split a packed sequence over `size` = P ranks: rank r gets tokens r, r + P, r + 2 P, ...
    Causal attention is then divided evenly for documents of any lengths, but no two neighbouring
    tokens are on the same rank. `starts` [D + 1]: first position of each document, then the length.
    Returns for each rank its positions [L_r] int64.
    """
    return [torch.arange(starts[-1])[rank::size] for rank in range(size)]


CUTS: dict[str, Cut] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "zigzag_document": zigzag_document,
    "striped": striped,
}
"""{name in `training.sequence.cut`: function that splits a packed sequence over ranks so}."""

CANDIDATES = ("contiguous", "zigzag", "zigzag_document")
"""Splits from which `training.sequence.cut: auto` chooses; "contiguous" comes first, since it needs
the fewest messages for short documents."""

TIE = 1.005
"""A later split of `CANDIDATES` is chosen only if the imbalance of the earlier one is larger by
this factor."""


def keys_seen(starts: list[int]) -> torch.Tensor:
    """[T] int64: for each position of a packed sequence of T tokens, the number of keys that causal
    attention within its document computes, itself included. `starts` [D + 1]: first position of
    every document, then the length T.
    """
    edges = torch.tensor(starts)
    return torch.arange(starts[-1]) - edges[:-1].repeat_interleave(edges.diff()) + 1


def imbalance(
    starts: list[int],
    indices: Sequence[torch.Tensor],
    *,
    linear: bool = True,
    seen: torch.Tensor | None = None,
) -> float:
    """How unevenly a split of a packed sequence divides the work: largest work of a rank divided by
    the mean work of all ranks; 1.0 is the best.

    `starts` [D + 1]: first position of every document, then the length T. `indices`: for each rank
    its positions [L_r] int64. With `linear` the work of the linear layers counts too, for each
    token as much as attention to 4096 keys; otherwise only attention. `seen` [T]: number of keys
    that each token attends to, by default those before it in its document and itself.
    """
    seen = keys_seen(starts) if seen is None else seen
    work = [
        int(seen[index].sum()) / ATTENTION_TOKENS + (len(index) if linear else 0)
        for index in indices
    ]
    return max(work) * len(work) / max(sum(work), 1e-9)


def cut(
    starts: Sequence[int] | torch.Tensor,
    size: int,
    how: str = "auto",
    seen: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Split a packed sequence over `size` ranks: for each rank its positions [L_r] int64, in the
    order in which the rank's tensors have the tokens. Every rank computes the same.

    `starts` [D + 1]: first position of every document, then the length T. `how`: "contiguous",
    "zigzag", "zigzag_document" or "striped" (`CUTS`), or "auto" for the split with the most even
    work of the first three, the earlier one if the difference is below 0.5 %. `seen` [T]: number of
    keys that each token attends to, where documents continue others; by default those before it in
    its document and itself.
    """
    edges = [int(edge) for edge in starts]
    if how != "auto":
        return CUTS[how](edges, size)
    best, least = None, float("inf")
    for name in CANDIDATES:
        made = CUTS[name](edges, size)
        found = imbalance(edges, made, seen=seen)
        if best is None or found * TIE < least:
            best, least = made, found
    assert best is not None
    return best
