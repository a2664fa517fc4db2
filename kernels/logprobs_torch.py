"""The two passes over a chunk of logits in torch: for CPU, and as reference for logprobs_triton.py.

    z = logits / temperature    p = softmax(z)    H = -sum p log p

Shard r of the vocabulary has rows `first` to `first + V`; targets are ids of the whole. Shards'
statistics combine as

    m = max m_r    s = sum s_r e^(m_r - m)    t = sum e^(m_r - m) (t_r + (m_r - m) s_r)
    z_y = z_y_r + m_r - m    of the shard r that has the target
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megarl.kernels.linear import accumulator

BLOCK_BYTES = 2**20
"""Of logits processed at once, so that they stay in a core's cache from pass to pass."""
LOWEST_LOG_P = -1e4
"""Lower bound of log p: 0 times -inf would be NaN."""


def row_blocks(num_rows: int, row_bytes: int, block_bytes: int) -> Iterator[slice]:
    """Slices of neighbouring rows of at most `block_bytes` bytes, and of one row at least."""
    step = max(1, block_bytes // max(1, row_bytes))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _target_columns(
    targets: torch.Tensor, first: int, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's column [C, 1] in this shard, and whether it is inside [C]."""
    column = targets - first
    return column.clamp(0, vocabulary - 1)[:, None], (column >= 0) & (column < vocabulary)


def statistics(
    logits: torch.Tensor, targets: torch.Tensor, first: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """First pass over `logits` [C, V], not changed: m = max z, s = sum e^(z-m), t = sum (z-m)
    e^(z-m) and z[target] - m (0 outside), each [C] float32 or float64. Only logits -inf: m = -inf
    and s = t = 0.
    """
    num_rows, vocabulary = logits.shape
    dtype = accumulator(logits.dtype)
    m, s, t, z_y = torch.empty(4, num_rows, dtype=dtype, device=logits.device)
    if not vocabulary:  # an empty shard is one of nothing but -inf
        return m.fill_(-torch.inf), s.zero_(), t.zero_(), z_y.zero_()
    column, inside = _target_columns(targets, first, vocabulary)
    for rows in row_blocks(num_rows, dtype.itemsize * vocabulary, BLOCK_BYTES):
        z = logits[rows].to(dtype) if temperature == 1.0 else logits[rows].to(dtype) / temperature
        torch.amax(z, 1, out=m[rows])
        z = z - m[rows, None].masked_fill(m[rows, None] == -torch.inf, 0.0)
        z_y[rows] = z.gather(1, column[rows])[:, 0].where(inside[rows], 0.0)
        e = z.exp()
        torch.sum(e, 1, out=s[rows])
        torch.sum(z.clamp_min_(LOWEST_LOG_P).mul_(e), 1, out=t[rows])
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
    """Second pass: replace `logits` [C, V] in place by their gradient, (g_logp (1[y] - p) - g_H p
    (log p + H)) / temperature. `first`: vocabulary id of column 0. Other tensors are [C], over the
    whole vocabulary: `m` is max z and `log_s` is log sum e^(z - m), with z = logits / temperature.
    """
    num_rows, vocabulary = logits.shape
    dtype = accumulator(logits.dtype)
    if not vocabulary:
        return
    column, inside = _target_columns(targets, first, vocabulary)
    at_target = (grad_logprobs.to(dtype) / temperature).where(inside, 0.0)[:, None]
    # dz away from the target is p (slope log p + offset).
    slope = (grad_entropy.to(dtype) / -temperature)[:, None]
    offset = ((grad_logprobs + grad_entropy * entropy).to(dtype) / -temperature)[:, None]
    for rows in row_blocks(num_rows, dtype.itemsize * vocabulary, BLOCK_BYTES):
        z = logits[rows].to(dtype)  # the same memory where the dtype is already right
        if temperature != 1.0:
            z.div_(temperature)
        z.sub_(m[rows, None]).sub_(log_s[rows, None]).clamp_min_(LOWEST_LOG_P)
        p = z.exp()
        z.mul_(slope[rows]).add_(offset[rows]).mul_(p)
        z.scatter_add_(1, column[rows], at_target[rows])
        if z.dtype != logits.dtype:
            logits[rows] = z
