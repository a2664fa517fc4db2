"""From the rewards of turns to one advantage per turn, for rollouts of several turns.

The reward of a turn counts for this turn and those before it, not for later ones:

    return of turn k = sum over j >= k of discount^(j - k) x reward of turn j
    advantage of turn k = `ADVANTAGES[name]` of the returns of turn k over the rollouts that have it

With a reward at the end alone all turns of a rollout have the same return, but turn k is compared
only with the rollouts of the group that got as far. N counts the samples of the step on all ranks,
K is the largest number of turns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.objectives.advantages import AdvantageFunction


def turn_of_tokens(mask: Tensor, sample_ids: Tensor) -> Tensor:
    """[T] int64 turn of each token, from 0: a turn is a stretch of tokens of one sample where
    `mask` ([T] bool, tokens of the policy) is True. Tokens where it is False get an arbitrary
    number. `sample_ids`: [T] int64, whose equal values are neighbours.
    """
    before = torch.cat([mask.new_zeros(1), mask[:-1]])
    is_new = torch.ones_like(mask)
    is_new[1:] = sample_ids[1:] != sample_ids[:-1]
    starts = (mask & (~before | is_new)).long()
    counts = starts.cumsum(0)
    if not len(counts):
        return counts
    # Turns of earlier samples do not count.
    first = torch.where(is_new, counts - starts, 0)
    return (counts - torch.cummax(first, 0).values - 1).clamp(min=0)


def turn_sums(values: Tensor, mask: Tensor, sample_ids: Tensor, shape: tuple[int, int]) -> Tensor:
    """[N, K] float64 sum of `values` ([T]) over the tokens of each turn of each sample of this
    rank; 0 for samples of other ranks. `shape`: (N, K).
    """
    found = torch.zeros(shape, dtype=torch.float64, device=values.device)
    places = sample_ids * shape[1] + turn_of_tokens(mask, sample_ids)
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
    """[N, K] float64 advantage of each turn; 0 for turns that a sample does not have.

    `rewards_NK`: [N, K] float64 reward of each turn. `tokens_NK`: [N, K] int64 trained tokens of
    each turn, 0 for turns that a sample does not have. `groups_N`: [N] int64 group of each sample.
    `discount`: 0 to 1, of the reward one turn later.
    """
    returns_NK = rewards_NK.clone()
    for turn in range(rewards_NK.shape[1] - 2, -1, -1):
        returns_NK[:, turn] += discount * returns_NK[:, turn + 1]
    found = torch.zeros_like(returns_NK)
    for turn in range(rewards_NK.shape[1]):
        has = (tokens_NK[:, turn:] > 0).any(1)
        found[has, turn] = function(returns_NK[has, turn], groups_N[has], tokens_NK[has, turn])
    return found
