"""From the rewards of every token to one advantage per token.

`megarl.objectives.advantages` has the functions that give a whole sample one advantage. Here are
those that give each token its own. To add one: write a function of `TokenRewards`, add a line to
`TOKEN_ADVANTAGES`, add its name to `AdvantageName` in `config.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.objectives.advantages import EPSILON


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


def reinforce_plus_plus_tokens(step: TokenRewards) -> Tensor:
    """Return from each token on, normalised over all response tokens of the step: REINFORCE++,
    arXiv:2501.03262, eq. 8 to 10, with discount 1.

    A KL penalty in the reward is charged to a token for itself and the tokens after it, not, as
    under `reinforce_plus_plus`, for the whole sequence.
    """
    return normalise(returns_to_go(step.rewards, step.sample_ids), step.mask, step.sum_over_ranks)


TokenAdvantage = Callable[[TokenRewards], Tensor]
"""TokenRewards -> advantages [T] float64."""

TOKEN_ADVANTAGES: dict[str, TokenAdvantage] = {
    "reinforce_plus_plus_tokens": reinforce_plus_plus_tokens,
}
