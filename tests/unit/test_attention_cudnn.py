"""cuDNN's attention: through torch's dispatcher and autograd with stand-ins for its two operators,
which record what they are given, and on a GPU.

A stand-in computes in float64 and insists on what cuDNN needs. The layout of its log-sum-exp for
cumulative lengths, which differs between versions of torch, is one of two.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from support.block_pairs import LAYOUTS, LONG, compare
from support.sequence_cases import Case, assert_close, dense, make_plan, split_attention
from torch import Tensor

from megarl.kernels import attention_cudnn, block_flash, mask_regions, packed_attention
from megarl.kernels.attention_plan import BLOCKS
from megarl.kernels.packed_attention import (
    Documents,
    automatic_attention,
    packed_reference,
    prove_varlen,
    varlen_kernel,
)
from megarl.kernels.packed_varlen import torch_varlen
from megarl.settings.training import SequenceConfig, TrainingConfig
from megarl.trainer import plan
from megarl.trainer.attention import attention_line

HEADS = [(4, 4), (4, 2), (6, 1)]
HALVES = [torch.float16, torch.bfloat16]


class Cudnn:
    """The stand-ins. A test may set a `factor` that spoils the scale."""

    def __init__(self, by_head: bool) -> None:
        self.calls: list[dict[str, Any]] = []
        self.by_head, self.factor = by_head, 1.0

    def pieces(self, q: Tensor, k: Tensor, cum_q: Any, cum_k: Any, most: tuple[int, int]) -> Any:
        """Slices of the queries and keys of each document, after the checks."""
        assert q.dtype == k.dtype and q.stride(-1) == k.stride(-1) == 1
        if cum_q is None:
            assert q.dim() == 4 and len(q) == len(k) and most == (q.shape[2], k.shape[2])
            return []
        assert q.is_contiguous() and k.is_contiguous() and cum_q.dtype == cum_k.dtype == torch.int32
        assert cum_q[0] == cum_k[0] == 0 and cum_q[-1] == len(q) and cum_k[-1] == len(k)
        # cuDNN before 9.25 returns NaN for empty documents, and 9.19 errs where the longest is 1.
        assert min(cum_q.diff().min(), cum_k.diff().min()) > 0 and min(most) > 1
        assert cum_q.diff().max() <= most[0] and cum_k.diff().max() <= most[1]
        edges = [cum_q.tolist(), cum_k.tolist()]
        return [[slice(a, b) for a, b in zip(one[:-1], one[1:], strict=True)] for one in edges]

    def forward(
        self, query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, compute_log_sumexp,
        dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert (attn_bias, compute_log_sumexp, dropout_p) == (None, True, 0.0)
        assert not return_debug_mask and scale is not None
        pieces = self.pieces(query, key, cum_seq_q, cum_seq_k, (max_q, max_k))
        self.calls.append(
            {"way": "forward", "bounds": None if cum_seq_q is None else cum_seq_q.tolist()}
            | {"most": (max_q, max_k), "causal": is_causal, "scale": scale}
        )
        scale *= self.factor
        if cum_seq_q is None:
            out, lse = attend(query, key, value, is_causal, scale)
            lse = lse[..., None]
        else:
            out = torch.empty_like(query)
            lse = torch.empty(query.shape[1], len(query), dtype=sum_type(query.dtype))
            for rows, columns in zip(*pieces, strict=True):
                heads = (x.transpose(0, 1) for x in (query[rows], key[columns], value[columns]))
                one, lse[:, rows] = attend(*heads, is_causal, scale)
                out[rows] = one.transpose(0, 1)
            lse = lse if self.by_head else lse.T[..., None].contiguous()
        state = torch.zeros((), dtype=torch.int64)
        nothing = torch.empty(0)
        return out, lse, nothing, nothing, max_q, max_k, state, state, nothing

    def backward(
        self, grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias,
        cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert philox_seed.dtype == philox_offset.dtype == torch.int64
        assert (attn_bias, dropout_p) == (None, 0.0) and scale is not None
        assert grad_out.dtype == out.dtype == query.dtype and grad_out.stride(-1) == 1
        pieces = self.pieces(query, key, cum_seq_q, cum_seq_k, (max_q, max_k))
        self.calls.append(
            {"way": "backward", "bounds": None if cum_seq_q is None else cum_seq_q.tolist()}
            | {"most": (max_q, max_k), "causal": is_causal, "scale": scale}
        )
        scale *= self.factor
        assert logsumexp.is_contiguous()
        if cum_seq_q is None:
            assert logsumexp.shape == (*query.shape[:3], 1)
            given = (grad_out, query, key, value, out)
            return attend_backward(*given, logsumexp[..., 0], is_causal, scale)
        tokens, heads = query.shape[:2]
        assert logsumexp.shape == ((heads, tokens) if self.by_head else (tokens, heads, 1))
        lse = logsumexp if self.by_head else logsumexp[..., 0].T
        grads = tuple(torch.empty_like(x) for x in (query, key, value))
        for rows, columns in zip(*pieces, strict=True):
            given = (grad_out[rows], query[rows], key[columns], value[columns], out[rows])
            found = attend_backward(
                *(x.transpose(0, 1) for x in given), lse[:, rows], is_causal, scale
            )
            for grad, one, where in zip(grads, found, (rows, columns, columns), strict=True):
                grad[where] = one.transpose(0, 1)
        return grads


def sum_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """[..., Hq, n, m] in float64; the causal mask is aligned at the top left."""
    k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    found = q.double() @ k.double().transpose(-1, -2) * scale
    later = torch.ones(found.shape[-2:], dtype=torch.bool).triu(1)
    return found.masked_fill(later, -torch.inf) if causal else found


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of q [..., Hq, n, D], k and v [..., Hkv, m, D]."""
    v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    found = scores(q, k, causal, scale)
    return (found.softmax(-1) @ v.double()).to(q.dtype), found.logsumexp(-1).to(sum_type(q.dtype))


