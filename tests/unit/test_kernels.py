"""Packed attention and linear layers against float64 references, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.kernels.linear import linear
from megarl.kernels.packed_attention import Documents, packed_attention


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    """The obvious way: the whole score matrix with a block-diagonal causal mask."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(sum(lengths))
    mask = (document[:, None] == document[None]) & (place[:, None] >= place[None])
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def starts_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.sampled_from([0.1, 0.35, 1.0]),
    st.integers(0, 999),
)
def test_packed_attention_equals_dense(
    lengths: list[int], heads: tuple[int, int], scale: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    total, (query_heads, kv_heads) = sum(lengths), heads
    q, k, v = (
        torch.randn(total, count, 8, dtype=torch.float64, generator=draw, requires_grad=True)
        for count in (query_heads, kv_heads, kv_heads)
    )
    out = packed_attention(q, k, v, Documents.of(starts_of(lengths)), scale)
    expected = dense_attention(q, k, v, lengths, scale)
    upstream = torch.randn(out.shape, dtype=torch.float64, generator=draw)
    found, wanted = (torch.autograd.grad(y, (q, k, v), upstream) for y in (out, expected))
    for a, b in zip((out, *found), (expected, *wanted), strict=True):
        assert (a - b).abs().max() < 1e-10


def test_the_cuda_path_calls_torch_as_torch_wants_it() -> None:
    """It cannot run here; its call can be checked against the signature."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    from megarl.kernels.packed_attention import causal

    inspect.signature(varlen_attn).bind(*(None,) * 7, **causal(0.1))


def test_another_document_never_changes_mine() -> None:
    lengths = [7, 30, 12]
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(49, 2, 8, generator=draw, requires_grad=True) for _ in range(3))
    out = packed_attention(q, k, v, Documents.of(starts_of(lengths)), 0.3)
    grads = torch.autograd.grad(out[7:37].sum(), (q, k, v))
    for grad in grads:
        assert (
            grad[:7].abs().max() == 0 and grad[37:].abs().max() == 0 and grad[7:37].abs().max() > 0
        )
    with torch.no_grad():
        for x in (q, k, v):
            x[:7] = 1e4
            x[37:] = -1e4
    again = packed_attention(q, k, v, Documents.of(starts_of(lengths)), 0.3)
    assert torch.equal(out[7:37], again[7:37])


@pytest.mark.parametrize("shape", [(1, 5, 7), (2, 33, 192), (64, 17)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_equals_float64_forward_and_backward(
    shape: tuple[int, ...], with_bias: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=draw)
    weight, bias = torch.randn(29, shape[-1], generator=draw), torch.randn(29, generator=draw)
    upstream = torch.randn(*shape[:-1], 29, generator=draw)

    def values_and_grads(function, kind: torch.dtype) -> list[torch.Tensor]:
        inputs = [
            tensor.to(kind).requires_grad_()
            for tensor in ((x, weight, bias) if with_bias else (x, weight))
        ]
        out = function(*inputs)
        return [out, *torch.autograd.grad(out, inputs, upstream.to(kind))]

    found = values_and_grads(linear, torch.float32)
    wanted = values_and_grads(torch.nn.functional.linear, torch.float64)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and ((a.double() - b).norm() / b.norm()) < 1e-6


def test_linear_of_no_rows_and_of_other_types() -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    linear(torch.zeros(0, 4), weight).sum().backward()
    assert weight.grad is not None and weight.grad.abs().max() == 0
    assert linear(torch.ones(2, 4).double(), weight.double()).dtype == torch.float64
