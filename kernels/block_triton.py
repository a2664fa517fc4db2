"""The block of attention for GPUs: flash attention masked by positions, in Triton."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's type hints know neither launch options nor compile-time constants that are passed by value.

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from megarl.kernels.attention_triton import (
    LOG2_E,
    forward_kernel,
    grad_keys_kernel,
    grad_queries_kernel,
    row_sums_kernel,
)
from megarl.kernels.block import Positions
from megarl.kernels.tiles import (
    Tile,
    Tiles,
    TileWork,
    head_tiles,
    padded_width,
    section_of,
    tiles_for,
    tiles_of,
)

ROW_SUM_ROWS = 32
"""Queries of a program of `row_sums_kernel`."""


class TritonBlock:
    """`Block` by Triton kernels, for float32, float16 or bfloat16 inputs of one dtype and head
    widths up to 256; `out`, `lse` and gradients are float32.

    Products of float32 numbers are computed without TF32, which is slow. `forward` and `backward`
    raise `ValueError` for other inputs, and for scales or soft caps that are not positive.
    """

    others: dict[int, Tiles] = {}
    """{head width: tiles in place of those for 16 bit on GPUs with 227 KiB of shared memory}"""

    def __init__(self, tiles: Tiles | None = None, descriptors: bool = False) -> None:
        """`tiles`: None for those that suit the device, head width and dtype. `descriptors`:
        whether inner loops load by tensor descriptors (Hopper's tensor memory accelerator) where
        width and strides allow it. Not yet tried on a GPU.
        """
        self.tiles, self.descriptors = tiles, descriptors

    def prepare(self, queries: Positions, keys: Positions, device: torch.device) -> TileWork | None:
        return TileWork.of(queries, keys, device)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: TileWork,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
        cap: float | None = None,
    ) -> None:
        common = self._common(q, k, v, scale, cap)
        assert out.dtype == lse.dtype == torch.float32 and lse.stride(1) == 1
        tile = self._tile("forward", q)
        rows, runs = work.visits(tile, by_keys=False)
        section = section_of(
            q.shape[1], k.shape[0] * k.shape[2] * 2 * k.itemsize * k.shape[1] // q.shape[1]
        )
        walked, described = self._walked(tile, k, v)
        forward_kernel[(len(rows) * q.shape[1],)](
            q, *walked, out, lse, work.index_q, work.start_q, work.index_k, rows, runs,
            len(q), len(k), len(rows), section, *_strides(q, k, v, out), lse.stride(0),
            scale * LOG2_E.value, _base2(cap),
            DESCRIBED=described, **_shape(tile), **common,
        )  # fmt: skip

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        work: TileWork,
        scale: float,
        grad_q: torch.Tensor,
        grad_k: torch.Tensor,
        grad_v: torch.Tensor,
        cap: float | None = None,
    ) -> None:
        common = self._common(q, k, v, scale, cap)
        assert (
            grad_q.dtype == grad_k.dtype == grad_v.dtype == lse.dtype == torch.float32
            and lse.stride(1) == 1
        )
        num_queries, query_heads = q.shape[:2]
        grad_out = grad_out.to(q.dtype)
        padded = len(work.index_q)
        lse2, delta = torch.empty(2, query_heads, padded, dtype=torch.float32, device=q.device)
        row_sums_kernel[(padded // ROW_SUM_ROWS, query_heads)](
            grad_out, out, lse, lse2, delta, num_queries, padded, *_strides(grad_out, out), lse.stride(0),
            ROWS=ROW_SUM_ROWS, WIDTH=padded_width(q.shape[2]), HEAD=q.shape[2], num_warps=4,
        )  # fmt: skip
        positions = (work.index_q, work.start_q, work.index_k)
        scales = (scale, scale * LOG2_E.value, _base2(cap))
        head_bytes = 2 * q.shape[2] * q.itemsize

        tile = self._tile("grad_keys", q)
        rows, runs = work.visits(tile, by_keys=True)
        section = section_of(k.shape[1], num_queries * head_bytes * query_heads // k.shape[1])
        (walked_q, walked_grad), described = self._walked(tile, q, grad_out)
        grad_keys_kernel[(len(rows) * k.shape[1],)](
            walked_q, k, v, walked_grad, lse2, delta, grad_k, grad_v, *positions, rows, runs,
            num_queries, len(k), len(rows), section, padded, *_strides(q, k, v, grad_out, grad_k, grad_v), *scales,
            DESCRIBED=described, **_shape(tile), **common,
        )  # fmt: skip
        tile = self._tile("grad_queries", q)
        rows, runs = work.visits(tile, by_keys=False)
        section = section_of(query_heads, len(k) * head_bytes * k.shape[1] // query_heads)
        walked, described = self._walked(tile, k, v)
        grad_queries_kernel[(len(rows) * query_heads,)](
            q, *walked, grad_out, lse2, delta, grad_q, *positions, rows, runs, num_queries, len(k), len(rows), section, padded,
            *_strides(q, k, v, grad_out, grad_q), *scales, DESCRIBED=described, **_shape(tile), **common,
        )  # fmt: skip

    def _tile(self, name: str, q: torch.Tensor) -> Tile:
        width, tiles = q.shape[2], self.tiles or tiles_of(q.device, q.dtype, q.shape[2])
        # Others fit where the largest tiles for 16 bit do.
        if tiles == tiles_for(227 * 1024, torch.bfloat16, width):
            tiles = tiles | self.others.get(width, {})
        return tiles[name]

    def _walked(self, tile: Tile, *tensors: torch.Tensor) -> tuple[list[Any], bool]:
        """(kernel arguments for `tensors` [L, H, D], whether they are tensor descriptors)."""
        length, heads, width = tensors[0].shape
        fits = all(
            x.stride(1) == width and x.stride(0) * x.itemsize % 16 == 0 and x.data_ptr() % 16 == 0
            for x in tensors
        )
        if not (self.descriptors and fits and width == padded_width(width)):
            return list(tensors), False
        # All heads are one matrix [L, heads x width]; a head of a power-of-2 width is a tile of it.
        return [
            TensorDescriptor(x, [length, heads * width], [x.stride(0), 1], [tile.columns, width])
            for x in tensors
        ], True

    @staticmethod
    def _common(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, cap: float | None
    ) -> dict[str, Any]:
        """Compile-time constants of all kernels."""
        if (
            q.dtype not in (torch.float32, torch.float16, torch.bfloat16)
            or not q.dtype == k.dtype == v.dtype
        ):
            raise ValueError(
                "the Triton block takes q, k and v of one type of float32, float16 and bfloat16,"
                f" got {q.dtype}, {k.dtype} and {v.dtype}; the block named reference takes float64"
            )
        if q.shape[2] > 256 or not scale > 0 or not (cap is None or cap > 0):
            raise ValueError(
                "the Triton block takes head widths up to 256, scales over 0 and soft caps over 0,"
                f" got {q.shape[2]}, {scale} and {cap}"
            )
        width, rest = head_tiles(q.shape[2], q.dtype)
        return {
            "GROUP": q.shape[1] // k.shape[1],
            "WIDTH": width,
            "REST": rest,
            "HEAD": q.shape[2],
            "PRECISION": "ieee" if q.dtype == torch.float32 else None,
            "CAPPED": cap is not None,
        }


class WideKeys(TritonBlock):
    """Backward on Hopper in 16 bit, not yet timed: each of the two warp groups owns 64 keys, so that
    the products of their gradients have 128 columns in place of 64.
    """

    others = {128: {"grad_keys": Tile(128, 32, 8, 3)}}


class SmallPrograms(TritonBlock):
    """As `WideKeys`, with four warps a program: two programs share a multiprocessor, and one
    computes while the other waits.
    """

    others = {
        64: {"grad_keys": Tile(64, 64, 4, 3), "grad_queries": Tile(64, 64, 4, 2)},
        128: {"grad_keys": Tile(64, 32, 4, 3), "grad_queries": Tile(64, 64, 4, 2)},
    }


def _base2(cap: float | None) -> float:
    """The soft cap in base 2; 1 for none, which kernels do not read."""
    return 1.0 if cap is None else cap * LOG2_E.value


def _strides(*tensors: torch.Tensor) -> list[int]:
    """Of token and head for each tensor [L, H, D], whose last dimension is contiguous."""
    assert all(x.stride(2) == 1 for x in tensors), "the head width must be contiguous"
    return [stride for x in tensors for stride in x.stride()[:2]]


def _shape(tile: Tile) -> dict[str, Any]:
    shape = {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    return {**shape, "enable_fp_fusion": True}  # Triton 3.10 stops doing so by itself
