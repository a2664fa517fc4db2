"""A step's groups become samples dealt out to data ranks, with the bookkeeping every rank needs of
the whole step.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from megarl.parallel import balance
from megarl.types import Group, Rollout, Sample, StepBatch


@dataclass(frozen=True)
class StepGroups:
    """A complete step, dealt out."""

    step: int
    per_rank: list[StepBatch]

    def share(self, data_rank: int) -> StepBatch:
        """What data rank `data_rank` trains on."""
        return self.per_rank[data_rank]


def to_sample(row: int, group: Group, rollout: Rollout) -> Sample:
    """Prompt and turns as one row of tokens: exactly what was sampled, never tokenised again."""
    tokens, mask, logprobs = (
        list(group.prompt.token_ids),
        [False] * len(group.prompt.token_ids),
        [0.0] * len(group.prompt.token_ids),
    )
    for turn in rollout.turns:
        tokens += turn.token_ids
        mask += [True] * len(turn.token_ids)
        logprobs += turn.logprobs
    return Sample(row, tokens, mask, logprobs)


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
    samples: list[Sample] = []
    number_of: list[int] = []
    part_of: list[int] = []
    parts = min(num_mini_batches, len(accepted))
    for number, group in enumerate(accepted):
        for rollout in group.rollouts:
            samples.append(to_sample(len(samples), group, rollout))
            number_of.append(number)
            part_of.append(number * parts // len(accepted))
    dealt: list[list[list[Sample]]] = [[] for _ in range(num_data_ranks)]
    rows: list[list[list[list[int]]]] = [[] for _ in range(num_data_ranks)]
    for part in range(parts):
        mine = [sample for sample, belongs in zip(samples, part_of, strict=True) if belongs == part]
        lengths = [len(sample.token_ids) for sample in mine]
        split = balance.split(lengths, num_data_ranks)
        packed = balance.rows_in_step(
            [[lengths[i] for i in rank] for rank in split], micro_batch_tokens
        )
        for rank, positions in enumerate(split):
            dealt[rank].append([mine[i] for i in positions])
            rows[rank].append(packed[rank])
    rewards = [rollout.verdict.reward for group in accepted for rollout in group.rollouts]
    tokens = [rollout.num_tokens for group in accepted for rollout in group.rollouts]
    metrics = describe(step, drawn, accepted, seconds)
    shown = [to_transcript(step, group) for group in drawn[:transcripts]]
    return StepGroups(
        step,
        [
            StepBatch(
                step=step,
                samples=dealt[rank],
                micro_batches=rows[rank],
                rewards=rewards,
                groups=number_of,
                response_tokens=tokens,
                mini_batch_of=part_of,
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
    oldest = [
        min(version for turn in rollout.turns for version, _ in turn.versions)
        for rollout in rollouts
    ]
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
                "response": "".join(turn.text for turn in rollout.turns),
                "reward": rollout.verdict.reward,
                "correct": rollout.verdict.correct,
                "failure": rollout.verdict.failure,
                "detail": rollout.verdict.detail,
                "tokens": rollout.num_tokens,
                "finish": rollout.turns[-1].finish,
                "versions": [list(span) for turn in rollout.turns for span in turn.versions],
            }
            for rollout in group.rollouts
        ],
    }
