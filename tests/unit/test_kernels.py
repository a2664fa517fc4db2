"""Packed attention and linear layers against float64 references, forward and backward."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.kernels.linear import ONEDNN, linear, use_bfloat16x2
from megarl.kernels.logprobs import linear_logprobs
from megarl.kernels.packed_attention import (
    Documents,
    PackedBackend,
    automatic_attention,
    packed_attention,
    packed_reference,
    prove_varlen,
    varlen_kernel,
)
from megarl.kernels.packed_varlen import provider, torch_varlen, varlen_function


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
    st.sampled_from(["torch", "reference"]),
)
def test_packed_attention_equals_dense(
    lengths: list[int], heads: tuple[int, int], scale: float, seed: int, backend: PackedBackend
) -> None:
    draw = torch.Generator().manual_seed(seed)
    total, (query_heads, kv_heads) = sum(lengths), heads
    q, k, v = (
        torch.randn(total, count, 8, dtype=torch.float64, generator=draw, requires_grad=True)
        for count in (query_heads, kv_heads, kv_heads)
    )
    out = packed_attention(q, k, v, Documents.of(starts_of(lengths)), scale, backend)
    expected = dense_attention(q, k, v, lengths, scale)
    upstream = torch.randn(out.shape, dtype=torch.float64, generator=draw)
    found, wanted = (torch.autograd.grad(y, (q, k, v), upstream) for y in (out, expected))
    for a, b in zip((out, *found), (expected, *wanted), strict=True):
        assert (a - b).abs().max() < 1e-10


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A module `flash_attn` whose function computes on the CPU; the dict of its last call, in which
    a test may set a `factor` that spoils the result.
    """
    last: dict[str, Any] = {"factor": 1.0}

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
        softmax_scale: float | None = None, causal: bool = False, deterministic: bool = False,
    ) -> Tensor:  # fmt: skip
        assert causal and softmax_scale and cu_seqlens_q is cu_seqlens_k
        last.update(longest=max_seqlen_q, deterministic=deterministic)
        out = packed_reference(q, k, v, cu_seqlens_q, softmax_scale * last["factor"])
        return out.to(q.dtype)

    inner = ModuleType("flash_attn.flash_attn_interface")
    outer = ModuleType("flash_attn")
    outer.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    outer.__path__ = []
    for module in (outer, inner):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    varlen_function.cache_clear()
    prove_varlen.cache_clear()
    yield last
    varlen_function.cache_clear()
    prove_varlen.cache_clear()


