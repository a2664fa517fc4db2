"""`task: preference`: learn from preferences without a reward model (DPO, IPO, SimPO, ORPO, KTO).
`task: reward_model`: a model that scores whole responses, a Hugging Face sequence classifier.

Preference -> two packed samples -> sums of log-probs, or scores, [P, 2] -> loss of each pair
(`megarl.apps.tune.pairwise`), one mean over the step's pairs
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from megarl.apps.tune.pairs import PairBatch, PairStep, PairTask, right, sums_of_responses
from megarl.apps.tune.pairwise import Pairs, Terms, bradley_terry, kto, pair_loss
from megarl.apps.tune.reference_scores import reference_scores
from megarl.apps.tune.supervised import run_supervised
from megarl.parallel.collectives import all_reduce
from megarl.settings.config import PreferenceConfig, RewardModelConfig
from megarl.settings.objectives import PreferenceLossConfig, RewardLossConfig
from megarl.trainer.context import RunContext, RunInputs
from megarl.trainer.role import Role


class PreferenceTask(PairTask):
    """Trains a policy on preferences by DPO, IPO, SimPO, ORPO or KTO. It supplies the training loop
    `run_supervised` with the policy, its batches and its loss. All ranks create the object and call
    every method together.
    """

    def __init__(self, context: RunContext, inputs: RunInputs) -> None:
        config = cast("PreferenceConfig", context.config)
        self._loss, scores = config.loss, list[np.ndarray | None]([None, None])
        if config.loss.has_reference:  # before the policy is there: one model at a time
            scores = reference_scores(context, inputs.rows, inputs.held_out_rows)
        role = context.role("policy", config.model, optimizer_steps=config.steps)
        super().__init__(context, inputs, role, scores)

    def begin(self, batch: PairBatch) -> PairStep:
        step = KtoStep if self._loss.method == "kto" else PreferenceStep
        return step(self.role, batch, self._loss)


def main(config: PreferenceConfig, inputs: RunInputs) -> int:
    """Run `task: preference`: train a policy on preferences (DPO, IPO, SimPO, ORPO, KTO) until
    `config.steps`. Every trainer rank calls it; rank 0 prints a summary as one JSON object on
    standard output. `inputs`: tokenizer, data set and so on, as `check_preference` returns them.
    Returns the exit code 0.
    """
    return run_supervised(config, inputs, lambda context: PreferenceTask(context, inputs))


class PreferenceStep(PairStep):
    """The loss of a policy on one batch of pairs of responses, computed micro-batch by micro-batch,
    by the method of the recipe: DPO, IPO, SimPO, ORPO or another.
    """

    def __init__(self, role: Role, batch: PairBatch, config: PreferenceLossConfig) -> None:
        """`batch`: the same on every rank. All ranks create the object together."""
        super().__init__(role, batch)
        self._config = config
        self._reference = torch.from_numpy(batch.reference).to(role.device)
        self._num_tokens = torch.from_numpy(batch.num_tokens).to(role.device)

    def terms(self, sums: torch.Tensor, ids: torch.Tensor) -> Terms:
        rows = ids[::2] // 2
        pairs = Pairs(sums.view(-1, 2), self._reference[rows], self._num_tokens[rows])
        return pair_loss(pairs, self._config)


class KtoStep(PairStep):
    """KTO's loss of a policy on one batch of single responses, labelled good or bad. Only the first
    response of each pair is trained on. The second one belongs to another prompt: the mean of
    log(policy / reference) over these mismatched responses is the estimate of the KL divergence in
    the loss.
    """

    def __init__(self, role: Role, batch: PairBatch, config: PreferenceLossConfig) -> None:
        """`batch`: the same on every rank. All ranks create the object together, and compute the
        estimate of the divergence.
        """
        super().__init__(role, batch, is_single=True)
        self._config = config
        self._reference = torch.from_numpy(batch.reference[:, 0]).to(role.device)
        self._is_desirable = torch.from_numpy(batch.is_desirable).to(role.device)
        others = all_reduce(sums_of_responses(role, batch.side(1)).sum(), role.mesh.gradient)
        self.divergence = (others.item() - float(batch.reference[:, 1].sum())) / len(batch)
        """Mean over the batch of log(policy / reference) of responses that belong to other prompts,
        an estimate of the KL divergence; the same on every rank."""

    def terms(self, sums: torch.Tensor, ids: torch.Tensor) -> Terms:
        ratios = sums - self._reference[ids // 2]
        loss = kto(ratios, self._is_desirable[ids // 2], self.divergence, self._config)
        return Terms(loss, self._config.scale * ratios)

    def sides(
        self, rewards: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        good, bar = self._is_desirable[ids // 2], self._config.scale * max(0.0, self.divergence)
        won = right(torch.where(good, rewards - bar, bar - rewards))
        return rewards[good], rewards[~good], won

    def reduced(self) -> dict[str, float]:
        """The metrics `loss`, `accuracy` and mean rewards, and `kl`, the estimate of the KL
        divergence; over all ranks, on every rank.
        """
        return super().reduced() | {"kl": self.divergence}


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


def train_reward_model(config: RewardModelConfig, inputs: RunInputs) -> int:
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
