"""Matrix products of linear layers on CPU through oneDNN, which on processors with AVX-512 can be
twice as fast as BLAS.

    x [..., K], weight [N, K], bias [N] or None  ->  x weight^T + bias [..., N]

float32 in, float32 arithmetic, float32 out: only the library differs. Elsewhere (GPU, other dtypes,
another build of torch) the functions fall back to torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def _onednn() -> Any:
    """oneDNN's linear operator, or None where this torch or this processor has no use for it."""
    if (
        not torch.backends.mkldnn.is_available()
        or "AVX512" not in torch.backends.cpu.get_cpu_capability()
    ):
        return None
    try:
        return torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:
        return None


ONEDNN = _onednn()


def serves(x: torch.Tensor) -> bool:
    """Whether oneDNN takes this input."""
    return (
        ONEDNN is not None and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0
    )


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] times the transpose of b [N, K], without gradients."""
    if not serves(a):
        return a @ b.T
    return ONEDNN(a, b, None, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return ONEDNN(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        flat_grad, flat_x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = product(flat_grad, weight.T).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_weight = product(flat_grad.T, flat_x.T) if ctx.needs_input_grad[1] else None
        grad_bias = flat_grad.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`, by whichever library is faster here."""
    if not serves(x):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)
