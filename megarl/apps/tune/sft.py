"""`megarl sft`, supervised fine-tuning: demonstrations in, with the same policy network, engine and
packing as reinforcement learning.

Demonstration -> Samples -> MicroBatch -> -log-prob of the response, one mean over the step's
response tokens
"""

from __future__ import annotations

import time

import numpy as np
import torch

from megarl.apps.tune.supervised import chunks, run_supervised
from megarl.config import SftConfig
from megarl.data.demonstrations import DemonstrationList
from megarl.parallel.collectives import broadcast_object
from megarl.parallel.mesh import ProcessMesh
from megarl.trainer.context import DataRows, RunContext, RunInputs
from megarl.trainer.finite import StepGuard
from megarl.trainer.prefixes import balance_of
from megarl.trainer.role import Role
from megarl.trainer.step import StepMetrics, computed_tokens, optimizer_step, scale_metrics
from megarl.types import Demonstration, MicroBatch, Samples, StepReport


def to_sample(sample_id: int, demonstration: Demonstration) -> Samples:
    """Concatenate the token ids of prompt and response of `demonstration` into a batch of one
    sequence with the id `sample_id`; its `mask` is True for response tokens, of a conversation only
    for the assistant's.
    """
    prompt, response = demonstration.prompt_ids, demonstration.response_ids
    chosen = demonstration.response_mask or [1] * len(response)
    mask = np.array([0] * len(prompt) + chosen, dtype=bool)
    return Samples.one(sample_id, prompt + response, mask=mask)


def take_demonstrations(
    demonstrations: DemonstrationList | None,
    mesh: ProcessMesh,
    first: int,
    count: int,
    *,
    stops: bool = False,
) -> Samples | None:
    """The samples of `count` demonstrations from position `first` of the training order, on every
    rank. Rank 0, which alone has the demonstrations, sends them: about 13 bytes for each token.
    None on every rank if rank 0 passes `stops`, to end the run. All ranks call it together.
    """
    samples = None
    if demonstrations is not None and not stops:
        samples = Samples.concatenate(
            [to_sample(number, demonstrations.at(first + number)) for number in range(count)]
        )
    return broadcast_object(samples, mesh.world)


def take_all_demonstrations(
    demonstrations: DemonstrationList | None, mesh: ProcessMesh, at_once: int
) -> list[Samples]:
    """All demonstrations of rank 0, such as held-out ones, on every rank, in batches of about
    `at_once`; an empty list without any. All ranks call it together.
    """
    batches = []
    for first, count in broadcast_object(chunks(num_rows(demonstrations), at_once), mesh.world):
        samples = take_demonstrations(demonstrations, mesh, first, count)
        assert samples is not None
        batches.append(samples)
    return batches


class SftTask:
    """Supervised fine-tuning of a policy on demonstrations: `take` draws a batch, `train` takes an
    optimizer step on it, `evaluate` computes the loss on held-out demonstrations. The training loop
    `run_supervised` calls them. All ranks create the object and call every method together.
    """

    def __init__(self, context: RunContext, inputs: RunInputs) -> None:
        config = context.config
        self._rows, self._mesh = _demonstrations(inputs.rows), context.mesh
        self.role = context.role("policy", config.model, optimizer_steps=config.steps)
        self._guard = StepGuard(self.role, allowed=config.training.max_skipped_steps)
        assert isinstance(config, SftConfig)
        held_out = _demonstrations(inputs.held_out_rows)
        self._held_out = take_all_demonstrations(held_out, context.mesh, config.samples_per_step)

    def take(self, first: int, count: int, *, stops: bool) -> Samples | None:
        return take_demonstrations(self._rows, self._mesh, first, count, stops=stops)

    def train(self, batch: Samples, step: int) -> StepReport:
        return sft_step(self.role, batch, step, self._guard)

    def evaluate(self) -> dict[str, float]:
        return held_out_loss(self.role, self._held_out)


def _demonstrations(rows: DataRows | None) -> DemonstrationList | None:
    assert rows is None or isinstance(rows, DemonstrationList)
    return rows


