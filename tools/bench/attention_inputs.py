"""Inputs of tools/bench/attention.py: packed documents, tensors, and one attention layer."""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch

from megarl.kernels.sequence_attention import AttentionPlan, sequence_attention


def documents(tokens: int, count: int) -> torch.Tensor:
    """Starts [count + 1] of documents of uneven lengths, the same on every rank."""
    if count == 1:
        return torch.tensor([0, tokens])
    return torch.tensor([0, *sorted(random.Random(0).sample(range(1, tokens), count - 1)), tokens])


def causal_pairs(starts: torch.Tensor) -> int:
    """(query, key) pairs that causal attention inside documents computes."""
    return sum(n * (n + 1) // 2 for n in (starts[1:] - starts[:-1]).tolist())


def make_tensors(
    args: argparse.Namespace, tokens: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    draw = torch.Generator(device).manual_seed(0)
    counts = (args.heads, args.kv_heads, args.kv_heads, args.heads)
    return [
        torch.randn(tokens, count, args.width, generator=draw, device=device, dtype=dtype)
        for count in counts
    ]


class Alone:
    """An exchange of one."""

    rank, size = 0, 1


def layer(
    tensors: list[torch.Tensor], plan: AttentionPlan, inner: Any, outer: Any, transport: str
) -> list[torch.Tensor]:
    """Forward and backward of one layer: output and gradients."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = sequence_attention(q, k, v, plan, inner, outer, q.shape[2] ** -0.5, transport)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]
