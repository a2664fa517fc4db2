"""Split a masked attention problem into regions that kernels with a plain causal mask can compute.

With queries and keys sorted by position, the range of keys grows from query to query: a staircase.
It splits into rectangles and causal triangles, which need no mask; regular splits over ranks
contain nothing else. Irregular staircases become tiles with a mask. A sliding window makes a band:
rectangles, and tiles at its edges. Small regions of similar shape form padded batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

TILE = 64
"""Most queries in a call with an explicit mask."""
TILE_KEYS = 512
SMALL_SCORES = 128 * 128
"""Regions of so many scores, which take about one kernel launch, form batches."""
BATCH_SCORES = 2**20
"""Most scores in a batched call; bounds the memory of masks and copies."""
BAND_TILE = 512
"""Most queries in a tile of a band, or a quarter of its width."""
WIDE_TILE = 256
"""As `BAND_TILE`, where masks are cheap and the band is four times as wide; elsewhere `TILE`."""
SIDE_RATIO = 1.25
"""About the largest ratio of lengths of regions in a batch; bounds the padding."""


@dataclass(frozen=True)
class MaskRegion:
    """Queries [q0, q1) and keys [k0, k1), numbered in the order of their positions."""

    q0: int
    q1: int
    k0: int
    k1: int
    kind: str
    """Which keys the queries attend to. "full": all. "causal": the lower triangle of a square.
    "stairs", "band start": those in `RegionLimits`, by a mask; a query is in one region of each
    kind at most, as batches require. "edges": "stairs" without the keys of `gap`, never in a batch.
    """
    gap: tuple[int, int] = (0, 0)
    """Keys [g0, g1) of an "edges" region that are in another region; k0 <= g0 < g1 <= k1."""

    @property
    def shape(self) -> tuple[int, int]:
        """(queries, keys without those of `gap`)"""
        return self.q1 - self.q0, self.k1 - self.k0 - (self.gap[1] - self.gap[0])

    def keys(self) -> torch.Tensor:
        """Numbers [m] int64 of the keys without those of `gap`."""
        if self.kind != "edges":
            return torch.arange(self.k0, self.k1)
        g0, g1 = self.gap
        return torch.cat([torch.arange(self.k0, g0), torch.arange(g1, self.k1)])


MASKED = ("stairs", "band start", "edges")
"""Kinds of `MaskRegion` that need an explicit mask."""


class RegionLimits(NamedTuple):
    """Each of Lq queries attends to keys `first` to `upto` - 1."""

    first: torch.Tensor
    """[Lq] int64"""
    upto: torch.Tensor
    """[Lq] int64"""


@dataclass(frozen=True)
class KernelCall:
    """A call of a ready-made attention kernel: a region, or a batch of regions padded to one
    shape.
    """

    queries: slice | torch.Tensor
    """Rows of the sorted q; [B, n] int64 for a batch, padded by repeating a row."""
    keys: slice | tuple[slice, ...] | torch.Tensor
    """As `queries`, of k and v; or several slices one after the other."""
    causal: bool
    """Whether the kernel applies its causal mask; then n = m."""
    mask: torch.Tensor | None
    """[B, 1, n or 1, m] float32: 0, or -inf for hidden keys. Every query attends to a key."""
    real: torch.Tensor | None = None
    """Indices of the flattened `queries` [B * n] that are no padding; None for all."""

    def to(self, device: torch.device) -> KernelCall:
        parts = (self.queries, self.keys, self.mask, self.real)
        queries, keys, mask, real = (
            x.to(device) if isinstance(x, torch.Tensor) else x for x in parts
        )
        return replace(self, queries=queries, keys=keys, mask=mask, real=real)


@dataclass(frozen=True)
class KernelCalls:
    """The calls that compute some queries' attention; each has a query at most once."""

    query_order: torch.Tensor | None
    """[Lq] int64 permutation that sorts by position, if needed."""
    key_order: torch.Tensor | None
    pieces: list[KernelCall]


def _query_ranges(first: list[int], upto: list[int], rows: list[int]) -> Iterator[tuple[int, int]]:
    """Cut queries into ranges [a, b), each of one document and consecutive in q. A long run whose
    key counts all stay (a rectangle) or all grow by 1 (a causal triangle) needs no mask, and is one
    range; those between are cut into tiles. `first`, `upto`: by query, its first key and the last
    one plus 1. `rows`: each query's row of q, ascending.
    """
    # added_keys[i]: keys query i + 1 sees beyond query i; -1: other document, or rows apart
    # (queries without a key stand between)
    added_keys = [
        u1 - u0 if f1 == f0 and r1 == r0 + 1 else -1
        for f0, f1, u0, u1, r0, r1 in zip(
            *(first, first[1:], upto, upto[1:], rows, rows[1:]), strict=False
        )
    ]
    runs: list[tuple[int, int, int]] = []  # (begin, end, step) where all steps are equal
    for position, step in enumerate(added_keys):
        if runs and runs[-1][2] == step:
            runs[-1] = (runs[-1][0], position + 1, step)
        else:
            runs.append((position, position + 1, step))
    start = 0  # first query that is in no range yet

    def tiles(end: int) -> Iterator[tuple[int, int]]:
        """Cut the queries before `end` into tiles of at most `TILE` queries and `TILE_KEYS` added
        keys.
        """
        nonlocal start
        while start < end:
            stop = start + 1
            while (
                stop < end
                and added_keys[stop - 1] >= 0
                and stop - start < TILE
                and upto[stop] - upto[start] <= TILE_KEYS
            ):
                stop += 1
            yield start, stop
            start = stop

    for begin, end, step in runs:
        if step in (0, 1) and end - begin >= TILE:
            yield from tiles(begin)
            yield start, end + 1
            start = end + 1
    yield from tiles(len(rows))


