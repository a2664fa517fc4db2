"""From a step's rewards, and the per-token results of other models, to one advantage per token.

    StepBatch + {"logprobs", "reference_logprobs", "values", "values.NAME"}
        ->  {"advantages", "returns", "returns.NAME"}

The formulas are in `megarl.objectives`; here are the sums over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from megarl.environments.user_code import function_of
from megarl.objectives.advantages import ADVANTAGES, AdvantageFunction, check_rewards
from megarl.objectives.kl import KL_ESTIMATORS
from megarl.objectives.token_advantages import (
    TOKEN_ADVANTAGES,
    TokenRewards,
    is_per_token,
    turn_advantages,
    turn_of_tokens,
    turn_sums,
    value_targets,
)
from megarl.parallel.collectives import all_reduce, all_reduce_max
from megarl.parallel.mesh import Axis
from megarl.settings.objectives import AlgorithmConfig
from megarl.trainer.role import Column
from megarl.types import StepBatch


def step_advantages(
    batch: StepBatch,
    columns: Mapping[str, Column],
    algorithm: AlgorithmConfig,
    *,
    kl_coefficient: float,
    data: Axis,
    device: torch.device,
) -> dict[str, Column]:
    """The columns "advantages" and, for each "values..." in `columns`, "returns..." for that critic
    to learn. A KL penalty in the reward needs "logprobs" and "reference_logprobs". What the user's
    own function reports is added to `batch.metrics`. Raises `ValueError` for rewards that are not
    finite. Collective over the policy's ranks.
    """
    masks = [torch.from_numpy(samples.mask).to(device) for samples in batch.samples]
    ids = [
        torch.from_numpy(np.repeat(samples.ids, samples.lengths)).to(device)
        for samples in batch.samples
    ]
    rewards = [
        torch.from_numpy(samples.rewards).to(device, torch.float64) for samples in batch.samples
    ]
    # Copies: what the service has sent cannot be written.
    totals = torch.tensor(batch.rewards, device=device)
    kl = algorithm.kl
    if kl_coefficient > 0 and kl.where == "reward":
        charges = torch.zeros_like(totals)
        pairs = zip(columns["logprobs"], columns["reference_logprobs"], strict=True)
        for number, (logprobs, reference) in enumerate(pairs):
            per_token = KL_ESTIMATORS[kl.estimator](logprobs, reference).double() * masks[number]
            rewards[number] = rewards[number] - kl_coefficient * per_token
            chosen = masks[number]
            charges.index_add_(0, ids[number][chosen], per_token[chosen])
        totals -= kl_coefficient * all_reduce(charges, data)
    outcomes = totals.cpu(), torch.tensor(batch.groups), torch.tensor(batch.response_tokens)
    check_rewards(*outcomes)
    every = ADVANTAGES | TOKEN_ADVANTAGES
    function = function_of(algorithm.advantage, every, "algorithm.advantage")
    if algorithm.credit == "turn":
        groups = outcomes[1].to(device)
        starts = [torch.from_numpy(samples.branches[:, 0]).to(device) for samples in batch.samples]
        turns = [turn_of_tokens(*columns) for columns in zip(masks, ids, starts, strict=True)]
        return {
            "advantages": _of_turns(function, rewards, masks, ids, turns, groups, algorithm, data)
        }
    if not is_per_token(function):
        per_sample = function(*outcomes).float().to(device)
        return {"advantages": [per_sample[index] for index in ids]}
    empty = torch.zeros(0, dtype=torch.float64, device=device)
    values = {
        name.removeprefix("values"): torch.cat([empty, *(values.double() for values in column)])
        for name, column in columns.items()
        if name.startswith("values")
    }
    step = TokenRewards(
        rewards=torch.cat([empty, *rewards]),
        mask=torch.cat([empty.bool(), *masks]),
        sample_ids=torch.cat([empty.long(), *ids]),
        sum_over_ranks=lambda tensor: all_reduce(tensor, data),
        values=values.get(""),
        critics={name[1:]: critic_values for name, critic_values in values.items() if name},
    )
    # Before the advantage, which may be the user's own and change its arguments.
    results = {"returns" + name: value_targets(step, v, algorithm) for name, v in values.items()}
    results["advantages"] = function(step, algorithm)
    batch.metrics.update({f"own/{name}": float(value) for name, value in step.metrics.items()})
    lengths = [len(mask) for mask in masks]
    return {name: list(column.float().split(lengths)) for name, column in results.items()}


def _of_turns(
    function: AdvantageFunction,
    rewards: Column,
    masks: Column,
    ids: Column,
    turns: Column,
    groups: torch.Tensor,
    algorithm: AlgorithmConfig,
    data: Axis,
) -> Column:
    """The advantage of each token's turn, for `algorithm.credit: turn`."""
    most = torch.ones(1, dtype=torch.int64, device=groups.device)
    for turn, mask in zip(turns, masks, strict=True):
        if bool(mask.any()):
            most = torch.maximum(most, turn[mask].max() + 1)
    shape = (len(groups), int(all_reduce_max(most, data)))
    sums = torch.zeros((2, *shape), dtype=torch.float64, device=groups.device)
    for reward, mask, of, turn in zip(rewards, masks, ids, turns, strict=True):
        sums[0] += turn_sums(reward, mask, of, turn, shape)
        sums[1] += turn_sums(torch.ones_like(reward), mask, of, turn, shape)
    sums = all_reduce(sums, data).cpu()
    advantages = turn_advantages(
        function, sums[0], sums[1].long(), groups.cpu(), discount=algorithm.turn_discount
    )
    advantages = advantages.float().to(groups.device)
    return [advantages[of, turn] for of, turn in zip(ids, turns, strict=True)]
