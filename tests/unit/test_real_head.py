"""The fused output head at the size of a pretrained model: 262,144 words, whose float32 gradients
are compared with float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from support.real import documents, real_folder
from support.vocabulary_ranks import Ranks

from megarl.kernels.logprobs import CHUNK_BYTES, linear_logprobs

TOKENS, TEMPERATURE = 12, 0.8
ROWS = 2**12
"""Words whose weights are in float64 at once: all of them take 1.3 GB."""


class Case(NamedTuple):
    """Real hidden states and their output head, and what float64 makes of them."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    upstream: torch.Tensor
    """[2, T] gradients of log-probs and entropies."""
    logprobs: torch.Tensor
    entropies: torch.Tensor
    logits_gradient: torch.Tensor
    hidden_gradient: torch.Tensor


@pytest.fixture(scope="module")
def case() -> Case:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = real_folder("gemma3")
    text = documents(folder)[0][: TOKENS + 1]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda _, given: found.append(given[0][0]))
    with torch.no_grad():
        by_model = model(torch.tensor([text[:-1]])).logits[0]
    (hidden,), targets = found, torch.tensor(text[1:])
    weight, exact = model.lm_head.weight.detach(), hidden.double()
    assert weight.shape == (262_144, 640)
    logits = torch.cat([exact @ part.double().T for part in weight.split(ROWS)], dim=1)
    assert (logits - by_model).abs().max() < 1e-4, "the model does more to its logits"
    logits.requires_grad_()
    scaled = (logits / TEMPERATURE).log_softmax(1)
    logprobs = scaled.gather(1, targets[:, None])[:, 0]
    entropies = -(scaled.exp() * scaled).sum(1)
    upstream = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(0))
    (slope,) = torch.autograd.grad([logprobs, entropies], logits, list(upstream.double()))
    back = zip(slope.split(ROWS, 1), weight.split(ROWS), strict=True)
    down = torch.stack([ours @ part.double() for ours, part in back]).sum(0)
    values = logprobs.detach(), entropies.detach()
    return Case(hidden, weight, targets, upstream, *values, slope, down)


@pytest.mark.nightly
@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("cut", [[262_144], [100_000, 162_144]], ids=["whole", "two ranks"])
def test_a_large_vocabulary_equals_float64(
    case: Case, cut: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs, entropies and both gradients, in several chunks, of a whole vocabulary and of one
    that ranks share.
    """
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 5 * 2**20)  # 5 tokens, and 8 of the smaller shards
    ranks = Ranks(len(cut))
    shards = ranks.shards(cut) if len(cut) > 1 else [None]
    parts = case.weight.split(cut)

    def of_rank(rank: int) -> tuple[torch.Tensor, ...]:
        hidden = case.hidden.clone().requires_grad_()
        weight = parts[rank].detach().requires_grad_()
        made = linear_logprobs(hidden, weight, case.targets, TEMPERATURE, shards[rank])
        slopes = torch.autograd.grad(made, (hidden, weight), list(case.upstream))
        return *(one.detach() for one in made), *slopes

    exact, largest = case.hidden.double(), case.hidden_gradient.abs().max()
    for rank, (logprobs, entropies, down, of_weight) in enumerate(ranks.run(of_rank)):
        assert (logprobs - case.logprobs).abs().max() < 1e-4
        assert (entropies - case.entropies).abs().max() < 1e-4
        assert (down - case.hidden_gradient).abs().max() < 1e-5 * largest
        gap = size = torch.zeros(())
        slopes = case.logits_gradient.split(cut, 1)[rank].split(ROWS, 1)
        for part, mine in zip(slopes, of_weight.split(ROWS), strict=True):
            wanted = part.T @ exact
            gap = torch.maximum(gap, (mine - wanted).abs().max())
            size = torch.maximum(size, wanted.abs().max())
        assert gap < 1e-5 * size
