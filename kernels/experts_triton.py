"""Products of rows that are sorted by expert with each expert's weight, in one Triton kernel each.

    grouped_rows     a [S, K] times the transpose of each row's weight [E, N, K]: [S, N]
    grouped_weights  the transpose of a [S, N] times b [S, K], summed by expert: [E, N, K]

Experts have as many rows as they have: a tile of rows ends where its expert ends, and an expert
without rows costs nothing forward and zeros backward. Sums are in float32, and are rounded once.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's type hints know neither launch options nor compile-time constants that are passed by value.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class GroupedTile:
    """A program computes `rows` x `columns` numbers, and loops over `inner` at a time."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


TILE = GroupedTile(128, 128, 64, 8, 3)
EXACT = GroupedTile(64, 64, 16, 8, 1)
"""For float32, whose operands live in registers."""


@triton.jit
def _tile_of(ptr, row, column, row_stride, column_stride, num_rows, num_columns):
    """[rows, columns] of a matrix, 0 beyond its edges."""
    at = row[:, None].to(tl.int64) * row_stride + column[None, :].to(tl.int64) * column_stride
    inside = (row[:, None] < num_rows) & (column[None, :] < num_columns)
    return tl.load(ptr + at, mask=inside, other=0.0)


@triton.jit
def grouped_rows_kernel(
    a_ptr, weight_ptr, out_ptr, work_ptr, width, inner, a_stride,
    weight_expert_stride, weight_row_stride, weight_column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one expert, work [tiles, 3] of (expert, first row, end of its rows);
    `out` is contiguous.
    """
    work_ptr += tl.program_id(1) * 3
    expert, first, end = tl.load(work_ptr), tl.load(work_ptr + 1), tl.load(work_ptr + 2)
    weight_ptr += expert.to(tl.int64) * weight_expert_stride
    rows = first + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, inner, INNER):
        at = start + tl.arange(0, INNER)
        a = _tile_of(a_ptr, rows, at, a_stride, 1, end, inner)
        weight = _tile_of(
            weight_ptr, at, columns, weight_column_stride, weight_row_stride, inner, width
        )
        total = tl.dot(a, weight, total, input_precision=PRECISION)
    at = rows[:, None].to(tl.int64) * width + columns[None, :]
    inside = (rows[:, None] < end) & (columns[None, :] < width)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def grouped_weights_kernel(
    a_ptr, b_ptr, out_ptr, ends_ptr, height, width, a_stride, b_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's sum [height, width]; its rows are those from ends[expert] to
    ends[expert + 1]. `out` is contiguous.
    """
    expert = tl.program_id(2)
    first, end = tl.load(ends_ptr + expert), tl.load(ends_ptr + expert + 1)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, end, INNER):
        at = start + tl.arange(0, INNER)
        a = _tile_of(a_ptr, rows, at, 1, a_stride, height, end)
        b = _tile_of(b_ptr, at, columns, b_stride, 1, end, width)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    at = (expert.to(tl.int64) * height + rows[:, None]) * width + columns[None, :]
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def _rows(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float64:
        raise ValueError("the Triton kernels of experts compute in float32, not float64")
    return x if x.stride(1) == 1 else x.contiguous()


def _options(dtype: torch.dtype) -> dict[str, int | str]:
    is_exact = dtype == torch.float32
    tile = EXACT if is_exact else TILE
    return {
        "ROWS": tile.rows, "COLUMNS": tile.columns, "INNER": tile.inner,
        "PRECISION": "ieee" if is_exact else "tf32",  # which 16 bit do not heed
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip


def grouped_rows(a: torch.Tensor, weight: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """[S, N] of a [S, K] and weight [E, N, K], which may have any strides, in a's dtype."""
    a, options = _rows(a), _options(a.dtype)
    out, size = a.new_empty(len(a), weight.shape[1]), options["ROWS"]
    tiles, first = list[tuple[int, int, int]](), 0
    for expert, count in enumerate(counts):
        tiles += [(expert, row, first + count) for row in range(first, first + count, size)]
        first += count
    if tiles and out.numel():
        work = torch.tensor(tiles, dtype=torch.int32).to(a.device, non_blocking=True)
        grid = triton.cdiv(out.shape[1], options["COLUMNS"]), len(tiles)
        grouped_rows_kernel[grid](
            a, weight, out, work, out.shape[1], a.shape[1], a.stride(0), *weight.stride(), **options
        )
    return out


def grouped_weights(a: torch.Tensor, b: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """[E, N, K] of a [S, N] and b [S, K], in a's dtype."""
    a, b, options = _rows(a), _rows(b), _options(a.dtype)
    out = a.new_empty(len(counts), a.shape[1], b.shape[1])
    ends = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32).to(a.device, non_blocking=True)
    if out.numel():
        grid = (
            triton.cdiv(out.shape[2], options["COLUMNS"]),
            triton.cdiv(out.shape[1], options["ROWS"]),
            len(counts),
        )
        grouped_weights_kernel[grid](
            a, b, out, ends, *out.shape[1:], a.stride(0), b.stride(0), **options
        )
    return out
