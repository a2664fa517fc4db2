"""From the rewards of a whole step to one advantage per sample.

To add one, write a function of (rewards_N, groups_N, tokens_N), add a line to `ADVANTAGES`, its
name to `ADVANTAGE` in `settings/objectives.py`, and its closed form to
`tests/unit/test_algorithms.py`.

The reward r belongs to the whole response and the discount is 1, so every token has its sample's
advantage. N counts all samples of the step on all ranks, which compute the same. A sample without
response tokens counts in its group, since its reward is the outcome of an attempt, but not in
statistics over tokens. For a KL penalty in the reward see `kl.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to a standard deviation before dividing; far below any meaningful reward difference."""

REWARD_LIMIT = 1e18
"""Largest absolute reward, whose square is finite in float32."""

AdvantageFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rewards_N float64, groups_N int64, tokens_N int64) -> advantages_N float64; raises as
`check_rewards`. groups_N is equal for responses to one prompt; tokens_N are trained tokens, 0 for
the greedy responses that `remax` compares with.
"""


@dataclass(frozen=True, slots=True)
class _Groups:
    """Of each sample."""

    centred_N: Tensor
    """[N] float64, reward minus its group's mean; exactly 0 if all rewards are equal."""
    index_N: Tensor
    """[N] int64, number of each sample's group, from 0."""
    sizes_N: Tensor
    """[N] int64, samples in each sample's group."""
    num_groups: int


def check_rewards(rewards_N: Tensor, groups_N: Tensor, tokens_N: Tensor) -> None:
    """Raise `ValueError` if the shapes differ, a reward is NaN or beyond `REWARD_LIMIT`, or a
    sample has a negative number of tokens.
    """
    if (
        rewards_N.dim() != 1
        or rewards_N.shape != groups_N.shape
        or rewards_N.shape != tokens_N.shape
    ):
        shapes = [list(tensor.shape) for tensor in (rewards_N, groups_N, tokens_N)]
        raise ValueError(
            f"rewards, groups and tokens must all be [N], found {shapes[0]}, {shapes[1]} and"
            f" {shapes[2]}"
        )
    bad = (~(rewards_N.abs() <= REWARD_LIMIT)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"the reward of sample {bad[0]} is {float(rewards_N[bad[0]]):g} ({len(bad)} such in the"
            f" step); make the verifier return numbers of at most {REWARD_LIMIT:g}"
        )
    if bool((tokens_N < 0).any()):
        raise ValueError(
            "a sample has a negative number of response tokens; count the True entries of its mask"
        )


def _by_group(rewards_N: Tensor, groups_N: Tensor) -> _Groups:
    labels, index_N = torch.unique(groups_N, return_inverse=True)
    num_groups = int(labels.numel())
    sizes = torch.bincount(index_N, minlength=num_groups)
    lowest = rewards_N.new_full((num_groups,), float("inf")).scatter_reduce(
        0, index_N, rewards_N, "amin"
    )
    # Measured from the group's lowest reward, equal rewards are exact zeros: (0.1 + 0.1 + 0.1) / 3
    # is not 0.1.
    above_N = rewards_N - lowest[index_N]
    means = above_N.new_zeros(num_groups).index_add(0, index_N, above_N) / sizes
    return _Groups(above_N - means[index_N], index_N, sizes[index_N], num_groups)


def _normalise_over_tokens(values_N: Tensor, tokens_N: Tensor) -> Tensor:
    """(x - mean) / (population std + EPSILON) of each sample's value x [N]; in mean and std a
    sample counts as often as it has response tokens. A sample without tokens gets 0.
    """
    trained_N = tokens_N > 0
    if not bool(trained_N.any()):
        return torch.zeros_like(values_N)
    weights_N = tokens_N.to(values_N.dtype) / tokens_N.sum()
    # As in `_by_group`: equal values become exact zeros.
    above_N = torch.where(trained_N, values_N - values_N[trained_N].min(), 0.0)
    centred_N = above_N - (weights_N * above_N).sum()
    std = (weights_N * centred_N.square()).sum().sqrt()
    return torch.where(trained_N, centred_N / (std + EPSILON), 0.0)


