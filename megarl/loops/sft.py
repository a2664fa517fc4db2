"""Supervised fine-tuning: demonstrations in, the same policy network, engine and packing as
reinforcement learning.

Demonstration -> Samples -> MicroBatch -> -log-prob of the response, one mean over the step's
response tokens
"""

from __future__ import annotations

import time

import numpy as np
import torch

from megarl.config import SftConfig
from megarl.data.demonstrations import DemonstrationList
from megarl.loops.schedule import due
from megarl.parallel import balance
from megarl.parallel.collectives import broadcast_object
from megarl.parallel.mesh import ProcessMesh
from megarl.trainer.context import RunInputs, open_run
from megarl.trainer.role import Role
from megarl.trainer.step import StepMetrics, optimizer_step
from megarl.types import Demonstration, MicroBatch, Samples, StepReport


def to_sample(sample_id: int, demonstration: Demonstration) -> Samples:
    """Concatenate prompt and response into one sample; only response tokens are trained on."""
    prompt, response = demonstration.prompt_ids, demonstration.response_ids
    mask = np.arange(len(prompt) + len(response)) >= len(prompt)
    return Samples.one(sample_id, prompt + response, mask=mask)


def take(
    demonstrations: DemonstrationList | None, mesh: ProcessMesh, first: int, count: int
) -> Samples:
    """The samples of `count` demonstrations from position `first`, on every rank. Rank 0, which
    alone has the demonstrations, sends them: about 13 bytes for each token.
    """
    samples = None
    if demonstrations is not None:
        samples = Samples.concatenate(
            [to_sample(number, demonstrations.at(first + number)) for number in range(count)]
        )
    shared = broadcast_object(samples, mesh.world)
    assert shared is not None
    return shared


def main(config: SftConfig, inputs: RunInputs) -> int:
    """`megarl sft`: supervised fine-tuning until `config.steps`, from a resumed checkpoint or the
    model's own weights.
    """
    with open_run(config, inputs) as context:
        role = context.role("policy", config.model, optimizer_steps=config.steps)
        checkpoints = context.checkpoints(role.engine)
        progress = context.resume(checkpoints)
        first = progress.step if progress else 0
        observer = context.observe(first)
        size = config.samples_per_step
        for step in range(first, config.steps):
            samples = take(inputs.demonstrations, context.mesh, step * size, size)
            report = train(role, samples, step)
            if observer is not None:
                observer.step(report)
            if due(step + 1, config.training.checkpoint.every, config.steps):
                checkpoints.save(step=step + 1, next_ordinal=(step + 1) * size)
    return 0


def train(role: Role, samples: Samples, step: int) -> StepReport:
    """Take one optimizer step on `samples`, which are the same on every rank. The loss is the mean
    of -log-prob over the response tokens of the step.
    """
    started_at = time.monotonic()
    mesh, lengths = role.mesh, samples.lengths.tolist()
    dealt = balance.split(lengths, mesh.data.size)
    budget = role.training.micro_batch_tokens * mesh.sequence.size
    packed = balance.rows_in_step([[lengths[i] for i in rank] for rank in dealt], budget)
    mine = role.pack(samples.select(dealt[mesh.data.rank]), packed[mesh.data.rank])
    # Nothing predicts the first token of a sample.
    num_tokens = int(samples.mask.sum() - samples.mask[samples.offsets[:-1]].sum())
    metrics = StepMetrics(role.device, ("loss",))

    def loss(micro: MicroBatch) -> torch.Tensor:
        logprobs, _ = role.engine(micro, 1.0)
        found = -logprobs.sum() / num_tokens
        metrics.add(loss=found.detach().double())
        return found

    norm, rate = optimizer_step(role, mine, loss)
    found = metrics.reduce(mesh.gradient)
    seconds = time.monotonic() - started_at
    found |= {
        "grad_norm": norm,
        "learning_rate": rate,
        "tokens/trained": float(num_tokens),
        "tokens/trained_per_s": sum(lengths) / seconds,
        "time/step_s": seconds,
    }
    return StepReport(step, found)
