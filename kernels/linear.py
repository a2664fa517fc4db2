"""Linear layers on CPU through oneDNN, up to twice as fast as BLAS on processors with AVX-512.

Other devices, dtypes, processors and torch builds use torch's own. With `use_bfloat16x2(True)` a
float32 factor x is the sum of two bfloat16 parts, high(x) = bfloat16(x) and low(x) = bfloat16(x -
high(x)), with an error of at most 2^-18 |x|. Their products are summed in float32, which AMX does
several times as fast:

    forward    high(a) high(b) + low(a) high(b) + high(a) low(b)
    gradients  high(a) high(b)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F


def _onednn() -> Any:
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
"""(x, weight, bias, "none", [], "") -> x weight^T + bias; None where it is not supported."""

_in_parts = False


def use_bfloat16x2(chosen: bool) -> None:
    """Whether this process splits float32 factors on CPU from now on; at first it does not. True
    raises `RuntimeError` without AVX-512 or oneDNN.
    """
    global _in_parts
    if chosen and ONEDNN is None:
        raise RuntimeError("bfloat16x2 needs a processor with AVX-512 and a torch with oneDNN")
    _in_parts = chosen


def part_bytes(width: int) -> int:
    """Bytes that `product` copies for each row of a factor of `width` columns: three float32 parts,
    or 0 where factors are not split.
    """
    return 12 * width if _in_parts else 0


def onednn_supports(x: torch.Tensor) -> bool:
    return (
        ONEDNN is not None and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0
    )


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which tensors of `dtype` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rounded(a: torch.Tensor) -> torch.Tensor:
    return a.bfloat16().float()


@contextlib.contextmanager
def _bfloat16_products() -> Iterator[None]:
    matmul = torch.backends.mkldnn.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _forward(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """a [..., K] times the transpose of b [N, K], plus bias [N], by oneDNN."""
    if not _in_parts:
        return ONEDNN(a, b, bias, "none", [], "")
    a_high, b_high = _rounded(a), _rounded(b)
    # One product over 3 K: the sums of all three stay in float32.
    a = torch.cat([a_high, _rounded(a - a_high), a_high], -1)
    b = torch.cat([b_high, b_high, _rounded(b - b_high)], -1)
    with _bfloat16_products():
        return ONEDNN(a, b, bias, "none", [], "")


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] times the transpose of b [N, K]; oneDNN records no gradients."""
    return _forward(a, b, None) if onednn_supports(a) else a @ b.T


def gradient_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`product` for gradients, whose split factors are rounded to bfloat16."""
    if not (_in_parts and onednn_supports(a)):
        return product(a, b)
    with _bfloat16_products():
        return ONEDNN(_rounded(a), _rounded(b), None, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return _forward(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        flat_grad, flat_x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = gradient_product(flat_grad, weight.T).view(x.shape) if needs_x else None
        grad_weight = gradient_product(flat_grad.T, flat_x.T) if needs_weight else None
        return grad_x, grad_weight, flat_grad.sum(0) if needs_bias else None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] weight [N, K]^T + bias [N], differentiable."""
    if not onednn_supports(x):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)