def attend_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """By the log-sum-exp and output that are given, which may be over more keys."""
    heads, dtype = (k.shape[-3], q.shape[-3] // k.shape[-3]), q.dtype
    p = (scores(q, k, causal, scale) - lse.double()[..., None]).exp()
    grad_out, q, out = grad_out.double(), q.double(), out.double()
    keys, values = (x.double().repeat_interleave(heads[1], -3) for x in (k, v))
    grad_p = grad_out @ values.transpose(-1, -2)
    grad_scores = p * (grad_p - (grad_out * out).sum(-1, keepdim=True)) * scale
    each = grad_scores.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad_out
    grad_k, grad_v = (x.unflatten(-3, heads).sum(-3).to(dtype) for x in each)
    return (grad_scores @ keys).to(dtype), grad_k, grad_v


@pytest.fixture(params=["lse by token", "lse by head"])
def cudnn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cudnn]:
    """The operators' CPU kernels are stand-ins, and torch keeps plans."""
    made = Cudnn(request.param == "lse by head")
    library = torch.library.Library("aten", "IMPL")
    library.impl("_cudnn_attention_forward", made.forward, "CPU")
    library.impl("_cudnn_attention_backward", made.backward, "CPU")
    monkeypatch.setattr(attention_cudnn, "keeps_plans", lambda: True)
    monkeypatch.setattr(packed_attention, "keeps_plans", lambda: True)
    prove_varlen.cache_clear()
    automatic_attention.cache_clear()
    yield made
    library._destroy()
    prove_varlen.cache_clear()
    automatic_attention.cache_clear()


def packings() -> Iterator[tuple[list[int], tuple[int, int], int]]:
    """(tokens of each document, heads, seed): rows of one token, empty documents, long and short."""
    draw = random.Random(3)
    fixed = [[1], [1, 1, 1], [256], [255, 1], [0, 5, 0], [300, 0, 1], [512, 512], [0, 257]]
    for seed in range(16):
        lengths = [draw.choice([0, 1, 2, 40, 300]) for _ in range(draw.randint(1, 7))]
        lengths = [draw.randint(0, most) for most in lengths] if seed % 2 else lengths
        lengths = fixed[seed] if seed < len(fixed) else [*lengths, draw.randint(1, 90)]
        yield lengths, draw.choice(HEADS), seed


def wanted_bounds(lengths: list[int]) -> tuple[list[int] | None, int]:
    """(cumulative lengths that cuDNN must be given, upper bound of the lengths): one document is
    padded; of several there are a power of two, and they end at a multiple of 256 tokens.
    """
    lengths = [length for length in lengths if length]
    if len(lengths) == 1:
        return None, (lengths[0] + 255) // 256 * 256
    documents, most = 2, 256
    while documents <= len(lengths):
        documents *= 2
    while most < max(lengths):
        most *= 2
    lengths += [1] * (documents - len(lengths))
    lengths[-1] += -sum(lengths) % 256
    return [0, *torch.tensor(lengths).cumsum(0).tolist()], most


