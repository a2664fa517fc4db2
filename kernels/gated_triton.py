"""The activation of an MLP's gate times its other half, as one Triton kernel each way.

    gate [..., I], up [..., I]  ->  act(gate) * up [..., I]

transformers' own code is two operations, each of which reads and writes all states and rounds to
their dtype. The kernels compute in float32 and round once; backward computes the activation again.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Triton's type hints know neither launch options nor compile-time constants that are passed by value.

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import triton
import triton.language as tl

Activation = Literal["silu", "gelu_tanh", "gelu"]
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
"""{activation: its number in the kernels}"""
BLOCK = 1024
"""Columns of one row that a program computes."""
NUM_WARPS = 4
# A constant stands right of a tensor: Triton's interpreter cannot multiply in the other order.
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_SQRT_HALF_OVER_PI = tl.constexpr(math.sqrt(0.5 / math.pi))
_TWO_SQRT_2_OVER_PI = tl.constexpr(2 * math.sqrt(2 / math.pi))
_CUBIC = tl.constexpr(0.044715)
"""Coefficient of x^3 in the tanh form of GELU (arXiv:1606.08415, section 2)."""
_THREE_CUBIC = tl.constexpr(3 * 0.044715)


@triton.jit
def _activation(x, KIND: tl.constexpr):
    """(act(x), act'(x))."""
    if KIND == 0:
        s = tl.sigmoid(x)
        return x * s, s * (1 + x * (1 - s))
    if KIND == 1:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        s = tl.sigmoid(x * (x * x * _CUBIC + 1) * _TWO_SQRT_2_OVER_PI)
        slope = (x * x * _THREE_CUBIC + 1) * _TWO_SQRT_2_OVER_PI
        return x * s, s * (1 + x * (1 - s) * slope)
    p = 0.5 * (1 + tl.erf(x * _SQRT_HALF))
    density = tl.exp(-0.5 * x * x) * _SQRT_HALF_OVER_PI
    return x * p, p + x * density


@triton.jit
def _block(width, BLOCK: tl.constexpr):
    """(row, columns [BLOCK], which of them are below `width`) of this program."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(0).to(tl.int64), columns, columns < width


@triton.jit
def _numbers(ptr, inside):
    """What is stored at `ptr`, in float32; 0 where `inside` is false."""
    return tl.load(ptr, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _gated_forward(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, width,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row of act(gate) * up; `out` is contiguous."""
    row, columns, inside = _block(width, BLOCK)
    gate = _numbers(gate_ptr + row * gate_stride + columns, inside)
    up = _numbers(up_ptr + row * up_stride + columns, inside)
    value, _ = _activation(gate, KIND)
    out = (value * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + columns, out, mask=inside)


@triton.jit
def _gated_backward(
    gate_ptr, up_ptr, grad_ptr, grad_gate_ptr, grad_up_ptr, gate_stride, up_stride, width,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row of both gradients; `grad` and the gradients are contiguous."""
    row, columns, inside = _block(width, BLOCK)
    gate = _numbers(gate_ptr + row * gate_stride + columns, inside)
    up = _numbers(up_ptr + row * up_stride + columns, inside)
    grad = _numbers(grad_ptr + row * width + columns, inside)
    value, slope = _activation(gate, KIND)
    at = row * width + columns
    dtype = grad_gate_ptr.dtype.element_ty
    tl.store(grad_gate_ptr + at, (grad * up * slope).to(dtype), mask=inside)
    tl.store(grad_up_ptr + at, (grad * value).to(dtype), mask=inside)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., I] as [N, I] with contiguous columns; copied only where needed."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, kind: int) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        a, b = _rows(gate), _rows(up)
        if out.numel():
            _gated_forward[_grid(a)](
                a, b, out, a.stride(0), b.stride(0), a.shape[1],
                KIND=kind, BLOCK=BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = (
            torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2)
        )
        a, b = _rows(gate), _rows(up)
        if grad.numel():
            _gated_backward[_grid(a)](
                a, b, grad.contiguous(), grad_gate, grad_up, a.stride(0), b.stride(0), a.shape[1],
                KIND=ctx.kind, BLOCK=BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip
        return grad_gate, grad_up, None


def _grid(rows: torch.Tensor) -> tuple[int, int]:
    return rows.shape[0], triton.cdiv(rows.shape[1], BLOCK)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """`gate` and `up` have one shape and dtype (float32 or 16 bit), as the result. Differentiable
    in both. Raises `ValueError` for float64.
    """
    if gate.dtype == torch.float64:
        raise ValueError("the Triton kernels of gated activations compute in float32, not float64")
    assert gate.shape == up.shape and gate.dtype == up.dtype
    return _Gated.apply(gate, up, ACTIVATIONS[activation])
