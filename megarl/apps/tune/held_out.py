"""The loss of supervised fine-tuning on demonstrations that are not trained on."""

from __future__ import annotations

import itertools

import torch

from megarl.data.demonstrations import DemonstrationList
from megarl.trainer.prefixes import balance_of
from megarl.trainer.role import Role
from megarl.trainer.step import StepMetrics
from megarl.types import Samples


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


def chunks(num_rows: int, at_least: int) -> list[tuple[int, int]]:
    """(first row, number of rows) of chunks of about equal size, each of `at_least` rows or more;
    of all rows if there are fewer, and none without rows.
    """
    count = max(1, num_rows // at_least) if num_rows else 0
    bounds = [num_rows * number // max(1, count) for number in range(count + 1)]
    return [(first, last - first) for first, last in itertools.pairwise(bounds)]


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
