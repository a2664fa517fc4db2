"""On-policy distillation: the policy learns a teacher's next-token distributions at every token
that it has generated itself.

    StepBatch (this rank's samples) + Teacher  --train--> StepReport

    loss = sum over generated tokens of weight x D(policy's distribution, teacher's distribution)

GKD, arXiv:2306.13649, eq. 5 with all data from the student: no gradient flows through the choice of
the tokens. The weights add up to 1 over a mini-batch, over all ranks.
"""

from __future__ import annotations

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
    token_weights,
    train_mini_batches,
)
from megarl.trainer.teacher import Teacher
from megarl.types import MicroBatch, StepBatch, StepReport

SUMS = ("loss", "divergence", "teacher_logprob", "entropy", "tokens")
"""Sums over the trained tokens."""


class Distillation:
    """Trains the policy towards a teacher's next-token distributions. Collective."""

    def __init__(
        self, policy: Role, distillation: DistillationConfig, *, compares_engines: bool
    ) -> None:
        """`compares_engines`: compute the metrics `mismatch/...`; only sensible at the rollouts'
        temperature, without top-p, top-k and min-p.
        """
        self.policy, self.config = policy, distillation
        self.compares_engines = compares_engines
        self.guard = StepGuard(policy, allowed=policy.training.max_skipped_steps)
        self.empty_steps = EmptySteps(self.guard, policy.training.max_empty_steps)

    def train(
        self, batch: StepBatch, packed: Sequence[Sequence[MicroBatch]], teacher: Teacher
    ) -> StepReport:
        """Train on one step's samples, with an optimizer step for each mini-batch and epoch; every
        rank gets the same report. `teacher` must have read this batch; its hidden states are freed.
        Raises `UserError` as `train_mini_batches`.
        """
        gaps = [f"mismatch/{name}" for name in GAPS] if self.compares_engines else []
        metrics = StepMetrics(self.policy.device, (*SUMS, *gaps), ("max_abs",))

        def loss_of(number: int, at_start: bool) -> MicroBatchLoss:
            weights = token_weights(batch, number, self.config.aggregation, self.policy.device)

            def loss(micro: MicroBatch) -> torch.Tensor:
                soft_targets = teacher.soft_targets(number, micro)
                outputs = self.policy.engine(micro, self.config.temperature, soft_targets)
                return self._loss(micro, outputs, weights, metrics, at_start=at_start)

            return loss

        num_steps, rates = train_mini_batches(
            *(self.policy, packed, loss_of, self.guard, metrics),
            num_mini_batches=len(batch.samples),
        )
        teacher.forget()
        report = self._report(metrics, num_mini_batches=num_steps)
        report |= rates | computed_tokens(packed, self.policy)
        return StepReport(step=batch.step, metrics=batch.metrics | report)

    def _loss(
        self,
        micro: MicroBatch,
        outputs: tuple[torch.Tensor, ...],
        weights: torch.Tensor,
        metrics: StepMetrics,
        *,
        at_start: bool,
    ) -> torch.Tensor:
        """This micro-batch's term of the mini-batch's loss; adds to `metrics`. `at_start`: the step
        has made no update yet.
        """
        divergence, entropy, logprobs, teacher_logprobs = outputs
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
        value = metrics.reduce(self.policy.mesh.gradient)
        tokens = max(value["tokens"], 1.0)
        report = {"loss": value["loss"] / max(1, num_mini_batches)}
        report |= {
            name: value[name] / tokens for name in ("divergence", "teacher_logprob", "entropy")
        }
        report["tokens/trained"] = value["tokens"]
        return report | (mismatch_metrics(value) if self.compares_engines else {})
