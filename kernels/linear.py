"""Linear layers on CPU through oneDNN, up to twice as fast as BLAS on processors with AVX-512.

    x [..., K], weight [N, K], bias [N] or None  ->  x weight^T + bias [..., N]

float32 arithmetic either way. Other devices, dtypes, processors and torch builds use torch's own
linear layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def _onednn() -> Any:
    """oneDNN's linear operator, or None where torch or the processor does not support it."""
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
"""oneDNN's linear operator, or None where it is not supported."""


def onednn_supports(x: torch.Tensor) -> bool:
    """Whether oneDNN computes with this tensor: float32 on CPU, not empty."""
    return (
        ONEDNN is not None and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0
    )


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] times the transpose of b [N, K], [M, N]; without gradients."""
    if not onednn_supports(a):
        return a @ b.T
    return ONEDNN(a, b, None, "none", [], "")


class _Linear(torch.autograd.Function):
    """A linear layer through oneDNN, with its gradients."""

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
    """`torch.nn.functional.linear`, through oneDNN where that supports `x`."""
    if not onednn_supports(x):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)
