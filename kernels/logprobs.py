"""Log-prob and entropy of chosen tokens straight from hidden states: logits exist one chunk at a
time.

    hidden [T, H], weight [V, H], targets [T]  ->  log-probs [T], entropies [T]   (float32, or
    float64 from float64)

With z = hidden weight^T / temperature, p = softmax(z), H = -sum p log p, and per token m = max z, s
= sum e^(z-m):
    forward   log p[y] = (z[y] - m) - log s        H = log s - sum (z-m) e^(z-m) / s
    backward  dz = g_logp (1[y] - p) - g_H p (log p + H)
Backward makes each chunk's logits again from m, log s and H, which is all that is kept. m and log s
stay apart: their sum would round log s away.

The rows of `weight` may be cut over ranks (`VocabularyShard`): forward then reduces twice a chunk,
backward once in all. To add an implementation, write a function with the signature of `_chunked`
and list it in `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch.autograd.function import once_differentiable

from megarl.kernels.linear import product, serves

CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Size of one chunk of logits: large enough for full matrix-product speed, small beside any model.
"""
BLOCK_BYTES = 8 * 2**20
"""What oneDNN writes at a time on CPU: small enough to be in the cache when it is copied or added
to where it belongs.
"""
TILE_ROWS = 128
"""Rows of a chunk are a multiple of this where there are that many: GPUs multiply in tiles of it.
"""


@dataclass(frozen=True)
class VocabularyShard:
    """Which rows of the vocabulary a rank's `weight` holds, and how it talks to those that hold the
    others.
    """

    first: int
    """First row; the number of them is that of `weight`. Shards may differ in size, and be empty.
    """
    rows: int
    """Rows of the largest shard: all ranks cut tokens into the chunks that suit it."""
    reduce_max: Callable[[torch.Tensor], torch.Tensor]
    """Elementwise maximum over the ranks, in place; returns its argument."""
    reduce_sum: Callable[[torch.Tensor], torch.Tensor]
    """The same for the sum."""


def _passes(hidden: torch.Tensor) -> ModuleType:
    """The module with `statistics` and `gradient_`, the passes over a chunk of logits, for such
    tensors.
    """
    if hidden.is_cuda and hidden.dtype != torch.float64:
        from megarl.kernels import logprobs_triton

        return logprobs_triton
    from megarl.kernels import logprobs_torch

    return logprobs_torch


def _chunks(
    hidden: torch.Tensor, weight: torch.Tensor, shard: VocabularyShard | None
) -> tuple[list[slice], torch.Tensor]:
    """Slices of the tokens, the same on all ranks of a shard's axis, and room for one's logits
    [rows, this rank's V].
    """
    num_tokens, columns = hidden.shape[0], max(1, shard.rows if shard else weight.shape[0])
    rows = CHUNK_BYTES["cuda" if hidden.is_cuda else "cpu"] // (hidden.dtype.itemsize * columns)
    rows = max(1, rows if rows < TILE_ROWS else rows - rows % TILE_ROWS)
    slices = [slice(start, min(start + rows, num_tokens)) for start in range(0, num_tokens, rows)]
    return slices, hidden.new_empty(min(rows, num_tokens), weight.shape[0])


