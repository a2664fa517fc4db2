"""A step's groups become samples dealt out to data ranks, with the bookkeeping every rank needs of
the whole step.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.parallel import balance
from megarl.types import Group, Rollout, Samples, StepBatch


@dataclass(frozen=True)
class StepGroups:
    """A complete step, dealt out."""

    step: int
    per_rank: list[StepBatch]

    def share(self, data_rank: int) -> StepBatch:
        """What data rank `data_rank` trains on."""
        return self.per_rank[data_rank]


def to_sample(sample_id: int, group: Group, rollout: Rollout) -> Samples:
    """Prompt and segments as one sequence: exactly what was sampled, never tokenised again."""
    prompt = np.asarray(group.prompt.token_ids, dtype=np.int32)
    parts = rollout.segments
    return Samples.one(
        sample_id,
        np.concatenate([prompt, *(part.token_ids for part in parts)]),
        mask=np.repeat(
            [False, *(part.kind == "model" for part in parts)],
            [len(prompt), *(len(part.token_ids) for part in parts)],
        ),
        engine_logprobs=np.concatenate(
            [np.zeros(len(prompt), np.float32), *(part.logprobs for part in parts)]
        ),
        reward=rollout.verdict.reward,
    )


def shares(
    *,
    step: int,
    drawn: list[Group],
    accepted: list[Group],
    seconds: float,
    num_data_ranks: int,
    num_mini_batches: int,
    micro_batch_tokens: int,
    transcripts: int,
) -> StepGroups:
    """Deal `accepted` out: mini-batches of whole groups, samples balanced over ranks, equal numbers
    of rows on each.

    Fewer accepted groups than mini-batches make fewer mini-batches; none at all make a step that
    trains on nothing.
    """
    rollouts = [(group, rollout) for group in accepted for rollout in group.rollouts]
    samples = [to_sample(number, *pair) for number, pair in enumerate(rollouts)]
    sizes = [len(group.rollouts) for group in accepted]
    group_of = np.repeat(np.arange(len(accepted)), sizes)
    num_parts = min(num_mini_batches, len(accepted))
    mini_batch_of = group_of * num_parts // max(1, len(accepted))
    dealt: list[list[Samples]] = [[] for _ in range(num_data_ranks)]
    packed: list[list[list[list[int]]]] = [[] for _ in range(num_data_ranks)]
    for part in range(num_parts):
        mine = [samples[number] for number in np.flatnonzero(mini_batch_of == part)]
        lengths = [len(sample.token_ids) for sample in mine]
        split = balance.split(lengths, num_data_ranks)
        rows = balance.rows_in_step(
            [[lengths[i] for i in rank] for rank in split], micro_batch_tokens
        )
        for rank, positions in enumerate(split):
            dealt[rank].append(Samples.concatenate([mine[i] for i in positions]))
            packed[rank].append(rows[rank])
    rewards = np.array([rollout.verdict.reward for _, rollout in rollouts], dtype=np.float64)
    tokens = np.array([rollout.num_tokens for _, rollout in rollouts], dtype=np.int64)
    metrics = describe(step, drawn, accepted, seconds)
    shown = [to_transcript(step, group) for group in drawn[:transcripts]]
    return StepGroups(
        step,
        [
            StepBatch(
                step=step,
                samples=dealt[rank],
                micro_batches=packed[rank],
                rewards=rewards,
                groups=group_of,
                response_tokens=tokens,
                mini_batch_of=mini_batch_of,
                metrics=metrics,
                transcripts=shown if rank == 0 else [],
            )
            for rank in range(num_data_ranks)
        ],
    )


def describe(
    step: int, drawn: list[Group], accepted: list[Group], seconds: float
) -> dict[str, float]:
    """Statistics over everything drawn: the accepted groups alone would flatter or belittle the
    policy.
    """
    rollouts = [rollout for group in drawn for rollout in group.rollouts]
    rewards = [rollout.verdict.reward for rollout in rollouts]
    lengths = [rollout.num_tokens for rollout in rollouts]
    failures = [rollout.verdict.failure for rollout in rollouts]
    oldest = [rollout.oldest_version for rollout in rollouts]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "accuracy": statistics.fmean(rollout.verdict.correct for rollout in rollouts),
        "length/mean": statistics.fmean(lengths),
        "length/max": max(lengths),
        "length/truncated_share": statistics.fmean(rollout.truncated for rollout in rollouts),
        "length/penalty": statistics.fmean(rollout.verdict.penalty for rollout in rollouts),
        "groups/drawn": len(drawn),
        "groups/rejected": len(drawn) - len(accepted),
        "staleness/max": max(step - version for version in oldest),
        "staleness/mean": statistics.fmean(step - version for version in oldest),
        "verifier/errors": failures.count("error"),
        "verifier/timeouts": failures.count("timeout"),
        "verifier/nans": failures.count("nan"),
        "tokens/generated": sum(lengths),
        "tokens/generated_per_s": sum(lengths) / max(seconds, 1e-9),
        "time/rollout_s": seconds,
    }


def to_transcript(step: int, group: Group) -> dict[str, Any]:
    """A group in words."""
    return {
        "step": step,
        "ordinal": group.ordinal,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "rollouts": [
            {
                "response": "".join(part.text for part in rollout.segments),
                "reward": rollout.verdict.reward,
                "correct": rollout.verdict.correct,
                "failure": rollout.verdict.failure,
                "detail": rollout.verdict.detail,
                "tokens": rollout.num_tokens,
                "finish": rollout.segments[-1].finish,
                "versions": [list(span) for part in rollout.segments for span in part.versions],
            }
            for rollout in group.rollouts
        ],
    }
