"""Supervised fine-tuning: demonstrations in, the same policy network, engine and packing as reinforcement learning.

Demonstration -> Sample -> MicroBatch -> -log-prob of the response, one mean over the step's response tokens
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import torch

from megarl.config import SftConfig, as_plain, dump
from megarl.loop import due
from megarl.observe.observer import Observer
from megarl.parallel import balance
from megarl.parallel import mesh as mesh_module
from megarl.parallel.collectives import all_reduce, broadcast_object
from megarl.parallel.mesh import ProcessMesh
from megarl.preflight import Checked
from megarl.training.checkpoint import Checkpoints
from megarl.training.engine import TrainEngine
from megarl.training.model import PolicyModel, load_model
from megarl.training.packing import pack_shared
from megarl.training.policy import DTYPES
from megarl.types import Demonstration, Sample, StepReport


def to_sample(row: int, demonstration: Demonstration) -> Sample:
    """Prompt and response as one row; only the response is trained on."""
    prompt, response = demonstration.prompt_ids, demonstration.response_ids
    length = len(prompt) + len(response)
    return Sample(row, prompt + response, [False] * len(prompt) + [True] * len(response), [0.0] * length)


def run(config: SftConfig, checked: Checked) -> None:
    """Train from the newest checkpoint (with `resume`) or the model's own weights to `config.steps`."""
    training, folder = config.training, Path(config.folder)
    demonstrations = checked.demonstrations
    assert demonstrations is not None
    torch.set_num_threads(training.num_threads)
    with ExitStack() as stack:
        device = mesh_module.initialise(timeout_s=training.collective_timeout_s)
        stack.callback(mesh_module.finalise)
        mesh = stack.enter_context(
            ProcessMesh(checked.layout, ulysses=training.sequence.ulysses, timeout_s=training.collective_timeout_s)
        )
        network = PolicyModel(load_model(config.model, dtype=DTYPES[training.precision], seed=config.seed), mesh, training)
        engine = TrainEngine(network, training, mesh, device, total_steps=config.steps)
        stack.callback(engine.destroy)
        checkpoints = Checkpoints(
            folder / "checkpoints",
            keep=training.checkpoint.keep,
            engine=engine,
            tokenizer=checked.tokenizer,
            mesh=mesh,
            seed=config.seed,
            data=checked.data,
        )
        chosen = broadcast_object(checked.resume_from, mesh.world)
        progress = checkpoints.load(chosen) if chosen is not None else None
        first = progress.step if progress else 0
        observer = None
        if mesh.world.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "recipe.yaml").write_text(dump(config))
            observer = stack.enter_context(
                Observer(config.observe, folder, total_steps=config.steps, first_step=first, resolved=as_plain(config))
            )
        size = config.samples_per_step
        for step in range(first, config.steps):
            # Every rank knows the whole step, so that all deal it out alike.
            samples = [to_sample(row, demonstrations.at(step * size + row)) for row in range(size)]
            report = train(engine, mesh, samples, step)
            if observer is not None:
                observer.step(report)
            if due(step + 1, training.checkpoint.every, config.steps):
                checkpoints.save(step=step + 1, next_ordinal=(step + 1) * size)


def train(engine: TrainEngine, mesh: ProcessMesh, samples: list[Sample], step: int) -> StepReport:
    """One optimizer step on `samples`, the same list on every rank."""
    begun = time.monotonic()
    lengths = [len(sample.token_ids) for sample in samples]
    dealt = balance.split(lengths, mesh.data.size)
    budget = engine.config.micro_batch_tokens * mesh.sequence.size
    rows = balance.rows_in_step([[lengths[i] for i in rank] for rank in dealt], budget)
    mine = [samples[i] for i in dealt[mesh.data.rank]]
    num_tokens = sum(sum(sample.mask[1:]) for sample in samples)
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for number, row in enumerate(rows[mesh.data.rank]):
        micro = pack_shared([mine[i] for i in row], engine.device, mesh.sequence, engine.config.sequence.cut)
        logprobs, _ = engine(micro, 1.0)
        loss = -logprobs.sum() / num_tokens
        engine.backward(loss, last=number == len(rows[mesh.data.rank]) - 1)
        total += loss.detach().double()
    norm, rate = engine.step()
    loss = all_reduce(total, mesh.gradient).item()
    seconds = time.monotonic() - begun
    metrics = {"loss": loss, "grad_norm": norm, "learning_rate": rate, "tokens/trained": float(num_tokens)}
    return StepReport(step, metrics | {"tokens/trained_per_s": sum(lengths) / seconds, "time/step_s": seconds})
