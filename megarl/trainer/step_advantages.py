"""From a step's rewards, and the columns of other roles, to one advantage per token.

    StepBatch + {"logprobs", "reference_logprobs", "values"}  ->  {"advantages", "returns"}

The formulas are in `megarl.objectives`; here are the sums over micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from megarl.objectives.advantages import ADVANTAGES, check_rewards
from megarl.objectives.config import AlgorithmConfig
from megarl.objectives.kl import KL_ESTIMATORS
from megarl.objectives.token_advantages import TOKEN_ADVANTAGES, TokenRewards, value_targets
from megarl.parallel.collectives import all_reduce
from megarl.parallel.mesh import Axis
from megarl.trainer.role import Column
from megarl.types import StepBatch


def step_advantages(
    batch: StepBatch,
    columns: Mapping[str, Column],
    algorithm: AlgorithmConfig,
    *,
    data: Axis,
    device: torch.device,
) -> dict[str, Column]:
    """The column `advantages` of a batch, and with a column `values` also `returns`, which the
    critic learns to predict. All ranks of the policy call it together; `data` is its data axis.

    A KL penalty in the reward is subtracted before.
    """
    masks = [torch.from_numpy(samples.mask).to(device) for samples in batch.samples]
    ids = [
        torch.from_numpy(np.repeat(samples.ids, samples.lengths)).to(device)
        for samples in batch.samples
    ]
    rewards = [
        torch.from_numpy(samples.rewards).to(device, torch.float64) for samples in batch.samples
    ]
    totals = torch.from_numpy(batch.rewards).to(device, copy=True)
    kl = algorithm.kl
    if kl.coefficient > 0 and kl.where == "reward":
        charges = torch.zeros_like(totals)
        pairs = zip(columns["logprobs"], columns["reference_logprobs"], strict=True)
        for number, (mine, theirs) in enumerate(pairs):
            per_token = KL_ESTIMATORS[kl.estimator](mine, theirs).double() * masks[number]
            rewards[number] = rewards[number] - kl.coefficient * per_token
            chosen = masks[number]
            charges.index_add_(0, ids[number][chosen], per_token[chosen])
        totals -= kl.coefficient * all_reduce(charges, data)
    groups = torch.from_numpy(batch.groups).to(device)
    tokens = torch.from_numpy(batch.response_tokens).to(device)
    if algorithm.advantage in ADVANTAGES:
        function = ADVANTAGES[algorithm.advantage]
        per_sample = function(totals.cpu(), groups.cpu(), tokens.cpu()).float().to(device)
        return {"advantages": [per_sample[index] for index in ids]}
    check_rewards(totals.cpu(), groups.cpu(), tokens.cpu())
    values = columns.get("values")
    empty = torch.zeros(0, dtype=torch.float64, device=device)
    step = TokenRewards(
        rewards=torch.cat([empty, *rewards]),
        mask=torch.cat([empty.bool(), *masks]),
        sample_ids=torch.cat([empty.long(), *ids]),
        sum_over_ranks=lambda tensor: all_reduce(tensor, data),
        values=None if values is None else torch.cat([empty, *(part.double() for part in values)]),
    )
    found = {"advantages": TOKEN_ADVANTAGES[algorithm.advantage](step, algorithm)}
    if values is not None:
        found["returns"] = value_targets(step, algorithm)
    lengths = [len(mask) for mask in masks]
    return {name: list(column.float().split(lengths)) for name, column in found.items()}
