"""Engine and trainer disagree on log-probs: weights that correct it, sums that measure it.

To add a correction: write a function of (trainer_logp_T, engine_logp_T, config) that returns
detached weights, add a line to `CORRECTIONS`, add its name to `CorrectionName` in `config.py` and
its closed form to `tests/unit/test_algorithms.py`.

Both log-probs are of the same sampled tokens, the trainer's from before the step's first update;
without staleness and mismatch w = 1. The weights multiply `LossTerms.per_token`; the normalisers
stay what they are, so a token of weight 0 still counts.

`mismatch` gives numbers to be reduced over micro-batches and ranks (`merge` says how), `summarise`
what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megarl.objectives.config import CorrectionConfig
from megarl.objectives.kl import k3

LOG_WEIGHT_LIMIT = 20.0
"""Log-weights are clamped to +-20 before exp, so that weights are finite whatever untrained
positions hold.
"""

OUTSIDE_RATIO = 1.25
"""A ratio counts as outside when it is not in [1 / 1.25, 1.25] = [0.8, 1.25]."""

MAXIMA = frozenset({"max_abs"})
"""Keys of `mismatch` that are reduced with MAX; all others with SUM."""

CorrectionFunction = Callable[[Tensor, Tensor, CorrectionConfig], Tensor]
"""(trainer_logp_T, engine_logp_T, config) -> weights_T, detached."""


def _weights(trainer_logp_T: Tensor, engine_logp_T: Tensor) -> Tensor:
    """[T] w = trainer's probability / engine's probability, detached."""
    log_w_T = trainer_logp_T.detach() - engine_logp_T.detach()
    return log_w_T.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()


def none(trainer_logp_T: Tensor, engine_logp_T: Tensor, config: CorrectionConfig) -> Tensor:
    """[T] ones."""
    return torch.ones_like(trainer_logp_T, requires_grad=False)


def tis(trainer_logp_T: Tensor, engine_logp_T: Tensor, config: CorrectionConfig) -> Tensor:
    """[T] min(w, high): truncated importance sampling, https://fengyao.notion.site/off-policy-rl.
    In [0, high].
    """
    return _weights(trainer_logp_T, engine_logp_T).clamp(max=config.high)


def icepop(trainer_logp_T: Tensor, engine_logp_T: Tensor, config: CorrectionConfig) -> Tensor:
    """[T] w where low <= w <= high, else 0: IcePop, arXiv:2510.18855. Tokens in doubt are left out,
    not truncated.
    """
    weights_T = _weights(trainer_logp_T, engine_logp_T)
    return torch.where((weights_T >= config.low) & (weights_T <= config.high), weights_T, 0.0)


CORRECTIONS: dict[str, CorrectionFunction] = {"none": none, "tis": tis, "icepop": icepop}


@torch.no_grad()
def mismatch(trainer_T: Tensor, engine_T: Tensor, mask_T: Tensor) -> dict[str, Tensor]:
    """What `summarise` needs, from this rank's tokens: float64 scalars, to be reduced as `merge`
    does.

    Args:
        trainer_T: [T] log-probs under the trainer.
        engine_T: [T] log-probs as the engine reported them.
        mask_T: [T] bool; other positions may hold anything, NaN included. May be all False, or
        empty.
    """
    # Selected before any arithmetic: 0 x NaN is NaN. A difference of 0 adds nothing to any of the
    # sums.
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
    """Two results of `mismatch` as one: the maxima's maximum, everything else's sum."""
    return {
        key: torch.maximum(value, second[key]) if key in MAXIMA else value + second[key]
        for key, value in first.items()
    }


def summarise(sums: dict[str, Tensor]) -> dict[str, float]:
    """The reduced numbers of `mismatch` as metrics; all 0 when there was no token.

    `k1` and `k3` estimate KL(engine || trainer), since the engine sampled: d = engine - trainer
    (see `kl.py`). `outside` is the share of tokens whose ratio is not in [0.8, 1.25].
    """
    num_tokens = max(float(sums["count"]), 1.0)
    return {
        "mean_abs": float(sums["sum_abs"]) / num_tokens,
        "max_abs": float(sums["max_abs"]),
        "k1": float(sums["sum_k1"]) / num_tokens,
        "k3": float(sums["sum_k3"]) / num_tokens,
        "outside": float(sums["sum_outside"]) / num_tokens,
    }
