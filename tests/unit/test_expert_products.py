"""Experts' MLPs by every backend against float64; Triton's kernels in its interpreter, in the process
that test_triton.py starts, and on a GPU if there is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

from megarl.kernels.experts import (
    Backend,
    ExpertRows,
    expert_mlp,
    fitting_backend,
    take_rows,
    weighted_sum,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.device("cpu" if INTERPRETED else "cuda")
CPU = torch.device("cpu")
H, INNER = 72, 40
COUNTS = {
    "ragged": [0, 5, 1, 0, 70, 3, 0],
    "one expert has all": [0, 0, 79],
    "one row": [0, 1, 0],
    "one expert": [130],
    "no row": [0, 0],
}
BOUND = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of the largest value, after two products and a gate: a rounding is 6e-8, 4e-3 and 5e-4."""
# The interpreter multiplies the bits of bfloat16 as integers, and is slow.
DTYPES = [torch.float32] if INTERPRETED else list(BOUND)
Case = tuple[torch.device, Backend, torch.dtype]


def on_device(test: Callable[..., None]) -> Callable[..., None]:
    return test if INTERPRETED else pytest.mark.gpu(test)


def gate(x: torch.Tensor) -> torch.Tensor:
    """As gpt-oss's, of interleaved halves. Without its limit, whose slope a rounding can change."""
    return F.silu(x[..., ::2]) * (x[..., 1::2] + 1)


def drawn(counts: Sequence[int], with_bias: bool, is_transposed: bool) -> list[torch.Tensor]:
    """x, gate_up, its bias, down, its bias, and a gradient; on CPU in float32."""
    draw = torch.Generator().manual_seed(0)
    experts, total = len(counts), sum(counts)
    shapes = [(total, H), (experts, 2 * INNER, H), (experts, 2 * INNER)]
    shapes += [(experts, H, INNER), (experts, H), (total, H)]
    tensors = [torch.randn(*shape, generator=draw) / shape[-1] ** 0.25 for shape in shapes]
    if is_transposed:
        for place in (1, 3):
            tensors[place] = tensors[place].transpose(1, 2).contiguous().transpose(1, 2)
    return [
        x if with_bias or place not in (2, 4) else x.new_zeros(0) for place, x in enumerate(tensors)
    ]