def test_flash_attn_is_called_as_it_wants_to_be(flash_attn: dict[str, Any]) -> None:
    lengths = [5, 40, 1]
    q, k, v = (torch.randn(46, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    documents = Documents.of(starts_of(lengths))
    out = packed_attention(q, k, v, documents, 0.3, "flash_attn")
    wanted = packed_reference(q, k, v, documents.starts, 0.3)
    assert torch.equal(out, wanted) and out.dtype == torch.bfloat16
    assert (flash_attn["longest"], flash_attn["deterministic"]) == (40, False)


@pytest.mark.parametrize("factor", [0.5, 1.2, float("nan")])
def test_a_kernel_that_is_wrong_is_refused(flash_attn: dict[str, Any], factor: float) -> None:
    flash_attn["factor"] = factor
    q, k, v = (torch.randn(6, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2))
    said = r"differs from the reference in float64.*set training.a"
    with pytest.raises(RuntimeError, match=said):
        packed_attention(q, k, v, Documents.of(starts_of([6])), 0.3, "flash_attn")


def test_flash_attn_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(3, 2, 8)
    with pytest.raises(ValueError, match=r"flash-attn-4.*or set training.attention to 'torch'"):
        packed_attention(q, q, q, Documents.of(starts_of([3])), 0.3, "flash_attn")
    found = ["flash_attn.cute", "flash_attn.flash_attn_interface"]
    monkeypatch.setattr("megarl.kernels.packed_varlen.has_module", found.__contains__)
    capabilities = [(8, 0), (9, 0), (10, 0), (12, 0)]
    assert [provider(one) for one in capabilities] == ["FA2", "FA4", "FA4", "FA2"]


@pytest.mark.parametrize(("capability", "dtype", "installed", "wanted", "why"), [
    ((9, 0), torch.bfloat16, True, "flash_attn", "FlashAttention-4, compute capability 9.0"),
    ((10, 0), torch.float16, True, "flash_attn", "compute capability 10.0"),
    ((9, 0), torch.bfloat16, False, "torch", "not installed"),
    ((8, 0), torch.bfloat16, True, "torch", "compute capability 8.0, for which"),
    ((12, 0), torch.bfloat16, True, "torch", "compute capability 12.0, for which"),
    ((9, 0), torch.float32, True, "torch", "float32, and FlashAttention-4 takes 16 bit"),
])  # fmt: skip
def test_what_auto_stands_for_on_a_gpu(
    capability: tuple[int, int], dtype: torch.dtype, installed: bool, wanted: str, why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Here, because kernels are tested also where the packages of trainers are not installed.
    from megarl.trainer.attention import attention_line

    device, module = torch.device("cuda", 0), "megarl.kernels.packed_attention"
    monkeypatch.setattr(f"{module}._capability", lambda device: capability)
    monkeypatch.setattr(f"{module}.has_module", lambda name: installed)
    monkeypatch.setattr(f"{module}.varlen_function", lambda capability: packed_reference)
    monkeypatch.setattr(f"{module}.prove_varlen", lambda *heads: None)
    automatic_attention.cache_clear()
    chosen, said = automatic_attention(dtype, device)
    kernel = varlen_kernel("auto", dtype, device)
    line = attention_line(str(dtype).removeprefix("torch."), device, 128)
    automatic_attention.cache_clear()
    assert chosen == wanted and why in said
    assert line == f"training.attention auto is {wanted}: {said}"
    if wanted == "flash_attn":
        assert kernel is packed_reference
    else:
        assert kernel is (torch_varlen if dtype == torch.bfloat16 else None)


@pytest.mark.parametrize(("factor", "wanted"), [(1.0, "flash_attn"), (0.5, "torch")])
def test_auto_is_torch_where_the_package_computes_something_else(
    flash_attn: dict[str, Any], factor: float, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash_attn["factor"] = factor
    module, cpu = "megarl.kernels.packed_attention", torch.device("cpu")
    monkeypatch.setattr(f"{module}._capability", lambda device: (9, 0))
    monkeypatch.setattr(f"{module}.has_module", lambda name: True)
    monkeypatch.setattr(f"{module}.prove_varlen", lambda *it: prove_varlen(*it[:-1], cpu))
    automatic_attention.cache_clear()
    chosen, why = automatic_attention(torch.bfloat16, torch.device("cuda", 0))
    automatic_attention.cache_clear()
    assert chosen == wanted
    assert wanted == "flash_attn" or "installed, and fails: RuntimeError: the attention" in why


@pytest.mark.parametrize("values", [2, 4, 5])
def test_flash_attention_4_may_return_more_than_torch_expects(
    values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forward kernel returns two, four or five values, depending on the version."""
    from torch.nn import attention
    from torch.nn.attention import _fa4

    interface, cute = ModuleType("flash_attn.cute.interface"), ModuleType("flash_attn.cute")
    made = [torch.full((2, 1), float(number)) for number in range(values)]
    interface._flash_attn_fwd = lambda *tensors, **settings: tuple(made)  # type: ignore[attr-defined]
    interface._flash_attn_bwd = lambda *tensors, **settings: tuple(made)  # type: ignore[attr-defined]
    cute.interface = interface  # type: ignore[attr-defined]
    outer = ModuleType("flash_attn")
    for module in (outer, cute, interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("megarl.kernels.packed_varlen.provider", lambda capability: "FA4")
    varlen_function.cache_clear()
    try:
        assert varlen_function((9, 0)) is torch_varlen
        given: Any = [*made[:1] * 3, *(None,) * 5, True, None, None, None]
        out, lse = _fa4._fa4_run_forward(*given)
    finally:
        attention.restore_flash_attention_impl(False)
        varlen_function.cache_clear()
    assert out is made[0] and torch.equal(lse, made[1])


def test_auto_is_the_default_and_torch_on_the_cpu() -> None:
    from megarl.settings.training import TrainingConfig

    assert TrainingConfig().attention == "auto"
    assert automatic_attention(torch.bfloat16, torch.device("cpu")) == ("torch", "no GPU")
    q = torch.randn(6, 2, 8)
    ours, torchs = (
        packed_attention(q, q, q, Documents.of(starts_of([2, 4])), 0.3, backend)
        for backend in ("auto", "torch")
    )
    assert torch.equal(ours, torchs)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "flash_attn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width"), [((4, 4), 64), ((8, 2), 128), ((6, 1), 80)])
def test_kernels_of_variable_length_on_a_gpu(
    backend: PackedBackend, dtype: torch.dtype, heads: tuple[int, int], width: int
) -> None:
    """Equal to float64 within rounding; float32 in memory that grows with the tokens alone."""
    if backend == "flash_attn" and not provider(torch.cuda.get_device_capability()):
        pytest.skip("no package flash-attn is installed for this GPU")
    if backend == "flash_attn" and dtype == torch.float32:
        pytest.skip("flash-attn takes 16 bit")
    lengths = [300, 1, 4096]
    draw = torch.Generator().manual_seed(2)
    shapes = [(sum(lengths), count, width) for count in (heads[0], heads[1], heads[1], heads[0])]
    *given, upstream = (torch.randn(one, generator=draw).to("cuda", dtype) for one in shapes)
    documents, scale = Documents.of(starts_of(lengths).cuda()), width**-0.5

    def results(kind: torch.dtype, name: PackedBackend) -> list[torch.Tensor]:
        q, k, v = (x.to(kind).requires_grad_() for x in given)
        out = packed_attention(q, k, v, documents, scale, name)
        return [out, *torch.autograd.grad(out, (q, k, v), upstream.to(kind))]

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = results(dtype, backend)
    assert torch.cuda.max_memory_allocated() - before < heads[0] * max(lengths) ** 2 * 4
    for one, wanted in zip(found, results(torch.float64, "reference"), strict=True):
        error = (one.double() - wanted).abs().max()
        assert error <= 8 * torch.finfo(dtype).eps * wanted.abs().max() + 1e-6


def test_the_cuda_path_calls_torch_as_torch_wants_it() -> None:
    """It cannot run here; its call can be checked against the signature."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    from megarl.kernels.packed_varlen import causal

    inspect.signature(varlen_attn).bind(*(None,) * 7, **causal(0.1))


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_a_torch_that_knows_no_shared_heads_is_given_every_head(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int
) -> None:
    """`enable_gqa` is missing in torch 2.11. A stand-in with its arguments refuses to share heads;
    output and gradients are those of attention that shares them.
    """
    from torch.nn.attention import varlen

    def old(
        q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        assert q.shape == k.shape == v.shape and window_size == (-1, 0) and scale is not None
        return packed_attention(q, k, v, Documents.of(cu_seq_q), scale, "reference")

    monkeypatch.setattr(varlen, "varlen_attn", old)
    lengths = [5, 1, 30]
    draw = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), heads, 8) for heads in (6, kv_heads, kv_heads, 6)]
    *given, upstream = (torch.randn(one, generator=draw, dtype=torch.float64) for one in shapes)
    q, k, v = (x.requires_grad_() for x in given)
    starts = starts_of(lengths)
    found = torch_varlen(q, k, v, starts, 30, 0.4)
    wanted = packed_attention(q, k, v, Documents.of(starts), 0.4, "reference")
    torch.testing.assert_close(found, wanted)
    grads = (torch.autograd.grad(out, (q, k, v), upstream) for out in (found, wanted))
    torch.testing.assert_close(*grads)


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
        given = (x, weight, bias) if with_bias else (x, weight)
        inputs = [tensor.to(kind).requires_grad_() for tensor in given]
        out = function(*inputs)
        return [out, *torch.autograd.grad(out, inputs, upstream.to(kind))]

    found = values_and_grads(linear, torch.float32)
    wanted = values_and_grads(torch.nn.functional.linear, torch.float64)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and ((a.double() - b).norm() / b.norm()) < 1e-6


@pytest.fixture
def in_parts() -> Iterator[None]:
    """Products of bfloat16 parts, for a test."""
    if ONEDNN is None:
        pytest.skip("this processor has no AVX-512, or torch no oneDNN")
    use_bfloat16x2(True)
    yield
    use_bfloat16x2(False)


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("head", [False, True])
def test_bfloat16x2_multiplies_finer_than_bfloat16(head: bool) -> None:
    """In linear layers and in the fused output head. What is exact in bfloat16 stays exact."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 300, generator=draw), torch.randn(29, 300, generator=draw) / 17
    targets, upstream = torch.arange(7), torch.randn(7, 29, generator=draw)

    def values_and_grads(kind: torch.dtype, *, exact: bool = False) -> list[torch.Tensor]:
        inputs = [one.bfloat16().to(kind) if exact else one.to(kind) for one in (x, weight)]
        a, b = (one.requires_grad_() for one in inputs)
        if head:
            out = linear_logprobs(a, b, targets, 1.0)[0]
            return [out, *torch.autograd.grad(out, [a, b], upstream[:, 0].to(out.dtype))]
        out = linear(a, b)
        given = upstream.bfloat16() if exact else upstream
        return [out, *torch.autograd.grad(out, [a, b], given.to(kind))]

    def gaps(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[float]:
        pairs = zip(found, wanted, strict=True)
        return [float((a.double() - b).detach().norm() / b.detach().norm()) for a, b in pairs]

    value, *grads = gaps(values_and_grads(torch.float32), values_and_grads(torch.float64))
    assert 3e-7 < value < 2**-16, "neither float32's products nor bfloat16's"
    assert all(1e-4 < one < 2**-8 for one in grads)
    exact = (values_and_grads(kind, exact=True) for kind in (torch.float32, torch.float64))
    value, *grads = gaps(*exact)
    assert value < 1e-6
    assert head or max(grads) < 1e-6  # the gradient of logits is no bfloat16 number


def test_linear_of_no_rows_and_of_other_types() -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    linear(torch.zeros(0, 4), weight).sum().backward()
    assert weight.grad is not None and weight.grad.abs().max() == 0
    assert linear(torch.ones(2, 4).double(), weight.double()).dtype == torch.float64
