"""From the rewards of every token, or of every turn, to one advantage per token.

The functions of `megarl.objectives.advantages` give a whole sample one advantage. Those here give
each token its own. To add one: write a function of (`TokenRewards`, config), add a line to
`TOKEN_ADVANTAGES`, add its name to `ADVANTAGE` in `settings/objectives.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.objectives.advantages import EPSILON, AdvantageFunction
from megarl.settings.objectives import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """Input of an advantage function that gives one advantage per token: the T tokens of all
    samples of a step on one data rank. [T] each: the rewards, the critic's values (None without a
    critic), whether the policy generated the token (`mask`), and the number of its sample
    (`sample_ids`). `sum_over_ranks` sums a tensor over the data ranks. The tokens of a sample are
    next to each other, in the order in which they were made: so are those of an agent's rollout
    that is a tree.
    """

    rewards: Tensor
    """[T] float64 reward for each token, less the KL penalty if it is part of the reward; 0 where
    `mask` is False."""
    mask: Tensor
    """[T] bool, True for tokens that the policy generated."""
    sample_ids: Tensor
    """[T] int64 number of each token's sample; equal ones are next to each other."""
    sum_over_ranks: Callable[[Tensor], Tensor]
    """Elementwise sum of a tensor over the data ranks, which have different samples; a collective,
    which every rank calls equally often."""
    values: Tensor | None = None
    """[T] float64 value of the state before each token, predicted by the critic; 0 where `mask` is
    False. None without a critic."""
    critics: Mapping[str, Tensor] = field(default_factory=dict)
    """{name in the recipe's `critics`: values [T] float64 that this critic predicts, 0 where `mask`
    is False}, for an advantage function of the user's own."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that an advantage function of the user's own sets, the same on every rank; a step's
    metrics have them as "own/NAME"."""


def returns_to_go(rewards: Tensor, sample_ids: Tensor) -> Tensor:
    """[T] sum of the rewards from each token to the end of its sample (discount 1). `rewards`: [T];
    `sample_ids`: [T] int64 sample of each token, equal ones next to each other.
    """
    lengths = torch.unique_consecutive(sample_ids, return_counts=True)[1].tolist()
    # Sample by sample: one sum over all would leave the rounding of other samples' rewards.
    parts = [part.flip(0).cumsum(0).flip(0) for part in rewards.split(lengths)]
    return torch.cat([rewards[:0], *parts])


