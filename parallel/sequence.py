"""Splits of a packed sequence over the ranks of the sequence axis (context parallelism).

`starts` [D + 1] are the first positions of D documents, then the length T. Splits return each
rank's positions [L_r] int64. Nothing is padded, because attention is masked by position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megarl.parallel.balance import ATTENTION_TOKENS

Cut = Callable[[list[int], int], list[torch.Tensor]]


def _edges(first: int, last: int, parts: int) -> list[int]:
    return [first + (last - first) * index // parts for index in range(parts + 1)]


def _join(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)


def contiguous(starts: list[int], size: int) -> list[torch.Tensor]:
    """The last rank has the most causal attention to compute."""
    edges = _edges(0, starts[-1], size)
    return [torch.arange(edges[rank], edges[rank + 1]) for rank in range(size)]


def zigzag(starts: list[int], size: int) -> list[torch.Tensor]:
    """Rank r of P gets parts r and 2 P - 1 - r of 2 P: an even share of one document's
    attention.
    """
    edges = _edges(0, starts[-1], 2 * size)
    pieces = [torch.arange(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return [torch.cat([pieces[rank], pieces[2 * size - 1 - rank]]) for rank in range(size)]


def zigzag_document(starts: list[int], size: int) -> list[torch.Tensor]:
    """`zigzag` of each document: even for any lengths."""
    owned: list[list[torch.Tensor]] = [[] for _ in range(size)]
    for number, (first, last) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        edges = _edges(first, last, 2 * size)
        # Shift the parts from document to document, so that the larger ones go to all ranks.
        for rank in range(size):
            slot = (rank + number) % size
            for piece in (slot, 2 * size - 1 - slot):
                if edges[piece] < edges[piece + 1]:
                    owned[rank].append(torch.arange(edges[piece], edges[piece + 1]))
    return [_join(pieces) for pieces in owned]


def striped(starts: list[int], size: int) -> list[torch.Tensor]:
    """Rank r gets tokens r, r + P, r + 2 P, ...: even, but neighbouring tokens are on different
    ranks.
    """
    return [torch.arange(starts[-1])[rank::size] for rank in range(size)]


CUTS: dict[str, Cut] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "zigzag_document": zigzag_document,
    "striped": striped,
}
"""{`training.sequence.cut`: split}"""

CANDIDATES = ("contiguous", "zigzag", "zigzag_document")
"""Of `auto`, the one with the fewest messages for short documents first."""

TIE = 1.005
"""A later candidate must be better by this factor."""


def keys_seen(starts: list[int]) -> torch.Tensor:
    """[T] int64: number of keys of each position in causal attention within its document."""
    edges = torch.tensor(starts)
    return torch.arange(starts[-1]) - edges[:-1].repeat_interleave(edges.diff()) + 1


def imbalance(
    starts: list[int],
    indices: Sequence[torch.Tensor],
    *,
    linear: bool = True,
    seen: torch.Tensor | None = None,
) -> float:
    """Largest work of a rank divided by the mean. `seen` [T]: number of keys that each token
    attends to. With `linear`, linear layers count too.
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
    """By one of `CUTS`, or by the candidate with the most even work ("auto"). `seen` as in
    `imbalance`.
    """
    edges = [int(edge) for edge in starts]
    if how != "auto":
        return CUTS[how](edges, size)
    best, least = None, float("inf")
    for name in CANDIDATES:
        positions = CUTS[name](edges, size)
        unevenness = imbalance(edges, positions, seen=seen)
        if best is None or unevenness * TIE < least:
            best, least = positions, unevenness
    assert best is not None
    return best
