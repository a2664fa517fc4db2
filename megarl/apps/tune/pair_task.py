"""What preference methods and reward models share: training on pairs of responses, as a task of the
loop for fixed data sets (`run_supervised`).

PairBatch --PairTask.begin--> PairStep: micro-batches, their loss, metrics
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from megarl.apps.tune.pairs import PairBatch, merged, preference_rows, take_all_pairs, take_pairs
from megarl.config import SupervisedConfig
from megarl.trainer.context import RunContext, RunInputs
from megarl.trainer.finite import StepGuard
from megarl.trainer.role import Role
from megarl.trainer.step import StepMetrics, computed_tokens, optimizer_step, scale_metrics
from megarl.types import MicroBatch, StepReport


class PairStep(Protocol):
    """Interface of an object that computes the loss of one batch of pairs, micro-batch by
    micro-batch, and its metrics: `loss` is called for each of `micro_batches`, then `reduced` once.
    All ranks call every method together.
    """

    metrics: StepMetrics
    micro_batches: list[MicroBatch]
    """This rank's micro-batches."""

    def loss(self, micro: MicroBatch, guard: StepGuard | None) -> torch.Tensor:
        """Compute the loss of `micro`, one of `micro_batches`, and add to `metrics`. Returns a
        scalar to differentiate on this rank: its part of the batch's loss. `guard`: object that
        records whether the values in the loss are finite; None in an evaluation.
        """
        ...

    def reduced(self) -> dict[str, float]:
        """The metrics of the batch over all ranks, {name: number}, such as `loss` and `accuracy`;
        the same on every rank.
        """
        ...


class PairTask(ABC):
    """Base class of training one model on pairs of responses: `take` draws a batch, `train` takes
    an optimizer step on it, `evaluate` computes metrics of held-out pairs. The training loop
    `run_supervised` calls them. A subclass gives the loss in `begin`. All ranks create the object
    and call every method together.
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
        config = context.config
        assert isinstance(config, SupervisedConfig)
        self.role, self._mesh = role, context.mesh
        self._rows, self._scores = preference_rows(inputs.rows), reference[0]
        held_out = preference_rows(inputs.held_out_rows)
        batches = take_all_pairs(held_out, context.mesh, config.samples_per_step, reference[1])
        # As one batch: its metrics are means over all rows, however many a step has.
        self._held_out = merged(batches)
        self._guard = StepGuard(role, allowed=config.training.max_skipped_steps)

    @abstractmethod
    def begin(self, batch: PairBatch) -> PairStep:
        """Prepare the loss of `batch`, which is the same on every rank. Returns an object with this
        rank's micro-batches (`micro_batches`), a function of the loss of each (`loss`), and one
        that returns the metrics of all (`reduced`).
        """

    def take(self, first: int, count: int, *, stops: bool) -> PairBatch | None:
        return take_pairs(self._rows, self._mesh, first, count, reference=self._scores, stops=stops)

    def train(self, batch: PairBatch, step: int) -> StepReport:
        guard, started_at = self._guard, time.monotonic()
        guard.begin(f"step {step + 1}")
        work = self.begin(batch)
        taken = optimizer_step(
            self.role,
            work.micro_batches,
            lambda micro: work.loss(micro, guard),
            guard,
            work.metrics,
        )
        guard.check_weights()
        found = work.reduced() | computed_tokens(work.micro_batches, self.role)
        seconds = time.monotonic() - started_at
        found |= {
            "grad_norm": taken[0] if taken else 0.0,
            "learning_rate": taken[1] if taken else self.role.engine.next_rate(),
            "skipped_steps": float(taken is None),
            "tokens/trained_per_s": len(batch.samples.token_ids) / seconds,
            "time/step_s": seconds,
        }
        return StepReport(step, found | scale_metrics(self.role))

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        if self._held_out is None:
            return {}
        work = self.begin(self._held_out)
        for micro in work.micro_batches:
            work.loss(micro, None)
        return {f"eval/{name}": value for name, value in work.reduced().items()}


ROUNDING = 1e-6
"""Size up to which a margin counts as 0: before the first update the policy is the reference, and
what is left of their difference is float32 rounding, whose sign depends on the layout."""


def right(margins: torch.Tensor) -> torch.Tensor:
    """Score of each of `margins` (any shape, such as chosen minus rejected reward) for an accuracy,
    as a tensor of the same shape: 1 for a positive margin, 0 for a negative one, and 0.5 for one of
    at most 1e-6 (`ROUNDING`) in size.
    """
    return (torch.where(margins.abs() <= ROUNDING, 0.0, margins).sign() + 1) / 2
