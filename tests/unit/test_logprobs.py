"""Fused linear log-probs, whole and cut over simulated ranks, against float64 autograd of the plain
formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.vocabulary_ranks import Largest, Ranks

from megarl.kernels import logprobs as fused
from megarl.kernels import logprobs_liger

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def dense_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The obvious way, with the whole logits; a word of probability 0 adds nothing to the entropy."""
    logits = hidden @ weight.T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    log_p = torch.log_softmax(logits / temperature, dim=1)
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * finite).sum(1)


@dataclass
class Case:
    """Inputs, and upstream gradients of each token's log-prob and entropy. The last column of
    `weight` meets a 1.
    """

    sizes: list[int]
    num_tokens: int = 9
    temperature: float = 1.0
    offset: str = "none"
    masked: bool = False
    seed: int = 0
    width: int = 6
    tensors: tuple[torch.Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        draw, words = torch.Generator().manual_seed(self.seed), sum(self.sizes)
        # Multiples of 1/8: logits of 1e4 are exact in float32, so that what is tested is not the
        # product's rounding.
        hidden, weight = (
            (torch.randn(rows, self.width, dtype=torch.float64, generator=draw) * 8).round() / 8
            for rows in (self.num_tokens, words)
        )
        hidden[:, -1] = 1
        both = torch.randint(0, 2, (words,), generator=draw) * 2.0 - 1
        signs = {"none": 0.0, "high": 1.0, "low": -1.0, "both": both}
        weight[:, -1] = 1e4 * torch.as_tensor(signs[self.offset], dtype=torch.float64)
        if self.masked:
            masked = torch.rand(words, generator=draw) < 0.5
            masked[torch.randint(0, words, (1,), generator=draw)] = False
            weight[masked, -1] = -torch.inf
        targets = torch.randint(0, words, (self.num_tokens,), generator=draw)
        upstream = torch.randn(2, self.num_tokens, dtype=torch.float64, generator=draw)
        self.tensors = hidden, weight, targets, upstream

    def evaluate(
        self, function: Callable[..., Any], dtype: torch.dtype, rows: slice = slice(None)
    ) -> list[torch.Tensor]:
        """Log-probs, entropies and the gradients of hidden and of these rows of weight.

        Of hidden's gradient the last column is left out: there 0 meets -inf, and 1e4 multiplies
        what should cancel.
        """
        hidden, weight, targets, upstream = self.tensors
        h, w = hidden.to(dtype).requires_grad_(), weight[rows].to(dtype).requires_grad_()
        outputs = function(h, w, targets, self.temperature)
        grads = torch.autograd.grad(outputs, (h, w), list(upstream.to(outputs[0].dtype)))
        return [*(output.detach() for output in outputs), grads[0][:, :-1], grads[1]]

    def evaluate_cut(
        self, dtype: torch.dtype, cap: float | None = None
    ) -> tuple[list[list[torch.Tensor]], Ranks]:
        """`evaluate` on a thread per shard, with the weight's gradients put together."""
        ranks = Ranks(len(self.sizes))
        shards = ranks.shards(self.sizes)

        def body(rank: int) -> list[torch.Tensor]:
            shard = shards[rank]
            rows = slice(shard.first, shard.first + self.sizes[rank])
            return self.evaluate(
                lambda *inputs: fused.linear_logprobs(*inputs, shard=shard, cap=cap), dtype, rows
            )

        found = ranks.run(body)
        weight = torch.cat([of_rank[3] for of_rank in found])
        return [[*of_rank[:3], weight] for of_rank in found], ranks


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float) -> None:
    names = ("log-prob", "entropy", "grad of hidden", "grad of weight")
    for name, a, b in zip(names, found, wanted, strict=True):
        assert a.shape == b.shape, name
        finite = b.isfinite()
        assert torch.equal(a[~finite].double(), b[~finite]), name
        error = (a.double() - b)[finite].abs() / b[finite].abs().clamp_min(1)
        assert not error.numel() or error.max() < tolerance, name


