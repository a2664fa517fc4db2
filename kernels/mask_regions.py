"""Split a masked attention problem into pieces that kernels with a plain causal mask can compute.

With queries and keys sorted by position, each query sees a range of keys that grows from query to
query: a staircase. A staircase splits into rectangles (all visible) and causal triangles, which
need no mask; contiguous, zigzag and striped splits contain nothing else. Irregular staircases
become small tiles with an explicit mask. With a sliding window the range also loses keys at its
beginning: a band, which splits into rectangles and the tiles at its two edges. Small pieces of
similar shape, as from many short documents, are padded and computed as one batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

TILE = 64
"""Maximum number of queries in an attention call with an explicit mask. Where the mask is a plain
causal triangle or rectangle, calls are larger and need no explicit mask."""
TILE_KEYS = 512
"""Maximum number of keys in an attention call with an explicit mask."""
SMALL_SCORES = 128 * 128
"""Regions with at most this many scores (queries x keys) are put into batches: computing so many
takes about as long as launching one kernel call."""
BATCH_SCORES = 2**20
"""Maximum number of scores in one batched kernel call; bounds the memory of masks and copies."""
BAND_TILE = 512
"""Maximum number of queries in a tile of a band (the keys within a sliding window); a quarter of
the band's width where that is less. The tile's triangle at the lower edge of the band is computed
as a square."""
WIDE_TILE = 256
"""Maximum number of queries in a tile of a band, where masks are cheap and the band is at least
four times as wide; elsewhere `TILE`. The keys that all queries of a wide tile attend to need no
mask, and those at both edges of the band are one call for every `TILE` queries."""
SIDE_RATIO = 1.25
"""Approximate maximum ratio between the lengths of regions in a batch; bounds the padding."""


@dataclass(frozen=True)
class MaskRegion:
    """A region of an attention problem: queries [q0, q1) and keys [k0, k1), numbered in the order
    of their positions, and which of the keys the queries attend to: `kind` "full" (all), "causal"
    (lower triangle), "stairs" or "band start" (from each query's first to its last key, by an
    explicit mask; "band start" is the beginning of sliding windows), or "edges" (like "stairs",
    without the keys [g0, g1) of `gap`, which belong to another region).
    """

    q0: int
    q1: int
    k0: int
    k1: int
    kind: str
    """Which keys of the region the queries attend to. "full": all. "causal": the lower triangle of
    a square region. "stairs" and "band start": those between the query's first and last key
    (`RegionLimits`), through an explicit mask; two kinds, because a query is in one region of each
    kind at most, so that regions of a kind may be one batch. "edges": like "stairs", without the
    keys of `gap`, and never in a batch."""
    gap: tuple[int, int] = (0, 0)
    """Keys [g0, g1) of an "edges" region that are in another region; k0 <= g0 < g1 <= k1."""

    @property
    def shape(self) -> tuple[int, int]:
        """(number of queries, number of keys) of the region. Keys of `gap`, a range in the middle
        of an "edges" region that belongs to another region, are not counted.
        """
        return self.q1 - self.q0, self.k1 - self.k0 - (self.gap[1] - self.gap[0])

    def keys(self) -> torch.Tensor:
        """The numbers [m] int64 of the region's keys in the order of positions, without the keys of
        `gap`, a range in the middle of an "edges" region that belongs to another region.
        """
        if self.kind != "edges":
            return torch.arange(self.k0, self.k1)
        g0, g1 = self.gap
        return torch.cat([torch.arange(self.k0, g0), torch.arange(g1, self.k1)])


MASKED = ("stairs", "band start", "edges")
"""Kinds of `MaskRegion` that need an explicit mask."""


class RegionLimits(NamedTuple):
    """The range of keys that each of Lq queries attends to: from key number `first` to key number
    `upto` - 1, both [Lq] int64, where keys are numbered in the order of their positions.
    """

    first: torch.Tensor
    """[Lq] int64 number of the first key that the query attends to."""
    upto: torch.Tensor
    """[Lq] int64 number of the last key that the query attends to, plus 1."""


@dataclass(frozen=True)
class KernelCall:
    """One call of a ready-made attention kernel, as `PieceBlock` makes it: which rows of q
    (`queries`) and of k and v (`keys`) it takes, as slices or as indices [B, n] for a batch, and
    its mask (`causal`, or `mask` [B, 1, n or 1, m] float32 added to the scores). It computes one
    region of queries and keys, or a batch of regions that are padded to one shape; `real` are the
    indices in the flattened `queries` that are no padding, None if there is none.
    """

    queries: slice | torch.Tensor
    """Rows of the sorted q, or [B, n] int64 rows for a batch, whose short regions are padded by
    repeating a row."""
    keys: slice | tuple[slice, ...] | torch.Tensor
    """Rows of the sorted k and v: a slice, several slices one after the other, or [B, m] int64 rows
    for a batch, whose short regions are padded by repeating a row."""
    causal: bool
    """Whether the kernel applies its causal mask; then n = m."""
    mask: torch.Tensor | None
    """[B, 1, n or 1, m] float32 mask added to the scores: 0, or -inf for keys not attended to.
    Every query attends to at least one key. None where no mask is needed."""
    real: torch.Tensor | None = None
    """Indices of the entries of the flattened `queries` [B * n] that are not padding; None if there
    is no padding."""

    def to(self, device: torch.device) -> KernelCall:
        """A copy of this kernel call's description with its tensors on `device`."""
        parts = (self.queries, self.keys, self.mask, self.real)
        queries, keys, mask, real = (
            x.to(device) if isinstance(x, torch.Tensor) else x for x in parts
        )
        return replace(self, queries=queries, keys=keys, mask=mask, real=real)


