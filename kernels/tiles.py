"""Which tiles of queries attend to which tiles of keys, and the sizes of tiles, for Triton kernels.

From the smallest and largest position in each tile follows whether its queries see none of the keys
(the pair is skipped), all of them (no mask needed) or some (positions are compared).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megarl.kernels.block import Positions

PADDING = 256
"""Position arrays are padded to a multiple of the largest tile, so that kernels load without
masks."""
FAR = 2**31 - 1
"""A position after that of every token; as a query's first visible position, or as a key's
position, it marks padding."""
L2_BYTES = 32 * 2**20
"""Bytes of L2 cache that the keys and values of concurrently running heads may fill (H200: 50
MB)."""


@dataclass(frozen=True)
class Tile:
    """Tile sizes and launch options of one Triton attention kernel. A program owns `rows` tokens of
    one side (queries or keys) and loops over the tokens of the other side, `columns` at a time;
    `num_warps` and `num_stages` are Triton's.
    """

    rows: int
    columns: int
    """Tokens of the other side that a program processes in one iteration."""
    num_warps: int
    num_stages: int


Tiles = dict[str, Tile]  # keys: forward, grad_keys, grad_queries
"""{kernel: its tile sizes}. Kernels are "forward" and "grad_queries", whose programs own queries
and loop over keys, and "grad_keys", whose programs own keys and loop over queries."""

KERNELS = ("forward", "grad_keys", "grad_queries")
Sizes = tuple[int, int, int, int]


def _tiles(*sizes: Sizes) -> Tiles:
    """Tiles of the three kernels, in the order of `KERNELS`, from (rows, columns, warps, stages) of
    each, or of all three.
    """
    each = sizes if len(sizes) > 1 else sizes * len(KERNELS)
    return {name: Tile(*one) for name, one in zip(KERNELS, each, strict=True)}


# By columns of a head's tiles. tools/compile_table.py compiles them: at widths 64 to 128 no inner
# loop spills registers, on any GPU, and all fit into shared memory. With two stages a tile's load
# starts only after the products before it; three stages hide it. At widths 80 and 96 there are
# 16 rows for each warp: with fewer the compiler lets several warps compute the same products.
_LARGE: dict[int, Tiles] = {  # 227 KB of shared memory: H100, H200, B200
    64: _tiles((128, 64, 8, 3)),
    80: _tiles((128, 64, 8, 3), (128, 32, 8, 3), (128, 64, 8, 3)),
    96: _tiles((128, 64, 8, 3), (128, 32, 8, 3), (128, 64, 8, 3)),
    128: _tiles((128, 64, 8, 3), (64, 64, 8, 3), (128, 64, 8, 3)),
    256: _tiles((128, 64, 8, 2), (64, 32, 8, 3), (64, 32, 8, 3)),
}
_SMALL: dict[int, Tiles] = {  # 99 KB: A10, L40S, RTX; A100 too
    64: _tiles((128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 8, 2)),
    80: _tiles((128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 2)),
    96: _tiles((128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 2)),
    128: _tiles((128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2)),
    256: _tiles((64, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1)),
}
_EXACT: dict[int, Tiles] = {  # float32 without tensor cores: operands live in registers
    64: _tiles((32, 32, 8, 1)),
    80: _tiles((32, 32, 8, 1)),
    96: _tiles((32, 32, 8, 1), (32, 16, 8, 1), (32, 32, 8, 1)),
    128: _tiles((32, 16, 8, 1)),
    256: _tiles((16, 16, 4, 1)),
}

# {is float32: columns of two tiles that compile better than one tile of the next power of 2}.
# With two tiles for 160 columns a kernel for sm_80 spills 11 KB, and with 192 in float32 one for
# sm_100 moves spilled registers in its loop.
_TWO_TILES = {False: (48, 80, 96, 192), True: (48, 80, 96)}


def padded_width(width: int) -> int:
    """`width` of an attention head (columns) rounded up to a power of 2, at least 16: the columns
    of a Triton tile that holds the head.
    """
    return max(16, 1 << (width - 1).bit_length())


def head_tiles(width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Columns of the two Triton tiles that hold an attention head of `width` columns; the second is
    0 where one tile is better: (64, 16) for 80, (64, 32) for 96, (128, 0) for 100. `dtype`: of
    queries and keys.
    """
    whole = padded_width(width)
    first, rest = whole // 2, padded_width(width - whole // 2)
    return (first, rest) if first + rest in _TWO_TILES[dtype == torch.float32] else (whole, 0)


