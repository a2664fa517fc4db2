"""The MLPs of a layer's experts, on rows that are sorted by expert, with one weight for each expert.

    rows [S, H]  --gate_up [E, 2 I, H]-->  [S, 2 I]  --gate-->  [S, I]  --down [E, H, I]-->  [S, H]

Of the two products in between only the first is kept for the backward pass, which computes the gate
again. Backends:

    loop      one expert after the other, on CPUs by oneDNN: the gate finds its rows in the cache
    grouped   torch._grouped_mm, one kernel for all experts
    triton    one Triton kernel for all experts; float32 too
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from megarl.kernels.linear import accumulator, gradient_product, product

Backend = Literal["loop", "grouped", "triton"]


class Products(NamedTuple):
    """Matrix products of rows that are sorted by expert; `counts` are rows by expert."""

    rows: Callable[[torch.Tensor, torch.Tensor, Sequence[int]], torch.Tensor]
    """a [S, K] times the transpose of each row's weight [E, N, K]: [S, N]"""
    row_gradients: Callable[[torch.Tensor, torch.Tensor, Sequence[int]], torch.Tensor]
    """The same for gradients."""
    weight_gradients: Callable[[torch.Tensor, torch.Tensor, Sequence[int]], torch.Tensor]
    """The transpose of a [S, N] times b [S, K], summed by expert: [E, N, K]"""


def _ends(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)


def _grouped_rows(a: torch.Tensor, weight: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    return torch._grouped_mm(a, weight.transpose(-2, -1), offs=_ends(counts, a.device))


def _grouped_weights(a: torch.Tensor, b: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    return torch._grouped_mm(a.T, b, offs=_ends(counts, a.device))


def products(backend: Backend) -> Products:
    """Those of "loop" take one expert at a time."""
    if backend == "loop":
        return Products(
            lambda a, weight, _: product(a, weight[0]),
            lambda a, weight, _: gradient_product(a, weight[0]),
            lambda a, b, _: gradient_product(a.T, b.T)[None],
        )
    if backend == "grouped":
        return Products(_grouped_rows, _grouped_rows, _grouped_weights)
    from megarl.kernels.experts_triton import grouped_rows, grouped_weights  # needs triton

    return Products(grouped_rows, grouped_rows, grouped_weights)


def fitting_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """The fastest backend that can run there."""
    if device.type != "cuda":
        return "loop"
    is_16_bit = dtype in (torch.bfloat16, torch.float16)
    is_new = torch.cuda.get_device_capability(device) >= (8, 0)
    return "grouped" if is_16_bit and is_new else "triton"


@dataclass(frozen=True)
class ExpertRows:
    """How the rows of a layer are computed."""

    counts: Sequence[int]
    """Rows of each expert."""
    gate: Callable[[torch.Tensor], torch.Tensor]
    """[S, 2 I] -> [S, I], each row for itself; without parameters."""
    backend: Backend

    def parts(self) -> Iterator[tuple[slice, slice, Sequence[int]]]:
        """(experts, their rows, rows by expert) of what is computed at once."""
        if self.backend != "loop":
            yield slice(None), slice(None), self.counts
            return
        first = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield slice(expert, expert + 1), slice(first, first + count), [count]
            first += count


def _add_bias(rows: torch.Tensor, bias: torch.Tensor | None, counts: Sequence[int]) -> torch.Tensor:
    if bias is not None:
        for part, addend in zip(rows.split(counts), bias, strict=True):
            part.add_(addend)
    return rows


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, gate_up, gate_up_bias, down, down_bias, work: ExpertRows):
        times = products(work.backend).rows
        gates = x.new_empty(len(x), gate_up.shape[1])
        out = x.new_empty(len(x), down.shape[1])
        for experts, rows, counts in work.parts():
            one, two = (b if b is None else b[experts] for b in (gate_up_bias, down_bias))
            gates[rows] = part = _add_bias(times(x[rows], gate_up[experts], counts), one, counts)
            out[rows] = _add_bias(times(work.gate(part), down[experts], counts), two, counts)
        ctx.save_for_backward(x, gates, gate_up, gate_up_bias, down, down_bias)
        ctx.work = work
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        (grad,), work = grads, ctx.work
        x, gates, *weights = ctx.saved_tensors
        gate_up, _, down, _ = weights
        _, times, sums = products(work.backend)
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weights = [
            torch.zeros_like(weight) if needed else None
            for weight, needed in zip(weights, ctx.needs_input_grad[1:5], strict=True)
        ]

        def add_weights(number: int, experts, counts, grad, values) -> None:
            weight, bias = grad_weights[number : number + 2]
            if weight is not None:
                weight[experts] = sums(grad, values, counts)
            if bias is not None:
                bias[experts] = torch.stack([part.sum(0) for part in grad.split(counts)])

        for experts, rows, counts in work.parts():
            part = gates[rows].requires_grad_()
            with torch.enable_grad():
                inner = work.gate(part)
            upper = grad[rows].contiguous()
            add_weights(2, experts, counts, upper, inner.detach())
            lower = times(upper, down[experts].transpose(-2, -1), counts)
            (lower,) = torch.autograd.grad(inner, part, lower)
            add_weights(0, experts, counts, lower, x[rows])
            if grad_x is not None:
                grad_x[rows] = times(lower, gate_up[experts].transpose(-2, -1), counts)
        return grad_x, *grad_weights, None


def expert_mlp(
    x: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor | None],
    down: tuple[torch.Tensor, torch.Tensor | None],
    work: ExpertRows,
) -> torch.Tensor:
    """Rows x [S, H], of which the first work.counts[0] are expert 0's, through their experts:
    [S, H]. `gate_up` and `down`: (weight, bias or None). Differentiable.
    """
    return _ExpertMlp.apply(x, *gate_up, *down, work)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, order, tokens):
        ctx.save_for_backward(order)
        return x[tokens]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        (order,) = ctx.saved_tensors
        rows = _with_zeros(grads[0].contiguous(), order)
        return _sums(rows, order, None).to(rows.dtype), None, None


