"""Off-policy correction: trainer and engine give different log-probs to the same sampled tokens.

To add a correction, write a function of (trainer_logp_T, engine_logp_T, sequence_sum, config) that
returns detached weights of at most `config.upper`, add a line to `CORRECTIONS`, its name to
`CORRECTION` in `config.py`, and its closed form to `tests/unit/test_algorithms.py`.

The trainer's log-probs are those before the step's first update; if both agree, all weights are 1.
Together with a loss that clips the ratio to them, this is PPO with three policies: the engine's
(behaviour), the trainer's at the start of the step (proximal) and the one that learns (current).
Weights multiply `LossTerms.per_token` and do not change the normalisers: a token of weight 0 still
counts. `mismatch`, `merge` and `summarise` measure the difference over micro-batches and ranks,
`weight_sums` and `summarise_weights` what the weights do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megarl.objectives.config import CorrectionConfig
from megarl.objectives.kl import k3

LOG_WEIGHT_LIMIT = 20.0
"""Bound of |log w|, which keeps weights finite at untrained positions too."""

OUTSIDE_RATIO = 1.25
"""A ratio is counted as outside if it is not in [1 / 1.25, 1.25] = [0.8, 1.25]."""

MAXIMA = frozenset({"max_abs"})
"""Keys of `mismatch` to be reduced with maximum; all others with sum."""

WEIGHT_SUMS = ("weights", "squares", "dropped", "clipped")
"""Keys of `weight_sums`, to be reduced with sum."""

SequenceSum = Callable[[Tensor], Tensor]
"""[T] -> [T]: each token's value becomes the sum over the response tokens of its sample, which may
be on several ranks; all of them call it, even without tokens."""

CorrectionFunction = Callable[[Tensor, Tensor, SequenceSum, CorrectionConfig], Tensor]
"""(trainer_logp_T, engine_logp_T, sequence_sum, config) -> weights_T, detached."""


def _log_weights(trainer_logp_T: Tensor, engine_logp_T: Tensor) -> Tensor:
    """[T] log w = trainer's log-prob - engine's log-prob, detached, without a bound."""
    return trainer_logp_T.detach() - engine_logp_T.detach()


def _bounded_exp(log_w_T: Tensor) -> Tensor:
    """[T] exp(log_w_T), with |log_w_T| bounded by LOG_WEIGHT_LIMIT."""
    return log_w_T.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()


def _inside(weights_T: Tensor, config: CorrectionConfig) -> Tensor:
    """[T] bool, True where low <= weight <= high."""
    return (weights_T >= config.lower) & (weights_T <= config.upper)


def none(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """No correction: [T] ones."""
    return torch.ones_like(trainer_logp_T, requires_grad=False)


def decoupled(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """Decoupled PPO: [T] w where w <= high, else 0, by default 5, so that the loss is w x clipped
    objective.

    Hilton et al., arXiv:2110.00641; for stale rollouts AReaL, arXiv:2505.24298. The papers
    have no bound, with which one token of w = e^20 would decide about a whole step. AReaL's code
    drops the tokens above `behav_imp_weight_cap`, 5 in its recipes, and so does this function.
    `tis` keeps such tokens, with the weight `high`.
    """
    weights_T = _bounded_exp(_log_weights(trainer_logp_T, engine_logp_T))
    return torch.where(_inside(weights_T, config), weights_T, 0.0)


def tis(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """Truncated importance sampling: [T] min(w, high), by default high 2. https://fengyao.notion.site/off-policy-rl"""
    return _bounded_exp(_log_weights(trainer_logp_T, engine_logp_T)).clamp(max=config.upper)


