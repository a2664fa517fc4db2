"""Off-policy correction: trainer and engine give different log-probs to the same sampled tokens.

To add a correction, write a function of (trainer_logp_T, engine_logp_T, sequence_sum, config) that
returns detached weights of at most `config.upper`, add a line to `CORRECTIONS`, its name to
`CORRECTION` in `settings/objectives.py`, and its closed form to `tests/unit/test_algorithms.py`.

The trainer's log-probs are those before the step's first update. With a loss that clips the ratio
to them, this is PPO with three policies: the engine's (behaviour), the trainer's at the start of
the step (proximal) and the current one. With w = exp(trainer_logp_T - engine_logp_T), weights
multiply `LossTerms.per_token`; a token of weight 0 still counts in the normalisers. Bounds are
those of `config`.
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
"""A ratio of probabilities is outside if it is not in [1 / 1.25, 1.25] = [0.8, 1.25]."""

WEIGHT_SUMS = ("weights", "squares", "dropped", "clipped")
"""Keys of `weight_sums`."""

SequenceSum = Callable[[Tensor], Tensor]
"""[T] -> [T]: each token's value becomes the sum over its sample's response tokens, which may be on
several ranks. Collective, also without tokens.
"""

CorrectionFunction = Callable[[Tensor, Tensor, SequenceSum, CorrectionConfig], Tensor]
"""(trainer_logp_T, engine_logp_T, sequence_sum, config) -> weights_T, detached."""


def _log_weights(trainer_logp_T: Tensor, engine_logp_T: Tensor) -> Tensor:
    """[T] log w, detached, without a bound."""
    return trainer_logp_T.detach() - engine_logp_T.detach()


def _bounded_exp(log_w_T: Tensor) -> Tensor:
    return log_w_T.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()


def _inside(weights_T: Tensor, config: CorrectionConfig) -> Tensor:
    return (weights_T >= config.lower) & (weights_T <= config.upper)


def none(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """A weight of 1 for each token."""
    return torch.ones_like(trainer_logp_T, requires_grad=False)


def decoupled(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """Decoupled PPO: w where w <= upper (5 by default), else 0. Hilton et al., arXiv:2110.00641;
    for stale rollouts AReaL, arXiv:2505.24298.

    The papers do not bound w, so that one token of w = e^20 would decide about a whole step.
    AReaL's code drops tokens above `behav_imp_weight_cap`, 5 in its recipes, as this does; `tis`
    keeps them.
    """
    weights_T = _bounded_exp(_log_weights(trainer_logp_T, engine_logp_T))
    return torch.where(_inside(weights_T, config), weights_T, 0.0)


def tis(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """Truncated importance sampling: min(w, upper), by default 2.
    https://fengyao.notion.site/off-policy-rl
    """
    return _bounded_exp(_log_weights(trainer_logp_T, engine_logp_T)).clamp(max=config.upper)


def icepop(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """IcePop, arXiv:2510.18855: w where lower <= w <= upper (0.5 and 5 by default, as in the
    paper), else 0.
    """
    return decoupled(trainer_logp_T, engine_logp_T, sequence_sum, config)


def sequence_mask(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """Masked importance sampling of whole samples: W where lower <= W <= upper (0 and 2 by
    default), else 0, with W the product of w over the sample's response tokens.

    The gradient of a sample that is kept has no bias. Long responses are nearly all dropped; then
    use `geometric_mask`.
    """
    weights_T = _bounded_exp(sequence_sum(_log_weights(trainer_logp_T, engine_logp_T)))
    return torch.where(_inside(weights_T, config), weights_T, 0.0)


def geometric_mask(
    trainer_logp_T: Tensor,
    engine_logp_T: Tensor,
    sequence_sum: SequenceSum,
    config: CorrectionConfig,
) -> Tensor:
    """1 where lower <= g <= upper (0.99 and 1.01 by default), else 0, with g the geometric mean of
    w over the sample's response tokens.

    Unlike W in `sequence_mask`, g does not depend on the length. Samples that are kept are not
    corrected.
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
"""{`algorithm.correction.kind`: function}"""


def truncated(trainer_logp_T: Tensor, engine_logp_T: Tensor, config: CorrectionConfig) -> Tensor:
    """[T] bool: which weights `tis` has lowered to its bound; False for other corrections."""
    weights_T = _bounded_exp(_log_weights(trainer_logp_T, engine_logp_T))
    return (weights_T > config.upper) & (config.kind == "tis")


@torch.no_grad()
def weight_sums(weights_T: Tensor, truncated_T: Tensor) -> dict[str, Tensor]:
    """Sums over this rank's trained tokens: of weights and their squares, and numbers of tokens of
    weight 0 and of lowered ones.
    """
    w_T = weights_T.double()
    return {
        "weights": w_T.sum(),
        "squares": w_T.square().sum(),
        "dropped": (w_T == 0).sum().double(),
        "clipped": truncated_T.sum().double(),
    }


def summarise_weights(sums: Mapping[str, float], num_tokens: float) -> dict[str, float]:
    """Metrics of `weight_sums` summed over ranks: mean weight, and shares of tokens, 0 to 1; all 0
    without tokens.

    `effective_samples` is Kish's effective sample size as a share of the tokens, (sum w)^2 / (n sum
    w^2): 1 if all weights are equal, 1 / n if one token has all the weight. Kish, Survey Sampling,
    1965; for importance weights Kong, A note on importance sampling using standardized weights,
    1992.
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
    """Sums over this rank's tokens of d = engine's - trainer's log-prob; over ranks `max_abs` is
    reduced with maximum.
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
    """Metrics of reduced `mismatch`es. `mean_abs` and `max_abs` of |d| are in nats, `k1` and `k3`
    estimates of KL(engine || trainer) per token.
    """
    num_tokens = max(float(sums["count"]), 1.0)
    return {
        "mean_abs": float(sums["sum_abs"]) / num_tokens,
        "max_abs": float(sums["max_abs"]),
        "k1": float(sums["sum_k1"]) / num_tokens,
        "k3": float(sums["sum_k3"]) / num_tokens,
        "outside_share": float(sums["sum_outside"]) / num_tokens,
    }
