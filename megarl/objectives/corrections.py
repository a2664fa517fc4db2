"""Off-policy correction: trainer and engine give different log-probs to the same sampled tokens.

To add a correction, write a function of (trainer_logp_T, engine_logp_T, sequence_sum, config) that
returns detached weights of at most `config.upper`, add a line to `CORRECTIONS`, its name to
`CORRECTION` in `settings/objectives.py`, and its closed form to `tests/unit/test_algorithms.py`.

The trainer's log-probs are those before the step's first update; if both agree, all weights are 1.
Together with a loss that clips the ratio to the trainer's log-probs, this is PPO with three
policies: the engine's (behaviour), the trainer's at the start of the step (proximal) and the one
that learns (current). Weights multiply `LossTerms.per_token` and do not change the normalisers: a
token of weight 0 still counts. `mismatch` and `summarise` measure the difference over micro-batches
and ranks, `weight_sums` and `summarise_weights` what the weights do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megarl.objectives.kl import k3
from megarl.settings.objectives import CorrectionConfig

LOG_WEIGHT_LIMIT = 20.0
"""Bound of |log w|, which keeps weights finite at untrained positions too."""

OUTSIDE_RATIO = 1.25
"""A token's ratio of probabilities, engine to trainer, counts as outside if it is not in
[1 / 1.25, 1.25] = [0.8, 1.25]."""

WEIGHT_SUMS = ("weights", "squares", "dropped", "clipped")
"""Keys of the result of `weight_sums`, which are all reduced over micro-batches and ranks with
sum."""

SequenceSum = Callable[[Tensor], Tensor]
"""[T] -> [T]: each token's value becomes the sum over the response tokens of its sample, which may
be on several ranks; all of them call it, even without tokens."""

CorrectionFunction = Callable[[Tensor, Tensor, SequenceSum, CorrectionConfig], Tensor]
"""Function of (trainer_logp_T, engine_logp_T, sequence_sum, config) -> weights_T, detached: the
factor of each token's loss."""


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
    """No off-policy correction: a weight of 1 for each of the T tokens of `trainer_logp_T`, [T].
    The other arguments, which all corrections take, are not used.
    """
    return torch.ones_like(trainer_logp_T, requires_grad=False)