def _bands(
    rows: list[int], first: list[int], upto: list[int], masks_are_cheap: bool
) -> Iterator[MaskRegion]:
    """Tiles of neighbouring queries: their common keys need no mask, those at both edges do."""
    width = max(u - f for f, u in zip(first, upto, strict=True))
    if masks_are_cheap:
        most = WIDE_TILE if width >= 4 * WIDE_TILE else TILE
    else:
        most = max(TILE, min(BAND_TILE, width // 4))
    a = 0
    while a < len(rows):
        b, direction = a + 1, 0
        while b < len(rows) and b - a < most and rows[b] == rows[b - 1] + 1:
            step = first[b] - first[b - 1]
            if first[b] >= upto[b - 1] or step * direction < 0:
                break  # another document, or not a band
            direction, b = direction or step, b + 1
        low, high = min(first[a:b]), upto[b - 1]
        inner_low, inner_high = max(first[a:b]), upto[a]
        if masks_are_cheap and (low, high) != (inner_low, inner_high):
            yield from _masked(rows, first, upto, a, b)
        elif inner_low >= inner_high:
            yield MaskRegion(rows[a], rows[b - 1] + 1, low, high, "stairs")
        else:
            yield MaskRegion(rows[a], rows[b - 1] + 1, inner_low, inner_high, "full")
            if low < inner_low:
                at = [i for i in range(a, b) if first[i] < inner_low]
                yield MaskRegion(rows[at[0]], rows[at[-1]] + 1, low, inner_low, "band start")
            if inner_high < high:
                above = next(i for i in range(a, b) if upto[i] > inner_high)
                is_triangle = upto[above:b] == list(range(inner_high + 1, high + 1))
                mask_kind = "causal" if is_triangle else "stairs"
                yield MaskRegion(rows[above], rows[b - 1] + 1, inner_high, high, mask_kind)
        a = b


def _masked(
    rows: list[int], first: list[int], upto: list[int], a: int, b: int
) -> Iterator[MaskRegion]:
    """Regions of queries a to b - 1 of a band; query i attends to keys `first[i]` to `upto[i]` - 1.
    Many common keys become one "full" region without a mask; the other keys are "edges", a
    region for every `TILE` queries. Otherwise every `TILE` queries with all keys are "stairs".
    """
    low, high = max(first[a:b]), upto[a]  # the common keys
    has_others = [first[i] < low or upto[i] > high for i in range(a, b)]
    # Every query of an "edges" region needs a key: queries with other keys must be one run.
    changes = sum(x != y for x, y in itertools.pairwise([False, *has_others, False]))
    is_split = b - a > TILE and high - low >= b - a and changes <= 2
    if is_split:
        yield MaskRegion(rows[a], rows[b - 1] + 1, low, high, "full")
    for begin in range(a, b, TILE):
        tile = range(begin, min(begin + TILE, b))
        if not is_split:
            span = (min(first[i] for i in tile), upto[tile[-1]], "stairs")
            yield MaskRegion(rows[begin], rows[tile[-1]] + 1, *span)
        elif edge := [i for i in tile if has_others[i - a]]:
            k0, k1 = min(low, *(first[i] for i in edge)), max(high, upto[edge[-1]])
            yield MaskRegion(rows[edge[0]], rows[edge[-1]] + 1, k0, k1, "edges", (low, high))


def mask_regions_of(
    queries: torch.Tensor, starts: torch.Tensor, keys: torch.Tensor, *, masks_are_cheap: bool
) -> tuple[list[MaskRegion], RegionLimits]:
    """Regions of attended pairs, and each query's range of keys.

    `queries` [Lq] and `keys` [Lk] are ascending int64 positions, on CPU, but queries that see no
    key come first. Query i attends to keys at `starts[i]` to `queries[i]`. `masks_are_cheap`: see
    `Operator`.
    """
    limits = RegionLimits(
        torch.searchsorted(keys, starts), torch.searchsorted(keys, queries, right=True)
    )
    seen = (limits.upto > limits.first).nonzero()[:, 0]
    rows, first, upto = seen.tolist(), limits.first[seen].tolist(), limits.upto[seen].tolist()
    if any(f1 != f0 and f1 < u0 for f0, f1, u0 in zip(first, first[1:], upto, strict=False)):
        return list(_bands(rows, first, upto, masks_are_cheap)), limits
    spans = []
    for a, b in _query_ranges(first, upto, rows):
        # A range is consecutive in q.
        q0, q1, begin, low, high = rows[a], rows[b - 1] + 1, first[a], upto[a], upto[b - 1]
        if high == low:
            spans.append(MaskRegion(q0, q1, begin, low, "full"))
        elif high - low == b - a - 1 and all(upto[i + 1] - upto[i] == 1 for i in range(a, b - 1)):
            spans.append(MaskRegion(q0, q1, low - 1, high, "causal"))
            if low - 1 > begin:
                spans.append(MaskRegion(q0, q1, begin, low - 1, "full"))
        elif low - begin <= TILE:  # cheaper inside the masked tile than as a call of its own
            spans.append(MaskRegion(q0, q1, begin, high, "stairs"))
        else:
            spans.append(MaskRegion(q0, q1, begin, low, "full"))
            # Queries before `above` see no key of the tile.
            above = next(i for i in range(a, b) if upto[i] > low)
            spans.append(MaskRegion(rows[above], q1, low, high, "stairs"))
    return spans, limits


def _mask(span: MaskRegion, limits: RegionLimits) -> torch.Tensor:
    """[n, m] float32: -inf for hidden keys, else 0."""
    keys, rows = span.keys()[None], slice(span.q0, span.q1)
    hidden = (keys >= limits.upto[rows, None]) | (keys < limits.first[rows, None])
    return torch.zeros(span.shape).masked_fill_(hidden, -torch.inf)


Masks = dict[tuple[int | bytes, ...], torch.Tensor]
"""{what a mask depends on: mask [1, 1, n, m]}: equal regions, as the tiles of a band, share it."""


def _single(span: MaskRegion, limits: RegionLimits, masks: Masks) -> KernelCall:
    mask, rows = None, slice(span.q0, span.q1)
    if span.kind in MASKED:
        first, upto = ((x[rows] - span.k0).numpy().tobytes() for x in limits)
        gap = [edge - span.k0 for edge in span.gap] if span.kind == "edges" else []
        key = (*span.shape, *gap, first, upto)
        if key not in masks:
            masks[key] = _mask(span, limits)[None, None]
        mask = masks[key]
    if span.kind == "edges":
        keys = (slice(span.k0, span.gap[0]), slice(span.gap[1], span.k1))
    else:
        keys = slice(span.k0, span.k1)
    return KernelCall(rows, keys, span.kind == "causal", mask)


def _batched(spans: list[MaskRegion], limits: RegionLimits) -> KernelCall:
    """Padded to one shape; in causal regions padding comes after every real query."""
    n, m = max(span.shape[0] for span in spans), max(span.shape[1] for span in spans)
    edges = torch.tensor([(span.q0, span.q1 - 1, span.k0, span.k1 - 1) for span in spans])
    q_first, q_last, k_first, k_last = edges.T[:, :, None]
    q_wanted, k_wanted = q_first + torch.arange(n), k_first + torch.arange(m)
    queries, keys = q_wanted.minimum(q_last), k_wanted.minimum(k_last)
    is_real = q_wanted <= q_last
    mask = None
    if spans[0].kind in MASKED:
        end = limits.upto[queries].minimum(k_last + 1)[:, :, None]
        columns = k_wanted[:, None]
        hidden = (columns >= end) | (columns < limits.first[queries][:, :, None])
        mask = torch.zeros(len(spans), n, m).masked_fill_(hidden, -torch.inf)[:, None]
    elif spans[0].kind == "full" and bool((k_wanted > k_last).any()):
        mask = torch.zeros(len(spans), m).masked_fill_(k_wanted > k_last, -torch.inf)[:, None, None]
    real = None if bool(is_real.all()) else is_real.flatten().nonzero()[:, 0]
    return KernelCall(queries, keys, spans[0].kind == "causal", mask, real)


def pieces_of(spans: list[MaskRegion], limits: RegionLimits) -> list[KernelCall]:
    """Calls for `spans`; small ones of one kind and similar shape form batches. On the CPU."""
    groups: dict[tuple[str, int, int], list[MaskRegion]] = {}
    pieces, masks = list[KernelCall](), Masks()
    for span in spans:
        n, m = span.shape
        if n * m > SMALL_SCORES or span.kind == "edges":
            pieces.append(_single(span, limits, masks))
        else:
            rows, columns = (math.ceil(math.log(size, SIDE_RATIO)) for size in (n, m))
            groups.setdefault((span.kind, rows, columns), []).append(span)
    for group in groups.values():
        area = max(span.shape[0] for span in group) * max(span.shape[1] for span in group)
        most = max(1, BATCH_SCORES // area)
        for start in range(0, len(group), most):
            some = group[start : start + most]
            single = len(some) == 1
            pieces.append(_single(some[0], limits, masks) if single else _batched(some, limits))
    return pieces
