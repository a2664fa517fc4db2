"""Rewards by models: scores of reward models, added to what the environment gave each response.

StepBatch --scores--> {name: column}   all ranks
          --rewarded--> StepBatch with other rewards and metrics   the policy's ranks
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
    """The reward models of a run. Its scorers are collective over all ranks of the job."""

    def __init__(self, scorers: Mapping[str, Scorer], weights: Mapping[str, float]) -> None:
        """`weights`: {name: factor of its scores}."""
        self.scorers, self.weights = dict(scorers), dict(weights)

    def scores(
        self, batch: StepBatch | None, packed: Sequence[Sequence[MicroBatch]]
    ) -> dict[str, Column]:
        """Each reward model's column over `batch`, with each sample's score at its last token.
        Ranks outside the policy pass None and [] and get empty lists.
        """
        return {
            name: scorer.score(batch, packed, temperature=1.0)
            for name, scorer in self.scorers.items()
        }

    def rewarded(
        self, batch: StepBatch, scores: Mapping[str, Column], *, data: Axis, device: torch.device
    ) -> StepBatch:
        """A copy of `batch` with weight x score added to its rewards, at the last token that the
        policy generated; `batch.metrics` gets `reward_model/NAME/mean` and `/std`. Collective over
        the policy's ranks. Raises `UserError` on all if a score is not finite.
        """
        if not scores:
            return batch
        added = np.zeros(len(batch.rewards))
        metrics: dict[str, float] = {}
        has_greedy = "reward/greedy_mean" in batch.metrics  # responses to compare with
        trained = (batch.response_tokens > 0) | (not has_greedy)
        for name, column in scores.items():
            own_scores = torch.zeros(len(batch.rewards), dtype=torch.float64, device=device)
            for samples, values in zip(batch.samples, column, strict=True):
                own_scores[torch.from_numpy(samples.ids)] = values[samples.offsets[1:] - 1].double()
            sample_scores = all_reduce(own_scores, data).cpu().numpy()
            if not np.isfinite(sample_scores).all():
                raise UserError(
                    f"reward model {name} scores a response of step {batch.step + 1} with a number"
                    f" that is not finite; set reward_models.{name}.model.path to another model"
                )
            added += self.weights[name] * sample_scores
            mean, std = mean_std(sample_scores[trained])
            metrics |= {f"reward_model/{name}/mean": mean, f"reward_model/{name}/std": std}
        totals = batch.rewards + added
        if len(totals):
            metrics["reward/mean"], metrics["reward/std"] = mean_std(totals[trained])
        if not trained.all():
            metrics["reward/greedy_mean"] = mean_std(totals[~trained])[0]
        batch.metrics.update(metrics)
        samples = [_with_rewards(samples, added[samples.ids]) for samples in batch.samples]
        return replace(batch, rewards=totals, samples=samples)


def mean_std(values: np.ndarray) -> tuple[float, float]:
    """Mean and population standard deviation (divisor N) of [N] values; (0, 0) for none."""
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
