"""Log-probs and entropies of given tokens from hidden states, without storing all logits.

    hidden [T, H], weight [V, H], targets [T]  ->  log-probs [T], entropies [T]

Logits exist for one chunk of tokens at a time, and backward recomputes them. With z = hidden
weight^T / temperature, p = softmax(z), m = max z and s = sum e^(z-m):

    forward   log p[y] = (z[y] - m) - log s        H = log s - sum (z-m) e^(z-m) / s
    backward  dz = g_logp (1[y] - p) - g_H p (log p + H)

m and log s are kept apart, since their sum would round log s away. Results are float32, or float64
for float64 inputs.

With a soft cap c (Gemma 2, arXiv:2408.00118) z = c tanh(hidden weight^T / c) / temperature, and the
gradient of the product is dz (1 - (z temperature / c)^2).

Over a split vocabulary forward does two all-reduces a chunk, backward one in all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch.autograd.function import once_differentiable

from megarl.kernels.linear import (
    accumulator,
    gradient_product,
    onednn_supports,
    part_bytes,
    product,
)
from megarl.kernels.logprobs_liger import liger_logprobs
from megarl.kernels.logprobs_torch import row_blocks

CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Of a chunk of logits: enough for fast matrix products, small beside a model."""
BLOCK_BYTES = 8 * 2**20
"""That oneDNN writes at a time on CPU, so that they are in cache when they are copied."""
TILE_ROWS = 128
"""Chunks on GPUs are a multiple of this where possible, as GPUs multiply in such tiles."""


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's consecutive rows of the output head [V, H]; shards may differ in size and be
    empty.
    """

    first: int
    rows: int
    """Of the largest shard, so that all ranks split the tokens into the same chunks."""
    reduce_max: Callable[[torch.Tensor], torch.Tensor]
    """All-reduce with maximum over `size` ranks, in place; returns its argument."""
    reduce_sum: Callable[[torch.Tensor], torch.Tensor]
    """As `reduce_max`, with sum."""
    rank: int = 0
    size: int = 1


def passes_for(hidden: torch.Tensor) -> ModuleType:
    """The module whose `statistics` and `gradient_` compute on the device and dtype of `hidden`."""
    if hidden.is_cuda and hidden.dtype != torch.float64:
        from megarl.kernels import logprobs_triton

        return logprobs_triton
    from megarl.kernels import logprobs_torch

    return logprobs_torch


def token_chunks(
    hidden: torch.Tensor, weight: torch.Tensor, shard: VocabularyShard | None, copies: int = 1
) -> tuple[list[slice], torch.Tensor]:
    """Slices of the T tokens, the same on all ranks of the vocabulary, and a buffer [largest chunk,
    V] for logits. `copies` such buffers take at most `CHUNK_BYTES`.
    """
    num_tokens, columns = hidden.shape[0], max(1, shard.rows if shard else weight.shape[0])
    rows = CHUNK_BYTES["cuda" if hidden.is_cuda else "cpu"] // (
        hidden.dtype.itemsize * columns * copies
    )
    unit = TILE_ROWS if hidden.is_cuda and rows >= TILE_ROWS else 1
    units = -(-num_tokens // unit)
    chunks = -(-units // max(1, rows // unit))
    # Equal chunks leave no last one of one or two tokens. BLAS on CPUs without AVX-512 would add
    # the V products of its gradient one after the other, with ten times the rounding error.
    ends = [min(num_tokens, i * units // chunks * unit) for i in range(chunks + 1) if chunks]
    slices = [slice(*pair) for pair in itertools.pairwise(ends)]
    longest = max((chunk.stop - chunk.start for chunk in slices), default=0)
    return slices, hidden.new_empty(longest, weight.shape[0])


def chunk_logits(hidden: torch.Tensor, weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """hidden [C, H] weight [V, H]^T, without temperature and gradients, in `buffer` [at least C, V]
    or, if it is small, in new memory.
    """
    logits = buffer[: hidden.shape[0]]
    if not onednn_supports(hidden):
        return torch.mm(hidden, weight.T, out=logits)
    row_bytes = 4 * hidden.shape[0] + part_bytes(hidden.shape[1])
    if weight.shape[0] * row_bytes <= BLOCK_BYTES:
        return product(hidden, weight)
    # oneDNN has no `out` argument, and allocating a whole chunk costs more than these copies.
    for block in row_blocks(weight.shape[0], row_bytes, BLOCK_BYTES):
        logits[:, block] = product(hidden, weight[block])
    return logits


def cap_(logits: torch.Tensor, cap: float | None) -> None:
    """cap tanh(logits / cap), in place."""
    if cap is not None:
        logits.div_(cap).tanh_().mul_(cap)


def add_outer(total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    """`total` [V, H] += `grad`^T `hidden` in place and in the dtype of `total`. `grad` [C, V],
    `hidden` [C, H].
    """
    if total.dtype == grad.dtype and not onednn_supports(hidden):
        total.addmm_(grad.T, hidden)
    elif total.is_cuda:
        torch.addmm(total, grad.T, hidden, out_dtype=total.dtype, out=total)
    else:
        for block in row_blocks(total.shape[0], 4 * total.shape[1], BLOCK_BYTES):
            total[block] += gradient_product(grad[:, block].T, hidden.T)


def _merged(
    statistics: tuple[torch.Tensor, ...], owned: torch.Tensor, shard: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-reduce `row_statistics` of this rank's words. `owned` [C] bool: whether it holds the
    target. Returns m [C] and, stacked [4, C], s, t, z[target] - m and the number of ranks that hold
    the target.
    """
    m, s, t, z_y = statistics
    if shard is None:
        return m, torch.stack([s, t, z_y, owned.to(s.dtype)])
    local = m.clone()
    shard.reduce_max(m)
    # A shard of only -inf has s = t = 0, and -inf - -inf is NaN.
    shift = (local - m).masked_fill_(local == -torch.inf, 0.0)
    scale, z_y = shift.exp(), torch.where(owned, z_y + shift, 0.0)
    shifted = torch.stack([s * scale, (t + shift * s) * scale, z_y, owned.to(s.dtype)])
    return m, shard.reduce_sum(shifted)


