"""On-policy distillation: the policy is trained to match a teacher's next-token distributions at
every token that it has generated itself.

    StepBatch (this rank's samples) + Teacher  --train--> StepReport

    loss = sum over generated tokens of weight x D(policy's distribution, teacher's distribution)

GKD, arXiv:2306.13649, eq. 5 with all data from the student. As there, samples are taken as given:
no gradient flows through the choice of the tokens. The weights add up to 1 over a mini-batch, over
all its micro-batches and ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from megarl.settings.objectives import DistillationConfig
from megarl.trainer.finite import StepGuard
from megarl.trainer.role import Role
from megarl.trainer.step import (
    GAPS,
    EmptySteps,
    MicroBatchLoss,
    StepMetrics,
    add_mismatch,
    computed_tokens,
    mismatch_metrics,
    scale_metrics,
    token_weights,
    train_mini_batches,
)
from megarl.trainer.teacher import Teacher
from megarl.types import MicroBatch, StepBatch, StepReport

SUMS = ("loss", "divergence", "teacher_logprob", "entropy", "tokens")
"""Sums over the trained tokens, from which a step's metrics are made."""


class Distillation:
    """Trains the policy by on-policy distillation: `train` makes the optimizer steps of one step's
    samples, towards the next-token distributions of a teacher. All ranks of the policy create it.
    `distillation`: which divergence, temperature and weighting of tokens. `compares_engines`:
    whether the metrics also have the difference between the log-probs of policy and engines.
    """

    def __init__(
        self, policy: Role, distillation: DistillationConfig, *, compares_engines: bool
    ) -> None:
        """`compares_engines`: compute the metrics `mismatch/...`, which compare the policy's
        log-probs with those of the engines. That makes sense only if distillation has the
        temperature of the rollouts, and the engines sample without top-p, top-k and min-p.
        """
        self.policy, self.config = policy, distillation
        self.compares_engines = compares_engines
        self.guard = StepGuard(policy, allowed=policy.training.max_skipped_steps)
        self.empty_steps = EmptySteps(self.guard, policy.training.max_empty_steps)

    def train(
        self, batch: StepBatch, packed: Sequence[Sequence[MicroBatch]], teacher: Teacher
    ) -> StepReport:
        """Train the policy on one step's samples, with one optimizer step for each mini-batch and
        epoch. All ranks of the policy call it together and get the same report, whose `metrics` are
        {name: number}, such as "loss" and "divergence".

        `packed`: for each mini-batch of `batch`, this rank's packed sequences, as `Role.pack_step`
        returns them. `teacher`: must have prepared this batch by `Teacher.read`; its hidden states
        are freed.

        Raises `UserError` if more optimizer steps without finite values occur than
        `training.max_skipped_steps` allows, or if a weight is not finite afterwards.
        """
        gaps = [f"mismatch/{name}" for name in GAPS] if self.compares_engines else []
        metrics = StepMetrics(self.policy.device, (*SUMS, *gaps), ("max_abs",))

        def loss_of(number: int, at_start: bool) -> MicroBatchLoss:
            weights = token_weights(batch, number, self.config.aggregation, self.policy.device)

            def loss(micro: MicroBatch) -> torch.Tensor:
                soft_targets = teacher.soft_targets(number, micro)
                found = self.policy.engine(micro, self.config.temperature, soft_targets)
                return self._loss(micro, found, weights, metrics, at_start=at_start)

            return loss

        taken, rates = train_mini_batches(
            *(self.policy, packed, loss_of, self.guard, metrics),
            num_mini_batches=len(batch.samples),
        )
        teacher.forget()
        found = self._report(metrics, num_mini_batches=taken)
        epochs = self.policy.training.epochs_per_step
        found |= computed_tokens(itertools.chain(*packed), self.policy, epochs)
        found |= rates | scale_metrics(self.policy)
        return StepReport(step=batch.step, metrics=batch.metrics | found)

    def _loss(
        self,
        micro: MicroBatch,
        found: tuple[torch.Tensor, ...],
        weights: torch.Tensor,
        metrics: StepMetrics,
        *,
        at_start: bool,
    ) -> torch.Tensor:
        """This micro-batch's term of the mini-batch's loss; adds its values to `metrics`. `found`:
        what the policy has returned. `at_start`: no update of this step has been made yet.
        """
        divergence, entropy, logprobs, teacher_logprobs = found
        self.guard.watch("teacher's log-probs", teacher_logprobs)
        self.guard.watch("policy's log-probs", logprobs)
        loss = (weights[micro.sample_ids[micro.mask]] * divergence).sum()
        metrics.add(
            loss=loss.detach().double(),
            divergence=divergence.detach().sum().double(),
            teacher_logprob=teacher_logprobs.sum().double(),
            entropy=entropy.sum().double(),
            tokens=float(divergence.numel()),
        )
        if at_start and self.compares_engines:
            add_mismatch(metrics, logprobs, micro.engine_logprobs[micro.mask])
        return loss

    def _report(self, metrics: StepMetrics, *, num_mini_batches: int) -> dict[str, float]:
        """{name: value} of a step for metrics.jsonl, such as loss and divergence: the values in
        `metrics`, added up over all ranks. `num_mini_batches`: optimizer steps taken.
        """
        value = metrics.reduce(self.policy.mesh.gradient)
        tokens = max(value["tokens"], 1.0)
        found = {"loss": value["loss"] / max(1, num_mini_batches)}
        found |= {
            name: value[name] / tokens for name in ("divergence", "teacher_logprob", "entropy")
        }
        found["tokens/trained"] = value["tokens"]
        return found | (mismatch_metrics(value) if self.compares_engines else {})
