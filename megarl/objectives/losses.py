"""From log-probs and advantages to a loss per token, and the weight of every token in the step's
loss.

To add a loss: write a function of (logp_T, old_T, advantages_T, sequence_mean, config) that returns
`LossTerms`, add a line to `LOSSES`, add its name to `LossName` in `config.py` and its closed form
to `tests/unit/test_algorithms.py`. To add an aggregation: the same with a function of (tokens_N,
config), `AGGREGATIONS` and `AggregationName`.

The loss of a mini-batch is one sum over its tokens, whichever micro-batch and rank they are on:

    loss = sum over response tokens of weights_N[row of the token] * per_token

The weights are computed once from the token counts of the whole mini-batch over all ranks, so
micro-batching and layout cannot change the loss. Every other term (KL, entropy) takes the same
weights, so coefficients mean the same everywhere.

Positions whose target is not trained may hold any finite number; the caller leaves them out of the
sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.objectives.config import AlgorithmConfig

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp: ratios and their sums are finite in float32.

A ratio of e^20 is no longer a number to learn from: `ppo_clip` and `dual_clip` give such a token no
gradient.
"""

SequenceMean = Callable[[Tensor], Tensor]
"""[T] -> [T]: at every token, the mean over the response tokens of its sample, wherever they are.
Differentiable.
"""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A loss before aggregation."""

    per_token: Tensor
    """[T] to be minimised. Carries the gradient."""
    clipped: Tensor
    """[T] bool, True where clipping changed the token's loss."""
    ratio: Tensor
    """[T] importance ratio before clipping, detached: of the token, or of its sequence in gspo."""


LossFunction = Callable[[Tensor, Tensor, Tensor, SequenceMean, AlgorithmConfig], LossTerms]
"""(logp_T, old_T, advantages_T, sequence_mean, config) -> LossTerms; the gradient flows through
logp_T alone.
"""

AggregationFunction = Callable[[Tensor, AlgorithmConfig], Tensor]
"""(tokens_N int64, config) -> weights_N float64."""


