"""Training on pairs of responses, as a task of the loop for fixed data sets: what preference
methods and reward models share.

    PreferenceList --pair_batch--> PairBatch --pack_share--> MicroBatch (pairs are not separated)
    MicroBatch --response_sums--> [S], one number a response --PairStep.terms--> loss, metrics

A pair's loss depends on sums over whole responses, whose tokens are divided among the
sequence-parallel ranks. Each rank sums the values of its own tokens, the sums are added up over the
ranks, and the loss is differentiated by these sums; each rank then weighs its own sum with that
derivative. No collective has to be differentiated.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from megarl.apps.tune.pairwise import Terms, pair_difference
from megarl.apps.tune.supervised import StepLoss, Task, all_batches, pack_share
from megarl.data.preferences import PreferenceList
from megarl.parallel.collectives import all_reduce
from megarl.settings.config import SupervisedConfig
from megarl.trainer.context import RunContext, RunInputs
from megarl.trainer.finite import StepGuard
from megarl.trainer.role import Role
from megarl.types import MicroBatch, Preference, Samples


@dataclass(frozen=True)
class PairBatch:
    """P preferences (a prompt with two responses each) as token sequences, the same on every rank,
    with the reference model's log-probs and the margins. Sample 2p is the first response of
    preference p, the chosen one of a pair, with its prompt; sample 2p + 1 is the second response
    with the prompt.
    """

    samples: Samples
    """The 2P token sequences, prompt and response each; `mask` is True for response tokens."""
    reference: np.ndarray
    """[P, 2] float64 sums of the reference model's log-probs over each response; 0 without a
    reference model."""
    margins: np.ndarray
    """[P] float64: by how much the first response is better, as the data set says; 0 if it does
    not."""
    is_desirable: np.ndarray
    """[P] bool: for single responses (KTO), whether the first response is good; True for pairs."""

    def __len__(self) -> int:
        return len(self.margins)

    @property
    def num_tokens(self) -> np.ndarray:
        """[P, 2] int64 numbers of trained tokens of each response, at least 1."""
        trained = self.samples.mask.copy()
        trained[self.samples.offsets[:-1]] = False  # nothing predicts a sample's first token
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(trained)])
        return np.maximum(1, np.diff(sums[self.samples.offsets])).reshape(-1, 2)

    def side(self, column: int) -> Samples:
        """The P samples of the first (`column` 0) or the second (1) responses, which keep their ids
        in the batch.
        """
        return self.samples.select(np.arange(column, 2 * len(self), 2))


def pair_batch(preferences: Sequence[Preference], reference: np.ndarray | None) -> PairBatch:
    """Make token sequences of tokenised preferences (a prompt with two responses each), two of each
    preference. `reference` [N, 2] float64: the reference model's summed log-probs of the two
    responses of all N rows of the data set, from which those of `preferences` are taken; None
    without a reference model.
    """
    samples = []
    for number, preference in enumerate(preferences):
        for side, response in enumerate(preference.responses):
            prompt = preference.prompt_ids[preference.cut if side else 0 :]
            mask = np.array([False] * len(prompt) + [True] * len(response))
            samples.append(Samples.one(2 * number + side, [*prompt, *response], mask=mask))
    indices = [preference.index for preference in preferences]
    none = np.zeros((len(indices), 2))
    return PairBatch(
        samples=Samples.concatenate(samples),
        reference=none if reference is None else reference[indices],
        margins=np.array([preference.margin for preference in preferences]),
        is_desirable=np.array([preference.is_desirable for preference in preferences], dtype=bool),
    )


def merged(batches: Sequence[PairBatch]) -> PairBatch | None:
    """Concatenate several batches of preferences to one, with its samples numbered anew from 0;
    None for no batches.
    """
    if not batches:
        return None
    samples = Samples.concatenate([batch.samples for batch in batches])
    return PairBatch(
        samples=replace(samples, ids=np.arange(len(samples))),
        reference=np.concatenate([batch.reference for batch in batches]),
        margins=np.concatenate([batch.margins for batch in batches]),
        is_desirable=np.concatenate([batch.is_desirable for batch in batches]),
    )


def response_sums(role: Role, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the model `role`, whose head gives log-probs ("logprobs") or scores ("scalar"), on a
    micro-batch and add up its values within each sample; differentiable. Returns (values [M], one
    for each of this rank's trained tokens; sums [S] float64, one for each sample; ids [S] of the
    samples, ascending). A sum covers this rank's tokens only: add the sums over the
    sequence-parallel ranks.
    """
    values, others = role.engine(micro, 1.0)
    sample_ids = others if role.head == "scalar" else micro.sample_ids[micro.mask]
    members = micro.members[micro.members >= 0]
    rows = torch.searchsorted(members, sample_ids)
    sums = torch.zeros(len(members), dtype=torch.float64, device=values.device)
    return values, sums.index_add(0, rows, values.double()), members


@torch.no_grad()
def sums_of_responses(role: Role, samples: Samples, *, together: int = 1) -> torch.Tensor:
    """Sum the model's (`role`) log-probs, or scores, over each response of `samples`, without
    gradient. Returns [N] float64, where entry i is for the sample with the id i, and N - 1 is the
    largest id. An entry is 0 where no sample has the id; each rank fills only its share, so that
    the results are to be summed over data and sequence ranks. `samples`: the same on every rank.
    `together`: how many consecutive samples are packed together, such as 2 for pairs. All ranks
    call it together.
    """
    by_sample = torch.zeros(int(samples.ids.max()) + 1, dtype=torch.float64, device=role.device)
    for micro in pack_share(samples, role, together=together):
        _, sums, ids = response_sums(role, micro)
        by_sample[ids] = sums
    return by_sample


ROUNDING = 1e-6
"""Size up to which a margin counts as 0: before the first update the policy is the reference, and
what is left of their difference is float32 rounding, whose sign depends on the layout."""


def right(margins: torch.Tensor) -> torch.Tensor:
    """Score of each of `margins` (any shape, such as chosen minus rejected reward) for an accuracy,
    as a tensor of the same shape: 1 for a positive margin, 0 for a negative one, and 0.5 for one of
    at most 1e-6 (`ROUNDING`) in size.
    """
    return (torch.where(margins.abs() <= ROUNDING, 0.0, margins).sign() + 1) / 2


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
        batches = all_batches(
            inputs.held_out_rows,
            PreferenceList.row,
            config.samples_per_step,
            role.mesh,
            lambda rows: pair_batch(rows, scores),
        )
        self._held_out = merged(batches)

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
        values, sums, ids = response_sums(self.role, micro)
        if guard is not None:
            guard.watch(self.watched, values)
        axis = self.role.mesh.sequence
        whole = all_reduce(sums.detach().clone(), axis).requires_grad_()
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
        return (slope * sums).sum()

    def reduced(self) -> dict[str, float]:
        """{name: value}: loss, accuracy (fraction of pairs whose chosen response has the higher
        reward) and mean rewards, over all ranks, on every rank. All ranks call it together.
        """
        sums = self.metrics.reduce(self.role.mesh.gradient)
        metrics = {"loss": sums["loss"], "accuracy": sums["right"] / len(self.batch)}
        for side in ("chosen", "rejected"):
            number = sums[f"num_{side}"] if self.is_single else len(self.batch)
            if number > 0:  # a step of single responses may have one side only
                metrics[f"reward/{side}"] = sums[side] / number
        if {"reward/chosen", "reward/rejected"} <= metrics.keys():
            metrics["reward/margin"] = metrics["reward/chosen"] - metrics["reward/rejected"]
        return metrics
