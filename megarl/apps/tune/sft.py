"""Supervised fine-tuning: demonstrations in, the same policy network, engine and packing as
reinforcement learning.

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
    """Concatenate prompt and response into one sample; only response tokens are trained on, and of
    a conversation only the assistant's.
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
    """The samples of `count` demonstrations from position `first`, on every rank. Rank 0, which
    alone has the demonstrations, sends them: about 13 bytes for each token. None on every rank if
    rank 0 `stops`.
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
    """All held-out demonstrations of rank 0, on every rank, in batches of about `at_once`."""
    batches = []
    for first, count in broadcast_object(chunks(num_rows(demonstrations), at_once), mesh.world):
        samples = take_demonstrations(demonstrations, mesh, first, count)
        assert samples is not None
        batches.append(samples)
    return batches


class SftTask:
    """Supervised fine-tuning of a policy on demonstrations."""

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
    """`megarl sft`: supervised fine-tuning; see `run_supervised`."""
    return run_supervised(config, inputs, lambda context: SftTask(context, inputs))


def sft_step(role: Role, samples: Samples, step: int, guard: StepGuard) -> StepReport:
    """Take one optimizer step on `samples`, which are the same on every rank. The loss is the mean
    of -log-prob over the response tokens of the step. Raises `UserError` if `guard` allows no step
    without finite values, or if a weight is not finite afterwards.
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
    """(samples of this data rank, indices of each of its micro-batches, number of trained tokens
    over all ranks). `samples` are the same on every rank.
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
    their number}; {} without batches. All ranks call it together with the same batches.
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
    """Number of demonstrations; 0 for None."""
    return 0 if demonstrations is None else len(demonstrations)