def normalise(values: Tensor, mask: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """(x - mean) / (std + 1e-6) of `values` [T], where mean and population standard deviation are
    over the tokens of all data ranks for which `mask` [T] bool is True; 0 elsewhere. Returns [T].

    `sum_over_ranks`: elementwise sum of a tensor over the data ranks. Every rank calls it together,
    also one without tokens.
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
    """[T] float64 generalised advantage estimate of each token that the policy generated (`mask`
    [T] bool); 0 elsewhere. GAE, arXiv:1506.02438, eq. 11 and 12:

        delta_t = r_t + gamma V_(t+1) - V_t        A_t = delta_t + gamma lam A_(t+1)

    `rewards` and `values` (of the state before each token): [T] float64. `sample_ids`: [T] int64,
    equal ones next to each other. t counts the masked tokens of a sample: tokens of the environment
    between two of them are no step. The tokens of a sample are in the order in which they were
    made: a token of a branch comes after all those before it in time, since the episode went on
    with it. After a sample's last masked token the value is 0, also if the response was cut off at
    its token limit.
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
    """GAE (arXiv:1506.02438), with the recipe's `algorithm.gae.gamma` and `gae.lam`: advantages [T]
    float64, 0 for tokens that the policy has not generated. `step` holds the rewards and the
    critic's values of the T tokens of a step on this rank, and which sample each token is of. With
    `gae.whiten` they are brought to mean 0 and variance 1 over all response tokens of the step; all
    data ranks then call it together.
    """
    assert step.values is not None, "GAE needs the values of a critic"
    found = generalised_advantages(
        *(step.rewards, step.values, step.mask, step.sample_ids),
        gamma=config.gae.gamma,
        lam=config.gae.lam,
    )
    return normalise(found, step.mask, step.sum_over_ranks) if config.gae.whiten else found


def value_targets(step: TokenRewards, values: Tensor, config: AlgorithmConfig) -> Tensor:
    """[T] float64 returns that a critic is trained to predict, where `values` [T] are its present
    predictions: values + GAE with the recipe's `gae.value_lam` (lambda returns); 0 for tokens that
    the policy has not generated. `step` holds the rewards of the T tokens of a step on this rank,
    and which sample each token is of. With lambda 1 the returns are the discounted sums of the
    rewards from each token on, and do not depend on the values.
    """
    found = generalised_advantages(
        *(step.rewards, values, step.mask, step.sample_ids),
        gamma=config.gae.gamma,
        lam=config.gae.value_lam,
    )
    return found + values * step.mask


def reinforce_plus_plus_tokens(step: TokenRewards, config: AlgorithmConfig) -> Tensor:
    """REINFORCE++, arXiv:2501.03262, eq. 8 to 10, with discount 1: the sum of rewards from each
    token to the end of its sample, brought to mean 0 and variance 1 over all response tokens of the
    step. `step` holds the rewards of the T tokens of a step on this rank, and which sample each
    token is of; `config` is not used. Returns [T] float64; all data ranks call it together.

    With a KL penalty in the reward, a token's sum has the penalties of that token and of later
    ones; the advantage `reinforce_plus_plus` uses the penalty of the whole sequence for every
    token.
    """
    return normalise(returns_to_go(step.rewards, step.sample_ids), step.mask, step.sum_over_ranks)


TokenAdvantage = Callable[[TokenRewards, AlgorithmConfig], Tensor]
"""Function of (TokenRewards, config) -> advantages [T] float64, 0 for tokens that are not
trained."""

TOKEN_ADVANTAGES: dict[str, TokenAdvantage] = {
    "reinforce_plus_plus_tokens": reinforce_plus_plus_tokens,
    "gae": gae,
}


def is_per_token(function: Callable[..., Tensor]) -> bool:
    """Whether an advantage function gives one advantage per token, from two arguments
    (`TokenRewards`, config), rather than one per sample, from three (rewards, groups, tokens).
    Decided by its number of parameters.
    """
    return len(inspect.signature(function).parameters) == 2


def turn_of_tokens(mask: Tensor, sample_ids: Tensor, branches: Tensor | None = None) -> Tensor:
    """[T] int64 number of the turn that each token is in, from 0 within its sample: a turn is a
    stretch of tokens of one sample where `mask` ([T] bool, tokens of the policy) is True, up to the
    next branch. Tokens where it is False get an arbitrary number. `sample_ids`: [T] int64 sample of
    each token, equal ones next to each other. `branches`: [B] int64 first tokens of the branches of
    samples that are trees; None for no branches.
    """
    before = torch.cat([mask.new_zeros(1), mask[:-1]])
    is_new = torch.ones_like(mask)
    is_new[1:] = sample_ids[1:] != sample_ids[:-1]
    begins = is_new if branches is None else is_new.index_fill(0, branches, True)
    starts = (mask & (~before | begins)).long()
    counts = starts.cumsum(0)
    if not len(counts):
        return counts
    # Turns of earlier samples do not count.
    first = torch.where(is_new, counts - starts, 0)
    return (counts - torch.cummax(first, 0).values - 1).clamp(min=0)


def turn_sums(
    values: Tensor, mask: Tensor, sample_ids: Tensor, turns: Tensor, shape: tuple[int, int]
) -> Tensor:
    """Sum of `values` [T] over the tokens of each turn (a stretch of tokens that the policy
    generated) of each sample: [N, K] float64 for `shape` = (N samples of the step, K turns at
    most); 0 for samples that are not on this rank.

    `mask`: [T] bool, tokens of the policy. `sample_ids`: [T] int64 number of each token's sample, 0
    to N - 1. `turns`: [T] int64 number of each token's turn, from `turn_of_tokens`.
    """
    found = torch.zeros(shape, dtype=torch.float64, device=values.device)
    places = sample_ids * shape[1] + turns
    found.view(-1).index_add_(0, places[mask], values.double()[mask])
    return found


def turn_advantages(
    function: AdvantageFunction,
    rewards_NK: Tensor,
    tokens_NK: Tensor,
    groups_N: Tensor,
    *,
    discount: float = 1.0,
) -> Tensor:
    """Advantage of each turn of each sample, [N, K] float64: `function` (an advantage per sample,
    such as `grpo`) is applied to each turn's returns, compared with the same turn of the other
    samples of the group. 0 for turns that a sample does not have.

    `rewards_NK`: [N, K] float64 reward of each turn. `tokens_NK`: [N, K] int64 trained tokens of
    each turn, 0 for turns that a sample does not have. `groups_N`: [N] int64 group of each sample,
    equal for responses to one prompt. `discount`: 0 to 1, how much the reward of the next turn
    counts.
    """
    returns_NK = rewards_NK.clone()
    for turn in range(rewards_NK.shape[1] - 2, -1, -1):
        returns_NK[:, turn] += discount * returns_NK[:, turn + 1]
    found = torch.zeros_like(returns_NK)
    for turn in range(rewards_NK.shape[1]):
        has = (tokens_NK[:, turn:] > 0).any(1)
        found[has, turn] = function(returns_NK[has, turn], groups_N[has], tokens_NK[has, turn])
    return found