def tiles_for(shared_memory: int, dtype: torch.dtype, width: int) -> Tiles:
    """Tile sizes and launch options of the three attention kernels, {"forward", "grad_keys",
    "grad_queries": `Tile`}, for a GPU with `shared_memory` bytes for a thread block, queries and
    keys of `dtype`, and heads of `width` columns. Widths above 256 raise `ValueError`.
    """
    columns = sum(head_tiles(width, dtype))
    bracket = min(known for known in _EXACT if known >= columns)
    if dtype == torch.float32:
        return _EXACT[bracket]
    return (_LARGE if shared_memory >= 220 * 1024 else _SMALL)[bracket]


def tiles_of(device: torch.device, dtype: torch.dtype, width: int) -> Tiles:
    """Tile sizes and launch options of the three attention kernels, {"forward", "grad_keys",
    "grad_queries": `Tile`}, for queries and keys of `dtype` on `device` with heads of `width`
    columns. Widths above 256 raise `ValueError`. For a device that is no GPU the sizes are those of
    an H100 (227 KB of shared memory).
    """
    shared_memory = 227 * 1024
    if device.type == "cuda":
        shared_memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return tiles_for(shared_memory, dtype, width)


def section_of(num_heads: int, bytes_per_head: int) -> int:
    """How many of `num_heads` heads should run at the same time, so that their keys and values fit
    into the L2 cache (32 MiB are counted with). `bytes_per_head`: bytes of keys and values that
    each head reads.

    The result is the largest divisor of `num_heads` that fits, at least 1.
    """
    return max(
        d
        for d in range(1, num_heads + 1)
        if num_heads % d == 0 and (d == 1 or d * bytes_per_head <= L2_BYTES)
    )


def _extremes(positions: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest position in each tile of `size` tokens, both [number of tiles]."""
    tiles = torch.cat([positions, positions[-1:].expand(-len(positions) % size)]).view(-1, size)
    return tiles.amin(1), tiles.amax(1)


def _runs(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs of neighbouring True in each row of `mask` [R, C].

    Returns offsets [R + 1] of each row's runs in the list of runs, and the runs [N, 2]: first
    column, last column + 1.
    """
    edged = torch.nn.functional.pad(mask, (1, 1))
    begins, ends = ((mask & ~edged[:, side : side + mask.shape[1]]).nonzero() for side in (0, 2))
    counts = torch.bincount(begins[:, 0], minlength=mask.shape[0])
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)), torch.stack(
        [begins[:, 1], ends[:, 1] + 1], 1
    )


