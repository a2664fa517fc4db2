"""Attention by matrix products, some queries at a time, for soft caps and for masks on GPUs. With s
= scale q k^T:

    capped scores     c = cap tanh(s / cap)                     (Gemma 2, arXiv:2408.00118)
    their gradient    ds = dc (1 - (c / cap)^2)

Arithmetic is that of q's dtype and the mask's together, and in float32 at least.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

CHUNK_SCORES = {"cpu": 2**22, "cuda": 2**27}
"""Most scores of a chunk of queries, over all heads; a few tensors of that size exist at once."""


def soft_cap(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    return scores if cap is None else (scores / cap).tanh().mul(cap)


def through_cap(
    grad: torch.Tensor, capped: torch.Tensor, cap: float | None, hidden: torch.Tensor | None = None
) -> torch.Tensor:
    """The gradient before the cap, from `grad` of the `capped` scores, 0 where a mask has set them
    to -inf (`hidden`).
    """
    if cap is None:
        return grad
    inside = capped if hidden is None else capped.masked_fill(hidden, 0.0)
    return grad * (1.0 - (inside / cap).square())


def _chunks(q: torch.Tensor, k: torch.Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    num_queries, num_keys = q.shape[2], k.shape[2]
    most = CHUNK_SCORES["cuda" if q.is_cuda else "cpu"]
    step = max(1, most // max(1, q.shape[0] * q.shape[1] * num_keys))
    for start in range(0, num_queries, step):
        stop = min(start + step, num_queries)
        yield slice(start, stop), slice(0, stop if causal else num_keys)


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    cap: float | None,
    diagonal: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(masked scores [B, Hkv, group, n, m], where they are -inf or None) of q [B, Hkv, group, n, D]
    and k [B, Hkv, 1, m, D]. Query i sees keys up to `diagonal` + i; None for all.
    """
    scores = soft_cap(q @ k.transpose(-1, -2) * scale, cap)
    hidden = None
    if mask is not None:
        scores = scores + mask[:, :, None]
        hidden = mask[:, :, None] == -torch.inf
    if diagonal is not None:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        later = ones.triu(diagonal + 1)
        hidden = later if hidden is None else hidden | later
        scores = scores.masked_fill(later, -torch.inf)
    return scores, hidden


def _grouped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[tuple[int, int], torch.Tensor, torch.Tensor, torch.Tensor]:
    """((Hkv, query heads of each), q, k, v)"""
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    dtype = torch.promote_types(q.dtype, torch.float32 if mask is None else mask.dtype)
    return heads, q.to(dtype).unflatten(1, heads), k.to(dtype)[:, :, None], v.to(dtype)[:, :, None]


def dense_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [B, Hq, n, D], log-sum-exp of the scores [B, Hq, n]) outside of autograd, for q [B,
    Hq, n, D], k and v [B, Hkv, m, D]. Every query must see a key.

    Args:
        causal: query i sees keys 0 to i; then n = m.
        mask: [B, 1, n or 1, m] added to the scores: 0, or -inf; None for none.
        scale: factor of q k^T.
        cap: soft cap of the scaled scores, or None.
    """
    _, q, k, v = _grouped(q, k, v, mask)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    for rows, keys in _chunks(q.flatten(1, 2), k.flatten(1, 2), causal):
        scores, _ = _scores(
            *(q[..., rows, :], k[..., keys, :], _part(mask, rows, keys), scale, cap),
            rows.start if causal else None,
        )
        lse[..., rows] = scores.logsumexp(-1)
        out[..., rows, :] = (scores - lse[..., rows, None]).exp_() @ v[..., keys, :]
    return out.flatten(1, 2), lse.flatten(1, 2)


def dense_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v; `out` and `lse` may be over more keys than those in `k`."""
    heads, q, k, v = _grouped(q, k, v, mask)
    grad_out, out = (x.to(q.dtype).unflatten(1, heads) for x in (grad_out, out))
    lse, delta = lse.unflatten(1, heads)[..., None], (grad_out * out).sum(-1, keepdim=True)
    grad_q = torch.empty_like(q)
    grad_k, grad_v = torch.zeros_like(k[:, :, 0]), torch.zeros_like(v[:, :, 0])
    for rows, keys in _chunks(q.flatten(1, 2), k.flatten(1, 2), causal):
        scores, hidden = _scores(
            *(q[..., rows, :], k[..., keys, :], _part(mask, rows, keys), scale, cap),
            rows.start if causal else None,
        )
        p = (scores - lse[..., rows, :]).exp()
        upstream = grad_out[..., rows, :]
        grad_scores = p * (upstream @ v[..., keys, :].transpose(-1, -2) - delta[..., rows, :])
        grad_scores = through_cap(grad_scores, scores, cap, hidden) * scale
        grad_q[..., rows, :] = grad_scores @ k[..., keys, :]
        grad_k[..., keys, :] += (grad_scores.transpose(-1, -2) @ q[..., rows, :]).sum(2)
        grad_v[..., keys, :] += (p.transpose(-1, -2) @ upstream).sum(2)
    return grad_q.flatten(1, 2), grad_k, grad_v


def _part(mask: torch.Tensor | None, rows: slice, keys: slice) -> torch.Tensor | None:
    if mask is None:
        return None
    return mask[:, :, rows if mask.shape[2] > 1 else slice(None), keys]