@pytest.fixture
def chunk_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, torch.dtype], None]:
    def set_rows(rows: int, words: int, dtype: torch.dtype) -> None:
        monkeypatch.setitem(fused.CHUNK_BYTES, "cpu", rows * words * dtype.itemsize)

    return set_rows


SIZES = st.lists(st.integers(0, 24), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) > 1)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sizes=SIZES,
    num_tokens=st.integers(0, 17),
    power=st.sampled_from([0.6, 1.0, 1.7]),
    offset=st.sampled_from(["none", "high", "low", "both"]),
    masked=st.booleans(),
    rows=st.sampled_from([1, 3, 5, 1000]),
    block_bytes=st.sampled_from([64, fused.BLOCK_BYTES]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 999),
)
@example([0, 9, 0, 2], 5, 1.0, "both", True, 2, 64, torch.float32, 1)
@example([7], 0, 1.0, "none", False, 2, 64, torch.float32, 1)
def test_any_cut_equals_the_plain_formula(
    sizes: list[int], num_tokens: int, power: float, offset: str, masked: bool, rows: int,
    block_bytes: int, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    # A temperature that is no power of two rounds logits of 1e4 by 1e-3: no formula could be near
    # then.
    temperature = power if offset == "none" else 2.0 ** round(3 * (power - 1))
    case = Case(sizes, num_tokens, temperature, offset, masked, seed)
    wanted = case.evaluate(dense_logprobs, torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fused.CHUNK_BYTES, "cpu", rows * max(sizes) * dtype.itemsize)
        patch.setattr(fused, "BLOCK_BYTES", block_bytes)
        found, _ = case.evaluate_cut(dtype)
        whole = case.evaluate(fused.linear_logprobs, dtype)
    for of_rank in found:
        assert_close(of_rank, wanted, TOLERANCE[dtype])
        for mine, first in zip(of_rank[:3], found[0][:3], strict=True):
            # To the bit the same on every rank.
            assert torch.equal(mine.nan_to_num(), first.nan_to_num())
    assert_close(whole, wanted, TOLERANCE[dtype])


def test_bfloat16_is_as_near_as_its_logits_are() -> None:
    case = Case([20, 44], 33, 0.7)
    wanted = case.evaluate(dense_logprobs, torch.float64)
    whole = case.evaluate(fused.linear_logprobs, torch.bfloat16)
    for found in (whole, *case.evaluate_cut(torch.bfloat16)[0]):
        assert [x.dtype for x in found] == [torch.float32] * 2 + [torch.bfloat16] * 2
        assert_close(found, wanted, 0.1)


@pytest.mark.parametrize("sizes", [[8, 3, 0], [5, 5]])
def test_two_reductions_a_chunk_and_one_in_backward(chunk_rows: Any, sizes: list[int]) -> None:
    chunk_rows(4, max(sizes), torch.float32)
    _, ranks = Case(sizes, 10, width=6).evaluate_cut(torch.float32)
    lengths = (3, 3, 4)  # of the chunks of 10 tokens
    forward = [call for n in lengths for call in (("max", (n,)), ("sum", (4, n)))]
    for calls in ranks.calls:
        assert calls == [(*call, torch.float32) for call in (*forward, ("sum", (10, 6)))]


def test_the_gradient_of_hidden_is_summed_over_ranks_in_float32() -> None:
    _, ranks = Case([5, 6], 10).evaluate_cut(torch.bfloat16)
    assert ranks.calls[0][-1] == ("sum", (10, 6), torch.float32)


def test_no_more_than_a_chunk_of_logits_exists(chunk_rows: Any) -> None:
    chunk_rows(5, 300, torch.float32)
    case = Case([300], 40, width=4)
    with Largest() as largest:
        case.evaluate(fused.linear_logprobs, torch.float32)
    assert largest.numel == 5 * 300
    with Largest() as largest:
        case.evaluate(dense_logprobs, torch.float32)
    assert largest.numel == 40 * 300


@pytest.mark.parametrize("target", [-1, 6])
def test_a_target_outside_the_vocabulary_is_found(target: int) -> None:
    with pytest.raises(RuntimeError, match="outside the vocabulary"):
        fused.linear_logprobs(torch.zeros(1, 4), torch.zeros(6, 4), torch.tensor([target]))
    shard = fused.VocabularyShard(0, 6, lambda x: x, lambda x: x.mul_(2))
    with pytest.raises(RuntimeError, match="shards overlap"):
        fused.linear_logprobs(torch.zeros(1, 4), torch.zeros(6, 4), torch.tensor([0]), 1.0, shard)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cap", [0.7, 30.0])
@pytest.mark.parametrize("sizes", [[23], [9, 0, 14]])
def test_a_soft_cap_of_the_logits(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], cap: float, dtype: torch.dtype
) -> None:
    """Several chunks of tokens, one shard or some of which one is empty."""
    monkeypatch.setitem(fused.CHUNK_BYTES, "cpu", 4 * 14 * dtype.itemsize)
    case = Case(sizes, temperature=0.8)
    wanted = case.evaluate(partial(dense_logprobs, cap=cap), torch.float64)
    for found in case.evaluate_cut(dtype, cap)[0]:
        assert_close(found, wanted, TOLERANCE[dtype])
    if len(sizes) == 1:
        found = case.evaluate(partial(fused.linear_logprobs, cap=cap), dtype)
        assert_close(found, wanted, TOLERANCE[dtype])


