"""From the rewards of every token, or of every turn, to one advantage per token.

To add one: write a function of (`TokenRewards`, config), and add it to `TOKEN_ADVANTAGES` and to
`ADVANTAGE` in `settings/objectives.py`.
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
    """The T tokens of all samples of a step on one data rank. Those of a sample are next to each
    other, in the order in which they were made, also those of a tree.
    """

    rewards: Tensor
    """[T] float64, less the KL penalty if it is part of the reward; 0 where `mask` is False."""
    mask: Tensor
    """[T] bool, True for tokens that the policy generated."""
    sample_ids: Tensor
    """[T] int64 number of each token's sample."""
    sum_over_ranks: Callable[[Tensor], Tensor]
    """Elementwise sum over the data ranks. Collective."""
    values: Tensor | None = None
    """[T] float64 value of the state before each token; 0 where `mask` is False. None without a
    critic.
    """
    critics: Mapping[str, Tensor] = field(default_factory=dict)
    """{name in the recipe's `critics`: its `values`}"""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that a function of the user's own sets, the same on every rank, for the step's
    metrics as "own/NAME".
    """


def returns_to_go(rewards: Tensor, sample_ids: Tensor) -> Tensor:
    """[T] sum of the rewards from each token to the end of its sample (discount 1)."""
    lengths = torch.unique_consecutive(sample_ids, return_counts=True)[1].tolist()
    # Sample by sample: one sum over all would leave the rounding of other samples' rewards.
    parts = [sample.flip(0).cumsum(0).flip(0) for sample in rewards.split(lengths)]
    return torch.cat([rewards[:0], *parts])


def normalise(values: Tensor, mask: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """(x - mean) / (population std + 1e-6) of `values` [T] over the tokens of all data ranks in
    `mask`; 0 elsewhere. Collective, also without tokens.
    """
    chosen = values[mask]
    count, total = sum_over_ranks(
        torch.stack([chosen.new_tensor(len(chosen)), chosen.sum()])
    ).tolist()
    centred = chosen - total / max(count, 1.0)
    square = sum_over_ranks(centred.square().sum().reshape(1)).item()
    normalised = torch.zeros_like(values)
    normalised[mask] = centred / ((square / max(count, 1.0)) ** 0.5 + EPSILON)
    return normalised


def generalised_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, sample_ids: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """[T] float64, 0 where `mask` is False. GAE, arXiv:1506.02438, eq. 11 and 12:

        delta_t = r_t + gamma V_(t+1) - V_t        A_t = delta_t + gamma lam A_(t+1)

    t counts the masked tokens of a sample: tokens of the environment are no step. A branch comes
    after all before it in time, since the episode went on with it. After the last masked token the
    value is 0, also where the token limit cut it off.
    """
    chosen = mask.nonzero()[:, 0]
    if not len(chosen):
        return torch.zeros_like(values)
    counts = torch.unique_consecutive(sample_ids[chosen], return_counts=True)[1]
    # One row for each sample, from its last token back to its first, so that all samples take a
    # step of the recursion together.
    last = counts.cumsum(0) - 1
    steps = torch.arange(int(counts.max()), device=values.device)
    index = (last[:, None] - steps).clamp(min=0)
    inside = steps < counts[:, None]
    value, reward = values[chosen][index] * inside, rewards[chosen][index] * inside
    advantages = torch.zeros_like(value)
    following, advantage = torch.zeros_like(value[:, 0]), torch.zeros_like(value[:, 0])
    for step in range(len(steps)):
        delta = reward[:, step] + gamma * following - value[:, step]
        advantage = delta + gamma * lam * advantage
        advantages[:, step], following = advantage, value[:, step]
    result = torch.zeros_like(values)
    result[chosen[index[inside]]] = advantages[inside]
    return result


def gae(step: TokenRewards, config: AlgorithmConfig) -> Tensor:
    """GAE (arXiv:1506.02438) with `algorithm.gae`. With `gae.whiten` it is brought to mean 0 and
    variance 1 over all response tokens of the step; then collective.
    """
    assert step.values is not None, "GAE needs the values of a critic"
    gains = generalised_advantages(
        *(step.rewards, step.values, step.mask, step.sample_ids),
        gamma=config.gae.gamma,
        lam=config.gae.lam,
    )
    return normalise(gains, step.mask, step.sum_over_ranks) if config.gae.whiten else gains


def value_targets(step: TokenRewards, values: Tensor, config: AlgorithmConfig) -> Tensor:
    """[T] float64 returns that a critic learns: its present `values` [T] + GAE with `gae.value_lam`
    (lambda returns). With lambda 1 they are discounted sums of rewards.
    """
    advantages = generalised_advantages(
        *(step.rewards, values, step.mask, step.sample_ids),
        gamma=config.gae.gamma,
        lam=config.gae.value_lam,
    )
    return advantages + values * step.mask


def reinforce_plus_plus_tokens(step: TokenRewards, config: AlgorithmConfig) -> Tensor:
    """REINFORCE++, arXiv:2501.03262, eq. 8 to 10, with discount 1: `returns_to_go`, brought to mean
    0 and variance 1 over all response tokens of the step. Collective.
    """
    return normalise(returns_to_go(step.rewards, step.sample_ids), step.mask, step.sum_over_ranks)


TokenAdvantage = Callable[[TokenRewards, AlgorithmConfig], Tensor]
"""(TokenRewards, config) -> advantages [T] float64, 0 for tokens that are not trained."""

TOKEN_ADVANTAGES: dict[str, TokenAdvantage] = {
    "reinforce_plus_plus_tokens": reinforce_plus_plus_tokens,
    "gae": gae,
}


def is_per_token(function: Callable[..., Tensor]) -> bool:
    """Whether it takes (`TokenRewards`, config), not (rewards, groups, tokens)."""
    return len(inspect.signature(function).parameters) == 2


def turn_of_tokens(mask: Tensor, sample_ids: Tensor, branches: Tensor | None = None) -> Tensor:
    """[T] int64 number of each token's turn in its sample: a stretch of True in `mask`, up to the
    next branch. Arbitrary elsewhere. `branches`: [B] int64 first tokens of branches.
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
    """Sum of `values` [T] over each turn: [N, K] float64 for `shape` = (samples of the step, most
    turns).
    """
    sums = torch.zeros(shape, dtype=torch.float64, device=values.device)
    index = sample_ids * shape[1] + turns
    sums.view(-1).index_add_(0, index[mask], values.double()[mask])
    return sums


def turn_advantages(
    function: AdvantageFunction,
    rewards_NK: Tensor,
    tokens_NK: Tensor,
    groups_N: Tensor,
    *,
    discount: float = 1.0,
) -> Tensor:
    """[N, K] float64: `function`, such as `grpo`, of each turn's returns, compared with the same
    turn of the group's other samples; 0 for turns that a sample does not have.

    `rewards_NK` and `tokens_NK` (trained tokens) are [N, K], 0 for turns that a sample does not
    have. `discount`: 0 to 1, how much the next turn counts.
    """
    returns_NK = rewards_NK.clone()
    for turn in range(rewards_NK.shape[1] - 2, -1, -1):
        returns_NK[:, turn] += discount * returns_NK[:, turn + 1]
    turns = torch.zeros_like(returns_NK)
    for turn in range(rewards_NK.shape[1]):
        has = (tokens_NK[:, turn:] > 0).any(1)
        turns[has, turn] = function(returns_NK[has, turn], groups_N[has], tokens_NK[has, turn])
    return turns
