"""Every entry of the learning rule against a closed form worked out here, and the properties that
all entries share.

Closed forms are plain Python and numpy over one token or one group at a time; nothing of the
package is used in them. A new entry without a closed form fails
`test_every_entry_has_a_closed_form`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.objectives.advantages import ADVANTAGES, check_rewards
from megarl.objectives.corrections import (
    CORRECTIONS,
    WEIGHT_SUMS,
    mismatch,
    summarise,
    summarise_weights,
    truncated,
    weight_sums,
)
from megarl.objectives.kl import KL_ESTIMATORS, KLControl
from megarl.objectives.losses import AGGREGATIONS, LOSSES
from megarl.settings.objectives import AlgorithmConfig, CorrectionConfig, KLConfig

FEW = settings(max_examples=25, deadline=None, derandomize=True)
# Settings of several losses and aggregations, which no recipe has together.
CONFIG = AlgorithmConfig().model_copy(update={"dual_clip": 1.5, "constant_tokens": 16})


def f64(values: object) -> Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.float64)


# --------------------------------------------------------------------------------------- advantages


def by_group(form: Callable[[list[float]], list[float]]) -> Callable[..., np.ndarray]:
    """Apply a closed form for one group's rewards to each group."""

    def whole(rewards: list[float], groups: list[int], tokens: list[int]) -> np.ndarray:
        out = np.zeros(len(rewards))
        for label in set(groups):
            rows = [i for i, g in enumerate(groups) if g == label]
            out[rows] = form([rewards[i] for i in rows])
        return out

    return whole


def normalised(values: list[float], tokens: list[int]) -> np.ndarray:
    """Write every value once per token, then take the ordinary mean and std."""
    spread = np.repeat(np.asarray(values, dtype=np.float64), tokens)
    if spread.size == 0:
        return np.zeros(len(values))
    out = [
        (v - spread.mean()) / (spread.std() + 1e-6) if t else 0.0
        for v, t in zip(values, tokens, strict=True)
    ]
    return np.asarray(out)


def leave_one_out(r: list[float]) -> list[float]:
    return [x - np.mean(r[:i] + r[i + 1 :]) if len(r) > 1 else 0.0 for i, x in enumerate(r)]


def teaching_share(r: list[float], g: list[int]) -> float:
    """Samples / samples in groups whose rewards differ."""
    teaching = [n for n in range(len(r)) if len({r[m] for m in range(len(r)) if g[m] == g[n]}) > 1]
    return len(r) / max(1, len(teaching))


def minus_greedy(r: list[float], g: list[int], t: list[int]) -> np.ndarray:
    """Reward less that of the group's only sample without trained tokens."""
    greedy = {group: x for x, group, tokens in zip(r, g, t, strict=True) if tokens == 0}
    return np.asarray([x - greedy[group] for x, group in zip(r, g, strict=True)])


minus_mean = by_group(lambda r: [x - np.mean(r) for x in r])
ADVANTAGE_FORMS: dict[str, Callable[..., np.ndarray]] = {
    "grpo": by_group(lambda r: [(x - np.mean(r)) / (np.std(r) + 1e-6) for x in r]),
    "dr_grpo": minus_mean,
    "gpg": lambda r, g, t: teaching_share(r, g) * minus_mean(r, g, t),
    "remax": lambda r, g, t: minus_greedy(r, g, t),
    "rloo": by_group(leave_one_out),
    "reinforce_plus_plus": lambda r, g, t: normalised(r, t),
    "reinforce_plus_plus_baseline": lambda r, g, t: normalised(list(minus_mean(r, g, t)), t),
}

SAMPLED = [name for name in ADVANTAGES if name != "remax"]
"""Advantages of sampled responses alone; `remax` needs a greedy one in each group."""

reward = st.sampled_from([-1.0, 0.0, 0.1, 1 / 3, 1.0]) | st.floats(-10, 10, allow_subnormal=False)
steps = st.lists(
    st.tuples(reward, st.sampled_from([0, 3, 7, -2]), st.integers(0, 40)), min_size=1, max_size=12
)


