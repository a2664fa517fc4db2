"""`task: distill`: on-policy distillation. The policy writes responses, and at each token of them
it learns the teacher's distribution of that token.

    prompts -> rollouts of the policy -> soft targets of a teacher -> divergence -> new weights

The loop is that of `task: rl` (`megarl.run.loop`): rollouts, publishing, evaluation,
checkpoints and signals are the same. Only a step's training differs, and is here: no rewards, no
advantages, no ratios. A verifier is optional and reported only.

    pages to read next   trainer/teacher.py        where the teacher is, and what it gives
                         trainer/distillation.py   the loss and its metrics
                         kernels/divergence.py     the formulas
"""

from __future__ import annotations

from megarl.run.build import ServingParts, TrainingParts
from megarl.run.loop import Method, run_command
from megarl.settings.config import DistillConfig
from megarl.trainer.context import RunInputs
from megarl.trainer.distillation import Distillation
from megarl.types import StepBatch, StepReport


def main(config: DistillConfig, inputs: RunInputs) -> int:
    """The command `task: distill` on this rank: train the policy on a teacher's distributions
    until `config.steps` steps are done. All ranks call it together. `config` is the checked recipe,
    `inputs` what the checks before a run have loaded: tokenizer, layout of the ranks and, on rank
    0, the prompts. Returns the exit code, 0; rank 0 prints a summary as one JSON object on stdout.
    """
    return run_command(config, inputs, METHOD)


def distillation_step(parts: TrainingParts, batch: StepBatch) -> StepReport:
    """One step of `task: distill` on a rank of the policy: the teacher computes its next-token
    distributions for the tokens of `batch` (this rank's samples of the step), and the policy is
    trained to predict them. All ranks of the policy call it together, once a step. `parts`: this
    rank's models, with a teacher. Returns the step's number and metrics {name: number}, the same on
    each rank.
    """
    learner, teacher = parts.learner, parts.teacher
    assert isinstance(learner, Distillation) and teacher is not None
    packed = parts.policy.pack_step(batch)
    teacher.read(batch, packed)
    return learner.train(batch, packed, teacher)


def serve_teacher(parts: ServingParts, step: int) -> None:
    """One step of `task: distill` on a rank that has a part of the teacher and none of the policy:
    compute the teacher's distributions for samples that the policy's ranks send, and send the
    distributions back. All such ranks call it together. `parts`: this rank's part of the teacher.
    `step` (from 0) is not used.
    """
    assert parts.teacher is not None
    parts.teacher.read(None, ())


METHOD = Method(distillation_step, serve_teacher)
"""The two functions by which `task: distill` differs from `task: rl`."""
