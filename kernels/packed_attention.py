"""Causal attention within each document of a packed sequence, on one rank, without padding.

    q [T, Hq, D], k and v [T, Hkv, D], documents  ->  out [T, Hq, D]

Two implementations: torch's variable-length flash attention (CUDA, 16 bit), and elsewhere batches
of documents of similar length through `scaled_dot_product_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

BUCKET_SLACK = 1.25
"""Documents share a batch if the longest is at most this many times the shortest; bounds
padding."""


@dataclass(frozen=True)
class Documents:
    """Boundaries of the documents in a packed sequence, and a division of the documents into padded
    batches of similar length.

    Created once for each micro-batch and used by every layer.
    """

    starts: torch.Tensor
    """[D + 1] int32 on the sequence's device: first token of each document, then the length T."""
    longest: int
    """Number of tokens of the longest document."""
    batches: list[torch.Tensor]
    """For each batch of B documents, [B, L] int64 positions of their tokens. A document shorter
    than L is padded by repeating its last position."""
    valid: list[torch.Tensor]
    """For each batch, [number of real tokens] int64 indices into the flattened [B * L] without
    padding."""
    order: torch.Tensor
    """[T] int64: index of each token of the sequence in the concatenated valid tokens of all
    batches."""

    @staticmethod
    def of(starts: torch.Tensor) -> Documents:
        """Create it from `starts` [D + 1] int32: the first token of each document, then the length
        T.
        """
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
    """Keyword arguments for torch's `varlen_attn`: causal attention, with scores multiplied by
    `scale`.
    """
    return {"scale": scale, "window_size": (-1, 0)}


def packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, scale: float
) -> torch.Tensor:
    """Causal attention within each document: q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D].

    Hkv divides Hq. Scores are multiplied by `scale` before the softmax.
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
        # [B, H, L, D]. Padded queries are dropped below; padded keys come after every real query.
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
