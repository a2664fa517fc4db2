"""Rewards by models: each response of a step gets scores of reward models, added to what the
environment gave it.

    StepBatch --scores--> {name: column}   all ranks
              --rewarded--> StepBatch with other rewards and metrics   the policy's ranks

A column is one float32 for each token of a rank's samples, for each mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from megarl.errors import UserError
from megarl.parallel.collectives import all_reduce
from megarl.parallel.mesh import Axis
from megarl.trainer.role import Column
from megarl.trainer.transfer import Scorer
from megarl.types import MicroBatch, Samples, StepBatch


class RewardModels:
    """The reward models of a run: `scores` computes their scores of a step's responses, `rewarded`
    adds the weighted scores to the rewards. All ranks of the job create it. `scorers`: {name: the
    `Scorer` that runs one reward model}. `weights`: {name: factor of its scores}.
    """

    def __init__(self, scorers: Mapping[str, Scorer], weights: Mapping[str, float]) -> None:
        """`scorers`: {name: reward model}. `weights`: {name: factor of its scores}."""
        self.scorers, self.weights = dict(scorers), dict(weights)

    def scores(
        self, batch: StepBatch | None, packed: Sequence[Sequence[MicroBatch]]
    ) -> dict[str, Column]:
        """Score every response of a step with each reward model: {name: for each mini-batch a
        float32 tensor [T] over the tokens of this rank's samples}, in which the last token of each
        sample has the sample's score and all others 0. `packed`: for each mini-batch, this rank's
        packed sequences. All ranks of the job call it together; ranks outside the policy pass None
        and [] and get empty lists.
        """
        return {
            name: scorer.score(batch, packed, temperature=1.0)
            for name, scorer in self.scorers.items()
        }

    def rewarded(
        self, batch: StepBatch, scores: Mapping[str, Column], *, data: Axis, device: torch.device
    ) -> StepBatch:
        """A copy of `batch` with weight x score of every reward model added to its rewards, at the
        last token that the policy generated. The metrics `reward_model/NAME/mean` and `/std` are
        added to `batch.metrics`, which the copy shares. `scores`: what `RewardModels.scores`
        returned for `batch`. All ranks of the policy call it together; `data` is the policy's
        data-parallel axis and `device` this rank's.

        Raises `UserError` on all ranks if a score is not finite.
        """
        if not scores:
            return batch
        added = np.zeros(len(batch.rewards))
        metrics: dict[str, float] = {}
        has_greedy = "reward/greedy_mean" in batch.metrics  # responses to compare with
        trained = (batch.response_tokens > 0) | (not has_greedy)
        for name, column in scores.items():
            mine = torch.zeros(len(batch.rewards), dtype=torch.float64, device=device)
            for part, values in zip(batch.samples, column, strict=True):
                mine[torch.from_numpy(part.ids)] = values[part.offsets[1:] - 1].double()
            found = all_reduce(mine, data).cpu().numpy()
            if not np.isfinite(found).all():
                raise UserError(
                    f"reward model {name} scores a response of step {batch.step + 1} with a number"
                    f" that is not finite; set reward_models.{name}.model.path to another model"
                )
            added += self.weights[name] * found
            mean, std = mean_std(found[trained])
            metrics |= {f"reward_model/{name}/mean": mean, f"reward_model/{name}/std": std}
        totals = batch.rewards + added
        if len(totals):
            metrics["reward/mean"], metrics["reward/std"] = mean_std(totals[trained])
        if not trained.all():
            metrics["reward/greedy_mean"] = mean_std(totals[~trained])[0]
        batch.metrics.update(metrics)
        samples = [_with_rewards(part, added[part.ids]) for part in batch.samples]
        return replace(batch, rewards=totals, samples=samples)


def mean_std(values: np.ndarray) -> tuple[float, float]:
    """Mean and population standard deviation (divisor N) of [N] values; (0, 0) for no values."""
    return (float(values.mean()), float(values.std())) if len(values) else (0.0, 0.0)


def _with_rewards(samples: Samples, added: np.ndarray) -> Samples:
    """`samples` with added[i] more reward on the last generated token of sample i."""
    rewards = samples.rewards.copy()
    for number, value in enumerate(added.tolist()):
        first, end = samples.offsets[number], samples.offsets[number + 1]
        generated = np.flatnonzero(samples.mask[first:end])
        if len(generated):
            rewards[first + generated[-1]] += value
    return replace(samples, rewards=rewards)
