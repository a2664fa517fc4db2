"""Ulysses (arXiv:2309.14509): all-to-alls that exchange a split by tokens for a split by heads.

Before attention a rank has its own tokens with all heads; in between it has all tokens of its
Ulysses group with some of the heads.
"""

from __future__ import annotations

import torch

from megarl.kernels.kv_transports import Call


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which numbers of dtype `dtype` are summed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _inner_lengths(call: Call) -> list[int]:
    """Number of tokens of each rank of this Ulysses group."""
    first = call.outer.rank * call.inner.size
    return call.plan.lengths[first : first + call.inner.size]


def _tokens_to_heads(x: list[torch.Tensor], call: Call) -> torch.Tensor:
    """All-to-all from own tokens to own heads.

    x: by inner rank, the heads it needs of this rank's tokens, [L, H', D] each. Returns the group's
    tokens with this rank's heads, [sum of L, H', D].
    """
    shapes = [(length, *x[0].shape[1:]) for length in _inner_lengths(call)]
    return torch.cat(call.inner.all_to_all([part.contiguous() for part in x], shapes))


def _heads_to_tokens(x: torch.Tensor, call: Call) -> list[torch.Tensor]:
    """All-to-all from own heads to own tokens: the inverse of `_tokens_to_heads`."""
    lengths = _inner_lengths(call)
    shape = (lengths[call.inner.rank], *x.shape[1:])
    return call.inner.all_to_all(list(x.contiguous().split(lengths)), [shape] * call.inner.size)


def needed_heads(num_heads: int, size: int, rank: int) -> slice:
    """The heads that rank number `rank` of a Ulysses group of `size` ranks computes.

    Heads are divided evenly over the ranks. With fewer heads than ranks, several ranks compute the
    same head.
    """
    first = rank * num_heads // size
    return slice(first, first + max(1, num_heads // size))


class TokensToHeads(torch.autograd.Function):
    """q, k and v of this rank's tokens with all heads -> the group's tokens with this rank's heads.

    One message to each rank of the group.
    """

    @staticmethod
    def forward(ctx, q, k, v, call: Call):
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
        dtype = sum_dtype(ctx.dtype) if ctx.heads[1] % size else ctx.dtype
        parts = _heads_to_tokens(torch.cat([grad.to(dtype) for grad in grads], 1), ctx.call)
        sums = [
            parts[0].new_zeros((parts[0].shape[0], count, parts[0].shape[2])) for count in ctx.heads
        ]
        for rank, part in enumerate(parts):
            for total, grad in zip(
                sums, part.split([max(1, count // size) for count in ctx.heads], 1), strict=True
            ):
                total[:, needed_heads(total.shape[1], size, rank)] += grad
        return *(total.to(ctx.dtype) for total in sums), None


class HeadsToTokens(torch.autograd.Function):
    """Attention output: (all tokens of the group, this rank's heads) -> (this rank's tokens, all
    heads).
    """

    @staticmethod
    def forward(ctx, out, call: Call):
        ctx.call = call
        return torch.cat(_heads_to_tokens(out, call), 1)

    @staticmethod
    def backward(ctx, grad):
        return _tokens_to_heads(list(grad.chunk(ctx.call.inner.size, 1)), ctx.call), None
