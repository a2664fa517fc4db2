"""Block attention by one dense score matrix, with which tests compare fast blocks. float64 inputs
are computed in float64, all others in float32.
"""

from __future__ import annotations

import torch

from megarl.kernels.block import Positions
from megarl.kernels.dense import soft_cap, through_cap


def visible(queries: Positions, keys: Positions, window: int | None = None) -> torch.Tensor:
    """[Lq, Lk] bool on the CPU: whether each query attends to each key, `window` as in
    `Positions.views`.
    """
    index, seen = keys.index[None], torch.zeros(len(queries.index), len(keys.index)).bool()
    for view in queries.views(window):
        seen |= (view.first[:, None] <= index) & (index <= view.index[:, None])
    return seen


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: Positions,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention within each document of a packed sequence, by one dense softmax;
    differentiable by autograd.

    q [L, Hq, D], k and v [L, Hkv, D] -> [L, Hq, D] in their dtype. `window`: as in
    `Positions.views`. `cap`: a scaled score s becomes cap tanh(s / cap). `sinks` [Hq]: score of one
    more key with the value 0.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = soft_cap(torch.einsum("qhd,khd->hqk", q, k) * scale, cap)
    mask = visible(positions, positions, window).to(q.device)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, sink.to(scores.dtype)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


class ReferenceBlock:
    """`Block` by a dense score matrix; its work list is the mask [Lq, Lk] bool."""

    def prepare(
        self, queries: Positions, keys: Positions, device: torch.device
    ) -> torch.Tensor | None:
        mask = visible(queries, keys)
        return mask.to(device) if bool(mask.any()) else None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        work: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
        cap: float | None = None,
    ) -> None:
        q, k, v = _upcast(q, k, v, out.dtype)
        scores = _scores(q, k, work, scale, cap)
        block_lse = scores.logsumexp(-1)
        total = torch.logaddexp(lse, block_lse)
        # Rows without visible keys are -inf on both sides, and -inf - -inf is NaN.
        finite = total.masked_fill(total == -torch.inf, 0.0)
        block_out = torch.einsum("hqk,khd->qhd", (scores - finite[:, :, None]).exp(), v)
        out.mul_((lse - finite).exp().T[:, :, None]).add_(block_out)
        lse.copy_(total)

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        work: torch.Tensor,
        scale: float,
        grad_q: torch.Tensor,
        grad_k: torch.Tensor,
        grad_v: torch.Tensor,
        cap: float | None = None,
    ) -> None:
        num_kv = k.shape[1]
        q, k, v = _upcast(q, k, v, grad_q.dtype)
        grad_out, out = grad_out.to(q.dtype), out.to(q.dtype)
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        scores = _scores(q, k, work, scale, cap)
        p = (scores - finite[:, :, None]).exp()
        delta = (grad_out * out).sum(-1).T
        grad_p = torch.einsum("qhd,khd->hqk", grad_out, v)
        grad_scores = through_cap(p * (grad_p - delta[:, :, None]), scores, cap, ~work) * scale
        grad_q += torch.einsum("hqk,khd->qhd", grad_scores, k)
        grad_k += _sum_heads(torch.einsum("hqk,qhd->khd", grad_scores, q), num_kv)
        grad_v += _sum_heads(torch.einsum("hqk,qhd->khd", p, grad_out), num_kv)


def _upcast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v in `dtype`, with k and v repeated to the number of query heads."""
    group = q.shape[1] // k.shape[1]
    return (
        q.to(dtype),
        k.to(dtype).repeat_interleave(group, dim=1),
        v.to(dtype).repeat_interleave(group, dim=1),
    )


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, scale: float, cap: float | None
) -> torch.Tensor:
    """[Hq, Lq, Lk], -inf where `mask` [Lq, Lk] is False."""
    return soft_cap(torch.einsum("qhd,khd->hqk", q, k) * scale, cap).masked_fill(~mask, -torch.inf)


def _sum_heads(grad: torch.Tensor, num_kv: int) -> torch.Tensor:
    """[Lk, Hq, D] -> [Lk, Hkv, D], the sum over each group of query heads."""
    return grad.unflatten(1, (num_kv, -1)).sum(2)
