"""Inputs of tools/bench/attention.py: packed documents or trees, tensors, one attention layer."""

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


def group(text: str) -> tuple[int, int, int]:
    """(prompt tokens, responses, response tokens) of "512:8x64". Raises `ValueError`."""
    prompt, _, rest = text.partition(":")
    responses, _, response = rest.partition("x")
    found = int(prompt), int(responses), int(response)
    if min(found) < 1:
        raise ValueError(text)
    return found


def trees(tokens: int, shape: tuple[int, int, int]) -> tuple[torch.Tensor, list[int]]:
    """As many groups of `shape` as `tokens` hold, each prompt once in front of its responses:
    starts [D + 1] of the D documents, and for each document the one that it continues, or -1.
    """
    prompt, responses, response = shape
    lengths, parents = [0], list[int]()
    for _ in range(tokens // (prompt + responses * response)):
        parents += [-1] + [len(parents)] * responses
        lengths += [prompt] + [response] * responses
    return torch.tensor(lengths).cumsum(0), parents


def repeated(tokens: int, shape: tuple[int, int, int]) -> torch.Tensor:
    """Starts [D + 1] of the documents of the same groups, the prompt in front of each response."""
    prompt, responses, response = shape
    documents_of_all = tokens // (prompt + responses * response) * responses
    return torch.arange(documents_of_all + 1) * (prompt + response)


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
