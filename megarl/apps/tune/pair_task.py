"""What preference methods and reward models share: training on pairs of responses, as a task of the
loop for fixed data sets (`run_supervised`).

PairBatch --PairTask.begin--> PairStep: micro-batches, their loss, metrics

A pair's loss depends on sums over whole responses, whose tokens are divided among the
sequence-parallel ranks. Each rank sums the values of its own tokens, the sums are added up over the
ranks, and the loss is differentiated by these sums; each rank then weighs its own sum with that
derivative. No collective has to be differentiated.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from megarl.apps.tune.pairs import (
    PairBatch,
    merged,
    pair_batch,
    response_sums,
    take_all_pairs,
)
from megarl.apps.tune.pairwise import Terms, pair_difference
from megarl.apps.tune.supervised import StepLoss, Task
from megarl.data.preferences import PreferenceList
from megarl.parallel.collectives import all_reduce
from megarl.settings.config import SupervisedConfig
from megarl.trainer.context import RunContext, RunInputs
from megarl.trainer.finite import StepGuard
from megarl.trainer.role import Role
from megarl.types import MicroBatch, Preference

SUMS = ("loss", "chosen", "rejected", "num_chosen", "num_rejected", "right")
"""Names of the sums over the responses of a step from which its metrics are made."""


class PairTask(Task):
    """Base class of tasks that train one model on pairs of responses, such as by DPO or as a reward
    model; `run_supervised`, the training loop, runs them. A subclass defines `begin`, which makes a
    `PairStep`, the loss, of a `PairBatch`. All ranks create the object and call every method
    together.
    """

    def __init__(
        self,
        context: RunContext,
        inputs: RunInputs,
        role: Role,
        reference: Sequence[np.ndarray | None] = (None, None),
    ) -> None:
        """`role`: the model to train. `reference`: on rank 0, the reference model's log-probs
        [N, 2], summed over each response, of the N rows to train on and of those to evaluate on;
        None without a reference model.
        """
        config = cast("SupervisedConfig", context.config)
        super().__init__(role, inputs.rows, config.training.max_skipped_steps)
        self._scores, scores = reference
        rows = cast("PreferenceList | None", inputs.held_out_rows)
        self._held_out = merged(take_all_pairs(rows, role.mesh, config.samples_per_step, scores))

    def batch(self, rows: Sequence[Preference]) -> PairBatch:
        return pair_batch(rows, self._scores)


class PairStep(StepLoss):
    """Base class of the loss of a model on one batch of pairs of responses, and of its metrics. The
    training loop calls `loss` for each micro-batch, then `reduced` once. A subclass defines
    `terms`, the loss of each pair.
    """

    watched = "policy's log-probs"
    """What the model computes of a response, as `StepGuard` names it."""

    def __init__(self, role: Role, batch: PairBatch, *, is_single: bool = False) -> None:
        """`batch`: the same on every rank. `is_single`: whether only the first response of each
        pair is trained on. All ranks create the object together.
        """
        samples, together = (batch.side(0), 1) if is_single else (batch.samples, 2)
        super().__init__(role, samples, SUMS, together=together)
        self.batch, self.num_tokens = batch, len(batch.samples.token_ids)
        self.is_single = is_single

    @abstractmethod
    def terms(self, sums: torch.Tensor, ids: torch.Tensor) -> Terms:
        """The loss and the rewards of each pair of a micro-batch. `sums` [S] float64: for each of
        its S responses the model's log-probs or scores, added up over the tokens. `ids` [S]: the
        number of each response in the batch, 2p for the chosen one of pair p and 2p + 1 for the
        rejected one, which follows it.
        """

    def sides(
        self, rewards: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split the rewards of a micro-batch, for the metrics. `rewards` [P, 2]: as `terms` returns
        them; `ids`: numbers of the responses in the batch, as `terms` gets them. Returns (rewards
        of the chosen responses; of the rejected ones; [P] accuracy of each pair: 1, 0, or 0.5 for a
        tie). For KTO, whose responses are single, good ones stand for chosen and bad ones for
        rejected.
        """
        return rewards[:, 0], rewards[:, 1], right(pair_difference(rewards))

    def loss(self, micro: MicroBatch, guard: StepGuard | None) -> torch.Tensor:
        """Compute what one micro-batch contributes to the mean loss of the batch's pairs, and add
        its loss and rewards to the metrics. Returns a scalar to differentiate on this rank; the
        gradients are to be summed over ranks. All sequence-parallel ranks call it together.
        `guard`: records whether the values are finite; None in an evaluation.
        """
        values, own, ids = response_sums(self.role, micro)
        if guard is not None:
            guard.watch(self.watched, values)
        axis = self.role.mesh.sequence
        whole = all_reduce(own.detach().clone(), axis).requires_grad_()
        with torch.enable_grad():  # in an evaluation, too, whose slopes are not used
            terms = self.terms(whole, ids)
            loss = terms.loss.sum() / len(self.batch)
        (slope,) = torch.autograd.grad(loss, whole)
        chosen, rejected, won = self.sides(terms.rewards.detach(), ids)
        share = 1 / axis.size  # every sequence rank knows all of it
        self.metrics.add(
            loss=share * loss.detach(),
            chosen=share * chosen.sum(),
            rejected=share * rejected.sum(),
            num_chosen=share * len(chosen),
            num_rejected=share * len(rejected),
            right=share * won.sum(),
        )
        return (slope * own).sum()

    def reduced(self) -> dict[str, float]:
        """{name: value}: loss, accuracy (fraction of pairs whose chosen response has the higher
        reward) and mean rewards, over all ranks, on every rank. All ranks call it together.
        """
        found = self.metrics.reduce(self.role.mesh.gradient)
        metrics = {"loss": found["loss"], "accuracy": found["right"] / len(self.batch)}
        for side in ("chosen", "rejected"):
            number = found[f"num_{side}"] if self.is_single else len(self.batch)
            if number > 0:  # a step of single responses may have one side only
                metrics[f"reward/{side}"] = found[side] / number
        if {"reward/chosen", "reward/rejected"} <= metrics.keys():
            metrics["reward/margin"] = metrics["reward/chosen"] - metrics["reward/rejected"]
        return metrics


ROUNDING = 1e-6
"""Size up to which a margin counts as 0: before the first update the policy is the reference, and
what is left of their difference is float32 rounding, whose sign depends on the layout."""


def right(margins: torch.Tensor) -> torch.Tensor:
    """Score of each of `margins` (any shape, such as chosen minus rejected reward) for an accuracy,
    as a tensor of the same shape: 1 for a positive margin, 0 for a negative one, and 0.5 for one of
    at most 1e-6 (`ROUNDING`) in size.
    """
    return (torch.where(margins.abs() <= ROUNDING, 0.0, margins).sign() + 1) / 2
