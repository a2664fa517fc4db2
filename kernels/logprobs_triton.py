"""The two passes over a chunk of logits as Triton kernels, for GPUs. Arguments, results and
formulas are those of logprobs_torch.py.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's type hints know neither launch options nor compile-time constants that are passed by value.

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Logits that a program processes at once: 32 a thread with 4 warps, without register spilling."""
NUM_WARPS = 4
_LOWEST_LOG_P = tl.constexpr(-1e4)
_LAUNCH = dict(BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=False)
"""Without fusion the largest logit minus the maximum is exactly 0. A fused multiply-add would
subtract the rounded maximum from the unrounded product: an error of 6.5e-4 of the sum on an H200,
for a logit of 3e4.
"""


@triton.jit
def _statistics(
    logits_ptr,
    targets_ptr,
    found_ptr,
    stride,
    first,
    vocabulary,
    num_rows,
    scale,
    BLOCK: tl.constexpr,
):
    """One row of logits: running maximum and, in each lane, sums relative to it."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride
    lanes = tl.arange(0, BLOCK)
    lane_s = tl.zeros([BLOCK], tl.float32)
    lane_t = tl.zeros([BLOCK], tl.float32)
    m = tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        z = (
            tl.load(
                logits_ptr + start + lanes, mask=start + lanes < vocabulary, other=float("-inf")
            ).to(tl.float32)
            * scale
        )
        higher = tl.maximum(m, tl.max(z, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        # Before the first finite logit the sums are 0; shifting them by -inf would give NaN.
        drop = tl.where(m == float("-inf"), 0.0, m - base)
        shrink = tl.exp(drop)
        z -= base
        e = tl.exp(z)
        lane_t = shrink * (lane_t + drop * lane_s) + tl.maximum(z, _LOWEST_LOG_P) * e
        lane_s = shrink * lane_s + e
        m = higher
    column = tl.load(targets_ptr + row) - first
    inside = (column >= 0) & (column < vocabulary)
    z_y = tl.load(logits_ptr + column, mask=inside, other=0.0).to(tl.float32) * scale
    z_y -= tl.where(m == float("-inf"), 0.0, m)
    tl.store(found_ptr + row, m)
    tl.store(found_ptr + num_rows + row, tl.sum(lane_s, 0))
    tl.store(found_ptr + 2 * num_rows + row, tl.sum(lane_t, 0))
    tl.store(found_ptr + 3 * num_rows + row, tl.where(inside, z_y, 0.0))


@triton.jit
def _gradient(
    logits_ptr, targets_ptr, m_ptr, log_s_ptr, entropy_ptr, grad_logprobs_ptr, grad_entropy_ptr,
    stride, first, vocabulary, scale, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row of logits, in place."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += row.to(tl.int64) * stride
    grad_logprob = tl.load(grad_logprobs_ptr + row).to(tl.float32) * scale
    slope = -tl.load(grad_entropy_ptr + row).to(tl.float32) * scale
    offset = slope * tl.load(entropy_ptr + row).to(tl.float32) - grad_logprob
    z = tl.load(logits_ptr + columns, mask=columns < vocabulary, other=0.0).to(tl.float32) * scale
    log_p = tl.maximum(z - tl.load(m_ptr + row) - tl.load(log_s_ptr + row), _LOWEST_LOG_P)
    grad = tl.exp(log_p) * (slope * log_p + offset)
    grad += tl.where(columns == tl.load(targets_ptr + row) - first, grad_logprob, 0.0)
    tl.store(logits_ptr + columns, grad.to(logits_ptr.dtype.element_ty), mask=columns < vocabulary)


def _check(logits: torch.Tensor) -> None:
    if logits.dtype == torch.float64:
        raise ValueError(
            "the Triton log-prob kernels compute in float32; for float64 logits use"
            " kernels/logprobs_torch.py"
        )
    assert logits.stride(1) == 1 or logits.shape[1] == 1


def statistics(
    logits: torch.Tensor, targets: torch.Tensor, first: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As in logprobs_torch.py. Raises `ValueError` for float64 logits."""
    _check(logits)
    num_rows, vocabulary = logits.shape
    results = torch.empty(4, num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        _statistics[(num_rows,)](
            logits, targets.contiguous(), results, logits.stride(0), first, vocabulary, num_rows, 1.0 / temperature,
            **_LAUNCH,
        )  # fmt: skip
    m, s, t, z_y = results
    return m, s, t, z_y


def gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first: int,
    temperature: float,
    m: torch.Tensor,
    log_s: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor,
) -> None:
    """As in logprobs_torch.py. Raises `ValueError` for float64 logits."""
    _check(logits)
    num_rows, vocabulary = logits.shape
    if num_rows:
        # Upstream gradients of a sum arrive expanded, with stride 0.
        per_row = [
            x.contiguous() for x in (targets, m, log_s, entropy, grad_logprobs, grad_entropy)
        ]
        _gradient[(num_rows, triton.cdiv(vocabulary, BLOCK))](
            logits, *per_row, logits.stride(0), first, vocabulary, 1.0 / temperature, **_LAUNCH
        )