def _blocks(rows: int, row_bytes: int) -> Iterator[slice]:
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _logits(hidden: torch.Tensor, weight: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """hidden weight^T [C, V], before the temperature, in the first rows of `room` or, if small, in
    memory of its own.
    """
    logits = room[: hidden.shape[0]]
    if not serves(hidden):
        return torch.mm(hidden, weight.T, out=logits)
    if logits.nbytes <= BLOCK_BYTES:
        return product(hidden, weight)
    # oneDNN has no `out`: memory fresh from the system for a whole chunk would cost more than these
    # copies.
    for block in _blocks(weight.shape[0], 4 * hidden.shape[0]):
        logits[:, block] = product(hidden, weight[block])
    return logits


def _add_outer(total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    """total [V, H] += grad [C, V]^T hidden [C, H], in the precision of `total`."""
    if total.dtype == grad.dtype and not serves(hidden):
        total.addmm_(grad.T, hidden)
    elif total.is_cuda:
        torch.addmm(total, grad.T, hidden, out_dtype=total.dtype, out=total)
    else:
        for block in _blocks(total.shape[0], 4 * total.shape[1]):
            total[block] += product(grad[:, block].T, hidden.T)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _merged(
    statistics: tuple[torch.Tensor, ...], owned: torch.Tensor, shard: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk's statistics over the whole vocabulary -> m [C] and [s, t, z_y - m, ranks that hold
    the target] [4, C].
    """
    m, s, t, z_y = statistics
    if shard is None:
        return m, torch.stack([s, t, z_y, owned.to(s.dtype)])
    local = m.clone()
    shard.reduce_max(m)
    # Where this rank has nothing but -inf, s and t are 0, and -inf minus -inf would be NaN.
    shift = (local - m).masked_fill_(local == -torch.inf, 0.0)
    scale = shift.exp()
    mine = [
        s * scale,
        (t + shift * s) * scale,
        torch.where(owned, z_y + shift, 0.0),
        owned.to(s.dtype),
    ]
    return m, shard.reduce_sum(torch.stack(mine))


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, shard):
        kind, num_rows = _accumulator(hidden.dtype), weight.shape[0]
        first = shard.first if shard else 0
        passes = _passes(hidden)
        logprobs, entropy, m, log_s = torch.empty(
            4, hidden.shape[0], dtype=kind, device=hidden.device
        )
        chunks, room = _chunks(hidden, weight, shard)
        for piece in chunks:
            mine = targets[piece]
            if num_rows:
                statistics = passes.statistics(
                    _logits(hidden[piece], weight, room), mine, first, temperature
                )
            else:
                m_, *nothing = hidden.new_zeros(4, len(mine), dtype=kind)
                statistics = (m_.fill_(-torch.inf), *nothing)
            m[piece], (s, t, z_y, owners) = _merged(
                statistics, (mine >= first) & (mine < first + num_rows), shard
            )
            torch.ops.aten._assert_async.msg(
                (owners == 1).all(), "a target is no row of the vocabulary, or its shards overlap"
            )
            log_s[piece] = s.log()
            logprobs[piece] = z_y - log_s[piece]
            entropy[piece] = log_s[piece] - t / s
        # Copies, so that no view keeps the others alive and callers may write to what they get.
        logprobs, entropy = logprobs.clone(), entropy.clone()
        ctx.save_for_backward(hidden, weight, targets, m, log_s, entropy)
        ctx.temperature, ctx.shard = temperature, shard
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets, m, log_s, entropy = ctx.saved_tensors
        shard, needs_hidden, needs_weight = ctx.shard, *ctx.needs_input_grad[:2]
        passes, kind = _passes(hidden), _accumulator(hidden.dtype)
        # float32 sums over chunks and ranks: bfloat16 would lose the later ones.
        grad_hidden = (
            torch.zeros_like(hidden, dtype=kind if shard else None) if needs_hidden else None
        )
        grad_weight = torch.zeros_like(weight, dtype=kind) if needs_weight else None
        chunks, room = _chunks(hidden, weight, shard)
        for piece in chunks if weight.shape[0] else []:
            grad = _logits(hidden[piece], weight, room)
            of_token = (
                m[piece],
                log_s[piece],
                entropy[piece],
                grad_logprobs[piece],
                grad_entropy[piece],
            )
            passes.gradient_(
                grad, targets[piece], shard.first if shard else 0, ctx.temperature, *of_token
            )
            if grad_hidden is not None:
                grad_hidden[piece] = product(grad, weight.T)
            if grad_weight is not None:
                _add_outer(grad_weight, grad, hidden[piece])
        if shard and grad_hidden is not None and grad_hidden.numel():
            shard.reduce_sum(grad_hidden)
        given = (grad_hidden, hidden.dtype), (grad_weight, weight.dtype)
        return (
            *(grad.to(dtype) if grad is not None else None for grad, dtype in given),
            None,
            None,
            None,
        )


def _chunked(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    shard: VocabularyShard | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _LinearLogProbs.apply(hidden, weight, targets, temperature, shard)


def _liger(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    shard: VocabularyShard | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from megarl.kernels.logprobs_liger import liger_logprobs

    return liger_logprobs(hidden, weight, targets, temperature, shard)


BACKENDS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "chunked": _chunked,
    "liger": _liger,
}
"""Ways to compute it: `chunked` is ours, for all devices; the others are refused where they cannot
run.
"""


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    shard: VocabularyShard | None = None,
    backend: str = "chunked",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of `targets` and entropy, both [T] float32 (float64 from float64), under
    softmax(hidden weight^T / temperature).

    `hidden` [T, H] and `weight` [V, H] of one dtype; `targets` [T] int64. Differentiable in both,
    in both outputs. With `shard`, `weight` is this rank's rows, all else and the upstream gradients
    are the same on every rank, and so are the results and the gradient of `hidden`. A target that
    no rank holds fails an assertion, on a GPU asynchronously.
    """
    if (
        hidden.shape[0] != targets.shape[0]
        or hidden.shape[1] != weight.shape[1]
        or hidden.dtype != weight.dtype
    ):
        raise ValueError(
            f"hidden {tuple(hidden.shape)} {hidden.dtype}, weight {tuple(weight.shape)}"
            f" {weight.dtype} and targets {tuple(targets.shape)} do not fit"
        )
    if shard and not 0 <= weight.shape[0] <= shard.rows:
        raise ValueError(
            f"weight has {weight.shape[0]} rows, but shard.rows says that the largest shard has"
            f" {shard.rows}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; set it above 0")
    if backend not in BACKENDS:
        raise ValueError(f"no log-prob backend {backend!r}; there are {', '.join(BACKENDS)}")
    return BACKENDS[backend](hidden, weight, targets, temperature, shard)