def main(config: SftConfig, inputs: RunInputs) -> int:
    """Run `megarl sft`: fine-tune a policy on demonstrations until `config.steps`. Every trainer
    rank calls it; rank 0 prints a summary as one JSON object on standard output. `inputs`:
    tokenizer, data set and so on, as `check_sft` returns them. Returns the exit code 0.
    """
    return run_supervised(config, inputs, lambda context: SftTask(context, inputs))


def sft_step(role: Role, samples: Samples, step: int, guard: StepGuard) -> StepReport:
    """Take one optimizer step of the policy `role` on the token sequences `samples`, which are the
    same on every rank. The loss is the mean of -log-prob over the response tokens of the step.
    `step` counts from 0. `guard` skips a step whose values are not finite; raises `UserError` if it
    has skipped too many, or if a weight is not finite afterwards. Returns the step's number and
    metrics, {name: number}. All ranks call it together.
    """
    guard.begin(f"step {step + 1}")
    started_at = time.monotonic()
    mesh = role.mesh
    share, packed, num_tokens = share_of(samples, role)
    mine = role.pack(share, packed)
    metrics = StepMetrics(role.device, ("loss",))

    def loss(micro: MicroBatch) -> torch.Tensor:
        logprobs, _ = role.engine(micro, 1.0)
        guard.watch("policy's log-probs", logprobs)
        found = -logprobs.sum() / num_tokens
        metrics.add(loss=found.detach().double())
        return found

    taken = optimizer_step(role, mine, loss, guard, metrics)
    if taken is None:
        num_tokens = 0
    guard.check_weights()
    found = metrics.reduce(mesh.gradient) | computed_tokens(mine, role)
    seconds = time.monotonic() - started_at
    found |= {
        "grad_norm": taken[0] if taken else 0.0,
        "learning_rate": taken[1] if taken else role.engine.next_rate(),
        "skipped_steps": float(taken is None),
        "tokens/trained": float(num_tokens),
        "tokens/trained_per_s": len(samples.token_ids) / seconds,
        "time/step_s": seconds,
    }
    return StepReport(step, found | scale_metrics(role))


def share_of(samples: Samples, role: Role) -> tuple[Samples, list[list[int]], int]:
    """Divide `samples`, a batch of token sequences that is the same on every rank, among the data
    ranks of the model `role`, balanced by cost. Returns (samples of this data rank; for each of its
    micro-batches the indices into these samples; number of trained tokens over all ranks). Does not
    communicate.
    """
    mesh, balance = role.mesh, balance_of(samples, role.training.share_prefix, role.windows)
    budget = role.training.micro_batch_tokens * mesh.sequence.size
    dealt = balance.split(mesh.data.size, budget)
    packed = balance.rows_in_step(dealt, budget)
    # Nothing predicts the first token of a sample.
    num_tokens = int(samples.mask.sum() - samples.mask[samples.offsets[:-1]].sum())
    return samples.select(dealt[mesh.data.rank]), packed[mesh.data.rank], num_tokens


@torch.no_grad()
def held_out_loss(role: Role, batches: list[Samples]) -> dict[str, float]:
    """{"eval/loss": mean of -log-prob over the response tokens of all `batches`, "eval/tokens":
    number of these tokens}; {} without batches. All ranks call it together with the same batches.
    """
    if not batches:
        return {}
    metrics, num_tokens = StepMetrics(role.device, ("loss",)), 0
    for samples in batches:
        mine, packed, tokens = share_of(samples, role)
        num_tokens += tokens
        for micro in role.pack(mine, packed):
            logprobs, _ = role.engine(micro, 1.0)
            metrics.add(loss=-logprobs.sum().double())
    total = metrics.reduce(role.mesh.gradient)["loss"]
    return {"eval/loss": total / max(1, num_tokens), "eval/tokens": float(num_tokens)}


def num_rows(demonstrations: DemonstrationList | None) -> int:
    """Number of demonstrations; 0 for None, which all ranks but rank 0 have."""
    return 0 if demonstrations is None else len(demonstrations)