def take_rows(x: torch.Tensor, order: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """x [T, H] -> x[tokens] [S, H]. `order` [T, K]: the rows of each token, S for none.
    Differentiable.
    """
    return _Take.apply(x, order, tokens)


def _with_zeros(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """`rows` [S, H], with a row S of zeros where `order` may have it."""
    return rows if len(rows) == order.numel() else F.pad(rows, (0, 0, 0, 1))


def _sums(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """The sums [T, H] of rows[order], times `weights` [T, K]; at least float32."""
    if rows.dtype in (torch.float32, torch.float64):  # at once, which torch has not in 16 bit
        return F.embedding_bag(order, rows, mode="sum", per_sample_weights=weights)
    out = torch.zeros(len(order), rows.shape[1], dtype=torch.float32, device=rows.device)
    for number, index in enumerate(order.T):
        addend = rows[index].float()
        out.add_(addend if weights is None else addend * weights[:, number, None])
    return out


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows, order, weights):
        ctx.save_for_backward(rows, order, weights)
        return _sums(rows, order, weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        (grad,) = grads
        rows, order, weights = ctx.saved_tensors
        grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
        for number, index in enumerate(order.T):
            grad_rows[index] = (grad * weights[:, number, None]).to(rows.dtype)
            grad_weights[:, number] = (grad * rows[index]).sum(-1)
        return grad_rows, None, grad_weights


def weighted_sum(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sums [T, H] of each token's rows, times `weights` [T, K], in the order of K; at least
    float32. `order` as in `take_rows`. Differentiable.
    """
    rows, weights = _with_zeros(rows, order), weights.to(accumulator(rows.dtype))
    return _WeightedSum.apply(rows, order, weights)