@pytest.mark.parametrize(("lengths", "heads", "seed"), list(packings()))
def test_packed_rows(cudnn: Cudnn, lengths: list[int], heads: tuple[int, int], seed: int) -> None:
    """16 packings: what cuDNN is given, and output and gradients through torch's own autograd."""
    draw = torch.Generator().manual_seed(seed)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    counts, scale = (heads[0], heads[1], heads[1], heads[0]), 0.1 + 0.05 * (seed % 5)
    shapes = [(sum(lengths), count, 8) for count in counts]
    *given, upstream = (torch.randn(one, generator=draw, dtype=torch.float64) for one in shapes)
    # As a model hands them over: heads first.
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in given)

    documents = Documents.of(starts)
    packed_attention.packed_attention(q, k, v, documents, scale, "cudnn")  # with the trial
    cudnn.calls.clear()
    out = packed_attention.packed_attention(q, k, v, documents, scale, "cudnn")
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), upstream)]

    bounds, most = wanted_bounds(lengths)
    call = {"bounds": bounds, "most": (most, most), "causal": True, "scale": scale}
    assert cudnn.calls == [{"way": "forward", **call}, {"way": "backward", **call}]
    expected = packed_reference(q, k, v, starts, scale)
    wanted = [expected.detach(), *torch.autograd.grad(expected, (q, k, v), upstream)]
    assert_close(found, wanted, 1e-10)


@pytest.mark.parametrize("cudnn", ["lse by token"], indirect=True)
@pytest.mark.parametrize("seed", range(12))
def test_rings_of_two(cudnn: Cudnn, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 packings: every piece without a mask is one call forward and one backward, which is given
    the log-sum-exp over both ranks' keys, or the gradients would be wrong.
    """
    monkeypatch.setattr(mask_regions, "SMALL_SCORES", 0)
    monkeypatch.setattr(block_flash, "_check", lambda *_: None)  # float64
    draw = random.Random(seed)
    lengths = tuple(draw.choice([1, 2, 30, 150, 301]) for _ in range(draw.randint(1, 5)))
    how = ("contiguous", "zigzag", "zigzag_document", "striped")[seed % 4]
    case = Case(lengths, 2, 1, how, HEADS[seed % 3], 8, 0.35, seed)
    tensors = case.tensors()

    found, _ = split_attention(case, "cudnn", "ring", tensors)
    assert_close(found, dense(case, tensors), 1e-10)

    layer = make_plan(case, "cudnn")
    works = [work for rank in range(2) for owner in range(2) for work in layer.works(rank, owner)]
    pieces = [
        (piece.queries.stop - piece.queries.start, piece.keys.stop - piece.keys.start, piece.causal)
        for work in works
        for piece in work.pieces
        if piece.mask is None and isinstance(piece.queries, slice)
    ]
    wanted = sorted((n, m, causal) for n, m, causal in pieces if min(n, m) > 1)
    for way in ("forward", "backward"):
        calls = [call for call in cudnn.calls if call["way"] == way]
        assert sorted((*call["most"], call["causal"]) for call in calls) == wanted
        assert all(call["scale"] == 0.35 and call["bounds"] is None for call in calls)


@pytest.mark.parametrize("cudnn", ["lse by token"], indirect=True)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layout", [*LAYOUTS, "long"])
def test_pieces_in_16_bit(cudnn: Cudnn, layout: str, dtype: torch.dtype) -> None:
    """Without a large region no plan is made: only the long layout has some."""
    starts = torch.tensor([0, 290, 600])
    for rank in (0, 1):
        made: Any = (BLOCKS["cudnn"](), torch.device("cpu"))
        if layout == "long":
            compare(LONG, rank, (4, 2), 16, dtype, *made, starts)
        else:
            compare(LAYOUTS[layout], rank, (4, 2), 16, dtype, *made)
    assert bool(cudnn.calls) == (layout == "long")
    assert {call["causal"] for call in cudnn.calls} in (set(), {True, False})


def test_a_torch_that_keeps_no_plans_has_rows_of_one_document_by_cudnn(
    cudnn: Cudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.13, of which the operators are, is such a torch."""
    monkeypatch.undo()
    assert not attention_cudnn.keeps_plans() or torch.__version__ >= "2.14"
    monkeypatch.setattr(attention_cudnn, "keeps_plans", lambda: False)
    monkeypatch.setattr(
        attention_cudnn,
        "torch_varlen",
        lambda q, k, v, *rest: packed_reference(q, k, v, *rest[::2]),
    )
    for lengths, calls in (([300], 1), ([300, 20], 0)):
        q = torch.randn(sum(lengths), 2, 8, dtype=torch.float64)
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        found = attention_cudnn.cudnn_varlen(q, q, q, starts, 300, 0.3)
        assert_close([found], [packed_reference(q, q, q, starts, 0.3)], 1e-10)
        assert len(cudnn.calls) == calls
        cudnn.calls.clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.device]:
    """A function that makes kernels be tried on the CPU as on a GPU of `capability`, with this
    cuDNN, and FlashAttention-4 if it is `installed` ("wrong": with half the scale).
    """

    def flash(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float
    ) -> Tensor:
        return packed_reference(q, k, v, starts, scale)

    def wrong(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float
    ) -> Tensor:
        return packed_reference(q, k, v, starts, scale / 2)

    def prove(*given: Any) -> None:
        prove_varlen(*given[:-1], torch.device("cpu"))

    def there(
        capability: tuple[int, int] = (9, 0), version: int | None = 92000, keeps: bool = True,
        installed: str = "",
    ) -> torch.device:  # fmt: skip
        for module in (packed_attention, attention_cudnn):
            monkeypatch.setattr(module, "keeps_plans", lambda: keeps)
        monkeypatch.setattr(packed_attention, "_capability", lambda device: capability)
        monkeypatch.setattr(packed_attention, "has_module", lambda name: bool(installed))
        made = wrong if installed == "wrong" else flash
        monkeypatch.setattr(packed_attention, "varlen_function", lambda capability: made)
        monkeypatch.setattr(attention_cudnn, "torch_varlen", flash)
        monkeypatch.setattr(packed_attention, "prove_varlen", prove)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
        return torch.device("cuda", 0)

    return there