def test_liger_is_refused_where_it_cannot_run() -> None:
    hidden, weight, targets, _ = Case([4]).tensors
    shard = fused.VocabularyShard(0, 4, torch.neg_, torch.neg_)
    for cut, cap, match in (
        (None, None, "needs a CUDA device"),
        (shard, None, "split over ranks"),
        (None, 2.0, "does not take a soft cap"),
    ):
        with pytest.raises(ValueError, match=f"'liger'.*{match}.*choose backend 'chunked'"):
            fused.linear_logprobs(hidden, weight, targets, 1.0, cut, "liger", cap)


def test_liger_agrees_on_cpu() -> None:
    pytest.importorskip("liger_kernel")
    case = Case([97], 40, 0.7, width=16)
    wanted = case.evaluate(logprobs_liger.apply, torch.float32)
    found = case.evaluate(fused.linear_logprobs, torch.float32)
    assert_close(found, [x.double() for x in wanted], 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", fused.BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_backend_on_a_gpu(backend: str, dtype: torch.dtype) -> None:
    if backend == "liger":
        pytest.importorskip("liger_kernel")
        if torch.cuda.get_device_capability() == (9, 0):
            pytest.importorskip("cutlass")
            if dtype != torch.bfloat16:
                pytest.skip("on Hopper Liger takes bfloat16 only")
    case = Case([5000], 3000, 0.7, width=64)
    hidden, weight, targets, upstream = case.tensors
    case.tensors = hidden.cuda() / 4, weight.cuda(), targets.cuda(), upstream.cuda()
    wanted = case.evaluate(dense_logprobs, torch.float64)
    found = case.evaluate(lambda *inputs: fused.linear_logprobs(*inputs, backend=backend), dtype)
    for a, b in zip(found, wanted, strict=True):
        assert ((a.double() - b).norm() / b.norm()) < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("tokens", [0, 1, 3, 10, 64 * 100 + 1])
def test_chunks_are_of_equal_length(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No chunk is left with a token or two, which BLAS on some processors sums less exactly."""
    monkeypatch.setitem(fused.CHUNK_BYTES, "cpu", 64 * 2 * 4 if tokens > 10 else 3 * 2 * 4)
    slices, buffer = fused.token_chunks(torch.empty(tokens, 1), torch.empty(2, 1), None)
    lengths = [one.stop - one.start for one in slices]
    assert [i for one in slices for i in range(tokens)[one]] == list(range(tokens))
    assert len(buffer) == max(lengths, default=0) <= (64 if tokens > 10 else 3)
    assert not lengths or max(lengths) - min(lengths) <= 1
