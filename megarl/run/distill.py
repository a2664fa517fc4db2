"""`task: distill`, on-policy distillation: the policy writes responses, and learns the teacher's
distribution at each token. The loop is that of `task: rl`.

Read next: trainer/teacher.py, trainer/distillation.py, kernels/divergence.py.
"""

from __future__ import annotations

from megarl.run.build import ServingParts, TrainingParts
from megarl.run.loop import Method, run_command
from megarl.settings.config import DistillConfig
from megarl.trainer.context import RunInputs
from megarl.trainer.distillation import Distillation
from megarl.types import StepBatch, StepReport


def main(config: DistillConfig, inputs: RunInputs) -> int:
    """`task: distill` on this rank; returns the exit code."""
    return run_command(config, inputs, METHOD)


def distillation_step(parts: TrainingParts, batch: StepBatch) -> StepReport:
    """Collective over the policy's ranks."""
    learner, teacher = parts.learner, parts.teacher
    assert isinstance(learner, Distillation) and teacher is not None
    packed = parts.policy.pack_step(batch)
    teacher.read(batch, packed)
    return learner.train(batch, packed, teacher)


def serve_teacher(parts: ServingParts, step: int) -> None:
    """A step on a rank without a part of the policy."""
    assert parts.teacher is not None
    parts.teacher.read(None, ())


METHOD = Method(distillation_step, serve_teacher)
