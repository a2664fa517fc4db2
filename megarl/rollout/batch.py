"""A step's groups are dealt out to data ranks as plans: lengths, rewards and references to token
arrays. A rank fetches the arrays of its own samples and assembles its `StepBatch`.

    groups --shares--> StepGroups --plan(data rank)--> SharePlan --assemble--> StepBatch
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megarl.parallel import balance
from megarl.types import COLUMNS, Group, Rollout, Samples, Segment, StepBatch, TokenArrays

Fetch = Callable[[Sequence[Any]], Sequence[TokenArrays]]
"""References to token arrays (`Segment.arrays`) -> the arrays, in the same order."""


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """One sample without its tokens."""

    sample_id: int
    """Number in the step."""
    prompt_ids: np.ndarray
    """[P] int32; one array for all samples of a group."""
    segments: list[Segment]
    reward: float


@dataclass(frozen=True, slots=True)
class SharePlan:
    """A data rank's share of a step, without the tokens."""

    batch: StepBatch
    """Complete but for `samples`."""
    parts: list[list[SamplePlan]]
    """Per mini-batch, the samples of this rank."""


@dataclass(frozen=True)
class StepGroups:
    """A complete step, dealt out."""

    step: int
    plans: list[SharePlan]
    """Per data rank."""
    shown: list[Group] = field(default_factory=list)
    """The groups to be written out as text."""

    def share(self, data_rank: int) -> StepBatch:
        """The `StepBatch` of a data rank where token arrays are in this process."""
        return assemble(self.plans[data_rank], in_process)


def in_process(arrays: Sequence[Any]) -> Sequence[TokenArrays]:
    """Fetch arrays that are in this process already."""
    return arrays


def assemble(plan: SharePlan, fetch: Fetch) -> StepBatch:
    """Fetch the tokens of a share's samples and return the complete `StepBatch`."""
    segments = [part for samples in plan.parts for one in samples for part in one.segments]
    arrays = iter(fetch([part.arrays for part in segments]))
    return replace(plan.batch, samples=[_columns(samples, arrays) for samples in plan.parts])


def _columns(samples: list[SamplePlan], arrays: Any) -> Samples:
    """Prompts and segments of `samples` as columns: exactly what was sampled, never tokenised
    again. `arrays` yields the `TokenArrays` of their segments in order.
    """
    lengths = [
        len(one.prompt_ids) + sum(part.num_tokens for part in one.segments) for one in samples
    ]
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    made = {name: np.zeros(offsets[-1], dtype) for name, dtype in COLUMNS.items()}
    for one, start in zip(samples, offsets[:-1].tolist(), strict=True):
        end = start + len(one.prompt_ids)
        made["token_ids"][start:end] = one.prompt_ids
        for part in one.segments:
            start, end = end, end + part.num_tokens
            token_ids, logprobs = next(arrays)
            made["token_ids"][start:end] = token_ids
            if part.kind == "model":
                made["engine_logprobs"][start:end] = logprobs
                made["mask"][start:end] = True
        if end > 0:
            made["rewards"][end - 1] = one.reward  # the last segment is the model's
    return Samples(
        ids=np.array([one.sample_id for one in samples], np.int64), offsets=offsets, **made
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
    of packed sequences on each. Needs lengths only.

    Fewer accepted groups than mini-batches make fewer mini-batches; none at all make a step that
    trains on nothing.
    """
    rollouts = [(group, rollout) for group in accepted for rollout in group.rollouts]
    samples = _plans(accepted)
    lengths = [
        len(one.prompt_ids) + sum(part.num_tokens for part in one.segments) for one in samples
    ]
    sizes = [len(group.rollouts) for group in accepted]
    group_of = np.repeat(np.arange(len(accepted)), sizes)
    num_parts = min(num_mini_batches, len(accepted))
    mini_batch_of = group_of * num_parts // max(1, len(accepted))
    dealt: list[list[list[SamplePlan]]] = [[] for _ in range(num_data_ranks)]
    packed: list[list[list[list[int]]]] = [[] for _ in range(num_data_ranks)]
    for part in range(num_parts):
        members = np.flatnonzero(mini_batch_of == part).tolist()
        split = balance.split([lengths[number] for number in members], num_data_ranks)
        of_rank = [[members[position] for position in positions] for positions in split]
        rows = balance.rows_in_step(
            [[lengths[number] for number in numbers] for numbers in of_rank], micro_batch_tokens
        )
        for rank, numbers in enumerate(of_rank):
            dealt[rank].append([samples[number] for number in numbers])
            packed[rank].append(rows[rank])
    whole = StepBatch(
        step=step,
        samples=[],
        micro_batches=[],
        rewards=np.array([rollout.verdict.reward for _, rollout in rollouts], dtype=np.float64),
        groups=group_of,
        response_tokens=np.array([rollout.num_tokens for _, rollout in rollouts], dtype=np.int64),
        mini_batch_of=mini_batch_of,
        metrics=describe(step, drawn, accepted, seconds),
    )
    plans = [
        SharePlan(replace(whole, micro_batches=rows), parts)
        for rows, parts in zip(packed, dealt, strict=True)
    ]
    return StepGroups(step, plans, drawn[:transcripts])


def _plans(groups: list[Group]) -> list[SamplePlan]:
    """The samples of `groups`, numbered in order."""
    made: list[SamplePlan] = []
    for group in groups:
        prompt_ids = np.asarray(group.prompt.token_ids, dtype=np.int32)
        for rollout in group.rollouts:
            reward = rollout.verdict.reward
            made.append(SamplePlan(len(made), prompt_ids, rollout.segments, reward))
    return made


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


def to_transcript(step: int, group: Group, responses: Sequence[str]) -> dict[str, Any]:
    """A group as text; `responses` are the decoded rollouts."""
    return {
        "step": step,
        "ordinal": group.ordinal,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "rollouts": [_transcript(*pair) for pair in zip(group.rollouts, responses, strict=True)],
    }


def _transcript(rollout: Rollout, response: str) -> dict[str, Any]:
    return {
        "response": response,
        "reward": rollout.verdict.reward,
        "correct": rollout.verdict.correct,
        "failure": rollout.verdict.failure,
        "detail": rollout.verdict.detail,
        "tokens": rollout.num_tokens,
        "finish": rollout.segments[-1].finish,
        "versions": [list(span) for part in rollout.segments for span in part.versions],
    }
