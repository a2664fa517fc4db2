"""Preference losses: from the log-probs of two responses to one prompt to a loss for each pair.

    method       loss of a pair, with x = r(chosen) - r(rejected)          reward r(y)
    dpo          -log s(x)                                                 beta (lp - ref)
    cdpo         -(1 - e) log s(x) - e log s(-x)                           beta (lp - ref)
    robust_dpo   (-(1 - e) log s(x) + e log s(-x)) / (1 - 2e)              beta (lp - ref)
    ipo          (x / beta - 1 / (2 beta))^2                               beta (lp - ref)
    simpo        -log s(x - gamma)                                         beta lp / T
    orpo         -lp(chosen) / T - beta log s(odds(chosen) - odds(rejected))   beta lp / T
    kto          w+ (1 - s(r - z)) or w- (1 - s(z - r)), one response      beta (lp - ref)

s is the sigmoid, lp the sum of the policy's log-probs over the T tokens of a response, ref the same
sum of the reference's log-probs, e `label_smoothing`, odds(y) = log(p / (1 - p)) with p = exp(lp /
T), and z beta times an estimate of the KL divergence of policy and reference.

Sources: DPO arXiv:2305.18290 eq. 7; cDPO ericmitchell.ai/cdpo.pdf; robust DPO arXiv:2403.00409 eq.
10; IPO arXiv:2310.12036 eq. 17; SimPO arXiv:2405.14734 eq. 6; ORPO arXiv:2403.07691 eq. 6 and 7;
KTO arXiv:2402.01306 eq. 7 and 8; reward models arXiv:2203.02155 eq. 1, margins arXiv:2307.09288 eq.
2.

To add a method, write a function (Pairs, settings) -> Terms, put it into `METHODS`, and its name
into `PreferenceMethod` of the configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid

from megarl.settings.objectives import PreferenceLossConfig, RewardLossConfig

CERTAIN = 1e-9
"""A response's mean log-prob counts as at most -CERTAIN in `orpo`, whose odds are infinite at a
probability of 1."""


@dataclass(frozen=True)
class Pairs:
    """P pairs of responses, each to one prompt, as the losses need them: summed log-probs of each
    response under the policy (`logprobs`) and the reference (`reference`), in float64, and its
    `num_tokens`. Each is [P, 2], with the chosen response at [:, 0] and the rejected one at [:, 1].
    """

    logprobs: torch.Tensor
    """[P, 2] sums of the policy's log-probs over the response tokens, with their graph."""
    reference: torch.Tensor
    """[P, 2] sums of the reference's log-probs over the response tokens; 0 without a reference."""
    num_tokens: torch.Tensor
    """[P, 2] numbers of response tokens, at least 1."""

    @property
    def ratios(self) -> torch.Tensor:
        """[P, 2] log-prob of each response under the policy minus that under the reference."""
        return self.logprobs - self.reference

    @property
    def means(self) -> torch.Tensor:
        """[P, 2] mean log-prob per token under the policy."""
        return self.logprobs / self.num_tokens


class Terms(NamedTuple):
    """What a preference loss returns: the loss [P] of each pair, and the implicit rewards [P, 2] of
    chosen and rejected responses.
    """

    loss: torch.Tensor
    """[P] loss of each pair, or of each single response for KTO; not averaged yet."""
    rewards: torch.Tensor
    """[P, 2] implicit reward of each response, [P] for KTO; that of the chosen response should be
    higher. For metrics alone."""


def pair_difference(values: torch.Tensor) -> torch.Tensor:
    """[P, 2] values of chosen and rejected responses -> [P]: the value of the chosen response minus
    that of the rejected one.
    """
    return values[:, 0] - values[:, 1]


def dpo(pairs: Pairs, config: PreferenceLossConfig) -> Terms:
    """Direct preference optimisation (arXiv 2305.18290): loss [P] of P pairs, -log sigmoid(x), and
    their implicit rewards [P, 2], beta (log-prob - reference's log-prob); x is the reward of the
    chosen response minus that of the rejected one. beta is `config.scale`.
    """
    rewards = config.scale * pairs.ratios
    return Terms(-logsigmoid(pair_difference(rewards)), rewards)


def cdpo(pairs: Pairs, config: PreferenceLossConfig) -> Terms:
    """Conservative DPO, for labels that are wrong with probability e = `label_smoothing`: loss [P]
    of P pairs, (1 - e) L(x) + e L(-x) with L(x) = -log sigmoid(x), and their implicit rewards [P,
    2], beta (log-prob - reference's log-prob); x is the reward of the chosen response minus that of
    the rejected one. beta is `config.scale`.
    """
    rewards, wrong = config.scale * pairs.ratios, config.label_smoothing
    x = pair_difference(rewards)
    return Terms(-(1 - wrong) * logsigmoid(x) - wrong * logsigmoid(-x), rewards)