def decoupled(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """Off-policy weights of decoupled PPO for T tokens: [T] w = exp(trainer_logp_T - engine_logp_T)
    where w <= `config.upper` (5 by default), else 0; detached. The loss is then w x clipped
    objective. `trainer_logp_T` and `engine_logp_T` are [T] log-probs of the sampled tokens by
    trainer and engine; `sequence_sum` is not used.

    Hilton et al., arXiv:2110.00641; for stale rollouts AReaL, arXiv:2505.24298. The papers do not
    bound w, so that one token of w = e^20 would decide about a whole step. AReaL's code drops the
    tokens above `behav_imp_weight_cap`, 5 in its recipes, and so does this function. The correction
    `tis` keeps such tokens, with the bound as weight.
    """
    weights_T = _bounded_exp(_log_weights(trainer_logp_T, engine_logp_T))
    return torch.where(_inside(weights_T, config), weights_T, 0.0)


def tis(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """Off-policy weights of truncated importance sampling for T tokens: [T] min(w, `config.upper`),
    by default 2, with w = exp(trainer_logp_T - engine_logp_T); detached. `trainer_logp_T` and
    `engine_logp_T` are [T] log-probs of the sampled tokens by trainer and engine; `sequence_sum` is
    not used. https://fengyao.notion.site/off-policy-rl
    """
    return _bounded_exp(_log_weights(trainer_logp_T, engine_logp_T)).clamp(max=config.upper)


def icepop(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """Off-policy weights of IcePop, arXiv:2510.18855, for T tokens: [T] w where `config.lower` <= w
    <= `config.upper` (0.5 and 5 by default, as in the paper), else 0, with w = exp(trainer_logp_T -
    engine_logp_T); detached. `trainer_logp_T` and `engine_logp_T` are [T] log-probs of the sampled
    tokens by trainer and engine; `sequence_sum` is not used.
    """
    return decoupled(trainer_logp_T, engine_logp_T, sequence_sum, config)


def sequence_mask(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """Masked importance sampling of whole samples: [T] off-policy weights, W where `config.lower`
    <= W <= `config.upper` (0 and 2 by default), else 0; detached. W is the product of w =
    exp(trainer_logp_T - engine_logp_T) over the response tokens of the token's sample, the same for
    all its tokens. `sequence_sum` takes and returns [T]: each token's value becomes the sum over
    its sample's response tokens, which may be on several ranks.

    The gradient of a sample that is kept has no bias from the difference between trainer and
    engine. For long responses W is far from 1, so that nearly every sample is dropped or has a
    weight near 0; then use `geometric_mask`.
    """
    weights_T = _bounded_exp(sequence_sum(_log_weights(trainer_logp_T, engine_logp_T)))
    return torch.where(_inside(weights_T, config), weights_T, 0.0)


def geometric_mask(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """Drops whole samples: [T] off-policy weights, 1 where `config.lower` <= g <= `config.upper`
    (0.99 and 1.01 by default), else 0; detached. g is the geometric mean of w = exp(trainer_logp_T
    - engine_logp_T) over the response tokens of the token's sample, the same for all its tokens.
    `sequence_sum` takes and returns [T]: each token's value becomes the sum over its sample's
    response tokens, which may be on several ranks.

    g does not depend on the sample's length, as the product of all w does (`sequence_mask`). The
    weights only drop samples; they do not correct those that are kept.
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
"""{name in `algorithm.correction.kind`: function from the two log-probs of each token to the factor
of its loss}"""


def truncated(trainer_logp_T: Tensor, engine_logp_T: Tensor, config: CorrectionConfig) -> Tensor:
    """[T] bool: for which of T tokens the correction `tis` has lowered the weight
    exp(trainer_logp_T - engine_logp_T) to its bound `config.upper`. All False for the other
    corrections, which drop what is outside of their bounds.
    """
    weights_T = _bounded_exp(_log_weights(trainer_logp_T, engine_logp_T))
    return (weights_T > config.upper) & (config.kind == "tis")


@torch.no_grad()
def weight_sums(weights_T: Tensor, truncated_T: Tensor) -> dict[str, Tensor]:
    """Sums over this rank's trained tokens, as float64 scalars, to be summed over micro-batches and
    ranks: {"weights": of the weights of a correction, "squares": of their squares, "dropped":
    number of tokens of weight 0, "clipped": number of tokens whose weight was lowered to the
    bound}.

    `weights_T`: [T] weights. `truncated_T`: [T] bool, whether a weight was lowered to the bound.
    """
    w_T = weights_T.double()
    return {
        "weights": w_T.sum(),
        "squares": w_T.square().sum(),
        "dropped": (w_T == 0).sum().double(),
        "clipped": truncated_T.sum().double(),
    }


def summarise_weights(sums: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """Metrics of a correction's weights from `sums`, the results of `weight_sums` summed over all
    ranks, and the number of trained tokens: {"mean": mean weight, "effective_samples",
    "dropped_share", "clipped_share": fractions of the tokens, 0 to 1}; all 0 without tokens.

    `effective_samples` is Kish's effective sample size as a fraction of the tokens, (sum w)^2 / (n
    sum w^2): 1 if all weights are equal, 1 / n if one token has all the weight, 0 if all weights
    are 0. Kish, Survey Sampling, 1965; for importance weights Kong, A note on importance sampling
    using standardized weights, 1992. n is the number of tokens also for corrections that give all
    tokens of a sample one weight.
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
def mismatch(trainer_logp_T: Tensor, engine_logp_T: Tensor) -> dict[str, Tensor]:
    """Sums over this rank's tokens of the differences d between the log-probs by the trainer and
    those that the engine reported, [T] each, as a dict of float64 scalars: `count` of tokens,
    `sum_abs` and `max_abs` of |d|, `sum_k1` and `sum_k3` of two KL estimates, and `sum_outside`,
    the number of tokens whose probability ratio is not in [0.8, 1.25]. Over micro-batches and ranks
    `max_abs` is reduced with maximum, all others with sum; `summarise` makes metrics of them.
    """
    d_T = engine_logp_T.to(torch.float64) - trainer_logp_T.to(torch.float64)
    return {
        "count": d_T.new_full((), d_T.numel()),
        "sum_abs": d_T.abs().sum(),
        "max_abs": d_T.abs().max() if d_T.numel() else d_T.new_zeros(()),
        "sum_k1": d_T.sum(),
        "sum_k3": k3(d_T, torch.zeros_like(d_T)).sum(),
        "sum_outside": (d_T.abs() > math.log(OUTSIDE_RATIO)).sum().to(torch.float64),
    }


def summarise(sums: dict[str, Tensor]) -> dict[str, float]:
    """Metrics of the difference between the trainer's and the engine's log-probs, as {name:
    number}, from the dicts of `mismatch` (sums over tokens) reduced over all micro-batches and
    ranks; all 0 without tokens.

    `mean_abs` and `max_abs` are of |log-prob difference|, in nats. `k1` and `k3` are estimates of
    KL(engine || trainer) per token. `outside_share` is the fraction of tokens whose probability
    ratio is not in [0.8, 1.25].
    """
    num_tokens = max(float(sums["count"]), 1.0)
    return {
        "mean_abs": float(sums["sum_abs"]) / num_tokens,
        "max_abs": float(sums["max_abs"]),
        "k1": float(sums["sum_k1"]) / num_tokens,
        "k3": float(sums["sum_k3"]) / num_tokens,
        "outside_share": float(sums["sum_outside"]) / num_tokens,
    }