def advantages(name: str, rewards: object, groups: object, tokens: object) -> Tensor:
    return ADVANTAGES[name](f64(rewards), torch.as_tensor(groups), torch.as_tensor(tokens))


@pytest.mark.parametrize("name", SAMPLED)
@FEW
@given(step=steps)
def test_advantage_is_its_closed_form(name: str, step: list[tuple[float, int, int]]) -> None:
    rewards, groups, tokens = map(list, zip(*step, strict=True))
    got = advantages(name, rewards, groups, tokens)
    assert got.dtype == torch.float64
    np.testing.assert_allclose(
        got.numpy(), ADVANTAGE_FORMS[name](rewards, groups, tokens), rtol=1e-7, atol=1e-7
    )


@FEW
@given(step=steps, greedy=st.lists(reward, min_size=4, max_size=4), seed=st.integers(0, 99))
def test_remax_subtracts_the_greedy_reward_of_the_group(
    step: list[tuple[float, int, int]], greedy: list[float], seed: int
) -> None:
    """Wherever the greedy sample stands in its group, and whatever its reward."""
    sampled = [(x, group, tokens + 1) for x, group, tokens in step]
    groups = sorted({group for _, group, _ in step})
    whole = [*sampled, *((x, group, 0) for x, group in zip(greedy, groups, strict=False))]
    order = np.random.default_rng(seed).permutation(len(whole))
    rewards, labels, tokens = (
        list(column) for column in zip(*(whole[n] for n in order), strict=True)
    )
    got = advantages("remax", rewards, labels, tokens)
    np.testing.assert_array_equal(got.numpy(), ADVANTAGE_FORMS["remax"](rewards, labels, tokens))
    assert not got[torch.as_tensor(tokens) == 0].any()


@pytest.mark.parametrize("tokens", [[3, 4, 5], [0, 0, 5]])
def test_remax_needs_one_greedy_response_in_each_group(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"group 7 has [02] greedy responses"):
        advantages("remax", [1.0, 0.0, 1.0], [7, 7, 7], tokens)


@pytest.mark.parametrize("value", [1e150, -1e19, math.inf, math.nan])
def test_rewards_without_finite_squares_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"the reward of sample 1 is .* at most 1e\+18"):
        check_rewards(f64([1.0, value]), torch.zeros(2), torch.ones(2))


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("value", [0.1, -1 / 3, 1e6 + 0.1])
def test_equal_rewards_give_exactly_nothing(name: str, value: float) -> None:
    got = advantages(name, [value] * 7, [0, 0, 0, 1, 1, 2, 3], [5, 0, 3, 9, 9, 1, 0])
    assert torch.equal(got, torch.zeros(7, dtype=torch.float64))


@pytest.mark.parametrize("name", SAMPLED)
def test_advantages_of_nothing(name: str) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert advantages(name, [], empty, empty).shape == (0,)
    assert torch.isfinite(advantages(name, [1.0, 0.0, 3.0], [0, 0, 1], [0, 0, 0])).all()


# ----------------------------------------------------------------------------------------------- kl

