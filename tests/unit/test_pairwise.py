"""Preference losses against their formulae worked by hand in Python's floats."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

from megarl.apps.tune.pairs import right
from megarl.apps.tune.pairwise import METHODS, Pairs, bradley_terry, kto, pair_loss
from megarl.settings.objectives import (
    USUAL_BETA,
    PreferenceLossConfig,
    PreferenceMethod,
    RewardLossConfig,
)

LP = [[-3.0, -4.5], [-12.0, -2.0], [-700.0, -0.25], [-1.0, -1.0]]
REF = [[-3.5, -4.0], [-2.0, -12.0], [-1.0, -900.0], [-1.0, -1.0]]
T = [[2, 3], [5, 1], [400, 1], [4, 4]]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def minus_log_sigmoid(x: float) -> float:
    return math.log1p(math.exp(-x)) if x > -30 else -x + math.log1p(math.exp(x))


def by_hand(method: str, lp: list[float], ref: list[float], t: list[int]) -> float:
    """The loss of one pair with beta 0.3, a share of 0.2 wrong labels and gamma 0.4."""
    b, e = 0.3, 0.2
    ratio = (lp[0] - ref[0]) - (lp[1] - ref[1])
    x = b * ratio
    mean = [lp[0] / t[0], lp[1] / t[1]]
    if method == "dpo":
        return minus_log_sigmoid(x)
    if method == "cdpo":
        return (1 - e) * minus_log_sigmoid(x) + e * minus_log_sigmoid(-x)
    if method == "robust_dpo":
        return ((1 - e) * minus_log_sigmoid(x) - e * minus_log_sigmoid(-x)) / (1 - 2 * e)
    if method == "ipo":
        return (ratio - 1 / 0.6) ** 2
    if method == "simpo":
        return minus_log_sigmoid(b * (mean[0] - mean[1]) - 0.4)
    assert method == "orpo"
    odds = [math.log(math.exp(m) / (1 - math.exp(m))) for m in mean]
    return -mean[0] + b * minus_log_sigmoid(odds[0] - odds[1])


def settings(method: Any, **more: Any) -> PreferenceLossConfig:
    smooths = {"label_smoothing": 0.2} if method in ("cdpo", "robust_dpo") else {}
    gamma = {"target_margin": 0.4} if method == "simpo" else {}
    return PreferenceLossConfig(method=method, beta=0.3, **smooths, **gamma, **more)


def pairs(lp: torch.Tensor) -> Pairs:
    return Pairs(lp, torch.tensor(REF, dtype=torch.float64), torch.tensor(T))


def logprobs() -> torch.Tensor:
    return torch.tensor(LP, dtype=torch.float64)


def test_every_method_has_a_loss() -> None:
    assert {*METHODS, "kto"} == set(get_args(PreferenceMethod))
    assert set(USUAL_BETA) <= set(METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_is_its_formula(method: str) -> None:
    found = pair_loss(pairs(logprobs()), settings(method))
    wanted = [by_hand(method, *row) for row in zip(LP, REF, T, strict=True)]
    assert found.loss.tolist() == pytest.approx(wanted, rel=1e-12)
    assert found.rewards.shape == (4, 2)
    if method != "orpo":
        extra = (
            pair_loss(pairs(logprobs()), settings(method, sft_coefficient=0.7)).loss - found.loss
        )
        means = [row[0] / tokens[0] for row, tokens in zip(LP, T, strict=True)]
        assert extra.tolist() == pytest.approx([-0.7 * mean for mean in means])
    raised = pair_loss(pairs(logprobs() + torch.tensor([0.5, 0.0])), settings(method))
    assert (raised.rewards[:, 0] > found.rewards[:, 0]).all()


@pytest.mark.parametrize("method", METHODS)
def test_extremes_are_finite(method: str) -> None:
    lp = torch.tensor([[0.0, 0.0], [-1e5, -1e-9], [0.0, -1e5]], dtype=torch.float64)
    made = Pairs(lp.requires_grad_(), torch.zeros(3, 2, dtype=torch.float64), torch.ones(3, 2))
    loss = pair_loss(made, settings(method)).loss
    (slope,) = torch.autograd.grad(loss.sum(), lp)
    assert loss.isfinite().all() and slope.isfinite().all()
    nothing = Pairs(lp[:0], lp[:0].detach(), torch.ones(0, 2))
    assert pair_loss(nothing, settings(method)).loss.shape == (0,)


def test_length_average_of_ipo() -> None:
    found = pair_loss(pairs(logprobs()), settings("ipo", length_average=True)).loss
    wanted = [
        ((lp[0] - ref[0]) / t[0] - (lp[1] - ref[1]) / t[1] - 1 / 0.6) ** 2
        for lp, ref, t in zip(LP, REF, T, strict=True)
    ]
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)


def test_robust_loss_is_dpos_in_expectation_over_swapped_labels() -> None:
    """The property for which the method is named (arXiv:2403.00409, lemma 3.1)."""
    made = pairs(logprobs())
    swapped = Pairs(made.logprobs.flip(1), made.reference.flip(1), made.num_tokens.flip(1))
    config = settings("robust_dpo")
    expected = 0.8 * pair_loss(made, config).loss + 0.2 * pair_loss(swapped, config).loss
    plain = pair_loss(made, PreferenceLossConfig(method="dpo", beta=0.3)).loss
    assert torch.allclose(expected, plain, rtol=1e-12)


@pytest.mark.parametrize("divergence", [0.0, 1.5, -2.0])
def test_kto(divergence: float) -> None:
    config = PreferenceLossConfig(
        method="kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.5
    )
    ratios = torch.tensor([0.5, -4.0, 900.0, -900.0], dtype=torch.float64)
    good = torch.tensor([True, False, True, False])
    z = max(0.0, divergence)
    wanted = [
        1.5 * (1 - sigmoid(0.3 * (r - z))) if g else 0.5 * (1 - sigmoid(0.3 * (z - r)))
        for r, g in zip(ratios.tolist(), good.tolist(), strict=True)
    ]
    loss = kto(ratios, good, divergence, config)
    assert loss.tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-15)


def test_reward_models() -> None:
    scores = torch.tensor([[2.0, 1.0], [-3.0, 4.0]], dtype=torch.float64)
    margins = torch.tensor([0.5, -1.0], dtype=torch.float64)
    config = RewardLossConfig(centering=0.01)
    wanted = [minus_log_sigmoid(0.5) + 0.01 * 9, minus_log_sigmoid(-6.0) + 0.01]
    found = bradley_terry(scores, margins, config)
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("wrong", "said"), [
    ({"method": "cdpo"}, "label_smoothing is 0"),
    ({"label_smoothing": 0.1}, "method is 'dpo', which does not use it"),
    ({"method": "ipo", "target_margin": 1.0}, "set .*method to 'simpo'"),
    ({"length_average": True}, "set .*method to 'ipo'"),
    ({"desirable_weight": 2.0}, "set .*method to 'kto'"),
    ({"method": "orpo", "sft_coefficient": 1.0}, "leave it out"),
    ({"method": "kto", "desirable_weight": 0.0, "undesirable_weight": 0.0}, "one above 0"),
])  # fmt: skip
def test_settings_that_would_do_nothing_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PreferenceLossConfig(**wrong)


def test_a_margin_of_rounding_is_none() -> None:
    """Before the first update every pair is a tie, on every machine and under every layout."""
    margins = torch.tensor([2e-3, -2e-3, 0.0, 9e-9, -6e-7], dtype=torch.float64)
    assert right(margins).tolist() == [1.0, 0.0, 0.5, 0.5, 0.5]
