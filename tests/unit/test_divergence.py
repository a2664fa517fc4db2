"""The fused divergence of student and teacher, whole and cut over simulated ranks, against float64
autograd of the plain formulas.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.vocabulary_ranks import Largest, Ranks

from megarl.kernels import divergence as fused
from megarl.kernels import logprobs
from megarl.kernels.divergence import KINDS, Divergence, linear_divergence

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
NAMES = ("divergence", "entropy", "logprobs", "teacher_logprobs")


def dense(
    hidden: Any, weight: Any, theirs: Any, their_weight: Any, targets: Any, how: Divergence
) -> list[torch.Tensor]:
    """The papers' formulas on whole logits, in the order of `NAMES`; with top-k on lists of k + 1
    probabilities, token by token."""
    log_p = torch.log_softmax(hidden @ weight.T / how.temperature, 1)
    log_q = torch.log_softmax(theirs @ their_weight.T / how.temperature, 1)
    if not how.top_k or how.top_k == log_p.shape[1]:
        value = between(log_p, log_q, how)
    else:
        order = log_q.argsort(1, descending=True)
        first, rest = order[:, : how.top_k], order[:, how.top_k :]
        buckets = [
            torch.cat([x.gather(1, first), x.gather(1, rest).logsumexp(1, keepdim=True)], 1)
            for x in (log_p, log_q)
        ]
        value = between(*buckets, how)
    at = targets[:, None]
    entropy = -(log_p.exp() * log_p).sum(1)
    return [value, entropy, log_p.gather(1, at)[:, 0], log_q.gather(1, at)[:, 0]]


def between(log_p: torch.Tensor, log_q: torch.Tensor, how: Divergence) -> torch.Tensor:
    p, q = log_p.exp(), log_q.exp()
    if how.kind == "forward_kl":
        return (q * (log_q - log_p)).sum(1)
    if how.kind == "reverse_kl":
        return (p * (log_p - log_q)).sum(1)
    mixture = (how.beta * q + (1 - how.beta) * p).log()
    to_teacher, to_student = (q * (log_q - mixture)).sum(1), (p * (log_p - mixture)).sum(1)
    return how.beta * to_teacher + (1 - how.beta) * to_student


@dataclass
class Case:
    """Inputs of both models, with other widths, and an upstream gradient of each token."""

    sizes: list[int]
    how: Divergence
    num_tokens: int = 9
    scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        draw, words = torch.Generator().manual_seed(self.seed), sum(self.sizes)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=draw)

        ours = self.scale * normal(self.num_tokens, 5), normal(words, 5)
        self.inputs = (*ours, self.scale * normal(self.num_tokens, 7), normal(words, 7))
        self.targets = torch.randint(0, words, (self.num_tokens,), generator=draw)
        self.upstream = normal(self.num_tokens)

    def evaluate(
        self, function: Any, dtype: torch.dtype, rows: slice = slice(None), **more: Any
    ) -> list[torch.Tensor]:
        """The results in the order of `NAMES`, and the gradients of hidden and of these rows of
        weight."""
        hidden, weight, theirs, their_weight = (one.to(dtype) for one in self.inputs)
        h, w = hidden.requires_grad_(), weight[rows].requires_grad_()
        found = function(h, w, theirs, their_weight[rows], self.targets, self.how, **more)
        if not isinstance(found, list):
            found = [getattr(found, name) for name in NAMES]
        grads = torch.autograd.grad(found[0], (h, w), self.upstream.to(found[0].dtype))
        return [*(one.detach() for one in found), *grads]

    def evaluate_cut(self, dtype: torch.dtype) -> tuple[list[list[torch.Tensor]], Ranks]:
        """`evaluate` on a thread per shard, with the weight's gradients put together."""
        ranks = Ranks(len(self.sizes))
        shards = [
            dataclasses.replace(shard, rank=rank, size=ranks.size)
            for rank, shard in enumerate(ranks.shards(self.sizes))
        ]

        def body(rank: int) -> list[torch.Tensor]:
            first = shards[rank].first
            rows = slice(first, first + self.sizes[rank])
            return self.evaluate(linear_divergence, dtype, rows, shard=shards[rank])

        found = ranks.run(body)
        weight = torch.cat([of_rank[-1] for of_rank in found])
        return [[*of_rank[:-1], weight] for of_rank in found], ranks


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float) -> None:
    for name, a, b in zip((*NAMES, "grad of hidden", "grad of weight"), found, wanted, strict=True):
        assert a.shape == b.shape, name
        error = (a.double() - b).abs() / b.abs().clamp_min(1)
        assert not error.numel() or error.max() < tolerance, (name, error.max())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 24), min_size=1, max_size=4).filter(lambda s: sum(s) > 1),
    kind=st.sampled_from(list(KINDS)),
    beta=st.sampled_from([0.01, 0.5, 0.9]),
    share=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
    num_tokens=st.integers(0, 17),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    rows=st.sampled_from([1, 3, 1000]),
    block_bytes=st.sampled_from([64, 2**20]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 999),
)
@example([0, 9, 0, 2], "forward_kl", 0.5, 0.3, 1.0, 5, 10.0, 2, 64, torch.float64, 1)
@example([7, 3], "jensen_shannon", 0.5, 1.0, 0.7, 3, 1.0, 1, 64, torch.float64, 3)
@example([7], "reverse_kl", 0.5, 0.0, 1.0, 0, 1.0, 2, 64, torch.float32, 1)
def test_any_cut_equals_the_plain_formulas(
    sizes: list[int], kind: str, beta: float, share: float, temperature: float, num_tokens: int,
    scale: float, rows: int, block_bytes: int, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    top_k = min(sum(sizes), max(1, round(share * sum(sizes)))) if share else 0
    how = Divergence(kind, beta, top_k, temperature)
    # In float32 logits of 100 are rounded by 1e-5, which no formula could undo.
    case = Case(sizes, how, num_tokens, scale if dtype == torch.float64 else min(scale, 1.0), seed)
    wanted = case.evaluate(dense, torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(logprobs.CHUNK_BYTES, "cpu", rows * max(sizes) * dtype.itemsize)
        patch.setitem(fused.BLOCK_BYTES, "cpu", block_bytes)
        found, _ = case.evaluate_cut(dtype)
        whole = case.evaluate(linear_divergence, dtype)
    for of_rank in found:
        assert_close(of_rank, wanted, TOLERANCE[dtype])
        for mine, first in zip(of_rank[:-1], found[0][:-1], strict=True):
            assert torch.equal(mine, first)  # to the bit the same on every rank
    assert_close(whole, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("beta", [1e-6, 1e-3, 0.5, 1 - 1e-3, 0.999999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_jensen_shannon_keeps_its_digits_in_float32(beta: float, spread: float) -> None:
    """A teacher near the student or far from it, and mixtures of almost one of them alone."""
    draw = torch.Generator().manual_seed(3)
    log_p = torch.randn(64, 33, generator=draw, dtype=torch.float64).log_softmax(-1)
    noise = torch.randn(64, 33, generator=draw, dtype=torch.float64)
    log_q = (log_p + spread * noise).log_softmax(-1)
    log_p, log_q = log_p.float(), log_q.float()
    exact = KINDS["jensen_shannon"](log_p.double(), log_p.double(), log_q.double(), beta)
    found = KINDS["jensen_shannon"](log_p, log_p, log_q, beta)
    for one, other in zip(found, exact, strict=True):
        assert one is not None and other is not None and torch.isfinite(one).all()
        assert float((one.double() - other).norm() / other.norm()) < 2e-6
    p, q = log_p.double().exp(), log_q.double().exp()
    mixture = beta * q + (1 - beta) * p
    student = (1 - beta) * (log_p.double() - mixture.log())
    assert exact[0] is not None
    torch.testing.assert_close(exact[0], student, rtol=1e-8, atol=1e-12)


def test_ties_of_the_k_th_token_are_all_kept() -> None:
    """Equal logits are one set under any cut; here the second and the third are equal."""
    weight = torch.tensor([[3.0], [2.0], [2.0], [0.0], [-1.0]], dtype=torch.float64)
    student = torch.tensor([[0.5], [-1.0], [2.0], [1.0], [0.3]], dtype=torch.float64)
    one, target = torch.ones(1, 1, dtype=torch.float64), torch.tensor([0])
    found = linear_divergence(one, student, one, weight, target, Divergence("reverse_kl", top_k=2))
    wanted = dense(one, student, one, weight, target, Divergence("reverse_kl", top_k=3))[0]
    assert torch.allclose(found.divergence, wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [0, 1, 2])
def test_impossible_tokens_are_finite(kind: str, top_k: int) -> None:
    """Logits so far apart that probabilities are 0 in float32, also of the whole bucket."""
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[600.0], [0.0], [10.0], [-600.0]], requires_grad=True)
    teacher = torch.tensor([[600.0], [300.0], [-20.0], [0.0]])
    found = linear_divergence(
        hidden, weight, torch.ones(1, 1), teacher, torch.tensor([0]), Divergence(kind, 0.5, top_k)
    )
    found.divergence.sum().backward()
    assert found.divergence.isfinite().all()
    for grad in (hidden.grad, weight.grad):
        # A gradient by logits is at most a difference of probabilities here.
        assert grad is not None and grad.isfinite().all() and grad.abs().max() < 600


def test_bfloat16_is_as_near_as_its_logits_are() -> None:
    case = Case([20, 44], Divergence("jensen_shannon", 0.5, 4), 33)
    found = case.evaluate(linear_divergence, torch.bfloat16)
    assert [one.dtype for one in found] == [torch.float32] * 4 + [torch.bfloat16] * 2
    # A token whose logit ties in bfloat16 changes S: compared without top-k.
    case.how = Divergence("jensen_shannon", 0.5)
    wanted = case.evaluate(dense, torch.float64)
    whole = case.evaluate(linear_divergence, torch.bfloat16)
    for found in (whole, *case.evaluate_cut(torch.bfloat16)[0]):
        assert_close(found, wanted, 0.15)


@pytest.mark.parametrize("top_k", [0, 3])
def test_no_more_than_a_chunk_of_logits_exists(monkeypatch: Any, top_k: int) -> None:
    monkeypatch.setitem(logprobs.CHUNK_BYTES, "cpu", 5 * 300 * 4)
    case = Case([300], Divergence("reverse_kl", 0.5, top_k), 40)
    with Largest() as largest:
        case.evaluate(linear_divergence, torch.float32)
    assert largest.numel == max(5 * 300, 300 * 7)  # a chunk; the teacher's weight itself
    with Largest() as largest:
        case.evaluate(dense, torch.float32)
    assert largest.numel == 40 * 300


@pytest.mark.parametrize(("top_k", "in_forward"), [(0, 5), (4, 8)])
def test_reductions_of_a_chunk(monkeypatch: Any, top_k: int, in_forward: int) -> None:
    monkeypatch.setitem(logprobs.CHUNK_BYTES, "cpu", 4 * 8 * 4)
    _, ranks = Case([8, 3, 0], Divergence("reverse_kl", 0.5, top_k), 10).evaluate_cut(torch.float32)
    for calls in ranks.calls:
        assert len(calls) == 3 * in_forward + 1
        assert calls[-1] == ("sum", (10, 5), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [0, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(kind: str, top_k: int, dtype: torch.dtype) -> None:
    case = Case([5000], Divergence(kind, 0.3, top_k, 0.7), 3000)
    if top_k and dtype == torch.bfloat16:
        # A teacher whose first 50 logits are far above the others: where the 50th and the 51st are
        # nearly equal, their rounding decides which token counts. float32 keeps the harder case.
        case.inputs[2][:, 0] = 1
        case.inputs[3].mul_(0.5)[:50, 0] += 12
    case.inputs = tuple(one.cuda() for one in case.inputs)
    case.targets, case.upstream = case.targets.cuda(), case.upstream.cuda()
    wanted = case.evaluate(dense, torch.float64)
    found = case.evaluate(linear_divergence, dtype)
    for name, a, b in zip((*NAMES, "hidden", "weight"), found, wanted, strict=True):
        error = (a.double() - b).norm() / b.norm()
        assert error < (1e-4 if dtype == torch.float32 else 3e-2), name