def exact(counts: Sequence[int], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients in float64 of tensors that are already rounded to the dtype."""
    x, up, up_bias, down, down_bias, grad = leaves = [
        t.detach().double().requires_grad_() for t in tensors
    ]
    parts = []
    for expert, rows in enumerate(x.split(counts)):
        one, two = (b[expert] if b.numel() else 0.0 for b in (up_bias, down_bias))
        parts.append(gate(rows @ up[expert].T + one) @ down[expert].T + two)
    out = torch.cat(parts)
    (out * grad.detach()).sum().backward()
    none = torch.zeros_like
    return [out.detach(), *(none(t) if t.grad is None else t.grad for t in leaves[:5])]


def compare(
    case: Case, counts: Sequence[int], with_bias: bool = False, is_transposed: bool = False
) -> None:
    device, backend, dtype = case
    tensors = [t.to(device, dtype) for t in drawn(counts, with_bias, is_transposed)]
    x, up, up_bias, down, down_bias, grad = leaves = [t.requires_grad_() for t in tensors]
    one, two = (b if with_bias else None for b in (up_bias, down_bias))
    out = expert_mlp(x, (up, one), (down, two), ExpertRows(counts, gate, backend))
    assert out.dtype == dtype and out.shape == x.shape
    out.backward(grad.detach())
    again = expert_mlp(x, (up, one), (down, two), ExpertRows(counts, gate, backend))
    assert torch.equal(out, again)
    found = [out, *(t.grad for t in leaves[:5])]
    for number, (a, b) in enumerate(zip(found, exact(counts, tensors), strict=True)):
        if b.numel() and (with_bias or number not in (3, 5)):
            assert a is not None and a.dtype == dtype and a.shape == b.shape
            largest = b.abs().max()
            assert (a.detach().double() - b).abs().max() <= BOUND[dtype] * largest, number
    for weight in leaves[1:5]:
        for expert, count in enumerate(counts):
            assert count or weight.grad is None or weight.grad[expert].abs().max() == 0


on_cpu: list[tuple[Backend, torch.dtype]] = [
    (backend, dtype) for backend in ("loop", "grouped") for dtype in BOUND
]


@pytest.mark.skipif(INTERPRETED, reason="runs in the process that starts this one")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("backend", "dtype"), on_cpu)
def test_an_mlp_on_cpu(
    backend: Backend, dtype: torch.dtype, name: str, is_transposed: bool, with_bias: bool
) -> None:
    compare((CPU, backend, dtype), COUNTS[name], with_bias, is_transposed)


@on_device
@pytest.mark.parametrize(("with_bias", "is_transposed"), [(False, False), (True, True)])
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_mlp_by_triton(
    dtype: torch.dtype, name: str, with_bias: bool, is_transposed: bool
) -> None:
    compare((GPU, "triton", dtype), COUNTS[name], with_bias, is_transposed)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs no interpreter")
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_mlp_by_torch_on_a_gpu(dtype: torch.dtype, name: str) -> None:
    compare((GPU, "grouped", dtype), COUNTS[name], True)


@on_device
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16] if INTERPRETED else DTYPES)
def test_triton_products_over_several_tiles(dtype: torch.dtype) -> None:
    """Sizes that no tile divides, in both directions, with rows that lie apart."""
    from megarl.kernels.experts_triton import grouped_rows, grouped_weights

    counts, draw = [0, 3, 140, 0, 65], torch.Generator().manual_seed(0)
    a, b = (torch.randn(208, n + 5, generator=draw).to(GPU, dtype)[:, :n] for n in (150, 133))
    weight = torch.randn(5, 133, 150, generator=draw).to(GPU, dtype)
    found = grouped_rows(a, weight, counts), grouped_weights(b, a, counts)
    parts = [
        (x.double(), y.double()) for x, y in zip(a.split(counts), b.split(counts), strict=True)
    ]
    wanted = (
        torch.cat([x @ w.double().T for (x, _), w in zip(parts, weight, strict=True)]),
        torch.stack([y.T @ x for x, y in parts]),
    )
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        assert (one.double() - other).abs().max() <= BOUND[dtype] / 2 * other.abs().max()


def test_float64_is_refused_by_triton() -> None:
    from megarl.kernels.experts_triton import grouped_rows

    x = torch.zeros(2, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        grouped_rows(x, x[None], [2])


def test_only_what_is_trained_has_gradients() -> None:
    counts = [3, 0, 2]
    x, up, _, down, *_ = drawn(counts, False, False)
    down.requires_grad_()
    expert_mlp(x, (up, None), (down, None), ExpertRows(counts, gate, "loop")).sum().backward()
    assert down.grad is not None and x.grad is up.grad is None


def test_cpus_multiply_one_expert_after_the_other() -> None:
    assert {fitting_backend(CPU, dtype) for dtype in BOUND} == {"loop"}


@pytest.mark.parametrize("dtype", [torch.float64, *BOUND])
@pytest.mark.parametrize("partial", [False, True])
def test_rows_of_tokens_and_their_weighted_sums(partial: bool, dtype: torch.dtype) -> None:
    """`partial`: some pairs are another rank's, whose part of the sum is 0."""
    draw = torch.Generator().manual_seed(0)
    tokens, top_k = 1500, 3  # more rows than a chunk has
    pairs = torch.randperm(tokens * top_k, generator=draw)
    pairs = pairs[pairs % 4 > 0] if partial else pairs
    order = torch.full((tokens * top_k,), len(pairs))
    order[pairs] = torch.arange(len(pairs))
    order = order.view(tokens, top_k)
    x = torch.randn(tokens, 8, generator=draw).to(dtype).requires_grad_()
    rows = torch.randn(len(pairs), 8, generator=draw).to(dtype).requires_grad_()
    weights = torch.rand(tokens, top_k, generator=draw).requires_grad_()
    grads = torch.randn(tokens, 8, generator=draw), torch.randn(len(pairs), 8, generator=draw)
    leaves = x, rows, weights
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]

    found = weighted_sum(rows, weights, pairs, order), take_rows(x, pairs // top_k, order)
    assert found[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.autograd.backward(found, [g.to(f.dtype) for g, f in zip(grads, found, strict=True)])
    whole = wide[1].new_zeros(tokens * top_k, 8).index_copy(0, pairs, wide[1])
    wanted = (whole.view(tokens, top_k, 8) * wide[2][..., None]).sum(1), wide[0][pairs // top_k]
    given = [g.to(f.dtype).double() for g, f in zip(grads, found, strict=True)]
    torch.autograd.backward(wanted, given)
    bound = 1e-6 if dtype in (torch.float32, torch.float64) else BOUND[dtype] / 2
    for a, b in [
        *zip(found, wanted, strict=True),
        *((a.grad, b.grad) for a, b in zip(leaves, wide, strict=True)),
    ]:
        assert (a.double() - b).abs().max() <= bound * b.abs().max()


def test_tokens_need_no_rows_of_their_own() -> None:
    """What one rank computes of tokens equals what it computes of their rows, bit for bit."""
    counts, index = [3, 0, 4, 1], torch.tensor([[0, 2], [2, 0], [0, 2], [3, 2]])
    pairs = index.view(-1).argsort(stable=True)
    order = torch.empty_like(pairs)
    order[pairs] = torch.arange(8)
    order = order.view_as(index)
    _, up, up_bias, down, down_bias, _ = drawn(counts, True, False)
    results = []
    for is_fused in (False, True):
        x = torch.randn(4, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
        source = pairs // 2, order
        work = ExpertRows(counts, gate, "loop", *(source if is_fused else ()))
        rows = x if is_fused else take_rows(x, *source)
        out = expert_mlp(rows, (up, up_bias), (down, down_bias), work)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        assert x.grad is not None
        results.append((out, x.grad))
    assert all(map(torch.equal, *results))


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("target", [80, 90])
def test_kernels_compile_without_spills(
    target: int, is_transposed: bool, dtype: torch.dtype
) -> None:
    """`is_transposed`: weights as gradients of rows read them."""
    from compile_table import SHARED_KIB, compiling, facts, launch_experts

    with compiling(target) as found:
        launch_experts(dtype, is_transposed)
    assert set(found) == {"grouped_rows_kernel", "grouped_weights_kernel"}
    for kernel, (made, log) in found.items():
        row = facts(kernel, made, log, width=None, dtype=str(dtype), target=target)
        assert row.spill_stores == 0 and row.shared <= SHARED_KIB[target] * 1024
        if target == 90 and dtype != torch.float32:
            assert "wgmma.mma_async" in made.asm["ptx"]