FA4 = "FlashAttention-4"


@pytest.mark.parametrize(("there", "width", "wanted", "said"), [
    ({}, 128, "cudnn", "cuDNN, compute capability 9.0"),
    ({"capability": (10, 0), "installed": "right"}, 64, "cudnn", "cuDNN, compute capability 10.0"),
    ({"keeps": False}, 128, "cudnn",
     f"cuDNN for rows of one document, compute capability 9.0; {FA4} is not installed"),
    ({"keeps": False, "installed": "right"}, 128, "flash_attn", f"{FA4}, compute capability 9.0"),
    ({"version": 90100, "installed": "right"}, 128, "flash_attn",
     f"{FA4}, compute capability 9.0; cuDNN needs cuDNN 9.18 (91800), for variable lengths (here"
     " 90100)"),
    ({"version": None}, 128, "torch",
     "cuDNN needs cuDNN 9.18 (91800), for variable lengths (here 0);"
     f" {FA4} is not installed"),
    ({}, 256, "torch", f"cuDNN needs heads of 8, 16, ... 128 (here 256); {FA4} is not installed"),
    ({"capability": (8, 0)}, 128, "torch",
     f"compute capability 8.0, for which {FA4} is not made, and cuDNN not tried"),
])  # fmt: skip
@pytest.mark.parametrize("cudnn", ["lse by token"], indirect=True)
def test_what_auto_takes(
    cudnn: Cudnn, gpu: Callable[..., torch.device], there: dict[str, Any], width: int, wanted: str,
    said: str,
) -> None:  # fmt: skip
    device = gpu(**there)
    assert automatic_attention(torch.bfloat16, device, width) == (wanted, said)
    line = attention_line("bfloat16", device, width)
    assert line == f"training.attention auto is {wanted}: {said}" and "\n" not in line
    kernel = varlen_kernel("auto", torch.bfloat16, device, width)
    assert (kernel is attention_cudnn.cudnn_varlen) == (wanted == "cudnn")
    assert (kernel is torch_varlen) == (wanted == "torch")
    assert bool(cudnn.calls) == (wanted == "cudnn")


