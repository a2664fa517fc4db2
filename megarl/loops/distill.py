"""`megarl distill`: on-policy distillation. The policy writes responses, and at each token of them
it learns the teacher's distribution of that token.

    prompts -> rollouts of the policy -> soft targets of a teacher -> divergence -> new weights

The loop is that of `megarl train` (`megarl.loops.rl`): rollouts, publishing, evaluation,
checkpoints and signals are the same. Only a step's training differs, and is here: no rewards, no
advantages, no ratios. A verifier is optional and reported only.

    pages to read next   trainer/teacher.py        where the teacher is, and what it gives
                         trainer/distillation.py   the loss and its metrics
                         kernels/divergence.py     the formulas
"""

from __future__ import annotations

from megarl.config import DistillConfig
from megarl.loops.rl import Method, run_command
from megarl.loops.rl_setup import ServingParts, TrainingParts
from megarl.trainer.context import RunInputs
from megarl.trainer.distillation import Distillation
from megarl.types import StepBatch, StepReport


def main(config: DistillConfig, inputs: RunInputs) -> int:
    """`megarl distill`; see `megarl.loops.rl.run_command`."""
    return run_command(config, inputs, METHOD)


def distillation_step(parts: TrainingParts, batch: StepBatch) -> StepReport:
    """Train the policy to predict the distributions that the teacher predicts for the rollouts of
    `batch`. A rank of the policy calls it once a step.
    """
    learner, teacher = parts.learner, parts.teacher
    assert isinstance(learner, Distillation) and teacher is not None
    packed = parts.policy.pack_step(batch)
    teacher.read(batch, packed)
    return learner.train(batch, packed, teacher)


def serve_teacher(parts: ServingParts, step: int) -> None:
    """A step on a rank that has a part of the teacher and none of the policy: compute the teacher's
    distributions, which the ranks of the policy receive.
    """
    assert parts.teacher is not None
    parts.teacher.read(None, ())


METHOD = Method(distillation_step, serve_teacher)
"""What `megarl distill` does with the rollouts of a step."""
