"""Policy losses per token, and the weight of every token in the loss of a mini-batch.

To add a loss, write a function of (logp_T, old_T, advantages_T, sequence_mean, config) that returns
`LossTerms`, add it to `LOSSES` and to `LOSS` in `settings/objectives.py`, and its closed form to
`tests/unit/test_algorithms.py`. For an aggregation do the same with (tokens_N, config),
`AGGREGATIONS` and `AggregationName`. A loss has no gradient where the advantage is 0: tokens of
groups of equal rewards are not computed (`RunConfig.skips_equal_groups`).

    loss = sum over response tokens of weights_N[sample of the token] * per_token

Weights follow from the token counts of the whole mini-batch over all ranks, so that micro-batches
and layout do not change the loss. KL and entropy terms get the same weights. Positions that are not
trained may have any finite value. Below, r = exp(logp - old), A is the advantage, and sg stops the
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.settings.objectives import AlgorithmConfig

LOG_RATIO_LIMIT = 20.0
"""Bound of |log ratio| of a token (in `gspo`, of its mean), which keeps sums of ratios finite in
float32. `ppo_clip` and `dual_clip` give a token at the bound no gradient.
"""

SequenceMean = Callable[[Tensor], Tensor]
"""[T] -> [T]: each token's value becomes the mean over its sample's response tokens, which may be
on several ranks. Collective; differentiable.
"""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A policy loss of T tokens, before the weighted sum."""

    per_token: Tensor
    """[T] with gradient."""
    clipped: Tensor
    """[T] bool, where clipping changed the token's loss."""
    ratio: Tensor
    """[T] importance ratio before clipping, detached; the sequence's in gspo."""


LossFunction = Callable[[Tensor, Tensor, Tensor, SequenceMean, AlgorithmConfig], LossTerms]
"""(logp_T, old_T, advantages_T, sequence_mean, config) -> LossTerms, differentiable in logp_T only.
old_T are the log-probs before the step's first update or the engine's (`algorithm.old_logprobs`).
"""

AggregationFunction = Callable[[Tensor, AlgorithmConfig], Tensor]
"""(response tokens [N] int64 of each sample of the mini-batch, over all ranks; config) -> weight of
each of its tokens [N] float64, 0 for samples without any.
"""


def _log_ratio(logp_T: Tensor, old_T: Tensor) -> Tensor:
    return (logp_T - old_T.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _clip_surrogate(
    ratio_T: Tensor, advantages_T: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and where it clipped."""
    unclipped_T = -ratio_T * advantages_T
    bounded_T = -ratio_T.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages_T
    return torch.maximum(unclipped_T, bounded_T), (bounded_T > unclipped_T).detach()


def ppo_clip(
    logp_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    sequence_mean: SequenceMean,
    config: AlgorithmConfig,
) -> LossTerms:
    """PPO, arXiv:1707.06347, eq. 7: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). The two
    widths ("clip-higher") are DAPO's, arXiv:2503.14476, 3.1.
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
    """Dual-clip PPO, arXiv:1912.09729: `ppo_clip`, and for A < 0 at most dual_clip x |A|, which
    limits large ratios that PPO does not clip.
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
    """GSPO: `ppo_clip` with the sequence's ratio s = exp(mean over the sample's tokens of (logp -
    old)).

    arXiv:2507.18071, eq. 5 and 7, in the token form of eq. 13 and 14: every token's ratio is sg[s]
    x exp(logp - sg[logp]), with the value s and the gradient of the token's own log-prob. With
    weights that are constant in a sample the sum has the gradient of the sequence form. s is much
    closer to 1 than r: the paper clips at 3e-4 and 4e-4, so set clip_low and clip_high.
    """
    with torch.no_grad():
        # Bounded after the mean: a token beyond the bound counts in full.
        mean_T = sequence_mean(logp_T - old_T)
        sequence_T = mean_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
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
    """CISPO, MiniMax-M1, arXiv:2506.13585, 3.1: -sg[clip(r, 1 - clip_low, 1 + clip_high)] x A x
    logp. Clipping bounds a token's weight but keeps its gradient. The paper has no lower bound: set
    clip_low to 1.
    """
    ratio_T = _log_ratio(logp_T, old_T).exp().detach()
    weight_T = ratio_T.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    clipped_T = (weight_T != ratio_T) & (advantages_T != 0)
    return LossTerms(-weight_T * advantages_T.detach() * logp_T, clipped_T, ratio_T)


def sapo(
    logp_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    sequence_mean: SequenceMean,
    config: AlgorithmConfig,
) -> LossTerms:
    """SAPO, arXiv:2511.20347, eq. 5 and 6: -(4 / tau) sigmoid(tau (r - 1)) A, where tau is
    `sapo_positive` for A > 0 and `sapo_negative` otherwise. No token is clipped: its gradient fades
    as r leaves 1.
    """
    ratio_T = _log_ratio(logp_T, old_T).exp()
    advantages_T = advantages_T.detach()
    tau_T = torch.full_like(advantages_T, config.sapo_negative)  # in the dtype of the rest
    tau_T = tau_T.masked_fill(advantages_T > 0, config.sapo_positive)
    gate_T = 4.0 * torch.sigmoid(tau_T * (ratio_T - 1.0)) / tau_T
    return LossTerms(-gate_T * advantages_T, torch.zeros_like(tau_T).bool(), ratio_T.detach())


def reinforce(
    logp_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    sequence_mean: SequenceMean,
    config: AlgorithmConfig,
) -> LossTerms:
    """REINFORCE, Williams 1992: -A x logp, without clipping; used by ReMax, arXiv:2310.10505, and
    GPG, arXiv:2504.02546. Several mini-batches or epochs in a step make later updates off-policy.
    """
    ratio_T = _log_ratio(logp_T, old_T).exp().detach()
    return LossTerms(-advantages_T.detach() * logp_T, torch.zeros_like(ratio_T).bool(), ratio_T)


def _where_trained(tokens_N: Tensor, divisors_N: Tensor) -> Tensor:
    weights_N = torch.zeros(tokens_N.shape, dtype=torch.float64, device=tokens_N.device)
    trained_N = tokens_N > 0
    weights_N[trained_N] = 1.0 / divisors_N[trained_N].to(torch.float64)
    return weights_N


def token(tokens_N: Tensor, config: AlgorithmConfig) -> Tensor:
    """Mean over all tokens: 1 / (response tokens of the mini-batch). DAPO, arXiv:2503.14476,
    3.3.
    """
    return _where_trained(tokens_N, tokens_N.sum().expand_as(tokens_N))


def sequence(tokens_N: Tensor, config: AlgorithmConfig) -> Tensor:
    """Mean over sequences of their token means: 1 / (sequences x tokens of the sample). GRPO,
    arXiv:2402.03300, eq. 3.
    """
    return _where_trained(tokens_N, (tokens_N > 0).sum() * tokens_N)


def constant(tokens_N: Tensor, config: AlgorithmConfig) -> Tensor:
    """Tokens of all responses alike: 1 / (sequences x `config.constant_tokens`). Dr.GRPO,
    arXiv:2503.20783, 3.2.
    """
    return _where_trained(
        tokens_N, ((tokens_N > 0).sum() * config.constant_tokens).expand_as(tokens_N)
    )


LOSSES: dict[str, LossFunction] = {
    "ppo_clip": ppo_clip,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
}
"""{`algorithm.loss`: function}"""

AGGREGATIONS: dict[str, AggregationFunction] = {
    "token": token,
    "sequence": sequence,
    "constant": constant,
}
"""{`algorithm.aggregation`: function}"""