KL_FORMS: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_is_its_closed_form(name: str) -> None:
    logp, ref = f64(np.linspace(-12, 0, 41)), f64(np.linspace(-3, -2, 41))
    got = KL_ESTIMATORS[name](logp, ref)
    expected = [KL_FORMS[name](float(d)) for d in logp - ref]
    torch.testing.assert_close(got, f64(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_gradient(name: str) -> None:
    ref = f64([-1.0, -2.0, -3.0, -0.5, -1.0])
    # The first is beyond k3's limit.
    logp = (ref + f64([-30.0, -9.0, -0.1, 0.7, 40.0])).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: KL_ESTIMATORS[name](x, ref), (logp,))
    ref.requires_grad_()
    KL_ESTIMATORS[name](logp, ref).sum().backward()
    assert ref.grad is None, "the reference does not learn"


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("d", [-1e4, -88.8, -10.0, 0.0, 10.0, 88.8, 1e4])
def test_kl_is_finite_and_pulls_back_in_float32(name: str, d: float) -> None:
    logp = torch.tensor([d], requires_grad=True)
    value = KL_ESTIMATORS[name](logp, torch.zeros(1))
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    assert torch.isfinite(value).all()
    assert torch.isfinite(gradient).all()
    if name != "k1":
        assert value >= 0
        assert gradient.sign() == np.sign(d)


def test_k3_is_exact_in_float32() -> None:
    """Small differences; and near the reference and far from it its gradient: 1 - exp(-d), and the
    tangent's slope below the limit, within a few roundings.
    """
    got = KL_ESTIMATORS["k3"](torch.tensor([1e-4]), torch.zeros(1))
    assert float(got) == pytest.approx(0.5e-8, rel=0.01)
    small = torch.logspace(-6, -1, 50)
    d = torch.cat([torch.linspace(-14, 4, 400), small, -small, torch.tensor([-10.0])])
    d.requires_grad_()
    KL_ESTIMATORS["k3"](d, torch.zeros_like(d)).sum().backward()
    expected = -torch.expm1(-d.detach().double().clamp(min=-10.0))
    assert ((d.grad.double() - expected).abs() / expected.abs().clamp_min(1.0)).max() < 3e-7


# ------------------------------------------------------------------------------------------- losses


@dataclass
class Row:
    """Packed samples: each has two prompt positions, then its response, then a last position
    without a target.
    """

    rows_T: Tensor
    mask_T: Tensor
    logp_T: Tensor
    old_T: Tensor
    advantages_N: Tensor


def make_row(lengths: list[int], seed: int, spread: float = 0.4) -> Row:
    rng = torch.Generator().manual_seed(seed)
    rows = torch.cat([torch.full((length + 3,), n) for n, length in enumerate(lengths)])
    mask = torch.cat([torch.tensor([False] * 2 + [True] * length + [False]) for length in lengths])
    logp = -3 * torch.rand(len(rows), dtype=torch.float64, generator=rng)
    old = logp + spread * torch.randn(len(rows), dtype=torch.float64, generator=rng)
    adv = torch.randn(len(lengths), dtype=torch.float64, generator=rng)
    return Row(rows, mask, logp.requires_grad_(), old, adv)


def mean_over(row: Row) -> Callable[[Tensor], Tensor]:
    """The mean over each sample's response tokens that the training room injects."""
    counts = torch.zeros(len(row.advantages_N), dtype=torch.float64)
    counts = counts.index_add(0, row.rows_T, row.mask_T.double()).clamp(min=1)

    def sequence_mean(x_T: Tensor) -> Tensor:
        kept = torch.where(row.mask_T, x_T, 0.0)
        total = torch.zeros_like(counts).index_add(0, row.rows_T, kept)
        return (total / counts)[row.rows_T]

    return sequence_mean


def clip(r: float) -> float:
    return min(max(r, 0.8), 1.28)


def ppo_form(d: float, mean_d: float, a: float, logp: float) -> tuple[float, float, bool]:
    """(loss of a token, its derivative by logp, clipped) from log-ratio, the sequence's mean
    log-ratio and advantage.
    """
    r = math.exp(d)
    cut = (a > 0 and r > 1.28) or (a < 0 and r < 0.8)
    return -clip(r) * a if cut else -r * a, 0.0 if cut else -r * a, cut


def dual_form(d: float, mean_d: float, a: float, logp: float) -> tuple[float, float, bool]:
    if a < 0 and math.exp(d) > 1.5:
        return -1.5 * a, 0.0, True
    return ppo_form(d, mean_d, a, logp)


def cispo_form(d: float, mean_d: float, a: float, logp: float) -> tuple[float, float, bool]:
    r = math.exp(d)
    return -clip(r) * a * logp, -clip(r) * a, not 0.8 <= r <= 1.28


def sapo_form(d: float, mean_d: float, a: float, logp: float) -> tuple[float, float, bool]:
    r, tau = math.exp(d), 1.0 if a > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return -4 / tau * gate * a, -4 * gate * (1 - gate) * r * a, False


LOSS_FORMS: dict[str, Callable[[float, float, float, float], tuple[float, float, bool]]] = {
    "ppo_clip": ppo_form,
    "dual_clip": dual_form,
    "gspo": lambda d, mean_d, a, logp: ppo_form(mean_d, mean_d, a, logp),
    "cispo": cispo_form,
    "sapo": sapo_form,
    "reinforce": lambda d, mean_d, a, logp: (-a * logp, -a, False),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(4))
def test_loss_is_its_closed_form(name: str, seed: int) -> None:
    row = make_row([1, 9, 1, 14, 5, 2], seed, spread=0.6)
    advantages_T = row.advantages_N[row.rows_T]
    terms = LOSSES[name](row.logp_T, row.old_T, advantages_T, mean_over(row), CONFIG)
    (gradient,) = torch.autograd.grad(terms.per_token[row.mask_T].sum(), row.logp_T)
    assert not terms.ratio.requires_grad
    assert not gradient[~row.mask_T].any()
    kinds = set()
    for t in row.mask_T.nonzero().flatten().tolist():
        n = int(row.rows_T[t])
        mine = row.mask_T & (row.rows_T == n)
        d = float(row.logp_T[t].detach() - row.old_T[t])
        mean_d = float((row.logp_T.detach() - row.old_T)[mine].mean())
        value, slope, cut = LOSS_FORMS[name](
            d, mean_d, float(row.advantages_N[n]), float(row.logp_T[t].detach())
        )
        assert float(terms.per_token[t].detach()) == pytest.approx(value, rel=1e-10)
        assert float(gradient[t]) == pytest.approx(slope, rel=1e-10, abs=1e-14)
        assert bool(terms.clipped[t]) is cut
        assert float(terms.ratio[t]) == pytest.approx(
            math.exp(mean_d if name == "gspo" else d), rel=1e-10
        )
        kinds.add(cut)
    # The case must show both sides of the clip; `sapo` and `reinforce` have none.
    assert kinds == ({False} if name in ("sapo", "reinforce") else {True, False})


def test_gspo_is_bounded_after_its_mean() -> None:
    """Log-ratios -40 and 25: s = exp(-7.5), which is below the clip range. Bounded one by one they
    would give exp(0).
    """
    logp = f64([-40.0, 0.0]).requires_grad_()
    terms = LOSSES["gspo"](logp, f64([0.0, -25.0]), f64([-1.0, -1.0]), torch.Tensor.mean, CONFIG)
    assert terms.clipped.all() and terms.per_token.detach().tolist() == [0.8, 0.8]
    assert float(terms.ratio.unique()) == pytest.approx(math.exp(-7.5), rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_only_logp_learns_and_nothing_without_advantages(name: str) -> None:
    row = make_row([2, 6], seed=3, spread=1.0)
    sequence_mean, advantages_T = mean_over(row), row.advantages_N[row.rows_T].requires_grad_()
    row.old_T.requires_grad_()
    terms = LOSSES[name](row.logp_T, row.old_T, advantages_T, sequence_mean, CONFIG)
    terms.per_token.sum().backward()
    assert row.logp_T.grad is not None and row.old_T.grad is None and advantages_T.grad is None
    terms = LOSSES[name](row.logp_T, row.old_T, torch.zeros_like(row.old_T), sequence_mean, CONFIG)
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), row.logp_T)
    assert not gradient.any() and not terms.clipped.any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("d", [-1e4, 1e4])
