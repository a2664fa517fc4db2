"""Triton kernels of block attention: forward, and the gradients of keys and values and of queries.
`block_triton.py` launches them.

Every kernel visits the tiles in its work list (`visits` in `tiles.py`): first runs seen completely,
without a mask, then runs seen in part, whose positions are compared. Scores are in base 2:
exp(scale x) = exp2(scale2 x) with scale2 = scale log2(e). The online softmax starts from the `out`
and `lse` of earlier blocks. There are no atomics: equal inputs give equal bits.

Arguments of all kernels: q, grad_out and grad_q [num_queries, heads, HEAD]; k, v, grad_k and grad_v
[num_keys, KV heads, HEAD], float32 gradients, GROUP query heads for each KV head; suffixes _l and
_h are strides of a token and of a head. `index_q`, `start_q`, `index_k`: padded int32 positions,
where query i attends to key j if start_q[i] <= index_k[j] <= index_q[i]. ROWS and COLUMNS are the
tile's sizes; [rows, head] is a tuple of tiles of WIDTH and REST columns (`heads_triton.py`). With
DESCRIBED, what the inner loop loads is a tensor descriptor.

`rows_ptr` [num_rows, 5] int32: a tile, begin and end in `runs` of those seen completely, then of
those seen in part. `runs` [N, 2]: first tile, last + 1. The grid is num_rows x heads; `section`
heads run at a time, so that what they read fits the L2 cache.

With a soft cap (CAPPED) a score x in base 2 becomes cap2 tanh(x / cap2) with cap2 = cap log2(e),
and its gradient is multiplied by 1 - tanh^2.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's type hints know neither launch options nor compile-time constants that are passed by value.

from __future__ import annotations

import math

import triton
import triton.language as tl

from megarl.kernels.heads_triton import (
    add_head,
    dot_head,
    dot_heads,
    load_head,
    load_head_where,
    load_rows,
    store_head_where,
    times_factor,
    walk_head,
    zero_head,
)

LOG2_E = tl.constexpr(math.log2(math.e))


_LN_2 = tl.constexpr(math.log(2))


@triton.jit
def _capped(scores, scale2, cap2):
    twice = tl.math.exp2(scores * (scale2 / cap2 * (2.0 * LOG2_E)))  # e^(2 x / cap)
    return cap2 - 2.0 * cap2 / (twice + 1.0)


@triton.jit
def _program(rows_ptr, num_rows, section):
    """(head, pointer to the work list's row); in a section the heaviest tiles come first."""
    pid = tl.program_id(0)
    return (
        pid // (num_rows * section) * section + pid % section,
        rows_ptr + pid // section % num_rows * 5,
    )


@triton.jit
def _forward_runs(
    acc, total, top, q, index_q, start_q, k_ptr, v_ptr, head, index_k_ptr, runs, first, last,
    k_l, k_h, v_l, v_h, num_keys, scale2, cap2,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, HEAD: tl.constexpr, PRECISION: tl.constexpr,
    PARTIAL: tl.constexpr, DESCRIBED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Online softmax: acc [rows, head], total [rows] of exponentials and top [rows], the
    maximum.
    """
    for run in range(first, last):
        for tile in range(tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1)):
            start = tile * COLUMNS
            k = walk_head(
                k_ptr, head, start, k_h, k_l, num_keys, COLUMNS, WIDTH, REST, HEAD, PARTIAL, DESCRIBED,
            )  # fmt: skip
            scores = dot_heads(q, k, PRECISION)
            unit = scale2
            if CAPPED:
                scores = _capped(scores, scale2, cap2)
                unit = 1.0
            if PARTIAL:
                index_k = tl.load(index_k_ptr + start + tl.arange(0, COLUMNS))[None, :]
                scores = tl.where(
                    (start_q[:, None] <= index_k) & (index_k <= index_q[:, None]),
                    scores,
                    float("-inf"),
                )
            higher = tl.maximum(top, tl.max(scores, 1) * unit)
            base = higher
            if PARTIAL:  # a row without visible keys: -inf - -inf is NaN
                base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.math.exp2(scores * unit - base[:, None])
            shrink = tl.math.exp2(top - base)
            total = total * shrink + tl.sum(p, 1)
            v = walk_head(
                v_ptr, head, start, v_h, v_l, num_keys, COLUMNS, WIDTH, REST, HEAD, PARTIAL, DESCRIBED,
            )  # fmt: skip
            acc = dot_head(p.to(v[0].dtype), v, times_factor(acc, shrink[:, None]), PRECISION)
            top = higher
    return acc, total, top


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_rows", "section"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, index_q_ptr, start_q_ptr, index_k_ptr, rows_ptr, runs,
    num_queries, num_keys, num_rows, section, q_l, q_h, k_l, k_h, v_l, v_h, out_l, out_h, lse_h, scale2, cap2,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr, HEAD: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Merge attention of a tile of queries to its tiles of keys into `out_ptr` (normalised) and
    `lse_ptr` [heads, num_queries] (natural), both float32, in place.
    """
    head, row = _program(rows_ptr, num_rows, section)
    head = tl.cast(head, tl.int64)
    start = tl.load(row) * ROWS
    offsets = start + tl.arange(0, ROWS)
    inside = offsets < num_queries
    lse = tl.load(lse_ptr + head * lse_h + offsets, mask=inside, other=float("-inf"))
    has_seen = lse > float("-inf")
    out_ptr += head * out_h + tl.cast(start, tl.int64) * out_l
    # Rows without earlier blocks are 0 and need no load: the first block of a ring loads nothing.
    acc = load_head_where(out_ptr, out_l, has_seen[:, None], ROWS, WIDTH, REST, HEAD)
    total = tl.where(has_seen, 1.0, 0.0)
    top = lse * LOG2_E
    q = load_head(q_ptr + head * q_h, start, q_l, num_queries, ROWS, WIDTH, REST, HEAD, True)
    index_q = tl.load(index_q_ptr + offsets)
    start_q = tl.load(start_q_ptr + offsets)
    for partial in tl.static_range(2):  # 0: tiles seen completely, 1: in part
        first, last = tl.load(row + 1 + 2 * partial), tl.load(row + 2 + 2 * partial)
        acc, total, top = _forward_runs(
            acc, total, top, q, index_q, start_q, k_ptr, v_ptr, head // GROUP, index_k_ptr, runs, first, last,
            k_l, k_h, v_l, v_h, num_keys, scale2, cap2, COLUMNS, WIDTH, REST, HEAD, PRECISION, partial, DESCRIBED, CAPPED,
        )  # fmt: skip
    seen = total > 0
    total = tl.where(seen, total, 1.0)
    store_head_where(out_ptr, out_l, acc, total[:, None], inside[:, None], ROWS, WIDTH, REST, HEAD)
    tl.store(
        lse_ptr + head * lse_h + offsets,
        tl.where(seen, (top + tl.math.log2(total)) * _LN_2, float("-inf")),
        mask=inside,
    )


@triton.jit(do_not_specialize=["num_queries", "padded"])
def row_sums_kernel(
    grad_out_ptr, out_ptr, lse_ptr, lse2_ptr, delta_ptr, num_queries, padded, grad_l, grad_h, out_l, out_h, lse_h,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Write delta = rowsum(grad_out out), and the log-sum-exp times log2(e), +inf for queries that
    see nothing; both [heads, padded] float32. Grid: (padded / ROWS, heads).
    """
    head = tl.cast(tl.program_id(1), tl.int64)
    start = tl.program_id(0) * ROWS
    offsets = start + tl.arange(0, ROWS)
    grad_out = load_rows(
        grad_out_ptr + head * grad_h, start, grad_l, num_queries, ROWS, WIDTH, HEAD, True
    )
    out = load_rows(out_ptr + head * out_h, start, out_l, num_queries, ROWS, WIDTH, HEAD, True)
    lse = tl.load(lse_ptr + head * lse_h + offsets, mask=offsets < num_queries, other=float("-inf"))
    tl.store(
        delta_ptr + head * padded + offsets, tl.sum(grad_out.to(tl.float32) * out.to(tl.float32), 1)
    )
    tl.store(
        lse2_ptr + head * padded + offsets,
        tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E),
    )


@triton.jit
def _grad_keys_runs(
    grad_k, grad_v, k, v, index_k, q_ptr, grad_out_ptr, head, lse2_ptr, delta_ptr, index_q_ptr, start_q_ptr, runs, first, last,
    q_l, q_h, grad_l, grad_h, num_queries, scale2, cap2,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, HEAD: tl.constexpr, PRECISION: tl.constexpr,
    PARTIAL: tl.constexpr, DESCRIBED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    for run in range(first, last):
        for tile in range(tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1)):
            start = tile * COLUMNS
            offsets = start + tl.arange(0, COLUMNS)
            q = walk_head(
                q_ptr, head, start, q_h, q_l, num_queries, COLUMNS, WIDTH, REST, HEAD, PARTIAL, DESCRIBED,
            )  # fmt: skip
            scores = dot_heads(k, q, PRECISION)
            unit = scale2
            if CAPPED:
                scores = _capped(scores, scale2, cap2)
                unit = 1.0
            p = tl.math.exp2(scores * unit - tl.load(lse2_ptr + offsets)[None, :])
            if PARTIAL:
                index_q = tl.load(index_q_ptr + offsets)[None, :]
                start_q = tl.load(start_q_ptr + offsets)[None, :]
                p = tl.where((start_q <= index_k[:, None]) & (index_k[:, None] <= index_q), p, 0.0)
            grad_out = walk_head(
                grad_out_ptr, head, start, grad_h, grad_l, num_queries, COLUMNS, WIDTH, REST, HEAD, PARTIAL, DESCRIBED,
            )  # fmt: skip
            grad_v = dot_head(p.to(grad_out[0].dtype), grad_out, grad_v, PRECISION)
            grad_p = dot_heads(v, grad_out, PRECISION)
            grad_scores = p * (grad_p - tl.load(delta_ptr + offsets)[None, :])
            if CAPPED:
                grad_scores *= 1.0 - (scores / cap2) * (scores / cap2)
            grad_k = dot_head(grad_scores.to(q[0].dtype), q, grad_k, PRECISION)
    return grad_k, grad_v


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_rows", "section", "padded"])
def grad_keys_kernel(
    q_ptr, k_ptr, v_ptr, grad_out_ptr, lse2_ptr, delta_ptr, grad_k_ptr, grad_v_ptr,
    index_q_ptr, start_q_ptr, index_k_ptr, rows_ptr, runs,
    num_queries, num_keys, num_rows, section, padded,
    q_l, q_h, k_l, k_h, v_l, v_h, grad_l, grad_h, gk_l, gk_h, gv_l, gv_h, scale, scale2, cap2,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr, HEAD: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a tile of keys and values of one KV head, from the tiles of queries that
    see it. `lse2_ptr` and `delta_ptr` come from `row_sums_kernel`.
    """
    head, row = _program(rows_ptr, num_rows, section)
    head = tl.cast(head, tl.int64)
    start = tl.load(row) * ROWS
    k = load_head(k_ptr + head * k_h, start, k_l, num_keys, ROWS, WIDTH, REST, HEAD, True)
    v = load_head(v_ptr + head * v_h, start, v_l, num_keys, ROWS, WIDTH, REST, HEAD, True)
    index_k = tl.load(index_k_ptr + start + tl.arange(0, ROWS))
    grad_k = zero_head(ROWS, WIDTH, REST)
    grad_v = zero_head(ROWS, WIDTH, REST)
    for member in range(GROUP):
        query_head = head * GROUP + member
        lse2_head = lse2_ptr + query_head * padded
        delta_head = delta_ptr + query_head * padded
        for partial in tl.static_range(2):
            first, last = tl.load(row + 1 + 2 * partial), tl.load(row + 2 + 2 * partial)
            grad_k, grad_v = _grad_keys_runs(
                grad_k, grad_v, k, v, index_k, q_ptr, grad_out_ptr, query_head, lse2_head, delta_head, index_q_ptr, start_q_ptr,
                runs, first, last, q_l, q_h, grad_l, grad_h, num_queries, scale2, cap2,
                COLUMNS, WIDTH, REST, HEAD, PRECISION, partial, DESCRIBED, CAPPED,
            )  # fmt: skip
    add_head(
        grad_k_ptr + head * gk_h, start, gk_l, num_keys, times_factor(grad_k, scale), ROWS, WIDTH, REST, HEAD
    )  # fmt: skip
    add_head(grad_v_ptr + head * gv_h, start, gv_l, num_keys, grad_v, ROWS, WIDTH, REST, HEAD)


@triton.jit
def _grad_queries_runs(
    grad_q, q, grad_out, lse2, delta, index_q, start_q, k_ptr, v_ptr, head, index_k_ptr, runs, first, last,
    k_l, k_h, v_l, v_h, num_keys, scale2, cap2,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, HEAD: tl.constexpr, PRECISION: tl.constexpr,
    PARTIAL: tl.constexpr, DESCRIBED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    for run in range(first, last):
        for tile in range(tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1)):
            start = tile * COLUMNS
            k = walk_head(
                k_ptr, head, start, k_h, k_l, num_keys, COLUMNS, WIDTH, REST, HEAD, PARTIAL, DESCRIBED,
            )  # fmt: skip
            v = walk_head(
                v_ptr, head, start, v_h, v_l, num_keys, COLUMNS, WIDTH, REST, HEAD, PARTIAL, DESCRIBED,
            )  # fmt: skip
            scores = dot_heads(q, k, PRECISION)
            grad_p = dot_heads(grad_out, v, PRECISION)
            unit = scale2
            if CAPPED:
                scores = _capped(scores, scale2, cap2)
                unit = 1.0
            p = tl.math.exp2(scores * unit - lse2[:, None])
            if PARTIAL:
                index_k = tl.load(index_k_ptr + start + tl.arange(0, COLUMNS))[None, :]
                p = tl.where((start_q[:, None] <= index_k) & (index_k <= index_q[:, None]), p, 0.0)
            grad_scores = p * (grad_p - delta[:, None])
            if CAPPED:
                grad_scores *= 1.0 - (scores / cap2) * (scores / cap2)
            grad_q = dot_head(grad_scores.to(k[0].dtype), k, grad_q, PRECISION)
    return grad_q


@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_rows", "section", "padded"])
def grad_queries_kernel(
    q_ptr, k_ptr, v_ptr, grad_out_ptr, lse2_ptr, delta_ptr, grad_q_ptr, index_q_ptr, start_q_ptr, index_k_ptr, rows_ptr, runs,
    num_queries, num_keys, num_rows, section, padded, q_l, q_h, k_l, k_h, v_l, v_h, grad_l, grad_h, gq_l, gq_h, scale, scale2, cap2,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, REST: tl.constexpr, HEAD: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Add the gradient of a tile of queries of one head from its tiles of keys."""
    head, row = _program(rows_ptr, num_rows, section)
    head = tl.cast(head, tl.int64)
    start = tl.load(row) * ROWS
    offsets = start + tl.arange(0, ROWS)
    q = load_head(q_ptr + head * q_h, start, q_l, num_queries, ROWS, WIDTH, REST, HEAD, True)
    grad_out = load_head(
        grad_out_ptr + head * grad_h, start, grad_l, num_queries, ROWS, WIDTH, REST, HEAD, True
    )
    lse2 = tl.load(lse2_ptr + head * padded + offsets)
    delta = tl.load(delta_ptr + head * padded + offsets)
    index_q = tl.load(index_q_ptr + offsets)
    start_q = tl.load(start_q_ptr + offsets)
    grad_q = zero_head(ROWS, WIDTH, REST)
    for partial in tl.static_range(2):
        first, last = tl.load(row + 1 + 2 * partial), tl.load(row + 2 + 2 * partial)
        grad_q = _grad_queries_runs(
            grad_q, q, grad_out, lse2, delta, index_q, start_q, k_ptr, v_ptr, head // GROUP, index_k_ptr, runs, first, last,
            k_l, k_h, v_l, v_h, num_keys, scale2, cap2, COLUMNS, WIDTH, REST, HEAD, PRECISION, partial, DESCRIBED, CAPPED,
        )  # fmt: skip
    add_head(
        grad_q_ptr + head * gq_h, start, gq_l, num_queries, times_factor(grad_q, scale), ROWS, WIDTH, REST, HEAD
    )  # fmt: skip