def _log_ratio(logp_T: Tensor, old_T: Tensor) -> Tensor:
    """[T] log(new / old probability), within +-LOG_RATIO_LIMIT."""
    return (logp_T - old_T.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _clip_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """The clipped objective as a loss [T], -min(r A, clip(r, 1 - low, 1 + high) A), and where the
    clip decided [T].
    """
    free_T = -ratio_T * advantages_T
    owned_T = -ratio_T.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages_T
    return torch.maximum(free_T, owned_T), (owned_T > free_T).detach()


def ppo_clip(
    logp_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    sequence_mean: SequenceMean,
    config: AlgorithmConfig,
) -> LossTerms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logp - old).

    PPO, arXiv:1707.06347, eq. 7; two clip widths ("clip-higher") from DAPO, arXiv:2503.14476,
    section 3.1.
    """
    ratio_T = _log_ratio(logp_T, old_T).exp()
    per_token_T, clipped_T = _clip_surrogate(ratio_T, advantages_T.detach(), config)
    return LossTerms(per_token_T, clipped_T, ratio_T.detach())


def dual_clip(
    logp_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    sequence_mean: SequenceMean,
    config: AlgorithmConfig,
) -> LossTerms:
    """`ppo_clip`, and for A < 0 the objective is max(min(r A, clip(r) A), c A), c =
    config.dual_clip > 1.

    As a loss: min(ppo_clip, c |A|). It bounds what one token with a large ratio and a negative
    advantage, which the ordinary clip lets through, can do. Dual-clip PPO, arXiv:1912.09729.
    """
    terms = ppo_clip(logp_T, old_T, advantages_T, sequence_mean, config)
    bound_T = -config.dual_clip * advantages_T.detach()
    over_T = (advantages_T < 0) & (terms.per_token.detach() > bound_T)
    return LossTerms(
        torch.where(over_T, bound_T, terms.per_token), terms.clipped | over_T, terms.ratio
    )


def gspo(
    logp_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    sequence_mean: SequenceMean,
    config: AlgorithmConfig,
) -> LossTerms:
    """`ppo_clip` with the ratio of the sequence, s = exp(mean over tokens of (logp - old)):
    arXiv:2507.18071, eq. 5, 7.

    In the token form (eq. 13 and 14): every token's ratio is sg[s] x exp(logp - sg[logp]), which
    has the value s and the gradient of that token's own log-prob. Summed with a weight that is
    constant in a sample, it has the gradient of the sequence form: T x weight x s x mean of
    gradients = weight x s x sum of gradients. So it is right under each aggregation (the paper's is
    `sequence`), it stays right where weights differ between tokens (corrections), and no gradient
    has to travel through `sequence_mean` to other ranks.

    s stays much closer to 1 than a token's ratio: the paper clips at 3e-4 and 4e-4, so set clip_low
    and clip_high.
    """
    with torch.no_grad():
        sequence_T = sequence_mean(_log_ratio(logp_T, old_T)).exp()
    # exp(0) is 1: the value stays s, only the gradient is added.
    ratio_T = sequence_T * (logp_T - logp_T.detach()).exp()
    per_token_T, clipped_T = _clip_surrogate(ratio_T, advantages_T.detach(), config)
    return LossTerms(per_token_T, clipped_T, sequence_T)


def cispo(
    logp_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    sequence_mean: SequenceMean,
    config: AlgorithmConfig,
) -> LossTerms:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] x A x logp: MiniMax-M1, arXiv:2506.13585, section
    3.1.

    Clipping bounds a token's weight and never silences it. The paper has no lower bound: set
    clip_low to 1.
    """
    ratio_T = _log_ratio(logp_T, old_T).exp().detach()
    weight_T = ratio_T.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    clipped_T = (weight_T != ratio_T) & (advantages_T != 0)
    return LossTerms(-weight_T * advantages_T.detach() * logp_T, clipped_T, ratio_T)


def _where_trained(tokens_N: Tensor, divisors_N: Tensor) -> Tensor:
    """[N] float64, 1 / divisor where the sample has response tokens and 0 where it has none.

    Samples without response tokens are not sequences: they add nothing to a sum, so they must not
    enlarge its divisor.
    """
    weights_N = torch.zeros(tokens_N.shape, dtype=torch.float64, device=tokens_N.device)
    trained_N = tokens_N > 0
    weights_N[trained_N] = 1.0 / divisors_N[trained_N].to(torch.float64)
    return weights_N


def token(tokens_N: Tensor, config: AlgorithmConfig) -> Tensor:
    """1 / (response tokens of the mini-batch): the mean over tokens, DAPO, arXiv:2503.14476,
    section 3.3.
    """
    return _where_trained(tokens_N, tokens_N.sum().expand_as(tokens_N))


def sequence(tokens_N: Tensor, config: AlgorithmConfig) -> Tensor:
    """1 / (sequences x T_i): the mean over sequences of their means over tokens, GRPO,
    arXiv:2402.03300, eq. 3.
    """
    return _where_trained(tokens_N, (tokens_N > 0).sum() * tokens_N)


def constant(tokens_N: Tensor, config: AlgorithmConfig) -> Tensor:
    """1 / (sequences x config.constant_tokens): Dr.GRPO, arXiv:2503.20783, section 3.2.

    A token weighs the same in a short and in a long response, and in a step of short and of long
    ones.
    """
    return _where_trained(
        tokens_N, ((tokens_N > 0).sum() * config.constant_tokens).expand_as(tokens_N)
    )


LOSSES: dict[str, LossFunction] = {
    "ppo_clip": ppo_clip,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "cispo": cispo,
}

AGGREGATIONS: dict[str, AggregationFunction] = {
    "token": token,
    "sequence": sequence,
    "constant": constant,
}
