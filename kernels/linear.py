"""Linear layers on CPU through oneDNN, up to twice as fast as BLAS on processors with AVX-512.

    x [..., K], weight [N, K], bias [N] or None  ->  x weight^T + bias [..., N]

float32 arithmetic by default. Other devices, dtypes, processors and torch builds use torch's own
linear layer.

`use_bfloat16x2(True)`: float32 tensors are multiplied as bfloat16 numbers whose products are summed
in float32, which processors with AMX do several times as fast. A factor x is the sum of two
bfloat16 parts, high(x) = bfloat16(x) and low(x) = bfloat16(x - high(x)), which leave an error of at
most 2^-18 |x|.

    forward    high(a) high(b) + low(a) high(b) + high(a) low(b)
    gradients  high(a) high(b)

Without AMX oneDNN computes the same sums in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
"""oneDNN's linear operator (x, weight, bias, "none", [], "") -> x weight^T + bias, or None where
torch or the processor does not support it."""

_in_parts = False


def use_bfloat16x2(chosen: bool) -> None:
    """Choose how this process multiplies float32 matrices on CPU from now on. False, the state
    before the first call: in float32. True: each factor is split into the sum of two bfloat16
    numbers, with a relative error of at most 2^-18, and their products are summed in float32. In
    backward passes each factor is rounded to one bfloat16 number. Processors with AMX do this
    several times as fast as float32. Raises `RuntimeError` for True where the processor lacks
    AVX-512 or torch lacks oneDNN.
    """
    global _in_parts
    if chosen and ONEDNN is None:
        raise RuntimeError("bfloat16x2 needs a processor with AVX-512 and a torch with oneDNN")
    _in_parts = chosen


def part_bytes(width: int) -> int:
    """Bytes of temporary memory for each row of the factors of `product`, to choose how many rows
    to multiply at once. `product(a, b)` multiplies a [M, K] and b [N, K], float32 on CPU; `width`
    is K.

    If this process splits factors (`use_bfloat16x2(True)`), every call of `product` copies all M
    rows of a and all N rows of b. Each copied row has 3 K float32 numbers, its bfloat16 parts side
    by side, so that the result is 12 K. The parts from which these rows are joined are not counted.
    If factors are not split, nothing is copied, and the result is 0.
    """
    return 12 * width if _in_parts else 0


def onednn_supports(x: torch.Tensor) -> bool:
    """Whether products with `x` are computed by oneDNN: `x` is float32 on CPU and not empty, and
    torch and the processor (AVX-512) support it.
    """
    return (
        ONEDNN is not None and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0
    )


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which tensors of `dtype` are summed: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rounded(a: torch.Tensor) -> torch.Tensor:
    """`a`, rounded to bfloat16, in float32."""
    return a.bfloat16().float()


@contextlib.contextmanager
def _bfloat16_products() -> Iterator[None]:
    """A context in which oneDNN may round the factors of float32 products to bfloat16."""
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
    """Matrix product of a [M, K] and the transpose of b [N, K], as [M, N]. It is computed by oneDNN
    where that supports a (`onednn_supports`), and by torch otherwise. oneDNN records no gradients,
    so call it inside an autograd function. If this process splits factors (`use_bfloat16x2`),
    oneDNN multiplies copies of a and b that hold their bfloat16 parts (`part_bytes`).
    """
    return _forward(a, b, None) if onednn_supports(a) else a @ b.T


def gradient_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Matrix product of a [M, K] and the transpose of b [N, K], as [M, N], for gradients. If this
    process splits factors (`use_bfloat16x2`) and oneDNN supports a, both factors are rounded to
    bfloat16 and not split, which is faster and less exact than `product`. Otherwise this is
    `product`.
    """
    if not (_in_parts and onednn_supports(a)):
        return product(a, b)
    with _bfloat16_products():
        return ONEDNN(_rounded(a), _rounded(b), None, "none", [], "")


class _Linear(torch.autograd.Function):
    """A linear layer through oneDNN, with its gradients."""

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
    """x weight^T + bias, as `torch.nn.functional.linear` computes it, by oneDNN where that supports
    `x` (float32 on CPU with AVX-512). x [..., K], weight [N, K], bias [N] -> [..., N];
    differentiable.
    """
    if not onednn_supports(x):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)
