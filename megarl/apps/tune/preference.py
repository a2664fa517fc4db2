"""`megarl preference`: learn from preferences without a reward model (DPO, IPO, SimPO, ORPO, KTO).

Preference -> two packed samples -> sums of log-probs [P, 2] -> loss of each pair
(`megarl.apps.tune.pairwise`), one mean over the step's pairs
"""

from __future__ import annotations

import numpy as np
import torch

from megarl.apps.tune.pair_task import PairTask, right
from megarl.apps.tune.pairs import PairBatch, by_slopes, pack_pairs, preference_rows, totals
from megarl.apps.tune.pairwise import Pairs, Terms, kto, pair_difference, pair_loss
from megarl.apps.tune.reference_scores import reference_scores
from megarl.apps.tune.supervised import run_supervised
from megarl.config import PreferenceConfig
from megarl.objectives.config import PreferenceLossConfig
from megarl.parallel.collectives import all_reduce
from megarl.trainer.context import RunContext, RunInputs
from megarl.trainer.finite import StepGuard
from megarl.trainer.role import Role
from megarl.trainer.step import StepMetrics
from megarl.types import MicroBatch

SUMS = ("loss", "chosen", "rejected", "num_chosen", "num_rejected", "right")
"""Names of the sums over the responses of a step from which its metrics are made."""


class PreferenceTask(PairTask):
    """Training of a policy on preferences (DPO and so on): `take` draws a batch, `train` takes an
    optimizer step on it, `evaluate` computes metrics of held-out preferences. The training loop
    `run_supervised` calls them. All ranks create the object and call every method together.
    """

    def __init__(self, context: RunContext, inputs: RunInputs) -> None:
        config = context.config
        assert isinstance(config, PreferenceConfig)
        scores: list[np.ndarray | None] = [None, None]
        if config.loss.has_reference:  # before the policy is there: one model at a time
            rows = preference_rows(inputs.rows), preference_rows(inputs.held_out_rows)
            scores = reference_scores(context, *rows)
        role = context.role("policy", config.model, optimizer_steps=config.steps)
        super().__init__(context, inputs, role, scores)
        self._loss = config.loss

    def begin(self, batch: PairBatch) -> PreferenceStep:
        return PreferenceStep(self.role, batch, self._loss)


def main(config: PreferenceConfig, inputs: RunInputs) -> int:
    """Run `megarl preference`: train a policy on preferences (DPO, IPO, SimPO, ORPO, KTO) until
    `config.steps`. Every trainer rank calls it; rank 0 prints a summary as one JSON object on
    standard output. `inputs`: tokenizer, data set and so on, as `check_preference` returns them.
    Returns the exit code 0.
    """
    return run_supervised(config, inputs, lambda context: PreferenceTask(context, inputs))


