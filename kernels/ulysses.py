"""Ulysses (arXiv:2309.14509): all-to-alls from all heads of a rank's own tokens to some heads of
all tokens of its group, and back.
"""

from __future__ import annotations

import torch

from megarl.kernels.kv_transports import AttentionCall
from megarl.kernels.linear import accumulator


def _inner_lengths(call: AttentionCall) -> list[int]:
    """Tokens of each rank of this Ulysses group."""
    first = call.outer.rank * call.inner.size
    return call.plan.lengths[first : first + call.inner.size]


def _tokens_to_heads(x: list[torch.Tensor], call: AttentionCall) -> torch.Tensor:
    """x: by inner rank, the heads it needs of this rank's tokens, [L, H', D] each. Returns the
    group's tokens with this rank's heads, [sum of L, H', D].
    """
    shapes = [(length, *x[0].shape[1:]) for length in _inner_lengths(call)]
    return torch.cat(call.inner.all_to_all([rows.contiguous() for rows in x], shapes))


def _heads_to_tokens(x: torch.Tensor, call: AttentionCall) -> list[torch.Tensor]:
    """The inverse of `_tokens_to_heads`."""
    lengths = _inner_lengths(call)
    shape = (lengths[call.inner.rank], *x.shape[1:])
    return call.inner.all_to_all(list(x.contiguous().split(lengths)), [shape] * call.inner.size)


def needed_heads(num_heads: int, size: int, rank: int) -> slice:
    """Heads that a rank of a Ulysses group computes. `num_heads` or `size` must divide the other;
    with fewer heads than ranks, several ranks compute the same.
    """
    first = rank * num_heads // size
    return slice(first, first + max(1, num_heads // size))


class TokensToHeads(torch.autograd.Function):
    """q, k and v [L, H, D] of this rank's tokens -> [sum of L, H / ranks (at least 1), D].
    Collective in the group.
    """

    @staticmethod
    def forward(ctx, q, k, v, call: AttentionCall):
        size = call.inner.size
        parts = [
            torch.cat([x[:, needed_heads(x.shape[1], size, rank)] for x in (q, k, v)], 1)
            for rank in range(size)
        ]
        own_heads = _tokens_to_heads(parts, call)
        heads = [x.shape[1] for x in (q, k, v)]
        ctx.call, ctx.heads, ctx.dtype = call, heads, q.dtype
        return own_heads.split([max(1, count // size) for count in heads], 1)

    @staticmethod
    def backward(ctx, *grads):
        size = ctx.call.inner.size
        # Ranks that share a KV head sum its gradient, which 16 bit would round.
        dtype = accumulator(ctx.dtype) if ctx.heads[1] % size else ctx.dtype
        parts = _heads_to_tokens(torch.cat([grad.to(dtype) for grad in grads], 1), ctx.call)
        sums = [
            parts[0].new_zeros((parts[0].shape[0], count, parts[0].shape[2])) for count in ctx.heads
        ]
        for rank, share in enumerate(parts):
            for total, grad in zip(
                sums, share.split([max(1, count // size) for count in ctx.heads], 1), strict=True
            ):
                total[:, needed_heads(total.shape[1], size, rank)] += grad
        return *(total.to(ctx.dtype) for total in sums), None


class HeadsToTokens(torch.autograd.Function):
    """[sum of L, H / ranks, D] -> [L, H, D] of this rank's tokens. Collective in the group."""

    @staticmethod
    def forward(ctx, out, call: AttentionCall):
        ctx.call = call
        return torch.cat(_heads_to_tokens(out, call), 1)

    @staticmethod
    def backward(ctx, grad):
        return _tokens_to_heads(list(grad.chunk(ctx.call.inner.size, 1)), ctx.call), None