def robust_dpo(pairs: Pairs, config: PreferenceLossConfig) -> Terms:
    """Robust DPO (arXiv 2403.00409), for labels that are wrong with probability e =
    `label_smoothing`: loss [P] of P pairs, ((1 - e) L(x) - e L(-x)) / (1 - 2 e) with L(x) = -log
    sigmoid(x), and their implicit rewards [P, 2], beta (log-prob - reference's log-prob); x is the
    reward of the chosen response minus that of the rejected one, and beta is `config.scale`. The
    loss's expectation over wrong labels is DPO's loss on the right labels.
    """
    rewards, wrong = config.scale * pairs.ratios, config.label_smoothing
    x = pair_difference(rewards)
    loss = -(1 - wrong) * logsigmoid(x) + wrong * logsigmoid(-x)
    return Terms(loss / (1 - 2 * wrong), rewards)


def ipo(pairs: Pairs, config: PreferenceLossConfig) -> Terms:
    """Identity preference optimisation (arXiv 2310.12036): loss [P] of P pairs, (d - 1 / (2
    beta))^2, and their implicit rewards [P, 2], beta log(policy / reference). d is log(policy /
    reference) of the chosen response minus that of the rejected one; with `length_average`, each is
    divided by the number of its tokens. beta is `config.scale`.
    """
    ratios = pairs.ratios / pairs.num_tokens if config.length_average else pairs.ratios
    return Terms((pair_difference(ratios) - 1 / (2 * config.scale)) ** 2, config.scale * ratios)


def simpo(pairs: Pairs, config: PreferenceLossConfig) -> Terms:
    """Simple preference optimisation (arXiv 2405.14734), without a reference: loss [P] of P pairs,
    -log sigmoid(x - `target_margin`), and their implicit rewards [P, 2], beta times the mean
    log-prob per token; x is the reward of the chosen response minus that of the rejected one. beta
    is `config.scale`.
    """
    rewards = config.scale * pairs.means
    return Terms(-logsigmoid(pair_difference(rewards) - config.target_margin), rewards)


def orpo(pairs: Pairs, config: PreferenceLossConfig) -> Terms:
    """Odds-ratio preference optimisation (arXiv 2403.07691), without a reference: loss [P] of P
    pairs and their implicit rewards [P, 2], beta times the mean log-prob per token. The loss is the
    mean -log-prob per token of the chosen response, plus beta times -log sigmoid of the difference
    of the two responses' log-odds. beta is `config.scale`.
    """
    means = pairs.means.clamp(max=-CERTAIN)
    log_odds = means - torch.log(-torch.expm1(means))
    loss = -pairs.means[:, 0] - config.scale * logsigmoid(pair_difference(log_odds))
    return Terms(loss, config.scale * pairs.means)


METHODS: dict[str, Callable[[Pairs, PreferenceLossConfig], Terms]] = {
    "dpo": dpo,
    "cdpo": cdpo,
    "robust_dpo": robust_dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
}
"""{method: function (Pairs, settings) to its loss}; `kto` is not among them, since it has no pairs.
"""


def pair_loss(pairs: Pairs, config: PreferenceLossConfig) -> Terms:
    """The loss [P] of each of P pairs by the method and settings of `config`, plus
    `sft_coefficient` times the mean -log-prob per token of the chosen response, and the implicit
    rewards [P, 2] of chosen and rejected responses.
    """
    terms = METHODS[config.method](pairs, config)
    if not config.sft_coefficient:
        return terms
    return Terms(terms.loss - config.sft_coefficient * pairs.means[:, 0], terms.rewards)


def kto(
    ratios: torch.Tensor,
    is_desirable: torch.Tensor,
    divergence: float,
    config: PreferenceLossConfig,
) -> torch.Tensor:
    """KTO's loss [P] (arXiv 2402.01306) of single responses: `desirable_weight` (1 - sigmoid(x)) if
    the response is labelled good, else `undesirable_weight` (1 - sigmoid(-x)), with x = beta (ratio
    - max(0, `divergence`)); beta is `config.scale`. `ratios` [P]: log-prob of each response under
    the policy minus that under the reference, with its graph. `is_desirable` [P] bool: labelled
    good. `divergence`: mean of such log-ratios over responses that belong to other prompts, an
    estimate of the KL divergence.
    """
    x = config.scale * (ratios - max(0.0, divergence))
    good = config.desirable_weight * (1 - torch.sigmoid(x))
    bad = config.undesirable_weight * (1 - torch.sigmoid(-x))
    return torch.where(is_desirable, good, bad)


def bradley_terry(
    scores: torch.Tensor, margins: torch.Tensor, config: RewardLossConfig
) -> torch.Tensor:
    """A reward model's loss [P] of pairs: -log sigmoid(chosen score - rejected score - margin),
    plus `config.centering` times the square of the two scores' sum. `scores` [P, 2]: chosen and
    rejected; `margins` [P]: by how much the chosen response is better.
    """
    loss = -logsigmoid(pair_difference(scores) - margins)
    return loss + config.centering * scores.sum(1) ** 2