@pytest.mark.parametrize("a", [-2.0, 2.0])
def test_losses_are_finite_in_float32(name: str, d: float, a: float) -> None:
    logp = torch.tensor([d, -1.0], requires_grad=True)
    terms = LOSSES[name](
        logp, torch.zeros(2), torch.full((2,), a), lambda x: x.mean().expand_as(x), CONFIG
    )
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), logp)
    for tensor in (terms.per_token, terms.ratio, gradient):
        assert torch.isfinite(tensor).all()
    if name == "dual_clip":
        assert terms.per_token.max() <= 1.5 * abs(a)


# ------------------------------------------------------------------------------------- aggregations

AGGREGATION_FORMS: dict[str, Callable[[list[np.ndarray]], float]] = {
    "token": lambda samples: float(np.mean(np.concatenate(samples))),
    "sequence": lambda samples: float(np.mean([np.mean(sample) for sample in samples])),
    "constant": lambda samples: float(np.mean([np.sum(sample) / 16 for sample in samples])),
}


@pytest.mark.parametrize("name", AGGREGATIONS)
@FEW
@given(lengths=st.lists(st.integers(0, 30), max_size=8), seed=st.integers(0, 99))
def test_aggregation_is_its_closed_form(name: str, lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = [rng.normal(size=length) for length in lengths]
    weights = AGGREGATIONS[name](torch.tensor(lengths), CONFIG)
    assert weights.dtype == torch.float64
    got = sum(float(w) * sample.sum() for w, sample in zip(weights, samples, strict=True))
    trained = [sample for sample in samples if sample.size]
    assert got == pytest.approx(
        AGGREGATION_FORMS[name](trained) if trained else 0.0, rel=1e-9, abs=1e-12
    )
    for weight, length in zip(weights.tolist(), lengths, strict=True):
        assert 0 < weight <= 1 if length else weight == 0


# -------------------------------------------------------------------------------------- corrections

CORRECTION_FORMS: dict[str, Callable[[float, list[float]], float]] = {
    "none": lambda log_w, sample: 1.0,
    "decoupled": lambda log_w, sample: math.exp(log_w) if math.exp(log_w) <= 5.0 else 0.0,
    "tis": lambda log_w, sample: min(math.exp(log_w), 2.0),
    "icepop": lambda log_w, sample: math.exp(log_w) if 0.5 <= math.exp(log_w) <= 5.0 else 0.0,
    "sequence_mask": lambda log_w, sample: (
        math.exp(sum(sample)) if sum(sample) <= math.log(2.0) else 0.0
    ),
    "geometric_mask": lambda log_w, sample: float(
        math.log(0.99) <= sum(sample) / len(sample) <= math.log(1.01)
    ),
}
"""{correction: weight of a token from its log w and those of all tokens of its sample}"""


def correct(name: str, trainer: Tensor, engine: Tensor, rows: Tensor) -> Tensor:
    """Weights by the correction `name` with its usual bounds; `rows` [T]: sample of each token."""

    def sequence_sum(values: Tensor) -> Tensor:
        sums = values.new_zeros(int(rows.max()) + 1).index_add(0, rows, values)
        return sums[rows]

    return CORRECTIONS[name](trainer, engine, sequence_sum, CorrectionConfig(kind=name))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("scale", [1e-3, 1.0])
@FEW
@given(log_w=st.lists(st.tuples(st.floats(-4, 4), st.integers(0, 2)), min_size=1, max_size=20))
def test_correction_is_its_closed_form(
    name: str, scale: float, log_w: list[tuple[float, int]]
) -> None:
    """Small differences, which whole samples survive, and large ones."""
    rows = torch.tensor([row for _, row in log_w])
    engine = f64(np.linspace(-3, -1, len(log_w)))
    trainer = (engine + scale * f64([value for value, _ in log_w])).requires_grad_()
    got = correct(name, trainer, engine, rows)
    assert not got.requires_grad
    exact = trainer.detach() - engine
    for t, row in enumerate(rows.tolist()):
        sample = exact[rows == row].tolist()
        limits = [math.log(2.0), math.log(0.99), math.log(1.01), -20.0]
        if any(abs(sum(sample) - limit) < 1e-12 for limit in limits) or sum(sample) < -20:
            continue
        wanted = CORRECTION_FORMS[name](float(exact[t]), sample)
        assert float(got[t]) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_correction_is_bounded_in_float32_and_1_without_mismatch(name: str) -> None:
    engine = torch.tensor([0.0, -1e4, -700.0, -2.5, -1.5])
    trainer = torch.tensor([-1e4, 0.0, -0.1, -2.5, -1.5])
    got = correct(name, trainer, engine, torch.tensor([0, 1, 2, 3, 3]))
    assert got.dtype == torch.float32
    config = CorrectionConfig(kind=name)  # pyright: ignore[reportArgumentType]
    most = 1.0 if name in ("none", "geometric_mask") else config.upper
    assert most <= 5.0
    assert ((got >= 0) & (got <= most)).all()
    assert got[3] == got[4] == 1


def test_sums_of_weights_by_hand() -> None:
    """Weights 1, 1.5, 0 and 2, the last one truncated from 3; in two parts, as two ranks add."""
    config = CorrectionConfig(kind="tis")
    log_w = f64([0.0, math.log(1.5), -80.0, math.log(3.0)])
    capped = truncated(log_w, torch.zeros_like(log_w), config)
    assert capped.tolist() == [False, False, False, True]
    weights = torch.tensor([1.0, 1.5, 0.0, 2.0])
    parts = [weight_sums(weights[part], capped[part]) for part in (slice(0, 1), slice(1, 4))]
    sums = {name: float(parts[0][name] + parts[1][name]) for name in WEIGHT_SUMS}
    assert summarise_weights(sums, 4.0) == {
        "mean": 4.5 / 4,
        "effective_samples": 4.5**2 / (4 * (1 + 1.5**2 + 4)),
        "dropped_share": 0.25,
        "clipped_share": 0.25,
    }


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [([], 0.0), ([0.0, 0.0], 0.0), ([3.0] * 5, 1.0), ([0.0, 0.0, 0.0, 7.0], 0.25)],
)
def test_effective_samples_are_between_0_and_1(weights: list[float], wanted: float) -> None:
    sums = weight_sums(torch.tensor(weights), torch.zeros(len(weights), dtype=torch.bool))
    found = summarise_weights({name: float(sums[name]) for name in WEIGHT_SUMS}, len(weights))
    assert found["effective_samples"] == pytest.approx(wanted)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_only_tis_truncates(name: str) -> None:
    """The others drop what is above their bound, or weigh nothing."""
    config = CorrectionConfig(kind=name)  # pyright: ignore[reportArgumentType]
    engine = torch.tensor([-9.0, -1.0])
    got = truncated(torch.tensor([-1.0, -1.0]), engine, config)
    assert got.tolist() == [name == "tis", False]


