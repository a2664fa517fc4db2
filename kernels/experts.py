"""Products of a layer's experts: rows sorted by expert, and one weight for each expert.

`torch._grouped_mm` multiplies 16-bit rows on GPUs in one kernel. Everything else multiplies one
expert after the other, on CPUs by oneDNN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.kernels.linear import gradient_product, product


class _ExpertLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        out = x.new_empty(len(x), weight.shape[1])
        parts = zip(x.split(counts), weight, out.split(counts), strict=True)
        for rows, matrix, target in parts:
            if len(rows):
                target.copy_(product(rows, matrix))
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        first = 0
        for expert, count in enumerate(ctx.counts):
            rows = slice(first, first + count)
            first += count
            if count and grad_x is not None:
                grad_x[rows] = gradient_product(grad[rows], weight[expert].T)
            if count and grad_weight is not None:
                grad_weight[expert] = gradient_product(grad[rows].T, x[rows].T)
        return grad_x, grad_weight, None


def expert_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    counts: Sequence[int],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows x [S, K], of which the first counts[0] are expert 0's, times weight [E, N, K] of each
    row's expert, plus bias [E, N]: [S, N]. Differentiable.
    """
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        ends = torch.tensor(counts, device=x.device).cumsum(0, dtype=torch.int32)
        out = torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    else:
        out = _ExpertLinear.apply(x, weight, list(counts))
    if bias is None:
        return out
    sizes = torch.tensor(counts, device=x.device)
    return out + bias.repeat_interleave(sizes, dim=0, output_size=len(x))
