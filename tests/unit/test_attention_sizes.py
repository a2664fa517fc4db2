"""Attention at the sizes of real models against float64: head widths, query heads for each KV head,
and one long document. On a GPU the Triton block in bfloat16, on the CPU the block of the CPU.
"""

from __future__ import annotations

import pytest
import torch
from support.block_pairs import LONG, TOLERANCE, compare

from megarl.kernels.attention_plan import BLOCKS, default_block
from megarl.kernels.block import Positions

CPU, CUDA, GPU = torch.device("cpu"), torch.device("cuda"), pytest.mark.gpu
WIDTHS = (64, 80, 96, 128, 256)
GROUPS = (1, 5, 8)
"""Query heads for each KV head: 5 is that of Qwen2.5-14B, 8 that of Llama-3-70B."""
ROWS = 512
"""Queries whose float64 scores are held at once."""


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, upstream: torch.Tensor, scale: float
) -> list[torch.Tensor]:
    """Causal attention of one document in float64, `ROWS` queries at a time: out, and the
    gradients of q, k and v."""
    group = q.shape[1] // k.shape[1]
    q, k, v, upstream = (x.double().transpose(0, 1) for x in (q, k, v, upstream))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    out, grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, q, k, v))
    for first in range(0, q.shape[1], ROWS):
        rows = slice(first, min(first + ROWS, q.shape[1]))
        scores = scale * q[:, rows] @ k[:, : rows.stop].mT
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(first + 1)
        p = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        out[:, rows] = p @ v[:, : rows.stop]
        delta = (out[:, rows] * upstream[:, rows]).sum(-1, keepdim=True)
        grad_scores = p * (upstream[:, rows] @ v[:, : rows.stop].mT - delta) * scale
        grad_q[:, rows] = grad_scores @ k[:, : rows.stop]
        grad_k[:, : rows.stop] += grad_scores.mT @ q[:, rows]
        grad_v[:, : rows.stop] += p.mT @ upstream[:, rows]
    whole = [x.unflatten(0, (-1, group)).sum(1) for x in (grad_k, grad_v)]
    return [x.transpose(0, 1) for x in (out, grad_q, *whole)]


def long_document(device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> None:
    """One causal document of `tokens`, four query heads on one KV head."""
    draw = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, heads, width) for heads in (4, 1, 1, 4)]
    q, k, v, upstream = (torch.randn(s, generator=draw).to(dtype).to(device) for s in shapes)
    scale = width**-0.5
    wanted = reference(q, k, v, upstream, scale)
    place = Positions.of(torch.arange(tokens), torch.tensor([0, tokens]))
    block = BLOCKS[default_block(device)]()
    work = block.prepare(place, place, device)
    out, *grads = (torch.zeros(x.shape, device=device) for x in (q, q, k, v))
    lse = torch.full((q.shape[1], tokens), -torch.inf, device=device)
    block.forward(q, k, v, work, scale, out, lse)
    block.backward(upstream, q, k, v, out, lse, work, scale, *grads)
    for name, a, b in zip(("out", "q", "k", "v"), [out, *grads], wanted, strict=True):
        error = float((a.double() - b).abs().max() / b.abs().max().clamp_min(1.0))
        assert error < TOLERANCE[dtype], f"{name}: {error}"


@pytest.mark.parametrize(
    ("device", "dtype"), [(CPU, torch.float32), pytest.param(CUDA, torch.bfloat16, marks=GPU)]
)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("width", WIDTHS)
def test_widths_and_groups(
    width: int, group: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Two blocks of 300 tokens in two documents, cut in zigzag, on both ranks."""
    block = BLOCKS[default_block(device)]()
    for rank in (0, 1):
        starts = torch.tensor([0, 290, 600])
        compare(LONG, rank, (2 * group, 2), width, dtype, block, device, starts)


def test_a_long_document() -> None:
    long_document(CPU, torch.float32, 1300, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_a_document_of_20k_tokens_on_a_gpu(width: int) -> None:
    long_document(CUDA, torch.bfloat16, 20480, width)
