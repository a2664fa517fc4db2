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
from megarl.loops.schedule import due
from megarl.parallel import balance
from megarl.parallel.collectives import all_reduce
from megarl.parallel.mesh import ProcessMesh
from megarl.trainer.build import build_network
from megarl.trainer.context import RunInputs, open_run
from megarl.trainer.packing import pack_shared
from megarl.trainer.zero import TrainEngine
from megarl.types import Demonstration, Samples, StepReport


def to_sample(sample_id: int, demonstration: Demonstration) -> Samples:
    """Prompt and response as one sequence; only the response is trained on."""
    prompt, response = demonstration.prompt_ids, demonstration.response_ids
    mask = np.arange(len(prompt) + len(response)) >= len(prompt)
    return Samples.one(sample_id, prompt + response, mask=mask)


def main(config: SftConfig, inputs: RunInputs) -> int:
    """`megarl sft`: train from the checkpoint to resume, or the model's own weights, to
    `config.steps`.
    """
    demonstrations = inputs.demonstrations
    assert demonstrations is not None
    with open_run(config, inputs) as context:
        mesh, training = context.mesh, config.training
        network = build_network(config.model, training, mesh, context.device, seed=config.seed)
        engine = TrainEngine(network, training, mesh, context.device, total_steps=config.steps)
        context.stack.callback(engine.destroy)
        checkpoints = context.checkpoints(engine)
        progress = context.resume(checkpoints)
        first = progress.step if progress else 0
        observer = context.observe(first)
        size = config.samples_per_step
        for step in range(first, config.steps):
            # Every rank reads the whole step, so that all deal it out alike.
            samples = Samples.concatenate(
                [
                    to_sample(number, demonstrations.at(step * size + number))
                    for number in range(size)
                ]
            )
            report = train(engine, mesh, samples, step)
            if observer is not None:
                observer.step(report)
            if due(step + 1, training.checkpoint.every, config.steps):
                checkpoints.save(step=step + 1, next_ordinal=(step + 1) * size)
    return 0


def train(engine: TrainEngine, mesh: ProcessMesh, samples: Samples, step: int) -> StepReport:
    """One optimizer step on `samples`, the same on every rank."""
    started_at = time.monotonic()
    lengths = samples.lengths.tolist()
    dealt = balance.split(lengths, mesh.data.size)
    budget = engine.config.micro_batch_tokens * mesh.sequence.size
    rows = balance.rows_in_step([[lengths[i] for i in rank] for rank in dealt], budget)
    mine = samples.select(dealt[mesh.data.rank])
    first_trained = samples.mask[samples.offsets[:-1]].sum()  # nothing predicts a first token
    num_tokens = int(samples.mask.sum() - first_trained)
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for number, row in enumerate(rows[mesh.data.rank]):
        micro = pack_shared(
            mine.select(row), engine.device, mesh.sequence, engine.config.sequence.cut
        )
        logprobs, _ = engine(micro, 1.0)
        loss = -logprobs.sum() / num_tokens
        engine.backward(loss, last=number == len(rows[mesh.data.rank]) - 1)
        total += loss.detach().double()
    norm, rate = engine.step()
    loss = all_reduce(total, mesh.gradient).item()
    seconds = time.monotonic() - started_at
    metrics = {
        "loss": loss,
        "grad_norm": norm,
        "learning_rate": rate,
        "tokens/trained": float(num_tokens),
    }
    return StepReport(
        step, metrics | {"tokens/trained_per_s": sum(lengths) / seconds, "time/step_s": seconds}
    )
