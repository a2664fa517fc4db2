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
of the reference, e `label_smoothing`, odds(y) = log(p / (1 - p)) with p = exp(lp / T), and z beta
times an estimate of the KL divergence of policy and reference.

Sources: DPO arXiv:2305.18290 eq. 7; cDPO ericmitchell.ai/cdpo.pdf; robust DPO arXiv:2403.00409 eq.
10; IPO arXiv:2310.12036 eq. 17; SimPO arXiv:2405.14734 eq. 6; ORPO arXiv:2403.07691 eq. 6 and 7;
KTO arXiv:2402.01306 eq. 7 and 8; reward models arXiv:2203.02155 eq. 1, margins arXiv:2307.09288 eq.
2.

To add one, write a function (Pairs, settings) -> Terms, put it into `METHODS`, and its name into
`PreferenceMethod` of the configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid

from megarl.objectives.config import PreferenceLossConfig, RewardLossConfig

CERTAIN = 1e-9
"""A response's mean log-prob counts as at most -CERTAIN in `orpo`, whose odds are infinite at a
probability of 1."""


@dataclass(frozen=True)
class Pairs:
    """P pairs of responses. Column 0 is the chosen response, column 1 the rejected one."""

    logprobs: torch.Tensor
    """[P, 2] sums of the policy's log-probs over the response tokens."""
    reference: torch.Tensor
    """[P, 2] the same of the reference; 0 without one."""
    num_tokens: torch.Tensor
    """[P, 2] numbers of response tokens, at least 1."""

    @property
    def ratios(self) -> torch.Tensor:
        """[P, 2] log-prob under the policy minus log-prob under the reference."""
        return self.logprobs - self.reference

    @property
    def means(self) -> torch.Tensor:
        """[P, 2] mean log-prob per token under the policy."""
        return self.logprobs / self.num_tokens


class Terms(NamedTuple):
    """A preference loss and what it takes for the rewards."""

    loss: torch.Tensor
    """[P] loss of each pair."""
    rewards: torch.Tensor
    """[P, 2] implicit reward of each response: the chosen one's should be higher."""


def pair_difference(values: torch.Tensor) -> torch.Tensor:
    """[P, 2] values of chosen and rejected responses -> [P]: the value of the chosen response minus
    that of the rejected one.
    """
    return values[:, 0] - values[:, 1]


def dpo(pairs: Pairs, config: PreferenceLossConfig) -> Terms:
    """Direct preference optimisation (arXiv 2305.18290): -log sigmoid(x), where x is the implicit
    reward of the chosen response minus that of the rejected one.
    """
    rewards = config.scale * pairs.ratios
    return Terms(-logsigmoid(pair_difference(rewards)), rewards)


def cdpo(pairs: Pairs, config: PreferenceLossConfig) -> Terms:
    """Conservative DPO: the mean of DPO's loss if each label is wrong with probability e =
    `label_smoothing`: (1 - e) L(x) + e L(-x), with L(x) = -log sigmoid(x) and x as in `dpo`.
    """
    rewards, wrong = config.scale * pairs.ratios, config.label_smoothing
    x = pair_difference(rewards)
    return Terms(-(1 - wrong) * logsigmoid(x) - wrong * logsigmoid(-x), rewards)


def robust_dpo(pairs: Pairs, config: PreferenceLossConfig) -> Terms:
    """Robust DPO (arXiv 2403.00409), for labels that are wrong with probability e =
    `label_smoothing`: ((1 - e) L(x) - e L(-x)) / (1 - 2 e), with L and x as in `cdpo`. Averaged
    over which labels are wrong, this is DPO's loss on the right labels.
    """
    rewards, wrong = config.scale * pairs.ratios, config.label_smoothing
    x = pair_difference(rewards)
    loss = -(1 - wrong) * logsigmoid(x) + wrong * logsigmoid(-x)
    return Terms(loss / (1 - 2 * wrong), rewards)


def ipo(pairs: Pairs, config: PreferenceLossConfig) -> Terms:
    """Identity preference optimisation: the difference of log-ratios is regressed on
    1 / (2 beta).
    """
    ratios = pairs.ratios / pairs.num_tokens if config.length_average else pairs.ratios
    return Terms((pair_difference(ratios) - 1 / (2 * config.scale)) ** 2, config.scale * ratios)


def simpo(pairs: Pairs, config: PreferenceLossConfig) -> Terms:
    """Simple preference optimisation: mean log-probs as rewards, without a reference."""
    rewards = config.scale * pairs.means
    return Terms(-logsigmoid(pair_difference(rewards) - config.target_margin), rewards)


def orpo(pairs: Pairs, config: PreferenceLossConfig) -> Terms:
    """Odds-ratio preference optimisation: fine-tuning on the chosen response, and a penalty on the
    odds of the rejected one; without a reference.
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
"""{method: its loss}; `kto` is not among them, since it has no pairs."""


def pair_loss(pairs: Pairs, config: PreferenceLossConfig) -> Terms:
    """The loss that `config` describes, with its fine-tuning term."""
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
    """KTO's loss [P] of single responses. ratios [P]: log-prob under the policy minus that under
    the reference. is_desirable [P] bool. `divergence`: the mean of such ratios over responses to
    other prompts, an estimate of the KL divergence, which counts as at least 0 and has no gradient.
    """
    x = config.scale * (ratios - max(0.0, divergence))
    good = config.desirable_weight * (1 - torch.sigmoid(x))
    bad = config.undesirable_weight * (1 - torch.sigmoid(-x))
    return torch.where(is_desirable, good, bad)


def bradley_terry(
    scores: torch.Tensor, margins: torch.Tensor, config: RewardLossConfig
) -> torch.Tensor:
    """A reward model's loss [P]: -log s(score(chosen) - score(rejected) - margin), and the
    centering term. scores [P, 2], margins [P].
    """
    loss = -logsigmoid(pair_difference(scores) - margins)
    return loss + config.centering * scores.sum(1) ** 2
