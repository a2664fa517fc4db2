"""`task: reward_model`: a model that scores whole responses, trained on preferences.

Preference -> two packed samples -> score of the last token of each [P, 2] -> Bradley-Terry loss of
each pair (`megarl.apps.tune.pairwise`), one mean over the step's pairs

The checkpoint's model is a Hugging Face sequence classifier with one label.
"""

from __future__ import annotations

from typing import cast

import torch

from megarl.apps.tune.pair_task import PairStep, PairTask
from megarl.apps.tune.pairs import PairBatch
from megarl.apps.tune.pairwise import Terms, bradley_terry
from megarl.apps.tune.supervised import run_supervised
from megarl.settings.config import RewardModelConfig
from megarl.settings.objectives import RewardLossConfig
from megarl.trainer.context import RunContext, RunInputs
from megarl.trainer.role import Role


class RewardModelTask(PairTask):
    """Trains a reward model on pairs of responses. It supplies the training loop `run_supervised`
    with the model, its batches and its loss. All ranks create the object and call every method
    together.
    """

    def __init__(self, context: RunContext, inputs: RunInputs) -> None:
        config = cast("RewardModelConfig", context.config)
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
    """Run `task: reward_model`: train a reward model on pairs of responses until `config.steps`;
    the checkpoint's model is a Hugging Face sequence classifier. Every trainer rank calls it; rank
    0 prints a summary as one JSON object on standard output. `inputs`: tokenizer, data set and so
    on, as `check_reward_model` returns them. Returns the exit code 0.
    """
    return run_supervised(config, inputs, lambda context: RewardModelTask(context, inputs))


class RewardModelStep(PairStep):
    """The loss of a reward model (Bradley-Terry) on one batch of pairs of responses, computed
    micro-batch by micro-batch.
    """

    watched = "reward model's scores"

    def __init__(self, role: Role, batch: PairBatch, config: RewardLossConfig) -> None:
        """`batch`: the same on every rank. All ranks create the object together."""
        super().__init__(role, batch)
        self._config, self._margins = config, torch.from_numpy(batch.margins).to(role.device)

    def terms(self, sums: torch.Tensor, ids: torch.Tensor) -> Terms:
        scores, margins = sums.view(-1, 2), self._margins[ids[::2] // 2]
        return Terms(bradley_terry(scores, margins, self._config), scores)
