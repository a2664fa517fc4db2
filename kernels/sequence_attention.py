"""Attention over a packed sequence whose tokens are split over ranks (context parallelism).

    q [L, Hq, D], k and v [L, Hkv, D] of this rank's tokens  ->  out [L, Hq, D]

Within a Ulysses group (`inner`), ranks exchange tokens for heads. Between groups (`outer`), keys
and values travel by one of `kv_transports.TRANSPORTS`, and each arriving block is merged by its
log-sum-exp:

    ring             inner 1             transport ring or ring_lean
    all-gather       inner 1             transport all_gather
    Ulysses          inner all ranks     (outer 1)
    Ulysses x ring   both above 1

Every rank knows all ranks' positions. Ranks may have any tokens, in any number.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from megarl.kernels.attention_plan import AttentionPlan
from megarl.kernels.kv_transports import (
    TRANSPORTS,
    AttentionCall,
    BackwardSums,
    Exchange,
    ForwardSums,
)
from megarl.kernels.linear import accumulator
from megarl.kernels.ulysses import HeadsToTokens, TokensToHeads, needed_heads


class _OverTokens(torch.autograd.Function):
    """Attention of this group's queries to the keys of all groups; heads are independent.

    A sink [Hq] is one more key with a score of its own and the value 0. With z the log-sum-exp over
    all keys, and p = e^(sink - z') that of the sink,

        z' = log(e^z + e^sink)    out' = out e^(z - z')    grad sink = -sum p rowsum(grad out')

    and with z' and out' the blocks' gradients are right as they are.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, call: AttentionCall):
        dtype = accumulator(q.dtype)
        out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=dtype, device=q.device)
        call.transport.forward(call, torch.stack((k, v), 1), ForwardSums(q, out, lse))
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(dtype)[:, None])
            out.mul_((lse - total).exp_().T[:, :, None])
            lse = total
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        grad_q = torch.zeros(q.shape, dtype=accumulator(q.dtype), device=q.device)
        sums = BackwardSums(grad_out.contiguous(), q, out, lse, grad_q)
        grad_kv = ctx.call.transport.backward(ctx.call, torch.stack((k, v), 1), sums).to(k.dtype)
        grad_sinks = None
        if sinks is not None:
            delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1).T
            grad_sinks = -((sinks.to(lse.dtype)[:, None] - lse).exp_() * delta).sum(1)
            grad_sinks = grad_sinks.to(sinks.dtype)
        return grad_q.to(q.dtype), grad_kv[:, 0], grad_kv[:, 1], grad_sinks, None


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    plan: AttentionPlan,
    inner: Exchange,
    outer: Exchange,
) -> None:
    if inner.size != plan.ulysses or inner.size * outer.size != len(plan.lengths):
        raise ValueError(
            f"the plan is for {len(plan.lengths)} sequence ranks in Ulysses groups of"
            f" {plan.ulysses}, but the exchanges have {outer.size} groups of {inner.size}"
        )
    expected = plan.lengths[outer.rank * inner.size + inner.rank]
    if (
        q.shape[0] != expected
        or k.shape != v.shape
        or (k.shape[0], k.shape[2]) != (q.shape[0], q.shape[2])
    ):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not match; this"
            f" rank has {expected} tokens in the plan"
        )
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks {tuple(sinks.shape)} for {q.shape[1]} query heads; give one each")
    query_heads, kv_heads, degree = q.shape[1], k.shape[1], inner.size
    if query_heads % kv_heads:
        raise ValueError(f"{kv_heads} KV heads do not divide {query_heads} query heads")
    if query_heads % degree or (kv_heads % degree and degree % kv_heads):
        fitting = [
            n
            for n in range(1, query_heads + 1)
            if query_heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
        ]
        raise ValueError(
            f"Ulysses groups of {degree} cannot share {query_heads} query heads and {kv_heads} KV"
            f" heads; set the Ulysses degree to one of {', '.join(map(str, fitting))} and leave the"
            " rest to the ring"
        )


def sequence_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    inner: Exchange,
    outer: Exchange,
    scale: float,
    transport: str,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of this rank's queries to earlier tokens of their documents and of the
    shared prefixes that these continue. Returns [L, Hq, D] in the dtype of q; differentiable once.

    Collective, forward and backward, also on ranks without tokens, whose loss must depend on the
    output.

    Args:
        q, k, v: [L, Hq, D] and twice [L, Hkv, D], in the order of `plan`.
        plan: this rank is number `outer.rank * inner.size + inner.rank` of it.
        inner: exchange of tokens for heads with the ranks of this Ulysses group.
        outer: exchange of keys and values with the ranks of the same number in other groups.
        scale: factor of the scores before the softmax.
        transport: a name in `TRANSPORTS`.
        cap: soft cap; a scaled score s becomes cap tanh(s / cap). None for none.
        sinks: [Hq] scores of attention sinks, not scaled or capped. None for none.

    Raises:
        ValueError: the block kernel lacks the cap, dtype or head width, or arguments do not match.
    """
    if transport not in TRANSPORTS:
        raise ValueError(
            f"no attention transport is called {transport!r}; set one of {', '.join(TRANSPORTS)}"
        )
    _check(q, k, v, sinks, plan, inner, outer)
    call = AttentionCall(plan, inner, outer, scale, TRANSPORTS[transport], cap)
    if inner.size == 1:
        return _OverTokens.apply(q, k, v, sinks, call)
    if sinks is not None:
        sinks = sinks[needed_heads(len(sinks), inner.size, inner.rank)]
    out = _OverTokens.apply(*TokensToHeads.apply(q, k, v, call), sinks, call)
    return HeadsToTokens.apply(out, call)
