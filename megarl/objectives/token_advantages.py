"""From the rewards of every token to one advantage per token.

`megarl.objectives.advantages` has the functions that give a whole sample one advantage. Here are
those that give each token its own. To add one: write a function of (`TokenRewards`, config), add a
line to `TOKEN_ADVANTAGES`, add its name to `AdvantageName` in `config.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.objectives.advantages import EPSILON
from megarl.objectives.config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """Rewards of the tokens of whole samples on one data rank; the tokens of a sample are in order
    and next to each other.
    """

    rewards: Tensor
    """[T] float64 reward for each token, less the KL penalty if it is part of the reward; 0 where
    `mask` is False."""
    mask: Tensor
    """[T] bool, True for tokens that the policy generated."""
    sample_ids: Tensor
    """[T] int64, the sample of each token."""
    sum_over_ranks: Callable[[Tensor], Tensor]
    """Elementwise sum over the data ranks, whose samples are disjoint; every rank calls it equally
    often.
    """
    values: Tensor | None = None
    """[T] float64 value of the state before each token, predicted by the critic; 0 where `mask` is
    False. None without a critic."""


def returns_to_go(rewards: Tensor, sample_ids: Tensor) -> Tensor:
    """[T] sum of the rewards from each token to the end of its sample (discount 1)."""
    lengths = torch.unique_consecutive(sample_ids, return_counts=True)[1].tolist()
    # Sample by sample: one sum over all would leave the rounding of other samples' rewards.
    parts = [part.flip(0).cumsum(0).flip(0) for part in rewards.split(lengths)]
    return torch.cat([rewards[:0], *parts])


def normalise(values: Tensor, mask: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """[T] (x - mean) / (std + EPSILON) over all masked tokens of all ranks; 0 elsewhere. The
    standard deviation is the population's.
    """
    chosen = values[mask]
    count, total = sum_over_ranks(
        torch.stack([chosen.new_tensor(len(chosen)), chosen.sum()])
    ).tolist()
    centred = chosen - total / max(count, 1.0)
    square = sum_over_ranks(centred.square().sum().reshape(1)).item()
    found = torch.zeros_like(values)
    found[mask] = centred / ((square / max(count, 1.0)) ** 0.5 + EPSILON)
    return found


def generalised_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, sample_ids: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """[T] float64 generalised advantage estimate of each masked token; 0 elsewhere. GAE,
    arXiv:1506.02438, eq. 11 and 12:

        delta_t = r_t + gamma V_(t+1) - V_t        A_t = delta_t + gamma lam A_(t+1)

    t counts the masked tokens of a sample: tokens of the environment between two of them are no
    step. After a sample's last masked token the value is 0, also if the response was cut off at its
    token limit.
    """
    chosen = mask.nonzero()[:, 0]
    if not len(chosen):
        return torch.zeros_like(values)
    counts = torch.unique_consecutive(sample_ids[chosen], return_counts=True)[1]
    # One row for each sample, from its last token back to its first, so that all samples take a
    # step of the recursion together.
    last = counts.cumsum(0) - 1
    steps = torch.arange(int(counts.max()), device=values.device)
    places = (last[:, None] - steps).clamp(min=0)
    inside = steps < counts[:, None]
    value, reward = values[chosen][places] * inside, rewards[chosen][places] * inside
    found = torch.zeros_like(value)
    following, advantage = torch.zeros_like(value[:, 0]), torch.zeros_like(value[:, 0])
    for step in range(len(steps)):
        delta = reward[:, step] + gamma * following - value[:, step]
        advantage = delta + gamma * lam * advantage
        found[:, step], following = advantage, value[:, step]
    result = torch.zeros_like(values)
    result[chosen[places[inside]]] = found[inside]
    return result


def gae(step: TokenRewards, config: AlgorithmConfig) -> Tensor:
    """GAE of the critic's values, with `gae.gamma` and `gae.lam`; over all response tokens of the
    step brought to mean 0 and variance 1 if `gae.whiten` is set.
    """
    found = _estimate(step, config.gae.gamma, config.gae.lam)
    return normalise(found, step.mask, step.sum_over_ranks) if config.gae.whiten else found


def value_targets(step: TokenRewards, config: AlgorithmConfig) -> Tensor:
    """[T] float64 returns that the critic is trained to predict: values + GAE with `gae.value_lam`
    (lambda returns); 0 where `mask` is False. With lambda 1 they are the discounted sums of the
    rewards from each token on, and do not depend on the values.
    """
    assert step.values is not None
    return _estimate(step, config.gae.gamma, config.gae.value_lam) + step.values * step.mask


def _estimate(step: TokenRewards, gamma: float, lam: float) -> Tensor:
    assert step.values is not None, "GAE needs the values of a critic"
    return generalised_advantages(
        step.rewards, step.values, step.mask, step.sample_ids, gamma=gamma, lam=lam
    )


def reinforce_plus_plus_tokens(step: TokenRewards, config: AlgorithmConfig) -> Tensor:
    """Sum of rewards from each token on, normalised over all response tokens of the step:
    REINFORCE++, arXiv:2501.03262, eq. 8 to 10, with discount 1.

    With a KL penalty in the reward, a token's sum has the penalties of that token and of later
    ones; `reinforce_plus_plus` uses the penalty of the whole sequence for every token.
    """
    return normalise(returns_to_go(step.rewards, step.sample_ids), step.mask, step.sum_over_ranks)


TokenAdvantage = Callable[[TokenRewards, AlgorithmConfig], Tensor]
"""(TokenRewards, config) -> advantages [T] float64."""

TOKEN_ADVANTAGES: dict[str, TokenAdvantage] = {
    "reinforce_plus_plus_tokens": reinforce_plus_plus_tokens,
    "gae": gae,
}