@pytest.mark.parametrize(("installed", "wanted"), [("right", "flash_attn"), ("wrong", "torch")])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("factor", [1.2, float("nan")])
@pytest.mark.parametrize("cudnn", ["lse by token"], indirect=True)
def test_auto_falls_back_from_a_wrong_kernel(
    cudnn: Cudnn, gpu: Callable[..., torch.device], factor: float, keeps: bool, installed: str,
    wanted: str,
) -> None:  # fmt: skip
    cudnn.factor = factor
    chosen, why = automatic_attention(torch.bfloat16, gpu(keeps=keeps, installed=installed))
    assert chosen == wanted
    fault = "RuntimeError: the attention kernel of megarl.kernels.attention_cudnn.cudnn_varlen"
    assert (f"fails: {fault} is wrong here" in why) == (keeps or wanted == "torch")
    given = ((130,), 4, 2, 64, torch.bfloat16, torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"is wrong here.*set training.attention to 'torch'"):
        prove_varlen(attention_cudnn.cudnn_varlen, *given)


@pytest.mark.parametrize(("version", "width", "said"), [
    (8902, 128, r"needs cuDNN 9.18 \(91800\), for variable lengths \(here 8902\)"),
    (92000, 80 + 4, r"needs heads of 8, 16, ... 128 \(here 84\)"),
    (92000, 256, r"needs heads of 8, 16, ... 128 \(here 256\)"),
])  # fmt: skip
@pytest.mark.parametrize("training", [
    TrainingConfig(attention="cudnn", precision="bfloat16", zero_stage=1),
    TrainingConfig(sequence=SequenceConfig(block="cudnn"), precision="bfloat16", zero_stage=1),
], ids=["attention", "block"])  # fmt: skip
def test_what_cudnn_lacks_is_said_before_the_start(
    monkeypatch: pytest.MonkeyPatch, training: TrainingConfig, version: int, width: int, said: str
) -> None:
    monkeypatch.setattr(plan, "local_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    config = transformers.LlamaConfig(head_dim=width)
    with pytest.raises(ValueError, match=rf"is 'cudnn', which {said}; set ") as raised:
        plan.refuse_kernels(training, config, torch.nn.Module())
    assert "\n" not in str(raised.value)
    config.head_dim = 128
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    plan.refuse_kernels(training, config, torch.nn.Module())


def test_what_the_block_cannot_do_is_refused() -> None:
    made = BLOCKS["cudnn"]()
    everything = torch.zeros(8, 2, 136)
    positions = mask_regions.KernelCalls(
        None, None, [mask_regions.KernelCall(slice(0, 8), slice(0, 8), True, None)]
    )
    for dtype, width, message in [
        (torch.float32, 64, "the cudnn block takes float16 or bfloat16, got torch.float32"),
        (torch.bfloat16, 136, "multiples of 8 up to 128, got 136"),
    ]:
        x = everything[..., :width].to(dtype)
        with pytest.raises(ValueError, match=message):
            made.forward(x, x, x, positions, 1.0, x.float(), torch.zeros(2, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("heads", "width"), [((4, 4), 64), ((8, 2), 128), ((6, 1), 80)])
def test_packed_rows_on_a_gpu(heads: tuple[int, int], width: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(2)
    for lengths in ([4096], [1], [257], [300, 1, 4096], [1, 1], [5, 0, 700]):
        starts = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
        counts = (heads[0], heads[1], heads[1], heads[0])
        shapes = [(sum(lengths), count, width) for count in counts]
        *given, upstream = (torch.randn(one, generator=draw).to("cuda", dtype) for one in shapes)

        def results(kind: torch.dtype, name: Any) -> list[Tensor]:
            q, k, v = (x.to(kind).requires_grad_() for x in given)  # noqa: B023
            documents = Documents.of(starts)  # noqa: B023
            out = packed_attention.packed_attention(q, k, v, documents, width**-0.5, name)
            return [out, *torch.autograd.grad(out, (q, k, v), upstream.to(kind))]  # noqa: B023

        wanted = results(torch.float64, "reference")
        for one, expected in zip(results(dtype, "cudnn"), wanted, strict=True):
            error = (one.double() - expected).abs().max()
            assert error <= 8 * torch.finfo(dtype).eps * expected.abs().max() + 1e-6, lengths


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_the_block_on_a_gpu(
    heads: tuple[int, int], rank: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_regions, "SMALL_SCORES", 0)
    made, device = BLOCKS["cudnn"](), torch.device("cuda")
    for width in (64, 128):
        for layout in LAYOUTS.values():
            compare(layout, rank, heads, width, dtype, made, device)
        compare(LONG, rank, heads, width, dtype, made, device, torch.tensor([0, 290, 600]))
