"""The flash block: with stand-ins for the kernels against float64, against torch's shape rules, and
on a GPU.

A stand-in does what torch's sources say the kernel does, and insists on what the kernel needs and
does not check.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from support.block_pairs import LAYOUTS, LONG, compare
from support.sequence_cases import CPU, TOLERANCE, Case, assert_close, cases, dense, split_attention
from torch._subclasses.fake_tensor import FakeTensorMode

from megarl.kernels import block_flash, mask_regions
from megarl.kernels.attention_plan import BLOCKS
from megarl.kernels.block import Positions
from megarl.kernels.block_flash import FlashOperator
from megarl.parallel.sequence import CUTS

META = torch.device("meta")
HALVES = [torch.float16, torch.bfloat16]
TENSORS = tuple[torch.Tensor, ...]


def scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """[B, H, n, m] in at least float32; the causal mask is aligned at the bottom right."""
    kind = torch.promote_types(q.dtype, torch.float32)
    found = q.to(kind) @ k.to(kind).transpose(-1, -2) * scale
    n, m = found.shape[-2:]
    hidden = torch.ones(n, m, dtype=torch.bool).triu(1 + m - n)
    return found.masked_fill(hidden, -torch.inf) if causal else found


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> TENSORS:
    found = scores(q, k, causal, scale)
    lse = found.logsumexp(-1)
    return ((found - lse[..., None]).exp() @ v.to(lse.dtype)).to(q.dtype), lse


def backward(given: TENSORS, lse: torch.Tensor, causal: bool, scale: float) -> TENSORS:
    dtype = given[0].dtype
    assert all(x.dtype == dtype for x in given), "the kernel takes one type"
    grad_out, q, k, v, out = (x.to(lse.dtype) for x in given)
    p = (scores(q, k, causal, scale) - lse[..., None]).exp()
    sums = (grad_out * out).sum(-1, keepdim=True)
    grad_scores = p * (grad_out @ v.transpose(-1, -2) - sums) * scale
    grads = grad_scores @ k, grad_scores.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad_out
    return tuple(grad.to(dtype) for grad in grads)


def by_rows(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """[B, L, H, D] as [B, H, L, D]."""
    for x in tensors:
        assert x.dim() == 4 and x.stride(-1) == 1
        yield x.transpose(1, 2)


def flash_forward(q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale) -> TENSORS:
    assert (cum_q, cum_k, dropout, debug) == (None, None, 0.0, False)
    assert (max_q, max_k) == (q.shape[1], k.shape[1])
    q, k, v = by_rows(q, k, v)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    out, lse = forward(q, k, v, causal, scale)
    return out.transpose(1, 2), lse, *[torch.empty(0)] * 3


def flash_backward(
    grad_out, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, state, unused, *,
    scale,
) -> TENSORS:  # fmt: skip
    assert (cum_q, cum_k, dropout) == (None, None, 0.0)
    assert (max_q, max_k) == (q.shape[1], k.shape[1])
    assert lse.is_contiguous() and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    grad_out, q, k, v, out = by_rows(grad_out, q, k, v, out)
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    repeated = [x.repeat_interleave(heads[1], 1) for x in (k, v)]
    grads = backward((grad_out, q, *repeated, out), lse, causal, scale)
    summed = (grad.unflatten(1, heads).sum(2) for grad in grads[1:])
    return tuple(x.transpose(1, 2) for x in (grads[0], *summed))


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that the block calls are stand-ins that take any type."""
    aten = torch.ops.aten
    monkeypatch.setattr(aten._flash_attention_forward, "default", flash_forward)
    monkeypatch.setattr(aten._flash_attention_backward, "default", flash_backward)
    monkeypatch.setattr(block_flash, "_check", lambda *_: None)


