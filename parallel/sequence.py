"""Which rank of the sequence axis holds which tokens of a packed row: index arrays, the same
arithmetic on every rank.

    starts [D + 1] of a row of T tokens, P ranks  ->  P arrays of positions: every position once

A rank needs no equal share of each document and no padding: attention goes by position. To add a
cut, add an entry to `CUTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megarl.parallel.balance import ATTENTION_TOKENS

Cut = Callable[[list[int], int], list[torch.Tensor]]


def _edges(first: int, last: int, parts: int) -> list[int]:
    """`parts` + 1 borders that split [first, last) as evenly as whole tokens allow."""
    return [first + (last - first) * part // parts for part in range(parts + 1)]


def _join(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)


def contiguous(starts: list[int], size: int) -> list[torch.Tensor]:
    """One piece each. Causal attention over one document then costs the last rank nearly twice the
    mean.
    """
    edges = _edges(0, starts[-1], size)
    return [torch.arange(edges[rank], edges[rank + 1]) for rank in range(size)]


def zigzag(starts: list[int], size: int) -> list[torch.Tensor]:
    """Of 2 P pieces the r-th from the front and the r-th from the back: even over one document."""
    edges = _edges(0, starts[-1], 2 * size)
    pieces = [torch.arange(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    return [torch.cat([pieces[rank], pieces[2 * size - 1 - rank]]) for rank in range(size)]


def zigzag_document(starts: list[int], size: int) -> list[torch.Tensor]:
    """`zigzag` inside each document: even for any mix of them, whatever their lengths divide by."""
    owned: list[list[torch.Tensor]] = [[] for _ in range(size)]
    for number, (first, last) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        edges = _edges(first, last, 2 * size)
        # Who gets the tokens that do not divide turns with the documents, so that nobody always
        # does.
        for rank in range(size):
            place = (rank + number) % size
            for piece in (place, 2 * size - 1 - place):
                if edges[piece] < edges[piece + 1]:
                    owned[rank].append(torch.arange(edges[piece], edges[piece + 1]))
    return [_join(pieces) for pieces in owned]


def striped(starts: list[int], size: int) -> list[torch.Tensor]:
    """Every P-th token: even for anything, but no two tokens of a rank are neighbours."""
    return [torch.arange(starts[-1])[rank::size] for rank in range(size)]


CUTS: dict[str, Cut] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "zigzag_document": zigzag_document,
    "striped": striped,
}

CANDIDATES = ("contiguous", "zigzag", "zigzag_document")
"""What `choose` considers, simplest first: contiguous needs the fewest messages where documents are
short.
"""

TIE = 1.005
"""A later candidate must be better than an earlier one by more than this."""


def causal_pairs(starts: list[int], index: torch.Tensor) -> int:
    """Attention work of the tokens at `index`: the number of (query, key) pairs that causal
    attention computes.
    """
    edges = torch.tensor(starts)
    return int((index - edges[torch.searchsorted(edges, index, right=True) - 1] + 1).sum())


def imbalance(starts: list[int], indices: Sequence[torch.Tensor], *, linear: bool = True) -> float:
    """Work of the busiest rank over the mean, 1.0 at best; without `linear`, of attention alone."""
    work = [
        causal_pairs(starts, index) / ATTENTION_TOKENS + (len(index) if linear else 0)
        for index in indices
    ]
    return max(work) * len(work) / max(sum(work), 1e-9)


def cut(starts: Sequence[int] | torch.Tensor, size: int, how: str = "auto") -> list[torch.Tensor]:
    """Each rank's positions [L_r] int64 in the order in which it holds them; `auto` takes the most
    even of `CANDIDATES`.
    """
    edges = [int(edge) for edge in starts]
    if how != "auto":
        return CUTS[how](edges, size)
    best, least = None, float("inf")
    for name in CANDIDATES:
        made = CUTS[name](edges, size)
        found = imbalance(edges, made)
        if best is None or found * TIE < least:
            best, least = made, found
    assert best is not None
    return best
