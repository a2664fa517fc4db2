"""Heads in Triton kernels as one tile of columns or two side by side: loads, stores and products.

A tile has a power of 2 of columns. A head of another width is two tiles: 80 = 64 + 16 and 96 = 64 +
32 columns, where one tile would be 128, the rest of it zeros.

[rows, head] is a tuple: ([rows, WIDTH],), or with REST ([rows, WIDTH], [rows, REST]), 0 beyond HEAD
columns. In memory a head is a matrix [num_rows, HEAD] with `stride` elements from row to row.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's type hints know neither launch options nor compile-time constants that are passed by value.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(
    ptr, start, stride, num_rows,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """[ROWS, WIDTH] from row `start`. With EDGE rows beyond num_rows are 0; else all must exist."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    ptrs = ptr + tl.cast(start, tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    if EDGE:
        values = tl.load(
            ptrs, mask=(start + rows[:, None] < num_rows) & (dims[None, :] < HEAD), other=0.0
        )
    elif WIDTH == HEAD:
        values = tl.load(ptrs)
    else:
        values = tl.load(ptrs, mask=dims[None, :] < HEAD, other=0.0)
    return values


@triton.jit
def load_head(
    ptr, start, stride, num_rows,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, HEAD: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """[ROWS, head] from row `start`; EDGE as in `load_rows`."""
    if REST:
        values = (
            load_rows(ptr, start, stride, num_rows, ROWS, WIDTH, WIDTH, EDGE),
            load_rows(ptr + WIDTH, start, stride, num_rows, ROWS, REST, HEAD - WIDTH, EDGE),
        )
    else:
        values = (load_rows(ptr, start, stride, num_rows, ROWS, WIDTH, HEAD, EDGE),)
    return values


@triton.jit
def _load_where(ptr, stride, chosen, ROWS: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr):
    dims = tl.arange(0, WIDTH)
    ptrs = ptr + (tl.arange(0, ROWS)[:, None] * stride + dims[None, :])
    return tl.load(ptrs, mask=chosen & (dims[None, :] < HEAD), other=0.0)


@triton.jit
def load_head_where(
    ptr, stride, chosen,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """The rows for which `chosen` [ROWS, 1] is true; others are 0."""
    if REST:
        values = (
            _load_where(ptr, stride, chosen, ROWS, WIDTH, WIDTH),
            _load_where(ptr + WIDTH, stride, chosen, ROWS, REST, HEAD - WIDTH),
        )
    else:
        values = (_load_where(ptr, stride, chosen, ROWS, WIDTH, HEAD),)
    return values


@triton.jit
def _store_where(
    ptr, stride, value, chosen, ROWS: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr
):
    dims = tl.arange(0, WIDTH)
    ptrs = ptr + (tl.arange(0, ROWS)[:, None] * stride + dims[None, :])
    tl.store(ptrs, value, mask=chosen & (dims[None, :] < HEAD))


@triton.jit
def store_head_where(
    ptr, stride, values, divisor, chosen,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Write values / divisor [ROWS, 1] to the rows for which `chosen` [ROWS, 1] is true."""
    if REST:
        _store_where(ptr, stride, values[0] / divisor, chosen, ROWS, WIDTH, WIDTH)
        _store_where(ptr + WIDTH, stride, values[1] / divisor, chosen, ROWS, REST, HEAD - WIDTH)
    else:
        _store_where(ptr, stride, values[0] / divisor, chosen, ROWS, WIDTH, HEAD)


@triton.jit
def walk_head(
    source, head, start, head_stride, stride, num_rows,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, HEAD: tl.constexpr, EDGE: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """`load_head` of head number `head`, in an inner loop. With DESCRIBED `source` is a tensor
    descriptor of a matrix [num_rows, heads x HEAD] with blocks [ROWS, HEAD], and REST must be 0.
    """
    if DESCRIBED:
        tl.static_assert(REST == 0, "a head of two tiles has no tensor descriptor")
        values = (source.load([start, tl.cast(head * HEAD, tl.int32)]),)
    else:
        values = load_head(
            source + head * head_stride, start, stride, num_rows, ROWS, WIDTH, REST, HEAD, EDGE
        )
    return values


@triton.jit
def zero_head(ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr):
    if REST:
        values = (tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, REST], tl.float32))
    else:
        values = (tl.zeros([ROWS, WIDTH], tl.float32),)
    return values


@triton.jit
def _add_rows(
    ptr, start, stride, num_rows, value, ROWS: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr
):
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    ptrs = ptr + tl.cast(start, tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    mask = (start + rows[:, None] < num_rows) & (dims[None, :] < HEAD)
    tl.store(ptrs, tl.load(ptrs, mask=mask, other=0.0) + value, mask=mask)


@triton.jit
def add_head(
    ptr, start, stride, num_rows, values,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Add from row `start` without atomics: no other program may write these rows."""
    if REST:
        _add_rows(ptr, start, stride, num_rows, values[0], ROWS, WIDTH, WIDTH)
        _add_rows(ptr + WIDTH, start, stride, num_rows, values[1], ROWS, REST, HEAD - WIDTH)
    else:
        _add_rows(ptr, start, stride, num_rows, values[0], ROWS, WIDTH, HEAD)


@triton.jit
def times_factor(values, factor):
    """`factor`: a number or [rows, 1]."""
    if len(values) == 2:
        product = (values[0] * factor, values[1] * factor)
    else:
        product = (values[0] * factor,)
    return product


@triton.jit
def dot_heads(a, b, PRECISION: tl.constexpr):
    """a b^T [M, N] float32 of a [M, head] and b [N, head]."""
    product = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    if len(a) == 2:
        product = tl.dot(a[1], tl.trans(b[1]), product, input_precision=PRECISION)
    return product


@triton.jit
def dot_head(weights, values, total, PRECISION: tl.constexpr):
    """total [rows, head] + weights [rows, columns] values [columns, head]."""
    first = tl.dot(weights, values[0], total[0], input_precision=PRECISION)
    if len(values) == 2:
        added = (first, tl.dot(weights, values[1], total[1], input_precision=PRECISION))
    else:
        added = (first,)
    return added
