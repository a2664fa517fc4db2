"""MLPs of a layer's experts, on rows that are sorted by expert, with one weight for each expert.

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
CHUNKS = {"cpu": 1024, "cuda": 16384}
"""{device type: rows at a time of sums that need copies}; those of a CPU stay in its cache."""


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
    """The products of a backend. Those of "loop" take the rows of one expert."""
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
    """Which rows of which experts are computed, and how."""

    counts: Sequence[int]
    """Rows of each expert."""
    gate: Callable[[torch.Tensor], torch.Tensor]
    """[S, 2 I] -> [S, I], each row for itself; without parameters."""
    backend: Backend
    tokens: torch.Tensor | None = None
    """[S] the token of each row, if x has tokens; None: x has the rows."""
    order: torch.Tensor | None = None
    """[T, K] with `tokens`: the rows of each token; S for none."""

    def calls(self) -> Iterator[tuple[slice, slice, Sequence[int]]]:
        """(experts, their rows, rows by expert) of each call of the products: one for each expert
        with rows under "loop", else one for all.
        """
        if self.backend != "loop":
            yield slice(None), slice(None), self.counts
            return
        first = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield slice(expert, expert + 1), slice(first, first + count), [count]
            first += count

    def output(self, like: torch.Tensor, *shape: int) -> torch.Tensor | None:
        """An empty tensor for the results of several calls; None if there is one call."""
        return like.new_empty(shape) if self.backend == "loop" else None

    def take(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        return x[rows] if self.tokens is None else x[self.tokens[rows]]


def _put(out: torch.Tensor | None, at: slice, values: torch.Tensor) -> torch.Tensor:
    """`out` after `out[at] = values`; without an `out`, `values` are the whole result."""
    if out is None:
        return values
    out[at] = values
    return out


def _add_bias(rows: torch.Tensor, bias: torch.Tensor | None, counts: Sequence[int]) -> torch.Tensor:
    if bias is not None:
        for expert_rows, addend in zip(rows.split(counts), bias, strict=True):
            expert_rows.add_(addend)
    return rows


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, gate_up, gate_up_bias, down, down_bias, work: ExpertRows):
        times, gates = products(work.backend).rows, []
        out = work.output(x, sum(work.counts), down.shape[1])
        for experts, rows, counts in work.calls():
            biases = [b if b is None else b[experts] for b in (gate_up_bias, down_bias)]
            upper = times(work.take(x, rows), gate_up[experts], counts)
            gates.append(_add_bias(upper, biases[0], counts))
            lower = times(work.gate(upper), down[experts], counts)
            out = _put(out, rows, _add_bias(lower, biases[1], counts))
        ctx.save_for_backward(x, gate_up, gate_up_bias, down, down_bias, *gates)
        ctx.work = work
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        (grad,), work, needed = grads, ctx.work, ctx.needs_input_grad
        x, *saved = ctx.saved_tensors  # once: gradient checkpointing computes them again
        weights, gates = saved[:4], saved[4:]
        _, times, sums = products(work.backend)
        grad_x = work.output(x, len(grad), x.shape[1])
        gradients = [
            work.output(x, *weight.shape) if is_needed else None
            for weight, is_needed in zip(weights, needed[1:5], strict=True)
        ]

        def put(index: int, experts: slice, counts: Sequence[int], grad: Any, inputs: Any) -> None:
            """Set the gradients of weight `index` and its bias, `index` + 1, for `experts`: from
            the gradient [S, N] of the product's rows and from its `inputs` [S, K].
            """
            if needed[1 + index]:
                gradients[index] = _put(gradients[index], experts, sums(grad, inputs, counts))
            if needed[2 + index]:
                bias = torch.stack([rows.sum(0) for rows in grad.split(counts)])
                gradients[index + 1] = _put(gradients[index + 1], experts, bias)

        for (experts, rows, counts), gate in zip(work.calls(), gates, strict=True):
            upper = gate.detach().requires_grad_()
            with torch.enable_grad():
                inner = work.gate(upper)
            grad_out = grad[rows].contiguous()
            put(2, experts, counts, grad_out, inner.detach())
            grad_inner = times(grad_out, weights[2][experts].transpose(-2, -1), counts)
            (grad_upper,) = torch.autograd.grad(inner, upper, grad_inner)
            put(0, experts, counts, grad_upper, work.take(x, rows))
            if needed[0]:
                grad_rows = times(grad_upper, weights[0][experts].transpose(-2, -1), counts)
                grad_x = _put(grad_x, rows, grad_rows)
        if needed[0] and work.order is not None:
            grad_x = _token_sums(grad_x, work.order)
        unused = [expert for expert, count in enumerate(work.counts) if not count]
        for gradient in gradients:
            if gradient is not None:
                gradient[unused] = 0
        return grad_x, *gradients, None


def expert_mlp(
    x: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor | None],
    down: tuple[torch.Tensor, torch.Tensor | None],
    work: ExpertRows,
) -> torch.Tensor:
    """Rows x [S, H], of which the first work.counts[0] are expert 0's, or tokens x [T, H], through
    their experts: [S, H]. `gate_up` and `down`: (weight, bias or None). Differentiable.
    """
    return _ExpertMlp.apply(x, *gate_up, *down, work)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, tokens, order):
        ctx.save_for_backward(order)
        return x[tokens]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return _token_sums(grads[0].contiguous(), *ctx.saved_tensors), None, None


def take_rows(x: torch.Tensor, tokens: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """x [T, H] -> x[tokens] [S, H]. `order` [T, K]: the rows of each token, S for none.
    Differentiable.
    """
    return _Take.apply(x, tokens, order)


def _token_sums(
    rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The sums [T, H] of each token's rows, times `weights` [T, K], in the order of K. Without
    weights in the rows' dtype.
    """
    if len(rows) < order.numel():  # row S is 0
        rows = F.pad(rows, (0, 0, 0, 1))
    if accumulator(rows.dtype) == rows.dtype:  # in one pass, not in 16 bit
        return F.embedding_bag(order, rows, mode="sum", per_sample_weights=weights)
    out = torch.zeros(len(order), rows.shape[1], dtype=torch.float32, device=rows.device)
    for number, index in enumerate(order.T):
        addend = rows[index].float()
        out += addend if weights is None else addend * weights[:, number, None]
    return out.to(rows.dtype) if weights is None else out


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows, weights, pairs, order):
        ctx.save_for_backward(rows, weights, pairs)
        return _token_sums(rows, order, weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        (grad,), (rows, weights, pairs) = grads, ctx.saved_tensors
        grad_rows, grad_weights = torch.empty_like(rows), torch.zeros_like(weights)
        size = CHUNKS[rows.device.type]
        chunks = (x.split(size) for x in (pairs, rows, grad_rows))
        for index, outputs, target in zip(*chunks, strict=True):
            token_grads = grad[index // weights.shape[1]]
            grad_weights.view(-1)[index] = (token_grads * outputs).sum(-1)
            target.copy_(token_grads.mul_(weights.view(-1)[index, None]))
        return grad_rows, grad_weights, None, None


def weighted_sum(
    rows: torch.Tensor, weights: torch.Tensor, pairs: torch.Tensor, order: torch.Tensor
) -> torch.Tensor:
    """The sums [T, H] of each token's rows, times `weights` [T, K], in the order of K; at least
    float32. `pairs` [S]: where in T x K each row is. `order` as in `take_rows`. Differentiable.
    """
    weights = weights.to(accumulator(rows.dtype)).contiguous()
    return _WeightedSum.apply(rows, weights, pairs, order)
