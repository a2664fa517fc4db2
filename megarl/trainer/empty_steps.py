"""Steps without a token to train on, and runs that have trained on nothing at all."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.errors import UserError


class EmptySteps:
    """Counts the steps in a row whose batch has no samples, because the rewards of every group were
    equal, and ends a run that cannot learn. It decides equally on all ranks, which all know the
    metrics of the whole batch.
    """

    def __init__(self, allowed: int) -> None:
        """`allowed`: the number of such steps in a row that ends the run
        (`training.max_empty_steps`).
        """
        self.allowed, self.in_a_row = allowed, 0
        self.has_updated = False
        """Whether the run, or the run that it continues, has made an optimizer step."""

    def count(self, step: int, num_samples: int, metrics: Mapping[str, float]) -> None:
        """Count a step, before it is trained. Raises `UserError` if there were too many empty steps
        in a row. `metrics`: those of the step's batch.
        """
        # A policy that has learnt to be right has nothing left to learn, which is no failure.
        may_be_done = self.has_updated and metrics.get("accuracy", 0.0) >= 0.5
        self.in_a_row = 0 if num_samples or may_be_done else self.in_a_row + 1
        if self.in_a_row >= self.allowed:
            raise UserError(
                f"step {step + 1}: {self.in_a_row} steps in a row trained on no token,"
                f" {_equal_rewards(metrics)}, or raise training.max_empty_steps"
            )

    def end(self, step: int, num_samples: int, metrics: Mapping[str, float]) -> None:
        """Raise `UserError` after the last step, before its checkpoint, if no step of the run has
        changed the weights.
        """
        if self.has_updated:
            return
        if num_samples:
            raise UserError(
                f"step {step + 1}: the run ends with the weights that it began with, since every"
                " optimizer step was skipped; see the warnings of the steps, or raise steps"
            )
        raise UserError(
            f"step {step + 1}: the run ends with the weights that it began with, since no step"
            f" trained on any token, {_equal_rewards(metrics)}, or raise steps"
        )


def _equal_rewards(metrics: Mapping[str, float]) -> str:
    """Why a step was empty, and what to set."""
    found = {"groups/drawn": 0, "accuracy": 0, "length/truncated_share": 0} | dict(metrics)
    return (
        f"since the rewards of every group were equal (in this step {found['groups/drawn']:.0f}"
        f" groups, accuracy {found['accuracy']:.4g}, {found['length/truncated_share']:.0%} cut"
        " off); set prompts that are neither too hard nor too easy, a verifier that tells responses"
        " apart, or a larger rollout.group_size or rollout.max_new_tokens"
    )