@dataclass(frozen=True)
class KernelCalls:
    """All calls of a ready-made attention kernel that together compute the attention of some
    queries to some keys: the calls (`pieces`), and the permutations that sort queries and keys by
    position (`query_order`, `key_order`; None where they are sorted). `PieceBlock.prepare` makes it
    from positions, and `forward` and `backward` carry it out.

    A query occurs at most once in a call, but may occur in many calls.
    """

    query_order: torch.Tensor | None
    """[Lq] int64 permutation that sorts the queries by position; None where they are sorted
    already."""
    key_order: torch.Tensor | None
    """[Lk] int64 permutation that sorts the keys by position; None where they are sorted
    already."""
    pieces: list[KernelCall]


def _stretches(first: list[int], upto: list[int], rows: list[int]) -> Iterator[tuple[int, int]]:
    """Split the queries into ranges [a, b) within one document. Where each query attends to as many
    keys as the one before, or to one more, a range may be long; elsewhere it has at most `TILE`
    queries.

    Args:
        first: for each query, the first key that it attends to.
        upto: for each query, the last key that it attends to, plus 1.
        rows: indices of the queries that attend to at least one key.
    """
    # Queries without a key here may stand between others, of documents that continue the same one.
    steps = [
        u1 - u0 if f1 == f0 and r1 == r0 + 1 else -1
        for f0, f1, u0, u1, r0, r1 in zip(
            *(first, first[1:], upto, upto[1:], rows, rows[1:]), strict=False
        )
    ]
    runs: list[tuple[int, int, int]] = []  # (begin, end, step) where all steps are equal
    for position, step in enumerate(steps):
        if runs and runs[-1][2] == step:
            runs[-1] = (runs[-1][0], position + 1, step)
        else:
            runs.append((position, position + 1, step))
    start = 0  # first query that is in no stretch yet

    def tiles(end: int) -> Iterator[tuple[int, int]]:
        nonlocal start
        while start < end:
            stop = start + 1
            while (
                stop < end
                and steps[stop - 1] >= 0
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
    """Split sliding-window attention into the regions (ranges of queries and of keys) of kernel
    calls. Queries are taken in tiles of neighbours. The keys that all queries of a tile attend to
    need no mask; the other keys, at both edges of the window, do.

    Args:
        rows: indices of the queries, ascending.
        first: for each query, the index of the first key that it attends to.
        upto: for each query, the index of the last key that it attends to, plus 1.
        masks_are_cheap: whether a kernel call with an explicit mask takes about as long as one
            without; then tiles are wider, and their masked keys are in one region.
    """
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
                kind = "causal" if is_triangle else "stairs"
                yield MaskRegion(rows[above], rows[b - 1] + 1, inner_high, high, kind)
        a = b


def _masked(
    rows: list[int], first: list[int], upto: list[int], a: int, b: int
) -> Iterator[MaskRegion]:
    """Split the sliding-window attention of one tile of queries, `rows[a:b]`, into regions of
    kernel calls, for a kernel to which an explicit mask costs nothing.

    The keys that all queries of the tile attend to are one region without a mask. For every `TILE`
    queries, the other keys of these queries are one "edges" region with a mask. A tile for which
    that does not pay (`TILE` queries or fewer, fewer common keys than queries) or where queries in
    the middle have no other keys is split otherwise: every `TILE` queries and all their keys are
    one masked region, "stairs". `rows`: indices of the queries; `first`, `upto`: for each query,
    the index of the first key that it attends to, and of the last one, plus 1.
    """
    low, high = max(first[a:b]), upto[a]
    has_others = [first[i] < low or upto[i] > high for i in range(a, b)]
    # A region has no query without a key: those without others must be at the tile's ends.
    ends = sum(x != y for x, y in itertools.pairwise([False, *has_others, False]))
    is_split = b - a > TILE and high - low >= b - a and ends <= 2
    if is_split:
        yield MaskRegion(rows[a], rows[b - 1] + 1, low, high, "full")
    for begin in range(a, b, TILE):
        some = range(begin, min(begin + TILE, b))
        if not is_split:
            span = (min(first[i] for i in some), upto[some[-1]], "stairs")
            yield MaskRegion(rows[begin], rows[some[-1]] + 1, *span)
        elif some := [i for i in some if has_others[i - a]]:
            k0, k1 = min(low, *(first[i] for i in some)), max(high, upto[some[-1]])
            yield MaskRegion(rows[some[0]], rows[some[-1]] + 1, k0, k1, "edges", (low, high))


def mask_regions_of(
    queries: torch.Tensor, starts: torch.Tensor, keys: torch.Tensor, *, masks_are_cheap: bool
) -> tuple[list[MaskRegion], RegionLimits]:
    """Split an attention problem into regions that are seen completely, through a causal mask, or
    through an explicit mask (`MaskRegion.kind`). Pairs of query and key outside the regions are not
    attended to.

    `queries` [Lq] and `keys` [Lk] are int64 positions, on CPU, ascending, but for queries that see
    no key, which come first. Query i attends to the keys at positions `starts[i]` to `queries[i]`.
    `masks_are_cheap`: whether a kernel call with an explicit mask takes about as long as one
    without; then windows are split into fewer, masked regions. Returns the regions and the range of
    each query's keys.
    """
    limits = RegionLimits(
        torch.searchsorted(keys, starts), torch.searchsorted(keys, queries, right=True)
    )
    seen = (limits.upto > limits.first).nonzero()[:, 0]
    rows, first, upto = seen.tolist(), limits.first[seen].tolist(), limits.upto[seen].tolist()
    if any(f1 != f0 and f1 < u0 for f0, f1, u0 in zip(first, first[1:], upto, strict=False)):
        return list(_bands(rows, first, upto, masks_are_cheap)), limits
    spans = []
    for a, b in _stretches(first, upto, rows):
        # A stretch is consecutive in q.
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
    """[n, m] float32 mask of a region: -inf for keys that a query does not attend to, else 0."""
    keys, rows = span.keys()[None], slice(span.q0, span.q1)
    hidden = (keys >= limits.upto[rows, None]) | (keys < limits.first[rows, None])
    return torch.zeros(span.shape).masked_fill_(hidden, -torch.inf)


Masks = dict[tuple[int | bytes, ...], torch.Tensor]
"""{what a region's mask depends on: mask [1, 1, n, m]}, so that equal regions, as the tiles of a
band, share one mask."""


def _single(span: MaskRegion, limits: RegionLimits, masks: Masks) -> KernelCall:
    """The kernel call for one region of queries and keys. `masks`: those made before."""
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
    """One kernel call for several regions of one kind, padded to the same shape.

    In causal regions the padding lies after every real query.
    """
    n, m = max(span.shape[0] for span in spans), max(span.shape[1] for span in spans)
    edges = torch.tensor([(span.q0, span.q1 - 1, span.k0, span.k1 - 1) for span in spans])
    q_first, q_last, k_first, k_last = edges.T[:, :, None]
    q_wanted, k_wanted = q_first + torch.arange(n), k_first + torch.arange(m)
    queries, keys = q_wanted.minimum(q_last), k_wanted.minimum(k_last)
    is_real = q_wanted <= q_last
    mask = None
    if spans[0].kind in MASKED:
        end = limits.upto[queries].minimum(k_last + 1)[:, :, None]
        wanted = k_wanted[:, None]
        hidden = (wanted >= end) | (wanted < limits.first[queries][:, :, None])
        mask = torch.zeros(len(spans), n, m).masked_fill_(hidden, -torch.inf)[:, None]
    elif spans[0].kind == "full" and bool((k_wanted > k_last).any()):
        mask = torch.zeros(len(spans), m).masked_fill_(k_wanted > k_last, -torch.inf)[:, None, None]
    real = None if bool(is_real.all()) else is_real.flatten().nonzero()[:, 0]
    return KernelCall(queries, keys, spans[0].kind == "causal", mask, real)


def pieces_of(spans: list[MaskRegion], limits: RegionLimits) -> list[KernelCall]:
    """Kernel calls that compute all regions `spans`, each a block of queries and keys with its kind
    of mask; small regions of the same kind and similar shape are padded and become one batch.
    `limits` is the range of keys of each query. `mask_regions_of` returns both. Tensors of the
    result are on the CPU.
    """
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
            one = len(some) == 1
            pieces.append(_single(some[0], limits, masks) if one else _batched(some, limits))
    return pieces
