"""Causal attention over documents packed into one row without padding: no document sees another.

    q [T, Hq, D], k and v [T, Hkv, D], documents  ->  out [T, Hq, D]

Two backends: torch's variable-length flash attention (CUDA, 16 bit), and batches of similar lengths
through `scaled_dot_product_attention` (everywhere), whose cost is that of the documents, not of the
row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

BUCKET_SLACK = 1.25
"""Documents share a batch while the longest is at most this many times the shortest: bounds the
padding.
"""


@dataclass(frozen=True)
class Documents:
    """Where documents lie in a packed row, prepared once and used by every layer."""

    starts: torch.Tensor
    """[D + 1] int32 on the row's device."""
    longest: int
    batches: list[torch.Tensor]
    """Per bucket [B, L] int64: positions of its documents, short ones padded with their own last
    position.
    """
    valid: list[torch.Tensor]
    """Per bucket [B * L] int64: which of the flattened batch's entries are real, in the order of
    `order`.
    """
    order: torch.Tensor
    """[T] int64: position in the concatenated buckets of each token of the row."""

    @staticmethod
    def of(starts: torch.Tensor) -> Documents:
        """From the first position of each document, then the row's length: [D + 1] int32."""
        edges = starts.tolist()
        spans = sorted(
            ((a, b) for a, b in zip(edges[:-1], edges[1:], strict=True) if b > a),
            key=lambda span: span[1] - span[0],
        )
        buckets: list[list[tuple[int, int]]] = []
        for span in spans:
            length = span[1] - span[0]
            shortest = buckets[-1][0][1] - buckets[-1][0][0] if buckets else 0
            if buckets and length <= max(shortest * BUCKET_SLACK, shortest + 4):
                buckets[-1].append(span)
            else:
                buckets.append([span])
        batches, valid = [], []
        order = torch.empty(edges[-1], dtype=torch.int64)
        filled = 0
        for bucket in buckets:
            first = torch.tensor([a for a, _ in bucket])[:, None]
            last = torch.tensor([b - 1 for _, b in bucket])[:, None]
            length = int((last - first).max()) + 1
            wanted = first + torch.arange(length)
            batch = wanted.minimum(last)
            real = (wanted <= last).flatten().nonzero()[:, 0]
            batches.append(batch.to(starts.device))
            valid.append(real.to(starts.device))
            order[batch.flatten()[real]] = torch.arange(filled, filled + real.numel())
            filled += real.numel()
        longest = max((b - a for a, b in spans), default=0)
        return Documents(starts, longest, batches, valid, order.to(starts.device))


def causal(scale: float) -> dict[str, Any]:
    """Keywords of `varlen_attn` for a causal mask: any number of keys before, none after."""
    return {"scale": scale, "window_size": (-1, 0)}


def packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float
) -> torch.Tensor:
    """Causal attention inside each document; q [T, Hq, D], k and v [T, Hkv, D] with Hkv dividing
    Hq; returns [T, Hq, D].
    """
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn

        if k.shape[1] != q.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return varlen_attn(
            q,
            k,
            v,
            documents.starts,
            documents.starts,
            documents.longest,
            documents.longest,
            **causal(scale),
        )
    pieces = []
    for batch, real in zip(documents.batches, documents.valid, strict=True):
        rows, length = batch.shape
        index = batch.flatten()
        # [B, H, L, D]; a padded query repeats the document's last token and is dropped, a padded
        # key is after every real query.
        heads = [
            x.index_select(0, index).view(rows, length, x.shape[1], x.shape[2]).transpose(1, 2)
            for x in (q, k, v)
        ]
        out = F.scaled_dot_product_attention(
            *heads, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        pieces.append(
            out.transpose(1, 2).reshape(rows * length, q.shape[1], q.shape[2]).index_select(0, real)
        )
    return torch.cat(pieces).index_select(0, documents.order)
