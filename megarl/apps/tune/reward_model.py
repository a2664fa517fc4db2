"""`megarl reward-model`: a model that scores whole responses, trained on preferences.

Preference -> two packed samples -> score of the last token of each [P, 2] -> Bradley-Terry loss of
each pair (`megarl.apps.tune.pairwise`), one mean over the step's pairs

The checkpoint's model is a Hugging Face sequence classifier with one label.
"""

from __future__ import annotations

import torch

from megarl.apps.tune.pair_task import PairTask, right
from megarl.apps.tune.pairs import PairBatch, by_slopes, pack_pairs, totals
from megarl.apps.tune.pairwise import bradley_terry, pair_difference
from megarl.apps.tune.supervised import run_supervised
from megarl.config import RewardModelConfig
from megarl.objectives.config import RewardLossConfig
from megarl.trainer.context import RunContext, RunInputs
from megarl.trainer.finite import StepGuard
from megarl.trainer.role import Role
from megarl.trainer.step import StepMetrics
from megarl.types import MicroBatch

SUMS = ("loss", "chosen", "rejected", "right")
"""Names of the sums over the pairs of a step from which its metrics are made."""


class RewardModelTask(PairTask):
    """Training of a reward model on pairs of responses: `take` draws a batch, `train` takes an
    optimizer step on it, `evaluate` computes metrics of held-out pairs. The training loop
    `run_supervised` calls them. All ranks create the object and call every method together.
    """

    def __init__(self, context: RunContext, inputs: RunInputs) -> None:
        config = context.config
        assert isinstance(config, RewardModelConfig)
        role = context.role(
            "reward model", config.model, head="scalar", optimizer_steps=config.steps
        )
        # Hugging Face's classifiers look for the last token that is no padding.
        settings = role.engine.module.model.config.get_text_config()
        settings.pad_token_id = inputs.tokenizer.pad_token_id
        super().__init__(context, inputs, role)
        self._loss = config.loss

    def begin(self, batch: PairBatch) -> RewardModelStep:
        return RewardModelStep(self.role, batch, self._loss)


def main(config: RewardModelConfig, inputs: RunInputs) -> int:
    """Run `megarl reward-model`: train a reward model on pairs of responses until `config.steps`;
    the checkpoint's model is a Hugging Face sequence classifier. Every trainer rank calls it; rank
    0 prints a summary as one JSON object on standard output. `inputs`: tokenizer, data set and so
    on, as `check_reward_model` returns them. Returns the exit code 0.
    """
    return run_supervised(config, inputs, lambda context: RewardModelTask(context, inputs))


class RewardModelStep:
    """The loss of a reward model on one batch of pairs, micro-batch by micro-batch, and its
    metrics: call `loss` for each of `micro_batches`, then `reduced`.
    """

    def __init__(self, role: Role, batch: PairBatch, config: RewardLossConfig) -> None:
        """`batch`: the same on every rank. All ranks create the object together."""
        self.role, self.batch, self.config = role, batch, config
        self.metrics = StepMetrics(role.device, SUMS)
        self._margins = torch.from_numpy(batch.margins).to(role.device)
        self.micro_batches = pack_pairs(batch.samples, role, together=2)
        """This rank's micro-batches, in which the two responses of a pair are not separated."""

    def loss(self, micro: MicroBatch, guard: StepGuard | None) -> torch.Tensor:
        """Compute the loss of one micro-batch, its part of the mean over the batch's pairs, and add
        to the metrics. Returns a scalar whose backward pass on this rank gives this rank's part of
        the gradient, which is to be summed over ranks. All sequence-parallel ranks call it
        together. `guard`: records whether the scores are finite; None in an evaluation.
        """
        scores, sample_ids = self.role.engine(micro, 1.0)
        if guard is not None:
            guard.watch("reward model's scores", scores)
        own, ids = totals(scores, sample_ids, micro)
        rows, seen = ids[::2] // 2, list[torch.Tensor]()

        def mean(sums: torch.Tensor) -> torch.Tensor:
            pairs = sums.view(-1, 2)
            seen.append(pairs.detach())
            return bradley_terry(pairs, self._margins[rows], self.config).sum() / len(self.batch)

        with torch.enable_grad():  # in an evaluation, too, whose slopes are not used
            value, found = by_slopes(own, self.role.mesh.sequence, mean)
        share = 1 / self.role.mesh.sequence.size  # every sequence rank knows all of it
        self.metrics.add(
            loss=share * value,
            chosen=share * seen[0][:, 0].sum(),
            rejected=share * seen[0][:, 1].sum(),
            right=share * right(pair_difference(seen[0])).sum(),
        )
        return found

    def reduced(self) -> dict[str, float]:
        """{name: value}: loss, accuracy (fraction of pairs whose chosen response scores higher) and
        mean rewards of the batch over all ranks, on every rank. All ranks call it together.
        """
        found = self.metrics.reduce(self.role.mesh.gradient)
        chosen, rejected = found["chosen"] / len(self.batch), found["rejected"] / len(self.batch)
        return {
            "loss": found["loss"],
            "accuracy": found["right"] / len(self.batch),
            "reward/chosen": chosen,
            "reward/rejected": rejected,
            "reward/margin": chosen - rejected,
        }
