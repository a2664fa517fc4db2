"""The two passes over a chunk of logits, in torch: for CPU, and what the Triton ones in
logprobs_triton.py are checked against.

    z = logits / temperature    p = softmax(z)    H = -sum p log p

The vocabulary may be cut over ranks: shard r holds rows `first` to `first + V` of it; targets are
ids of the whole vocabulary. What the shards find is put together by
    m = max m_r    s = sum s_r e^(m_r - m)    t = sum e^(m_r - m) (t_r + (m_r - m) s_r)    z_y =
    z_y_r + m_r - m
(the last by the target's shard alone), and then log p[y] = z_y - log s and H = log s - t / s. m and
log s stay apart: their sum would round log s away.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK_BYTES = 2**20
"""Rows are worked on in blocks of this size, which stay in a core's cache from pass to pass."""
LOWEST_LOG_P = -1e4
"""exp of it is 0 even in float64, and unlike -inf it gives 0 when multiplied with that 0."""


def _pieces(num_rows: int, vocabulary: int, itemsize: int) -> Iterator[slice]:
    step = max(1, BLOCK_BYTES // (itemsize * max(vocabulary, 1)))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _place(targets: torch.Tensor, first: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each target [C, 1], any where it is not of this shard, and whether it is [C]."""
    column = targets - first
    return column.clamp(0, vocabulary - 1)[:, None], (column >= 0) & (column < vocabulary)


def statistics(
    logits: torch.Tensor, targets: torch.Tensor, first: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per row of `logits` [C, V]: m = max z, s = sum e^(z-m), t = sum (z-m) e^(z-m) and the
    target's z - m; all [C].

    `targets` [C] int64 are ids of the whole vocabulary; where one is outside this shard its z - m
    is 0. Results are float32 (float64 from float64). A row of nothing but -inf has m = -inf and s =
    t = 0. `logits` is only read.
    """
    num_rows, vocabulary = logits.shape
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    m, s, t, z_y = torch.empty(4, num_rows, dtype=kind, device=logits.device)
    if not vocabulary:  # an empty shard is one of nothing but -inf
        return m.fill_(-torch.inf), s.zero_(), t.zero_(), z_y.zero_()
    column, inside = _place(targets, first, vocabulary)
    for piece in _pieces(num_rows, vocabulary, kind.itemsize):
        z = logits[piece].to(kind) if temperature == 1.0 else logits[piece].to(kind) / temperature
        torch.amax(z, 1, out=m[piece])
        z = z - m[piece, None].masked_fill(m[piece, None] == -torch.inf, 0.0)
        z_y[piece] = z.gather(1, column[piece])[:, 0].where(inside[piece], 0.0)
        e = z.exp()
        torch.sum(e, 1, out=s[piece])
        torch.sum(z.clamp_min_(LOWEST_LOG_P).mul_(e), 1, out=t[piece])
    return m, s, t, z_y


def gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first: int,
    temperature: float,
    m: torch.Tensor,
    log_s: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor,
    grad_entropy: torch.Tensor,
) -> None:
    """Replace `logits` [C, V] by their gradient (g_logp (1[y] - p) - g_H p (log p + H)) /
    temperature, in their dtype.

    All else is [C]: `targets` as in `statistics`; `m`, `log_s` and `entropy` over the whole
    vocabulary; the upstream gradients.
    """
    num_rows, vocabulary = logits.shape
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if not vocabulary:
        return
    column, inside = _place(targets, first, vocabulary)
    at_target = (grad_logprobs.to(kind) / temperature).where(inside, 0.0)[:, None]
    # dz away from the target is p (slope log p + offset).
    slope = (grad_entropy.to(kind) / -temperature)[:, None]
    offset = ((grad_logprobs + grad_entropy * entropy).to(kind) / -temperature)[:, None]
    for piece in _pieces(num_rows, vocabulary, kind.itemsize):
        z = logits[piece].to(kind)  # the same memory where the dtype is already right
        if temperature != 1.0:
            z.div_(temperature)
        z.sub_(m[piece, None]).sub_(log_s[piece, None]).clamp_min_(LOWEST_LOG_P)
        p = z.exp()
        z.mul_(slope[piece]).add_(offset[piece]).mul_(p)
        z.scatter_add_(1, column[piece], at_target[piece])
        if z.dtype != logits.dtype:
            logits[piece] = z