def row_statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, shard: VocabularyShard | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax statistics of a chunk over the whole vocabulary, each [C] float32 or float64, with z
    = logits / temperature:

        m = max z        s = sum e^(z-m)        t = sum (z-m) e^(z-m)        z[target] - m

    A target outside the vocabulary fails an assertion, at a later CUDA call on GPUs. Collective
    with `shard`.
    """
    first, num_rows = shard.first if shard else 0, logits.shape[1] if logits.numel() else 0
    if num_rows or not len(targets):
        local = passes_for(logits).statistics(logits, targets, first, temperature)
    else:
        m, *nothing = logits.new_zeros(4, len(targets), dtype=accumulator(logits.dtype))
        local = (m.fill_(-torch.inf), *nothing)
    owned = (targets >= first) & (targets < first + num_rows)
    m, (s, t, z_y, owners) = _merged(local, owned, shard)
    torch.ops.aten._assert_async.msg(
        (owners == 1).all(), "a target is outside the vocabulary, or vocabulary shards overlap"
    )
    return m, s, t, z_y


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, shard, cap):
        dtype, num_rows = accumulator(hidden.dtype), weight.shape[0]
        logprobs, entropy, m, log_s = torch.empty(
            4, hidden.shape[0], dtype=dtype, device=hidden.device
        )
        chunks, buffer = token_chunks(hidden, weight, shard)
        for chunk in chunks:
            logits = chunk_logits(hidden[chunk], weight, buffer) if num_rows else buffer[:0]
            cap_(logits, cap)
            m[chunk], s, t, z_y = row_statistics(logits, targets[chunk], temperature, shard)
            log_s[chunk] = s.log()
            logprobs[chunk] = z_y - log_s[chunk]
            entropy[chunk] = log_s[chunk] - t / s
        # Copies: a view would keep the other statistics alive.
        logprobs, entropy = logprobs.clone(), entropy.clone()
        ctx.save_for_backward(hidden, weight, targets, m, log_s, entropy)
        ctx.temperature, ctx.shard, ctx.cap = temperature, shard, cap
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets, m, log_s, entropy = ctx.saved_tensors
        shard, needs_hidden, needs_weight = ctx.shard, *ctx.needs_input_grad[:2]
        passes, dtype = passes_for(hidden), accumulator(hidden.dtype)
        # float32 sums over chunks and ranks: bfloat16 would lose the later ones.
        grad_hidden = (
            torch.zeros_like(hidden, dtype=dtype if shard else None) if needs_hidden else None
        )
        grad_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        chunks, buffer = token_chunks(hidden, weight, shard, copies=1 if ctx.cap is None else 2)
        for chunk in chunks if weight.shape[0] else []:
            grad = chunk_logits(hidden[chunk], weight, buffer)
            cap_(grad, ctx.cap)
            # The gradient takes the place of the logits, so the slope of the cap is kept.
            slope = None if ctx.cap is None else (grad / ctx.cap).square_().neg_().add_(1.0)
            columns = (m, log_s, entropy, grad_logprobs, grad_entropy)
            per_token = [column[chunk] for column in columns]
            passes.gradient_(
                grad, targets[chunk], shard.first if shard else 0, ctx.temperature, *per_token
            )
            if slope is not None:
                grad.mul_(slope)
            if grad_hidden is not None:
                grad_hidden[chunk] = gradient_product(grad, weight.T)
            if grad_weight is not None:
                add_outer(grad_weight, grad, hidden[chunk])
        if shard and grad_hidden is not None and grad_hidden.numel():
            shard.reduce_sum(grad_hidden)
        grads = (grad_hidden, hidden.dtype), (grad_weight, weight.dtype)
        return (
            *(grad.to(dtype) if grad is not None else None for grad, dtype in grads),
            *(None, None, None, None),
        )


BACKENDS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "chunked": _LinearLogProbs.apply,
    "liger": liger_logprobs,
}
"""{name: implementation}, called with `linear_logprobs`'s (hidden, weight, targets, temperature,
shard, cap).
"""


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    shard: VocabularyShard | None = None,
    backend: str = "chunked",
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `targets` and entropies of softmax(hidden weight^T / temperature),
    differentiable.

    Args:
        hidden: [T, H] hidden states of the last layer, each where it predicts its target.
        weight: [V, H] output head, same dtype; with `shard` this rank's rows.
        targets: [T] int64 ids; one outside fails an assertion, at a later CUDA call on GPUs.
        temperature: divisor of the logits, above 0.
        shard: this rank's part of a split vocabulary. Its ranks call this together, with all else
            equal; results and the gradient of `hidden` are equal too.
        backend: "chunked" runs everywhere, "liger" needs one CUDA GPU.
        cap: soft cap of the logits before the temperature, above 0; None for none.

    Raises `ValueError` if the backend cannot run here, or for a temperature or cap not above 0.
    """
    shapes = f"hidden {hidden.shape}, weight {weight.shape}, targets {targets.shape}"
    assert (len(hidden), hidden.shape[1]) == (len(targets), weight.shape[1]), shapes
    assert hidden.dtype == weight.dtype, f"{hidden.dtype} and {weight.dtype}"
    assert shard is None or len(weight) <= shard.rows
    if not temperature > 0 or (cap is not None and not cap > 0):
        values = f"temperature is {temperature}, the soft cap of logits {cap}"
        raise ValueError(f"{values}; set numbers above 0")
    return BACKENDS[backend](hidden, weight, targets, temperature, shard, cap)