def icepop(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """IcePop, arXiv:2510.18855: [T] w where low <= w <= high, else 0; by default 0.5 and 5, as
    there.
    """
    weights_T = _bounded_exp(_log_weights(trainer_logp_T, engine_logp_T))
    return torch.where(_inside(weights_T, config), weights_T, 0.0)


def sequence_mask(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """Masked importance sampling of whole samples: [T] W where low <= W <= high, else 0, by default
    0 and 2, with W = product of w over the sample's response tokens.

    The gradient of a sample that is kept has no bias from the difference between trainer and
    engine. Over long responses W leaves any bounds, and all samples are dropped: then
    `geometric_mask`.
    """
    weights_T = _bounded_exp(sequence_sum(_log_weights(trainer_logp_T, engine_logp_T)))
    return torch.where(_inside(weights_T, config), weights_T, 0.0)


def geometric_mask(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """Drops whole samples: [T] 1 where low <= g <= high, else 0, by default 0.99 and 1.01, with g =
    geometric mean of w over the sample's response tokens.

    g does not depend on the sample's length, as W of `sequence_mask` does. The weights only drop
    samples; they do not correct those that are kept.
    """
    log_w_T = _log_weights(trainer_logp_T, engine_logp_T)
    lengths_T = sequence_sum(torch.ones_like(log_w_T))
    means_T = _bounded_exp(sequence_sum(log_w_T) / lengths_T.clamp(min=1.0))
    return _inside(means_T, config).to(log_w_T.dtype)


CORRECTIONS: dict[str, CorrectionFunction] = {
    "none": none,
    "decoupled": decoupled,
    "tis": tis,
    "icepop": icepop,
    "sequence_mask": sequence_mask,
    "geometric_mask": geometric_mask,
}
"""{name in `algorithm.correction.kind`: function from log-probs to weights}"""


def truncated(trainer_logp_T: Tensor, engine_logp_T: Tensor, config: CorrectionConfig) -> Tensor:
    """[T] bool, True where `tis` has lowered a token's weight to `high`. All False for the other
    corrections, which drop what is outside of their bounds.
    """
    weights_T = _bounded_exp(_log_weights(trainer_logp_T, engine_logp_T))
    return (weights_T > config.upper) & (config.kind == "tis")


@torch.no_grad()
def weight_sums(weights_T: Tensor, truncated_T: Tensor) -> dict[str, Tensor]:
    """Sums over this rank's trained tokens, as float64 scalars, by the names of `WEIGHT_SUMS`: of
    the weights of a correction, of their squares, and the numbers of tokens of weight 0 and of
    tokens whose weight was lowered to the bound (`truncated`).
    """
    w_T = weights_T.double()
    return {
        "weights": w_T.sum(),
        "squares": w_T.square().sum(),
        "dropped": (w_T == 0).sum().double(),
        "clipped": truncated_T.sum().double(),
    }


def summarise_weights(sums: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """Metrics from the sums of `weight_sums` over all ranks and `num_tokens` tokens; all 0 without
    tokens.

    `effective_samples` is Kish's effective sample size as a share of the tokens,
    (sum w)^2 / (n sum w^2): 1 if all weights are equal, 1 / n if one token has all the weight, 0 if
    all weights are 0. Kish, Survey Sampling, 1965; for importance weights Kong, A note on
    importance sampling using standardized weights, 1992. It counts tokens for corrections of whole
    samples too, whose tokens have equal weights.
    """
    n = max(num_tokens, 1.0)
    squares = sums["squares"]
    return {
        "mean": sums["weights"] / n,
        "effective_samples": sums["weights"] ** 2 / (n * squares) if squares > 0 else 0.0,
        "dropped_share": sums["dropped"] / n,
        "clipped_share": sums["clipped"] / n,
    }


@torch.no_grad()
def mismatch(trainer_T: Tensor, engine_T: Tensor, mask_T: Tensor) -> dict[str, Tensor]:
    """Sums over this rank's tokens of differences between trainer and engine, as float64 scalars.

    Args:
        trainer_T: [T] log-probs by the trainer.
        engine_T: [T] log-probs reported by the engine.
        mask_T: [T] bool, tokens to count; other positions may have any value, NaN included.
    """
    # Selected before any arithmetic, because 0 x NaN is NaN. A difference of 0 adds 0 to each sum.
    d_T = torch.where(mask_T, engine_T.to(torch.float64) - trainer_T.to(torch.float64), 0.0)
    return {
        "count": mask_T.sum().to(torch.float64),
        "sum_abs": d_T.abs().sum(),
        "max_abs": d_T.abs().max() if d_T.numel() else d_T.new_zeros(()),
        "sum_k1": d_T.sum(),
        "sum_k3": k3(d_T, torch.zeros_like(d_T)).sum(),
        "sum_outside": (d_T.abs() > math.log(OUTSIDE_RATIO)).sum().to(torch.float64),
    }


def merge(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    """Combine two results of `mismatch`: maximum for `MAXIMA`, sum for all others."""
    return {
        key: torch.maximum(value, second[key]) if key in MAXIMA else value + second[key]
        for key, value in first.items()
    }


def summarise(sums: dict[str, Tensor]) -> dict[str, float]:
    """Metrics from the merged sums of `mismatch`; all 0 without tokens.

    `k1` and `k3` estimate KL(engine || trainer), see `kl.py`; `outside` is the share of tokens
    whose ratio is not in [0.8, 1.25].
    """
    num_tokens = max(float(sums["count"]), 1.0)
    return {
        "mean_abs": float(sums["sum_abs"]) / num_tokens,
        "max_abs": float(sums["max_abs"]),
        "k1": float(sums["sum_k1"]) / num_tokens,
        "k3": float(sums["sum_k3"]) / num_tokens,
        "outside": float(sums["sum_outside"]) / num_tokens,
    }
