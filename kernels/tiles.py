"""Which tiles of queries meet which tiles of keys, for kernels that mask by place; and the shapes
of those tiles.

A tile of queries meets a tile of keys in one of three ways, told by the smallest and largest place
in each: it sees none of them (never visited), all of them (no mask), or some (places are compared).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megarl.kernels.block import Places

PADDING = 256
"""Index arrays are padded to a multiple of this, the largest tile, so that kernels load them
without a mask.
"""
FAR = 2**31 - 1
"""A place after every other."""
L2_BYTES = 32 * 2**20
"""Heads run together as long as their keys and values fit into this much of the L2 cache (H200: 50
MB).
"""


@dataclass(frozen=True)
class Tile:
    """Shape of one program: `rows` of the side it owns, `columns` of the side it walks over."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int


Tiles = dict[str, Tile]  # keys: forward, grad_keys (owns keys, walks queries), grad_queries

# By padded head width. Compiled for sm_90 they use Hopper's matrix instructions and spill nothing
# in inner loops (but for # grad_keys without descriptors from 128 on). With two stages a tile's
# load # starts only when the products before it are done, # three hide it.
_LARGE: dict[int, Tiles] = {  # 227 KB of shared memory: H100, H200, B200
    64: {
        "forward": Tile(128, 64, 4, 3),
        "grad_keys": Tile(128, 64, 8, 3),
        "grad_queries": Tile(128, 64, 8, 3),
    },
    128: {
        "forward": Tile(128, 128, 8, 3),
        "grad_keys": Tile(128, 64, 8, 3),
        "grad_queries": Tile(128, 64, 8, 3),
    },
    256: {
        "forward": Tile(128, 64, 8, 2),
        "grad_keys": Tile(64, 32, 8, 3),
        "grad_queries": Tile(64, 32, 8, 3),
    },
}
_SMALL: dict[int, Tiles] = {  # 99 KB: A10, L40S, RTX; A100 too
    64: {
        "forward": Tile(128, 64, 4, 2),
        "grad_keys": Tile(64, 64, 4, 2),
        "grad_queries": Tile(64, 64, 4, 2),
    },
    128: {
        "forward": Tile(64, 64, 4, 2),
        "grad_keys": Tile(64, 32, 4, 2),
        "grad_queries": Tile(64, 32, 4, 2),
    },
    256: {
        "forward": Tile(64, 32, 4, 1),
        "grad_keys": Tile(32, 32, 4, 1),
        "grad_queries": Tile(32, 32, 4, 1),
    },
}
_EXACT: dict[int, Tiles] = {  # float32 without tensor cores: operands live in registers
    64: {name: Tile(32, 32, 4, 1) for name in ("forward", "grad_keys", "grad_queries")},
    128: {name: Tile(32, 16, 4, 1) for name in ("forward", "grad_keys", "grad_queries")},
    256: {name: Tile(16, 16, 4, 1) for name in ("forward", "grad_keys", "grad_queries")},
}


def padded_width(width: int) -> int:
    """Columns of a tile for this head width: a power of 2."""
    return max(16, 1 << (width - 1).bit_length())


def tiles_of(device: torch.device, dtype: torch.dtype, width: int) -> Tiles:
    """The shapes of programs for this device, type and head width."""
    bracket = max(64, padded_width(width))
    if dtype == torch.float32:
        return _EXACT[bracket]
    if device.type != "cuda":
        return _LARGE[bracket]
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return (_LARGE if room >= 220 * 1024 else _SMALL)[bracket]


def section_of(num_heads: int, bytes_per_head: int) -> int:
    """How many of `num_heads` run together: the largest divisor whose streams fit into the L2
    cache.
    """
    return max(
        d
        for d in range(1, num_heads + 1)
        if num_heads % d == 0 and (d == 1 or d * bytes_per_head <= L2_BYTES)
    )


def _extremes(places: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest of each tile [ceil(L / size)]."""
    tiles = torch.cat([places, places[-1:].expand(-len(places) % size)]).view(-1, size)
    return tiles.amin(1), tiles.amax(1)


def _runs(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Neighbouring True of each row of `mask` [R, C]: where each row's runs begin in the list [R +
    1]; begin and end [N, 2].
    """
    edged = torch.nn.functional.pad(mask, (1, 1))
    begins, ends = ((mask & ~edged[:, side : side + mask.shape[1]]).nonzero() for side in (0, 2))
    counts = torch.bincount(begins[:, 0], minlength=mask.shape[0])
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)), torch.stack(
        [begins[:, 1], ends[:, 1] + 1], 1
    )


def visits(
    queries: Places, keys: Places, rows: int, columns: int, by_keys: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tiles each tile of `rows` queries (keys if `by_keys`) meets on the other side, cut into
    tiles of `columns`.

    Rows of work [R, 5] int32, heaviest first: tile, its runs of tiles seen whole (first, last), in
    part (first, last); and the runs [N, 2] int32: begin and end tile. Tiles that meet nothing are
    left out.
    """
    size_q, size_k = (columns, rows) if by_keys else (rows, columns)
    (low_q, high_q), (low_s, high_s) = (
        _extremes(x, size_q) for x in (queries.index, queries.doc_start)
    )
    low_k, high_k = _extremes(keys.index, size_k)
    some = (low_s[:, None] <= high_k) & (low_k <= high_q[:, None])
    whole = (high_s[:, None] <= low_k) & (high_k <= low_q[:, None])
    # Only tiles seen in part check where the tensors end.
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
class Work:
    """One pair of places, ready for the device."""

    queries: Places
    keys: Places
    device: torch.device
    index_q: torch.Tensor
    """[Lq padded] int32; padding is seen by nothing and sees nothing, as in the two arrays below.
    """
    start_q: torch.Tensor
    index_k: torch.Tensor
    _visits: dict[tuple[int, int, bool], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )

    @staticmethod
    def of(queries: Places, keys: Places, device: torch.device) -> Work | None:
        """None where no query sees any key."""
        in_order = keys.index.sort().values
        first = torch.searchsorted(in_order, queries.doc_start)
        if not (first < torch.searchsorted(in_order, queries.index, right=True)).any():
            return None
        index_q = _padded(queries.index, -1, device)
        start_q = _padded(queries.doc_start, FAR, device)
        return Work(queries, keys, device, index_q, start_q, _padded(keys.index, FAR, device))

    def visits(self, tile: Tile, by_keys: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """`visits` of this pair on the device: made for the first layer that asks, since tiles
        depend on head width and type.
        """
        key = (tile.rows, tile.columns, by_keys)
        if key not in self._visits:
            rows, runs = visits(self.queries, self.keys, *key)
            self._visits[key] = rows.to(self.device), runs.to(self.device)
        return self._visits[key]


def _padded(places: torch.Tensor, value: int, device: torch.device) -> torch.Tensor:
    return torch.nn.functional.pad(places.int(), (0, -len(places) % PADDING), value=value).to(
        device
    )
