"""Which tiles of queries attend to which tiles of keys, and the sizes of tiles, for Triton kernels.

The smallest and largest position in each tile say whether its queries see none of the keys (the
pair is skipped), all of them (no mask needed) or some (positions are compared).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megarl.kernels.block import Positions

PADDING = 256
"""Position arrays are padded to a multiple of it, so that loads need no masks."""
FAR = 2**31 - 1
"""A position after every token, which marks padding."""
L2_BYTES = 32 * 2**20
"""That keys and values of concurrently running heads may fill (H200: 50 MB)."""


@dataclass(frozen=True)
class Tile:
    """A program owns `rows` queries or keys, and loops over `columns` of the other side."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


Tiles = dict[str, Tile]  # keys: forward, grad_keys, grad_queries
"""By `KERNELS`. Programs of "grad_keys" own keys, those of the other two queries."""

KERNELS = ("forward", "grad_keys", "grad_queries")
Sizes = tuple[int, int, int, int]


def _tiles(*sizes: Sizes) -> Tiles:
    """From (rows, columns, warps, stages) of each of `KERNELS`, or of all three."""
    each = sizes if len(sizes) > 1 else sizes * len(KERNELS)
    return {name: Tile(*numbers) for name, numbers in zip(KERNELS, each, strict=True)}


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
    """Columns of a tile that holds a head: a power of 2, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def head_tiles(width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Columns of the two tiles that hold a head; the second is 0 where one tile is better: (64, 16)
    for 80, (64, 32) for 96, (128, 0) for 100.
    """
    whole = padded_width(width)
    first, rest = whole // 2, padded_width(width - whole // 2)
    return (first, rest) if first + rest in _TWO_TILES[dtype == torch.float32] else (whole, 0)


def tiles_for(shared_memory: int, dtype: torch.dtype, width: int) -> Tiles:
    """For a GPU with `shared_memory` bytes for a thread block. Raises `ValueError` for widths above
    256.
    """
    columns = sum(head_tiles(width, dtype))
    bracket = min(known for known in _EXACT if known >= columns)
    if dtype == torch.float32:
        return _EXACT[bracket]
    return (_LARGE if shared_memory >= 220 * 1024 else _SMALL)[bracket]


def tiles_of(device: torch.device, dtype: torch.dtype, width: int) -> Tiles:
    """`tiles_for` this device; without a GPU those of an H100."""
    shared_memory = 227 * 1024
    if device.type == "cuda":
        shared_memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return tiles_for(shared_memory, dtype, width)


def section_of(num_heads: int, bytes_per_head: int) -> int:
    """How many heads run at a time: the largest divisor of `num_heads` that fits into `L2_BYTES`,
    at least 1.
    """
    return max(
        d
        for d in range(1, num_heads + 1)
        if num_heads % d == 0 and (d == 1 or d * bytes_per_head <= L2_BYTES)
    )


def _extremes(positions: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest position in each tile of `size` tokens."""
    tiles = torch.cat([positions, positions[-1:].expand(-len(positions) % size)]).view(-1, size)
    return tiles.amin(1), tiles.amax(1)


def _runs(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs of neighbouring True in each row of `mask` [R, C]: offsets [R + 1] of each row; [N, 2]
    first column, last + 1.
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
    """For each tile of `rows` queries, the tiles of `columns` keys that they attend to; with
    `by_keys` for each tile of keys those of queries.

    Returns (work [R, 5], runs [N, 2]), int32 on the CPU, as the kernels' `rows_ptr` and `runs`; the
    most work first.
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
    parted = some & ~whole
    if by_keys:
        whole, parted = whole.T, parted.T
    (at_whole, runs_whole), (at_part, runs_part) = _runs(whole), _runs(parted)
    at_part = at_part + len(runs_whole)
    work = torch.stack(
        [torch.arange(len(whole)), at_whole[:-1], at_whole[1:], at_part[:-1], at_part[1:]], 1
    )
    weight = whole.sum(1) + parted.sum(1)
    order = weight.argsort(descending=True, stable=True)[: int((weight > 0).sum())]
    return work[order].int(), torch.cat([runs_whole, runs_part]).int()


@dataclass(frozen=True)
class TileWork:
    queries: Positions
    keys: Positions
    device: torch.device
    index_q: torch.Tensor
    """[Lq padded] int32 last position that each query attends to."""
    start_q: torch.Tensor
    """[Lq padded] int32 first position."""
    index_k: torch.Tensor
    """[Lk padded] int32"""
    _visits: dict[tuple[int, int, bool], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )

    @staticmethod
    def of(queries: Positions, keys: Positions, device: torch.device) -> TileWork | None:
        """None where no query attends to any key."""
        in_order = keys.index.sort().values
        first = torch.searchsorted(in_order, queries.first)
        if not (first < torch.searchsorted(in_order, queries.index, right=True)).any():
            return None
        index_q = _padded(queries.index, -1, device)
        start_q = _padded(queries.first, FAR, device)
        return TileWork(queries, keys, device, index_q, start_q, _padded(keys.index, FAR, device))

    def visits(self, tile: Tile, by_keys: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """`visits` on the device, for a kernel with these tile sizes; kept."""
        key = (tile.rows, tile.columns, by_keys)
        if key not in self._visits:
            rows, runs = visits(self.queries, self.keys, *key)
            self._visits[key] = rows.to(self.device), runs.to(self.device)
        return self._visits[key]


def _padded(positions: torch.Tensor, value: int, device: torch.device) -> torch.Tensor:
    return torch.nn.functional.pad(positions.int(), (0, -len(positions) % PADDING), value=value).to(
        device
    )
