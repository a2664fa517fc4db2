"""Heads in Triton kernels as one tile of columns or two side by side: loads, stores and products.

A tile has a power of 2 of columns. A head of another width is two tiles, each with products of its
own: 80 = 64 + 16 and 96 = 64 + 32 columns, where one tile would be 128, the rest of it zeros.

[rows, head] is a tuple here: ([rows, WIDTH],), or with REST ([rows, WIDTH], [rows, REST]). The last
tile is 0 beyond HEAD columns.
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
    """Load a tile [ROWS, WIDTH] of a matrix [num_rows, HEAD] in memory at `ptr`, from row `start`;
    columns beyond HEAD are 0. `stride`: elements from row to row.

    With EDGE rows beyond num_rows are 0 too; otherwise all ROWS rows must exist.
    """
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
    """Load ROWS rows of an attention head, a matrix [num_rows, HEAD] in memory at `ptr`, from row
    `start`. Returns a tuple of tiles: ([ROWS, WIDTH],), or with REST above 0 ([ROWS, WIDTH],
    [ROWS, REST]); the first tile has the first WIDTH columns of the head. Columns beyond HEAD are
    0. `stride`: elements from row to row.

    With EDGE rows beyond num_rows are 0; otherwise all ROWS rows must exist.
    """
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
    """[ROWS, WIDTH] read from a matrix [ROWS, HEAD] in memory: the rows for which `chosen`
    [ROWS, 1] is true. Other rows, and columns beyond HEAD, are 0.
    """
    dims = tl.arange(0, WIDTH)
    ptrs = ptr + (tl.arange(0, ROWS)[:, None] * stride + dims[None, :])
    return tl.load(ptrs, mask=chosen & (dims[None, :] < HEAD), other=0.0)


@triton.jit
def load_head_where(
    ptr, stride, chosen,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Load from a matrix [ROWS, HEAD] in memory at `ptr` (one attention head) the rows for which
    `chosen` [ROWS, 1] is true; other rows, and columns beyond HEAD, are 0. Returns a tuple of
    tiles: ([ROWS, WIDTH],), or with REST above 0 ([ROWS, WIDTH], [ROWS, REST]). `stride`: elements
    from row to row.
    """
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
    """Write rows of `value` [ROWS, WIDTH] to a matrix [ROWS, HEAD] in memory, without the columns
    beyond HEAD: the rows for which `chosen` [ROWS, 1] is true.
    """
    dims = tl.arange(0, WIDTH)
    ptrs = ptr + (tl.arange(0, ROWS)[:, None] * stride + dims[None, :])
    tl.store(ptrs, value, mask=chosen & (dims[None, :] < HEAD))


@triton.jit
def store_head_where(
    ptr, stride, values, divisor, chosen,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Write rows of values / divisor to a matrix [ROWS, HEAD] in memory at `ptr` (one attention
    head): the rows for which `chosen` [ROWS, 1] is true. `values` is a tuple of tiles,
    ([ROWS, WIDTH],) or with REST above 0 ([ROWS, WIDTH], [ROWS, REST]); `divisor` is [ROWS, 1].
    `stride`: elements from row to row.
    """
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
    """Load ROWS rows, from row `start`, of head number `head`, for the inner loop of a kernel.
    Returns a tuple of tiles: ([ROWS, WIDTH],), or with REST above 0 ([ROWS, WIDTH], [ROWS, REST]),
    where the first has the first WIDTH columns; columns beyond HEAD are 0.

    Without DESCRIBED `source` is a pointer to a tensor [num_rows, heads, HEAD] whose rows are
    `stride` and whose heads are `head_stride` elements apart; with EDGE rows beyond num_rows are 0,
    otherwise all ROWS rows must exist. With DESCRIBED `source` is a tensor descriptor of a matrix
    [num_rows, heads x HEAD] with blocks [ROWS, HEAD]; strides and EDGE are not used, and REST must
    be 0.
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
    """float32 zeros for ROWS rows of an attention head, as a tuple of tiles: ([ROWS, WIDTH],), or
    with REST above 0 ([ROWS, WIDTH], [ROWS, REST]).
    """
    if REST:
        values = (tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, REST], tl.float32))
    else:
        values = (tl.zeros([ROWS, WIDTH], tl.float32),)
    return values


@triton.jit
def _add_rows(
    ptr, start, stride, num_rows, value, ROWS: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr
):
    """Add `value` [ROWS, WIDTH] to a matrix [num_rows, HEAD] in memory, from row `start`."""
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
    """Add `values` to a matrix [num_rows, HEAD] in memory at `ptr` (one attention head), in place,
    from row `start` and without atomics (no other program may write these rows at the time); rows
    beyond num_rows and columns beyond HEAD are left out. `values` is a tuple of tiles,
    ([ROWS, WIDTH],) or with REST above 0 ([ROWS, WIDTH], [ROWS, REST]). `stride`: elements from row
    to row.
    """
    if REST:
        _add_rows(ptr, start, stride, num_rows, values[0], ROWS, WIDTH, WIDTH)
        _add_rows(ptr + WIDTH, start, stride, num_rows, values[1], ROWS, REST, HEAD - WIDTH)
    else:
        _add_rows(ptr, start, stride, num_rows, values[0], ROWS, WIDTH, HEAD)


@triton.jit
def times_factor(values, factor):
    """Each tile [rows, columns] of the tuple `values` (one attention head in one or two tiles)
    times `factor`, a number or a column [rows, 1]; a new tuple.
    """
    if len(values) == 2:
        product = (values[0] * factor, values[1] * factor)
    else:
        product = (values[0] * factor,)
    return product


@triton.jit
def dot_heads(a, b, PRECISION: tl.constexpr):
    """a b^T of two matrices a [M, HEAD] and b [N, HEAD] of head vectors, each a tuple of one or two
    tiles that divide the HEAD columns; the result is one tile [M, N], float32. PRECISION:
    `input_precision` of `tl.dot`.
    """
    product = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    if len(a) == 2:
        product = tl.dot(a[1], tl.trans(b[1]), product, input_precision=PRECISION)
    return product


@triton.jit
def dot_head(weights, values, total, PRECISION: tl.constexpr):
    """total + weights values, where `weights` is a tile [rows, columns], and `values`
    [columns, head] and `total` [rows, head] are tuples of one or two tiles of a head's columns.
    Returns a tuple like `total`. PRECISION: `input_precision` of `tl.dot`.
    """
    first = tl.dot(weights, values[0], total[0], input_precision=PRECISION)
    if len(values) == 2:
        added = (first, tl.dot(weights, values[1], total[1], input_precision=PRECISION))
    else:
        added = (first,)
    return added
