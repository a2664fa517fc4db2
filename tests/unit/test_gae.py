"""GAE and the critic's loss against sums written out."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from megarl.objectives.config import AlgorithmConfig, GaeConfig
from megarl.objectives.token_advantages import (
    TokenRewards,
    gae,
    generalised_advantages,
    value_targets,
)
from megarl.objectives.value import MOMENTS, explained_variance, moments, value_loss
from megarl.schema import replace


def drawn(seed: int, num_samples: int = 9) -> TokenRewards:
    """Samples with prompts, tokens of an environment inside responses, dense rewards and values;
    one of them has no response.
    """
    draw = random.Random(seed)
    mask, ids = [], []
    for number in range(num_samples):
        middle = [draw.random() < 0.7 for _ in range(draw.randint(0, 12))]
        chosen = [False] * draw.randint(1, 3) + (middle if number else [False, False])
        mask += chosen
        ids += [number] * len(chosen)
    rewards = [draw.gauss(0, 1) * m for m in mask]
    values = [draw.gauss(0, 2) * m for m in mask]
    return TokenRewards(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        mask=torch.tensor(mask),
        sample_ids=torch.tensor(ids),
        sum_over_ranks=lambda tensor: tensor,
        values=torch.tensor(values, dtype=torch.float64),
    )


def by_definition(step: TokenRewards, gamma: float, lam: float) -> list[float]:
    """Eq. 11 of the paper: a sum over all later steps of (gamma lam)^l delta, token by token."""
    assert step.values is not None
    found = [0.0] * len(step.mask)
    for sample in set(step.sample_ids.tolist()):
        places = [
            n for n in range(len(found)) if step.mask[n] and int(step.sample_ids[n]) == sample
        ]
        value = [float(step.values[n]) for n in places] + [0.0]
        delta = [
            float(step.rewards[n]) + gamma * value[t + 1] - value[t] for t, n in enumerate(places)
        ]
        for t, n in enumerate(places):
            found[n] = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(places)))
    return found


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_gae_is_the_sum_of_the_paper(gamma: float, lam: float) -> None:
    step = drawn(1)
    assert step.values is not None
    found = generalised_advantages(
        step.rewards, step.values, step.mask, step.sample_ids, gamma=gamma, lam=lam
    )
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(by_definition(step, gamma, lam), abs=1e-12)


def test_targets_with_lambda_1_do_not_depend_on_the_values() -> None:
    step = drawn(2)
    config = AlgorithmConfig(advantage="gae", gae=GaeConfig(gamma=0.9, lam=0.5, value_lam=1.0))
    assert step.values is not None
    other = replace(step, values=step.values * -3)
    assert torch.allclose(value_targets(step, config), value_targets(other, config), atol=1e-12)
    assert not torch.allclose(gae(step, config), gae(other, config), atol=1e-3)
    plain = replace(step, values=torch.zeros_like(step.values))
    expected = by_definition(plain, 0.9, 1.0)
    assert value_targets(step, config).tolist() == pytest.approx(expected, abs=1e-12)


def test_whitened_advantages_have_mean_0_and_variance_1() -> None:
    step = drawn(3)
    config = AlgorithmConfig(advantage="gae")
    found = gae(step, config)
    assert float(found[step.mask].mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(found[step.mask].var(unbiased=False)) == pytest.approx(1.0, abs=1e-5)
    assert not found[~step.mask].any()
    raw = gae(step, replace(config, gae=GaeConfig(whiten=False)))
    assert raw.tolist() == pytest.approx(by_definition(step, 1.0, 0.95), abs=1e-12)


@pytest.mark.parametrize("where", ["no samples", "no response", "one token", "huge"])
def test_corner_cases_are_finite(where: str) -> None:
    mask = {"no samples": [], "no response": [False, False], "one token": [False, True]}
    chosen = torch.tensor(mask.get(where, [True] * 4), dtype=torch.bool)
    size = 1e18 if where == "huge" else 2.0
    step = TokenRewards(
        rewards=torch.full((len(chosen),), size, dtype=torch.float64) * chosen,
        mask=chosen,
        sample_ids=torch.zeros(len(chosen), dtype=torch.int64),
        sum_over_ranks=lambda tensor: tensor,
        values=torch.zeros(len(chosen), dtype=torch.float64),
    )
    plain = AlgorithmConfig(advantage="gae")
    for config in (plain, replace(plain, gae=GaeConfig(whiten=False))):
        assert bool(torch.isfinite(gae(step, config)).all())
        assert bool(torch.isfinite(value_targets(step, config)).all())
    if where == "one token":
        assert value_targets(step, AlgorithmConfig()).tolist() == [0.0, 2.0]


def test_the_value_loss_is_the_larger_error() -> None:
    values = torch.tensor([0.0, 1.0, 3.0, -2.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.0, 0.9, 1.0, 0.0], dtype=torch.float64)
    returns = torch.tensor([1.0, 1.0, 0.0, -2.0], dtype=torch.float64)
    terms = value_loss(values, old, returns, 0.2)
    # Within the clip; hit exactly; far off and counted in full; right, but too far from the old.
    assert terms.per_token.tolist() == pytest.approx([0.5, 0.0, 4.5, 0.5 * 1.8**2], abs=1e-12)
    assert terms.clipped.tolist() == [False, False, False, True]
    terms.per_token.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-1.0, 0.0, 3.0, 0.0], abs=1e-12)
    plain = value_loss(values, old, returns, None)
    assert plain.per_token.tolist() == pytest.approx([0.5, 0.0, 4.5, 0.0], abs=1e-12)
    assert not plain.clipped.any()


@pytest.mark.parametrize("clip", [None, 0.3])
def test_the_gradient_of_the_value_loss(clip: float | None) -> None:
    torch.manual_seed(5)
    values = torch.randn(20, dtype=torch.float64, requires_grad=True)
    old, returns = torch.randn(2, 20, dtype=torch.float64)

    def total(given: Tensor) -> Tensor:
        return value_loss(given, old, returns, clip).per_token.sum()

    assert torch.autograd.gradcheck(total, (values,))


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 1.0, 4.0])

    def of(values: Tensor) -> float:
        halves = [moments(values[part], returns[part]) for part in (slice(1), slice(1, None))]
        return explained_variance({name: sum(float(h[name]) for h in halves) for name in MOMENTS})

    assert of(returns) == pytest.approx(1.0)
    assert of(returns + 7) == pytest.approx(1.0)  # a constant error has no variance
    assert of(torch.full((4,), 0.3)) == pytest.approx(0.0)
    assert of(-returns) == pytest.approx(1 - 4.0)
    small = moments(torch.tensor([0.0, 1e-6]), torch.tensor([0.0, 2e-6]))
    assert explained_variance({n: float(v) for n, v in small.items()}) == pytest.approx(0.75)
    empty = torch.zeros(0)
    sums = {name: float(value) for name, value in moments(empty, empty).items()}
    assert explained_variance(sums) == 0.0
    equal = moments(torch.tensor([0.1, 0.2]), torch.tensor([0.7, 0.7]))
    assert explained_variance({name: float(value) for name, value in equal.items()}) == 0.0