def grpo(rewards_N: Tensor, groups_N: Tensor, tokens_N: Tensor) -> Tensor:
    """(r - mean) / (std + 1e-6) within each group: GRPO, DeepSeekMath, arXiv:2402.03300, 4.1.2.

    The std is the population's (n, not n - 1), which the paper leaves open: with n - 1 advantages
    are smaller by sqrt((n - 1) / n), 3 % at n = 16. A group of one sample or of equal rewards gets
    exactly 0.
    """
    check_rewards(rewards_N, groups_N, tokens_N)
    groups = _by_group(rewards_N, groups_N)
    squares = rewards_N.new_zeros(groups.num_groups).index_add(
        0, groups.index_N, groups.centred_N.square()
    )
    std_N = (squares[groups.index_N] / groups.sizes_N).sqrt()
    return groups.centred_N / (std_N + EPSILON)


def dr_grpo(rewards_N: Tensor, groups_N: Tensor, tokens_N: Tensor) -> Tensor:
    """r - mean within each group: Dr.GRPO, arXiv:2503.20783, 3.2. Use with `aggregation:
    constant`.
    """
    check_rewards(rewards_N, groups_N, tokens_N)
    return _by_group(rewards_N, groups_N).centred_N


def gpg(rewards_N: Tensor, groups_N: Tensor, tokens_N: Tensor) -> Tensor:
    """alpha x (r - mean) within each group: GPG, arXiv:2504.02546, with F_norm = 1.

    alpha = samples / samples in groups whose rewards differ, because groups of equal rewards shrink
    the loss, a mean over all tokens.
    """
    check_rewards(rewards_N, groups_N, tokens_N)
    groups = _by_group(rewards_N, groups_N)
    differing = rewards_N.new_zeros(groups.num_groups).index_add(
        0, groups.index_N, groups.centred_N.abs()
    )
    num_teaching = int((differing[groups.index_N] > 0).sum())
    return groups.centred_N * (rewards_N.numel() / max(1, num_teaching))


def remax(rewards_N: Tensor, groups_N: Tensor, tokens_N: Tensor) -> Tensor:
    """r minus the reward of the greedy response to the same prompt: ReMax, arXiv:2310.10505,
    algorithm 1.

    The greedy response is the group's sample with 0 in `tokens_N`; its own advantage is 0. Raises
    `ValueError` if a group does not have exactly one.
    """
    check_rewards(rewards_N, groups_N, tokens_N)
    labels, index_N = torch.unique(groups_N, return_inverse=True)
    greedy_N = tokens_N == 0
    per_group = torch.bincount(index_N[greedy_N], minlength=labels.numel())
    if bool((per_group != 1).any()):
        wrong = int((per_group != 1).nonzero()[0])
        raise ValueError(
            f"group {int(labels[wrong])} has {int(per_group[wrong])} greedy responses (samples"
            " without trained tokens), and remax needs one; add it to the group"
        )
    baselines = rewards_N.new_zeros(labels.numel())
    baselines[index_N[greedy_N]] = rewards_N[greedy_N]
    return rewards_N - baselines[index_N]


def rloo(rewards_N: Tensor, groups_N: Tensor, tokens_N: Tensor) -> Tensor:
    """r_i minus the mean of the group's other rewards: RLOO, arXiv:2402.14740 (Kool et al. 2019),
    equal to n / (n - 1) x (r_i - mean). A group of one sample gets 0.
    """
    check_rewards(rewards_N, groups_N, tokens_N)
    groups = _by_group(rewards_N, groups_N)
    return groups.centred_N * groups.sizes_N / (groups.sizes_N - 1).clamp(min=1)


def reinforce_plus_plus(rewards_N: Tensor, groups_N: Tensor, tokens_N: Tensor) -> Tensor:
    """REINFORCE++, arXiv:2501.03262: (r - mean) / (std + 1e-6) over all response tokens of the
    step, without a group baseline. A KL penalty in r is that of the whole sequence; in eq. 8 token
    t gets those from t on: `reinforce_plus_plus_tokens`.
    """
    check_rewards(rewards_N, groups_N, tokens_N)
    return _normalise_over_tokens(rewards_N, tokens_N)


def reinforce_plus_plus_baseline(rewards_N: Tensor, groups_N: Tensor, tokens_N: Tensor) -> Tensor:
    """REINFORCE++ with baseline, arXiv:2501.03262: x = r minus its group's mean, then (x - mean) /
    (std + 1e-6) over all response tokens of the step.

    The second mean counts tokens: if right and wrong answers differ in length, it is not 0, and a
    group of equal rewards gets a small advantage.
    """
    check_rewards(rewards_N, groups_N, tokens_N)
    return _normalise_over_tokens(_by_group(rewards_N, groups_N).centred_N, tokens_N)


ADVANTAGES: dict[str, AdvantageFunction] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "gpg": gpg,
    "rloo": rloo,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}
"""{`algorithm.advantage`: function}"""
