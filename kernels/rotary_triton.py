"""Rotary position embedding as one Triton kernel for queries or keys, each way.

    x [B, H, T, D], cos [B, T, R], sin [B, T, R]  ->  [B, H, T, D]

The first R columns of each head are rotated in pairs (j, j + R/2), as transformers does it
(`rotate_half`; RoFormer, arXiv:2104.09864, with another order of columns); the others are copied:

    y[j]       = x[j] cos[j] - x[j + R/2] sin[j]
    y[j + R/2] = x[j + R/2] cos[j + R/2] + x[j] sin[j + R/2]

The kernel computes in float32 and rounds once, where transformers rounds after each of five
operations.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's type hints know neither launch options nor compile-time constants that are passed by value.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

HEADS = 16
"""Heads of one token that a program rotates."""
NUM_WARPS = 4


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr,
    x_batch, x_head, x_token, out_batch, out_head, out_token, row_batch, row_token,
    tokens, heads, half, rest,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of one token; with BACKWARD by the transposed matrix. `rest`: columns that
    are copied.
    """
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // tokens, token % tokens
    # 64 bits: in a long sequence a head may begin beyond 2^31 numbers.
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    column = tl.arange(0, HALF)
    row = batch * row_batch + position * row_token + column
    valid = column < half
    cos_1 = tl.load(cos_ptr + row, mask=valid, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos_ptr + row + half, mask=valid, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin_ptr + row, mask=valid, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin_ptr + row + half, mask=valid, other=0.0).to(tl.float32)[None, :]
    x_ptr += batch * x_batch + position * x_token
    out_ptr += batch * out_batch + position * out_token
    inside = (head < heads)[:, None] & valid[None, :]
    at = head[:, None] * x_head + column[None, :]
    x_1 = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x_2 = tl.load(x_ptr + at + half, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        y_1 = x_1 * cos_1 + x_2 * sin_2
        y_2 = x_2 * cos_2 - x_1 * sin_1
    else:
        y_1 = x_1 * cos_1 - x_2 * sin_1
        y_2 = x_2 * cos_2 + x_1 * sin_2
    to = head[:, None] * out_head + column[None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + to, y_1.to(dtype), mask=inside)
    tl.store(out_ptr + to + half, y_2.to(dtype), mask=inside)
    if REST > 0:
        more = tl.arange(0, REST)
        inside = (head < heads)[:, None] & (more < rest)[None, :]
        at = head[:, None] * x_head + 2 * half + more[None, :]
        to = head[:, None] * out_head + 2 * half + more[None, :]
        tl.store(out_ptr + to, tl.load(x_ptr + at, mask=inside, other=0.0), mask=inside)


def _rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, backward: bool
) -> torch.Tensor:
    batch, heads, tokens, width = x.shape
    half = cos.shape[-1] // 2
    if x.stride(3) != 1:
        x = x.contiguous()
    # [B, T, H, D] in memory, as the projections that come before and the attention after have it.
    out = torch.empty(batch, tokens, heads, width, dtype=x.dtype, device=x.device).transpose(1, 2)
    if x.numel():
        rest = width - 2 * half
        _rotate[(batch * tokens, triton.cdiv(heads, HEADS))](
            x, cos, sin, out,
            x.stride(0), x.stride(1), x.stride(2), out.stride(0), out.stride(1), out.stride(2),
            cos.stride(0), cos.stride(1), tokens, heads, half, rest,
            HEADS=HEADS, HALF=triton.next_power_of_2(half),
            REST=triton.next_power_of_2(rest) if rest else 0,
            BACKWARD=backward, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, backward=False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _rotated(grad, *ctx.saved_tensors, backward=True), None, None


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, H, T, D] float32 or 16 bit, `cos` and `sin` [B or 1, T, R], R even and at most D.
    Gradients reach x alone. Raises `ValueError` for float64.
    """
    if x.dtype == torch.float64:
        raise ValueError("the Triton kernel of rotary embeddings computes in float32, not float64")
    batch, _, tokens, width = x.shape
    cos, sin = (factor.expand(batch, tokens, -1).contiguous() for factor in (cos, sin))
    assert cos.shape == sin.shape and cos.shape[-1] % 2 == 0 and cos.shape[-1] <= width
    return _Rotary.apply(x, cos, sin)