@pytest.mark.parametrize(("kind", "settings", "said"), [
    (CorrectionConfig, {"kind": "decoupled", "low": 0.5},
     "low is 0.5, but .*kind is 'decoupled', which does not use it"),
    (CorrectionConfig, {"high": 2.0}, "high is 2.0, but .*kind is 'none', .* 'decoupled' or 'tis'"),
    (CorrectionConfig, {"kind": "icepop", "low": 1.0, "high": 1.0},
     "low is 1 and high 1, .* set low below high"),
    (CorrectionConfig, {"kind": "tis", "allow_uncorrected": True},
     "allow_uncorrected is true, but .*kind is 'tis', .*; leave it out"),
    (AlgorithmConfig, {"loss": "reinforce", "clip_high": 5.0}, "clip_high is 5.0, but .*loss is 're"),
    (AlgorithmConfig, {"loss": "sapo", "clip_low": 0.1}, "clip_low is 0.1, but .*loss is 'sapo'"),
    (AlgorithmConfig, {"dual_clip": 5.0}, "dual_clip is 5.0, but .* set .*loss to 'dual_clip'"),
    (AlgorithmConfig, {"constant_tokens": 500}, "constant_tokens is 500, but .*ation is 'token'"),
    (AlgorithmConfig, {"correction": CorrectionConfig(kind="tis"), "old_logprobs": "engine"},
     "correction has settings.* is 'engine'.*set .*old_logprobs"),
    (AlgorithmConfig, {"loss": "reinforce", "old_logprobs": "engine"},
     "the denominator of a ratio that"),
    (AlgorithmConfig, {"turn_discount": 0.5}, "turn_discount is 0.5, but .*credit is 'response'"),
    (AlgorithmConfig, {"advantage": "reinforce_plus_plus", "credit": "turn"},
     "credit is 'turn', but .*advantage is 'reinforce_plus_plus'.* set"),
    (KLConfig, {"target": 0.1}, "target is 0.1, but .*coefficient is 0.0"),
    (KLConfig, {"coefficient": 0.1, "gain": 0.2}, "gain is 0.2, but .*target is null"),
])  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(
    kind: Callable[..., object], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        kind(**settings)


# --------------------------------------------------------------------------------- adaptive KL


def test_the_kl_coefficient_follows_the_divergence_by_hand() -> None:
    """arXiv:1909.08593, 2.2, with gain 0.1: errors beyond 0.2 count as 0.2."""
    control = KLControl(KLConfig(coefficient=0.5, target=0.01))
    expected = 0.5
    for divergence, error in [(0.02, 0.2), (0.011, 0.1), (0.0, -0.2), (-0.3, -0.2), (0.01, 0.0)]:
        control.update(divergence)
        expected *= 1 + 0.1 * error
        assert control.coefficient == pytest.approx(expected, rel=1e-12)
    control.restore(0.125)
    assert control.coefficient == 0.125
    # Without a target it stays.
    control = KLControl(KLConfig(coefficient=0.5))
    control.update(7.0)
    control.restore(0.1)
    assert control.coefficient == 0.5


def test_mismatch_by_hand() -> None:
    """KL(engine || trainer), d = engine - trainer: 0.3, -0.1 and 0.2; and no token."""
    got = summarise(mismatch(f64([-1.3, -0.9, -2.2]), f64([-1.0, -1.0, -2.0])))
    k3 = sum(math.exp(-x) - 1 + x for x in [0.3, -0.1, 0.2]) / 3
    wanted = {"mean_abs": 0.2, "max_abs": 0.3, "k1": 0.4 / 3, "k3": k3}
    # exp(-0.3) = 0.74; exp(0.1) = 1.11 and exp(-0.2) = 0.82
    assert got == pytest.approx(wanted | {"outside_share": 1 / 3})
    assert set(summarise(mismatch(f64([]), f64([]))).values()) == {0.0}


@pytest.mark.parametrize("ratio", [0.79, 0.81, 1.24, 1.26])
def test_mismatch_counts_ratios_outside_the_band(ratio: float) -> None:
    got = summarise(mismatch(f64([math.log(ratio)]), f64([0.0])))
    assert got["outside_share"] == (not 0.8 <= ratio <= 1.25)


# --------------------------------------------------------------------------------------- registries


@pytest.mark.parametrize(("registry", "forms"), [
    (ADVANTAGES, ADVANTAGE_FORMS), (KL_ESTIMATORS, KL_FORMS), (LOSSES, LOSS_FORMS),
    (AGGREGATIONS, AGGREGATION_FORMS), (CORRECTIONS, CORRECTION_FORMS),
])  # fmt: skip
def test_every_entry_has_a_closed_form(registry: dict[str, Any], forms: dict[str, Any]) -> None:
    assert registry.keys() == forms.keys()