class PreferenceStep:
    """The loss of a policy on one batch of preferences, micro-batch by micro-batch, and its
    metrics: call `loss` for each of `micro_batches`, then `reduced`.
    """

    def __init__(self, role: Role, batch: PairBatch, config: PreferenceLossConfig) -> None:
        """`batch`: the same on every rank. All ranks create the object together; for KTO they
        compute the KL estimate here.
        """
        self.role, self.batch, self.config = role, batch, config
        self.metrics = StepMetrics(role.device, SUMS)
        self.is_single = config.method == "kto"
        self._reference = torch.from_numpy(batch.reference).to(role.device)
        self._num_tokens = torch.from_numpy(batch.num_tokens).to(role.device)
        self._is_desirable = torch.from_numpy(batch.is_desirable).to(role.device)
        self.divergence = self._divergence() if self.is_single else 0.0
        """For KTO: mean over the batch of log(policy / reference) of responses that belong to other
        prompts, an estimate of the KL divergence; 0 for other methods."""
        samples, together = (batch.side(0), 1) if self.is_single else (batch.samples, 2)
        """The samples that are trained on."""
        self.micro_batches = pack_pairs(samples, role, together=together)
        """This rank's micro-batches, in which the two responses of a pair are not separated; for
        KTO they have single responses."""

    @torch.no_grad()
    def _divergence(self) -> float:
        """The mean over the step of log-prob under the policy minus that under the reference, of
        responses to other prompts; the same on every rank.
        """
        total = torch.zeros(1, dtype=torch.float64, device=self.role.device)
        for micro in pack_pairs(self.batch.side(1), self.role, together=1):
            logprobs, _ = self.role.engine(micro, 1.0)
            total += logprobs.double().sum()
        summed = all_reduce(total, self.role.mesh.gradient).item()
        return (summed - float(self.batch.reference[:, 1].sum())) / len(self.batch)

    def loss(self, micro: MicroBatch, guard: StepGuard | None) -> torch.Tensor:
        """Compute the loss of one micro-batch, its part of the mean over the batch's pairs, and add
        to the metrics. Returns a scalar whose backward pass on this rank gives this rank's part of
        the gradient, which is to be summed over ranks. All sequence-parallel ranks call it
        together. `guard`: records whether the log-probs are finite; None in an evaluation.
        """
        logprobs, _ = self.role.engine(micro, 1.0)
        if guard is not None:
            guard.watch("policy's log-probs", logprobs)
        own, ids = totals(logprobs, micro.sample_ids[micro.mask], micro)
        terms: list[Terms] = []

        def mean(sums: torch.Tensor) -> torch.Tensor:
            terms.append(self._singles(sums, ids) if self.is_single else self._pairs(sums, ids))
            return terms[0].loss.sum() / len(self.batch)

        with torch.enable_grad():  # in an evaluation, too, whose slopes are not used
            value, found = by_slopes(own, self.role.mesh.sequence, mean)
        self._note(value, terms[0].rewards.detach(), ids)
        return found

    def _pairs(self, sums: torch.Tensor, ids: torch.Tensor) -> Terms:
        """Terms of pairs. sums [2P]: log-probs of samples `ids`, chosen and rejected in turn."""
        rows = ids[::2] // 2
        pairs = Pairs(sums.view(-1, 2), self._reference[rows], self._num_tokens[rows])
        return pair_loss(pairs, self.config)

    def _singles(self, sums: torch.Tensor, ids: torch.Tensor) -> Terms:
        """Terms of single responses. sums [P]: log-probs of samples `ids`. Rewards are [P]."""
        rows = ids // 2
        ratios = sums - self._reference[rows, 0]
        loss = kto(ratios, self._is_desirable[rows], self.divergence, self.config)
        return Terms(loss, self.config.scale * ratios)

    def _note(self, value: torch.Tensor, rewards: torch.Tensor, ids: torch.Tensor) -> None:
        """Add up the metrics of a micro-batch, which every sequence rank knows whole."""
        share = 1 / self.role.mesh.sequence.size
        if self.is_single:
            good = self._is_desirable[ids // 2]
            bar = self.config.scale * max(0.0, self.divergence)
            won = right(torch.where(good, rewards - bar, bar - rewards))
            chosen, rejected = rewards[good], rewards[~good]
        else:
            won, chosen, rejected = right(pair_difference(rewards)), rewards[:, 0], rewards[:, 1]
        self.metrics.add(
            loss=share * value,
            chosen=share * chosen.sum(),
            rejected=share * rejected.sum(),
            num_chosen=share * len(chosen),
            num_rejected=share * len(rejected),
            right=share * won.sum(),
        )

    def reduced(self) -> dict[str, float]:
        """{name: value}: loss, accuracy (fraction of pairs whose chosen response has the higher
        implicit reward), mean implicit rewards and KTO's `kl`, over all ranks, on every rank. All
        ranks call it together.
        """
        found = self.metrics.reduce(self.role.mesh.gradient)
        metrics = {"loss": found["loss"], "accuracy": found["right"] / len(self.batch)}
        sides = ("chosen", "rejected")
        means = {
            side: found[side] / found[f"num_{side}"] for side in sides if found[f"num_{side}"] > 0
        }  # a step of single responses may have one side only
        metrics |= {f"reward/{side}": value for side, value in means.items()}
        if len(means) == 2:
            metrics["reward/margin"] = means["chosen"] - means["rejected"]
        return metrics | ({"kl": self.divergence} if self.is_single else {})
