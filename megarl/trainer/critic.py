"""The critic of PPO: predicts the return from each state, and learns from the returns it is given.

    batch --values--> column "values" --GAE--> column "returns" --start, learn, finish--> metrics

A column is one number for each token of a rank's samples. A critic in the recipe's section
`critics` has the columns "values.NAME" and "returns.NAME".

The critic computes on the policy's ranks or on ranks of its own. There, it learns while the policy
learns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.errors import UserError
from megarl.objectives.value import MOMENTS, explained_variance, moments, value_loss
from megarl.parallel.collectives import broadcast_object, gather_objects
from megarl.trainer.finite import StepGuard
from megarl.trainer.role import Column, Role
from megarl.trainer.step import MicroBatchLoss, StepMetrics, scale_metrics, train_mini_batches
from megarl.trainer.transfer import BatchTransfer, RoleBatch, Scorer
from megarl.types import MicroBatch, StepBatch


class Critic:
    """PPO's critic: `values` computes the values of a step's samples; `start`, `learn` and
    `finish`, in this order, train it on the returns. All ranks of the job create it and call each
    method together, also ranks without a part of the critic. `value_clip`: width of PPO's value
    clipping, in the units of the reward; None for none.
    """

    def __init__(
        self, transfer: BatchTransfer, *, value_clip: float | None, section: str = "critic"
    ) -> None:
        """`transfer` moves samples to the critic's ranks and values back; `transfer.role` is the
        critic, a model with the head `value` and an optimizer. `value_clip`: how far a value may
        move from the one before the update without loss; None for no clipping. `section`: the
        critic's section of the recipe, `critic` or `critics.NAME`, with which its metrics begin.
        """
        self.scorer, self.value_clip, self.section = Scorer(transfer), value_clip, section
        self.suffix = section.removeprefix("critics").removeprefix("critic")
        """What the names of the critic's columns end with: nothing, or .NAME."""
        role = transfer.role
        self.guard = role and StepGuard(
            role, allowed=role.training.max_skipped_steps, section=section
        )
        self._returns: Column | None = None
        self._learnt: tuple[str, dict[str, float]] = ("", {})
        """Error message, or metrics, of the last step on ranks of its own."""

    @property
    def role(self) -> Role | None:
        """The critic's model and optimizer on this rank; None on ranks that are not the
        critic's.
        """
        return self.scorer.transfer.role

    def values(self, batch: StepBatch | None, packed: Sequence[Sequence[MicroBatch]]) -> Column:
        """The critic's value of the state before each token that the policy generated: for each
        mini-batch of the step a float32 tensor [T], 0 for all other tokens of this rank's samples.
        `packed`: for each mini-batch of `batch`, this rank's packed sequences. Ranks outside the
        policy pass None and [] and get an empty list.
        """
        return self.scorer.score(batch, packed, temperature=1.0)

    def start(self, returns: Column | None) -> None:
        """Hand over the returns that the critic is to learn for the samples whose values were
        computed last: for each mini-batch a float32 tensor [T], one number for each token. On the
        policy's ranks None means that this step is not trained on; ranks outside the policy pass
        None always.
        """
        transfer = self.scorer.transfer
        self._returns, self._learnt = returns, ("", {})
        if transfer.is_shared:
            return
        # Rank 0 belongs to the policy, whose ranks decide alike.
        is_training = broadcast_object(returns is not None, transfer.everyone)
        self._returns = transfer.to_role(returns or []) if is_training else None

    def learn(self, step: int) -> None:
        """Train a critic that is on ranks of its own; does nothing for a critic on the policy's
        ranks, and on ranks without a part of the critic. `step`: number of the step from 0, for
        messages. Errors are raised by `finish`.
        """
        if self.scorer.transfer.is_shared:
            return
        try:
            self._learnt = ("", self._train(step))
        except UserError as error:  # raised in `finish`, by all ranks at once
            self._learnt = (str(error), {})

    def finish(self, step: int) -> dict[str, float]:
        """Train the critic, if it shares the policy's ranks; otherwise fetch the result of the
        training in `learn`. Returns the metrics of the step on all ranks, {"critic/loss",
        "critic/explained_variance", "critic/grad_norm", ...: number}; for a critic in the recipe's
        section `critics` they begin with "critics.NAME/". Raises `UserError` on all ranks if more
        optimizer steps without finite values occur than `training.max_skipped_steps` allows, or if
        a weight is not finite afterwards.
        """
        transfer = self.scorer.transfer
        if transfer.is_shared:
            return self._train(step)
        problem, metrics = gather_objects(self._learnt, transfer.everyone)[transfer.mesh.ranks[0]]
        if problem:
            raise UserError(problem)
        return metrics

    def _train(self, step: int) -> dict[str, float]:
        """One optimizer step for each mini-batch and epoch; {} on ranks outside the role."""
        role, here, guard = self.role, self.scorer.here, self.guard
        if role is None or guard is None or here is None:
            return {}
        guard.begin(f"step {step + 1}, {self.section}")
        metrics = StepMetrics(role.device, ("loss", "clipped", *MOMENTS))
        packed = here.packed if self._returns is not None else ()

        def loss_of(number: int, at_start: bool) -> MicroBatchLoss:
            return lambda micro: self._loss(here, micro, number, metrics)

        taken, rates = train_mini_batches(
            role, packed, loss_of, guard, metrics, num_mini_batches=len(packed)
        )
        sums = metrics.reduce(role.mesh.gradient)
        found = scale_metrics(role) | {
            "loss": sums["loss"] / max(1, taken),
            "clip_share": sums["clipped"] / max(1.0, sums["count"]),
            "explained_variance": explained_variance(sums),
        }
        return {f"{self.section}/{name}": value for name, value in (found | rates).items()}

    def _loss(
        self, here: RoleBatch, micro: MicroBatch, number: int, metrics: StepMetrics
    ) -> torch.Tensor:
        """This micro-batch's term of the mean value loss over the tokens of mini-batch
        `number`.
        """
        role, guard = self.role, self.guard
        assert role is not None and guard is not None and self._returns is not None
        values = role.engine(micro, 1.0)
        guard.watch("critic's values", values)
        in_part = here.batch.mini_batch_of == number
        num_tokens = max(1, int(here.batch.response_tokens[in_part].sum()))
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
