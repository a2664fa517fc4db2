"""The critic of PPO: predicts the return from each state, and learns from the returns it is given.

    batch --values--> column "values" --GAE--> column "returns" --start, learn, finish--> metrics

A critic of the section `critics` has the columns "values.NAME" and "returns.NAME". A critic on
ranks of its own learns while the policy does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.errors import UserError
from megarl.objectives.value import MOMENTS, explained_variance, moments, value_loss
from megarl.parallel.collectives import broadcast_object, gather_objects
from megarl.trainer.finite import StepGuard
from megarl.trainer.role import Column, Role
from megarl.trainer.step import MicroBatchLoss, StepMetrics, train_mini_batches
from megarl.trainer.transfer import BatchTransfer, RoleBatch, Scorer
from megarl.types import MicroBatch, StepBatch


class Critic:
    """PPO's critic, the role of `transfer`: `values`, then `start`, `learn` and `finish`, in each
    step. Collective over all ranks of the job, also those without it.
    """

    def __init__(
        self, transfer: BatchTransfer, *, value_clip: float | None, section: str = "critic"
    ) -> None:
        """`value_clip`: how far a value may move in an update, in the reward's units; None for any.
        `section`: `critic` or `critics.NAME`, with which its metrics begin.
        """
        self.scorer, self.value_clip, self.section = Scorer(transfer), value_clip, section
        self.suffix = section.removeprefix("critics").removeprefix("critic")
        """How the names of its columns end: "" or ".NAME"."""
        role = transfer.role
        self.guard = role and StepGuard(
            role, allowed=role.training.max_skipped_steps, section=section
        )
        self._returns: Column | None = None
        self._learnt: tuple[str, dict[str, float]] = ("", {})
        """Error message, or metrics, of the last step on ranks of its own."""

    @property
    def role(self) -> Role | None:
        """The critic on this rank, if it has a part of it."""
        return self.scorer.transfer.role

    def values(self, batch: StepBatch | None, packed: Sequence[Sequence[MicroBatch]]) -> Column:
        """The value of the state before each generated token. Ranks outside the policy pass None
        and [] and get [].
        """
        return self.scorer.score(batch, packed, temperature=1.0)

    def start(self, returns: Column | None) -> None:
        """Hand over the returns to learn, a column over the last valued samples. On the policy's
        ranks None skips the step; other ranks pass None.
        """
        transfer = self.scorer.transfer
        self._returns, self._learnt = returns, ("", {})
        if transfer.is_shared:
            return
        # Rank 0 belongs to the policy, whose ranks decide alike.
        is_training = broadcast_object(returns is not None, transfer.everyone)
        self._returns = transfer.to_role(returns or []) if is_training else None

    def learn(self, step: int) -> None:
        """Train a critic on ranks of its own. Errors are raised by `finish`."""
        if self.scorer.transfer.is_shared:
            return
        try:
            self._learnt = ("", self._train(step))
        except UserError as error:  # raised in `finish`, by all ranks at once
            self._learnt = (str(error), {})

    def finish(self, step: int) -> dict[str, float]:
        """Train a critic on the policy's ranks, or fetch the result of `learn`. Returns the step's
        metrics on all ranks. Raises `UserError` on all as `train_mini_batches`.
        """
        transfer = self.scorer.transfer
        if transfer.is_shared:
            return self._train(step)
        problem, metrics = gather_objects(self._learnt, transfer.everyone)[transfer.mesh.ranks[0]]
        if problem:
            raise UserError(problem)
        return metrics

    def _train(self, step: int) -> dict[str, float]:
        """The step's metrics; {} on ranks outside the role."""
        role, scored, guard = self.role, self.scorer.here, self.guard
        if role is None or guard is None or scored is None:
            return {}
        guard.begin(f"step {step + 1}, {self.section}")
        metrics = StepMetrics(role.device, ("loss", "clipped", *MOMENTS))
        packed = scored.packed if self._returns is not None else ()

        def loss_of(number: int, at_start: bool) -> MicroBatchLoss:
            return lambda micro: self._loss(scored, micro, number, metrics)

        num_steps, rates = train_mini_batches(
            role, packed, loss_of, guard, metrics, num_mini_batches=len(packed)
        )
        sums = metrics.reduce(role.mesh.gradient)
        report = {
            "loss": sums["loss"] / max(1, num_steps),
            "clip_share": sums["clipped"] / max(1.0, sums["count"]),
            "explained_variance": explained_variance(sums),
        }
        return {f"{self.section}/{name}": value for name, value in (report | rates).items()}

    def _loss(
        self, scored: RoleBatch, micro: MicroBatch, number: int, metrics: StepMetrics
    ) -> torch.Tensor:
        """This micro-batch's term of the mean value loss over mini-batch `number`."""
        role, guard = self.role, self.guard
        assert role is not None and guard is not None and self._returns is not None
        values = role.engine(micro, 1.0)
        guard.watch("critic's values", values)
        in_part = scored.batch.mini_batch_of == number
        num_tokens = max(1, int(scored.batch.response_tokens[in_part].sum()))
        places = micro.places[micro.mask]
        returns = self._returns[number][places]
        old = self.scorer.column[number][places]
        terms = value_loss(values, old, returns, self.value_clip)
        loss = terms.per_token.sum() / num_tokens
        metrics.add(
            loss=loss.detach().double(),
            clipped=terms.clipped.sum().double(),
            **moments(old, returns),
        )
        return loss