@pytest.mark.parametrize("small", [0, mask_regions.SMALL_SCORES])
def test_any_rows_equal_dense_attention(
    replaced: None, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr(mask_regions, "SMALL_SCORES", small)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(cases())
    def check(case: Case) -> None:
        case = replace(case, cap=None)  # which the block refuses
        tensors = case.tensors()
        found, _ = split_attention(case, "flash", "ring", tensors)
        assert_close(found, dense(case, tensors), TOLERANCE[torch.float64])

    check()


@pytest.mark.parametrize("dtype", [torch.float64, *HALVES])
@pytest.mark.parametrize("how", [*CUTS, "permuted"])
def test_longer_documents_and_every_cut(replaced: None, how: str, dtype: torch.dtype) -> None:
    """Rectangles, triangles, tiles and batches; in 16 bits each piece is rounded, and the sums are
    not.
    """
    case = Case((1, 300, 7, 450, 1), 4, 2, how, (4, 2), 8, 0.35, 3)
    tensors = case.tensors(dtype)
    found, _ = split_attention(case, "flash", "ring", tensors)
    assert all(x.dtype == dtype for x in found)
    tolerance = TOLERANCE[dtype] if dtype == torch.float64 else 2 * torch.finfo(dtype).eps
    assert_close(found, dense(case, [x.double() for x in tensors]), tolerance)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cases_of_the_gpu_here(replaced: None, layout: str, dtype: torch.dtype) -> None:
    for rank in (0, 1):
        compare(LAYOUTS[layout], rank, (4, 2), 16, dtype, BLOCKS["flash"](), CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_the_block_on_a_gpu(heads: tuple[int, int], rank: int, dtype: torch.dtype) -> None:
    made, device = BLOCKS["flash"](), torch.device("cuda")
    for width in (64, 128):
        for layout in LAYOUTS.values():
            compare(layout, rank, heads, width, dtype, made, device)
        compare(LONG, rank, heads, width, dtype, made, device, torch.tensor([0, 290, 600]))


def elsewhere() -> FakeTensorMode:
    """Operations give shapes only, and refuse tensors of two devices; `META` stands for the GPU
    that is not here.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.allow_meta = True
    return mode


def views(dtype: torch.dtype) -> Iterator[list[torch.Tensor]]:
    """(grad_out, q, k, v, out) as pieces hand them over: transposed, and as parts of something
    larger.
    """
    sizes = [(1, 4, 4, 300, 300), (1, 4, 2, 300, 200), (3, 4, 1, 20, 20)]
    for batch, heads, kv_heads, n, m in sizes:
        shapes = [(n, heads), (n, heads), (m, kv_heads), (m, kv_heads), (n, heads)]
        larger = (
            torch.empty(batch, x, 2, count, 64, dtype=dtype, device=META) for x, count in shapes
        )
        yield [one[:, :, 1].transpose(1, 2) for one in larger]


@pytest.mark.parametrize("dtype", HALVES)
def test_torch_accepts_the_calls(dtype: torch.dtype) -> None:
    """Torch's own names, order and shape rules of the kernels' arguments and results."""
    with elsewhere(), torch.no_grad():
        for grad_out, q, k, v, out in views(dtype):
            made, causal = FlashOperator(), q.shape[2] == k.shape[2]
            found, lse = made.forward(q, k, v, causal, None, 0.3)
            assert (found.shape, found.dtype, found.device) == (q.shape, dtype, META)
            assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
            strided = torch.empty(q.shape[1], q.shape[0], q.shape[2], device=META).transpose(0, 1)
            grads = made.backward(grad_out, q, k, v, out, strided, causal, None, 0.3)
            assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("how", ["zigzag", "permuted"])
def test_everything_the_block_makes_is_on_its_device(how: str) -> None:
    case = Case((1, 300, 7, 450, 20, 22, 25, 60), 2, 1, how, (4, 2), 8, 0.35, 3)
    owned = [Positions.of(index, case.starts) for index in case.indices()]
    made: Any = BLOCKS["flash"]()
    for queries, keys in itertools.product(owned, owned):
        work = made.prepare(queries, keys, META)
        if work is None:
            continue
        with elsewhere(), torch.no_grad():
            q = torch.empty(len(queries.index), 4, 64, dtype=torch.bfloat16, device=META)
            both = torch.empty(len(keys.index), 2, 2, 64, dtype=torch.bfloat16, device=META)
            k, v = both.unbind(1)
            sums = [torch.empty(x.shape, device=META) for x in (q, q, k, v)]
            lse = torch.empty(4, len(q), device=META)
            made.forward(q, k, v, work, 0.3, sums[0], lse)
            made.backward(q, q, k, v, q, lse, work, 0.3, *sums[1:])


def test_what_it_cannot_do_is_refused() -> None:
    positions = Positions.of(torch.arange(8), torch.tensor([0, 8]))
    made = BLOCKS["flash"]()
    work = made.prepare(positions, positions, torch.device("cpu"))
    for dtype, width, message in [
        (torch.float32, 64, "takes float16 or bfloat16, got torch.float32; the block named triton"),
        (torch.bfloat16, 20, "multiples of 8"),
        (torch.bfloat16, 264, "got 264"),
    ]:
        x = torch.zeros(8, 2, width, dtype=dtype)
        with pytest.raises(ValueError, match=message):
            made.forward(x, x, x, work, 1.0, x.float(), torch.zeros(2, 8))
