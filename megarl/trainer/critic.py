"""The critic of PPO: predicts the return from each state, and learns from the returns it is given.

    batch --values--> column "values" --GAE--> column "returns" --start, finish--> metrics

It works like `Scorer` on the policy's ranks or on ranks of its own. There, it learns while the
policy learns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.errors import UserError
from megarl.objectives.value import MOMENTS, explained_variance, moments, value_loss
from megarl.parallel.collectives import broadcast_object, gather_objects
from megarl.trainer.finite import StepGuard
from megarl.trainer.role import Column, Role
from megarl.trainer.step import StepMetrics, optimizer_step, scale_metrics
from megarl.trainer.transfer import BatchTransfer, RoleBatch, Scorer
from megarl.types import MicroBatch, StepBatch


class Critic:
    """Computes the column `values` of each batch and is trained on its `returns`. All ranks of the
    job create and call it together.
    """

    def __init__(self, transfer: BatchTransfer, *, value_clip: float | None) -> None:
        """`transfer.role`: the critic, a role with the head `value` and an optimizer. `value_clip`:
        see `megarl.objectives.value.value_loss`.
        """
        self.scorer, self.value_clip = Scorer(transfer), value_clip
        role = transfer.role
        self.guard = role and StepGuard(
            role, allowed=role.training.max_skipped_steps, section="critic"
        )
        self._returns: Column | None = None
        self._learnt: tuple[str, dict[str, float]] = ("", {})
        """Error message, or metrics, of the last step on ranks of its own."""

    @property
    def role(self) -> Role | None:
        """The critic's model; None on ranks outside the role."""
        return self.scorer.transfer.role

    def values(self, batch: StepBatch | None, packed: Sequence[Sequence[MicroBatch]]) -> Column:
        """The value of the state before each token of the batch that the policy generated. Ranks
        outside the policy pass None as `batch` and get an empty column.
        """
        return self.scorer.score(batch, packed, temperature=1.0)

    def start(self, step: int, returns: Column | None) -> None:
        """Send the returns of the batch whose values were computed last; on ranks of its own the
        critic learns at once. None on the policy's ranks: the batch is not trained on.
        """
        transfer = self.scorer.transfer
        self._returns, self._learnt = returns, ("", {})
        if transfer.is_shared:
            return
        # Rank 0 belongs to the policy, whose ranks decide alike.
        is_training = broadcast_object(returns is not None, transfer.everyone)
        self._returns = transfer.to_role(returns or []) if is_training else None
        try:
            self._learnt = ("", self._train(step))
        except UserError as error:  # raised in `finish`, by all ranks at once
            self._learnt = (str(error), {})

    def finish(self, step: int) -> dict[str, float]:
        """On the policy's ranks the critic learns now. Returns the metrics of its step, on all
        ranks. Raises `UserError` on all ranks if `training.max_skipped_steps` allows no further
        step without finite values, or if a weight is not finite afterwards.
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
        guard.begin(f"step {step + 1}, critic")
        metrics = StepMetrics(role.device, ("loss", "clipped", *MOMENTS))
        norms, rate = [], role.engine.next_rate()
        num_parts = len(here.packed) if self._returns is not None else 0
        for number in list(range(num_parts)) * role.training.epochs_per_step:
            taken = optimizer_step(
                role,
                here.packed[number],
                lambda micro, n=number: self._loss(here, micro, n, metrics),
                guard,
                metrics,
            )
            if taken is None:
                continue
            norms.append(taken[0])
            rate = taken[1]
        guard.check_weights()
        found = metrics.reduce(role.mesh.gradient)
        return scale_metrics(role, "critic/") | {
            "critic/loss": found["loss"] / max(1, len(norms)),
            "critic/clip_share": found["clipped"] / max(1.0, found["count"]),
            "critic/explained_variance": explained_variance(found),
            "critic/grad_norm": sum(norms) / max(1, len(norms)),
            "critic/learning_rate": rate,
            "critic/skipped_steps": float(num_parts * role.training.epochs_per_step - len(norms)),
        }

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