def visits(
    queries: Positions, keys: Positions, rows: int, columns: int, by_keys: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each tile of `rows` queries, which tiles of `columns` keys its queries attend to. With
    `by_keys` the other way round: for each tile of `rows` keys, which tiles of `columns` queries
    attend to it. `queries` and `keys` say which key positions each query attends to.

    Returns two CPU tensors (work [R, 5], runs [N, 2]), int32. Each of the R rows of `work` is one
    tile: its number; then two pairs (begin, end) of indices into `runs`: first for the tiles of the
    other side of which all pairs of query and key are attended (no mask needed), then for those
    with some such pairs. Each of the N rows of `runs` is a run of neighbouring tiles of the other
    side: first tile, last tile + 1. The tile with the most work comes first, and tiles without work
    are left out.
    """
    size_q, size_k = (columns, rows) if by_keys else (rows, columns)
    (low_q, high_q), (low_s, high_s) = (
        _extremes(x, size_q) for x in (queries.index, queries.first)
    )
    low_k, high_k = _extremes(keys.index, size_k)
    some = (low_s[:, None] <= high_k) & (low_k <= high_q[:, None])
    whole = (high_s[:, None] <= low_k) & (high_k <= low_q[:, None])
    # Incomplete last tiles count as seen in part, since only those check bounds.
    whole[len(queries.index) // size_q :] = False
    whole[:, len(keys.index) // size_k :] = False
    part = some & ~whole
    if by_keys:
        whole, part = whole.T, part.T
    (at_whole, runs_whole), (at_part, runs_part) = _runs(whole), _runs(part)
    at_part = at_part + len(runs_whole)
    work = torch.stack(
        [torch.arange(len(whole)), at_whole[:-1], at_whole[1:], at_part[:-1], at_part[1:]], 1
    )
    weight = whole.sum(1) + part.sum(1)
    order = weight.argsort(descending=True, stable=True)[: int((weight > 0).sum())]
    return work[order].int(), torch.cat([runs_whole, runs_part]).int()


@dataclass(frozen=True)
class TileWork:
    """The work list of Triton attention for one set of queries and one set of keys: their positions
    on the GPU, and the method `visits`, which lists the tiles of queries and keys to compute. It is
    made once for a micro-batch with `TileWork.of(queries, keys, device)`, and every layer uses it.
    """

    queries: Positions
    keys: Positions
    device: torch.device
    index_q: torch.Tensor
    """[Lq padded] int32 last position that each query attends to, usually its own; padding (-1)
    sees nothing."""
    start_q: torch.Tensor
    """[Lq padded] int32 first position that each query attends to: that of its document's first
    token, or of the window's."""
    index_k: torch.Tensor
    """[Lk padded] int32 positions of the keys; padding is seen by nothing."""
    _visits: dict[tuple[int, int, bool], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )
    """Cached tile visits, by tile sizes."""

    @staticmethod
    def of(queries: Positions, keys: Positions, device: torch.device) -> TileWork | None:
        """The work list for queries and keys at these positions, with tensors on `device`; None
        where no query attends to any key. Query i attends to key j where queries.first[i] <=
        keys.index[j] <= queries.index[i].
        """
        in_order = keys.index.sort().values
        first = torch.searchsorted(in_order, queries.first)
        if not (first < torch.searchsorted(in_order, queries.index, right=True)).any():
            return None
        index_q = _padded(queries.index, -1, device)
        start_q = _padded(queries.first, FAR, device)
        return TileWork(queries, keys, device, index_q, start_q, _padded(keys.index, FAR, device))

    def visits(self, tile: Tile, by_keys: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Which tiles each tile of a kernel with the sizes `tile` has to visit, as (work [R, 5],
        runs [N, 2]) int32 on the device. `by_keys`: tiles of keys visit tiles of queries; otherwise
        tiles of queries visit tiles of keys.

        A row of `work`: number of the tile, (begin, end) in `runs` of the tiles visited without a
        mask, (begin, end) in `runs` of those visited with one. A row of `runs`: first tile, last
        tile + 1. Computed at the first call for these sizes, then kept.
        """
        key = (tile.rows, tile.columns, by_keys)
        if key not in self._visits:
            rows, runs = visits(self.queries, self.keys, *key)
            self._visits[key] = rows.to(self.device), runs.to(self.device)
        return self._visits[key]


def _padded(positions: torch.Tensor, value: int, device: torch.device) -> torch.Tensor:
    """Positions as int32 on `device`, padded with `value` to a multiple of `PADDING`."""
    return torch.nn.functional.pad(positions.int(), (0, -len(positions) % PADDING), value=value).to(
        device
    )
