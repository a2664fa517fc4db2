"""A step's groups are dealt out to data ranks as plans: lengths, rewards and references to token
arrays. A rank fetches the arrays of its own samples and assembles its `StepBatch`.

    groups --shares--> StepGroups --plan(data rank)--> SharePlan --assemble--> StepBatch
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megarl.parallel import balance
from megarl.types import COLUMNS, Group, Rollout, Samples, Segment, StepBatch, TokenArrays

Fetch = Callable[[Sequence[Any]], Sequence[TokenArrays]]
"""A function that loads token arrays, given references to them (`Segment.arrays`), in the same
order."""


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """One sample of a step, with references to its token arrays instead of the arrays."""

    sample_id: int
    """Index of the sample in the step."""
    prompt_ids: np.ndarray
    """[P] int32 prompt tokens; all samples of a group share one array."""
    segments: list[Segment]
    reward: float


@dataclass(frozen=True, slots=True)
class SharePlan:
    """The samples of a step that one data-parallel rank trains on, without their token arrays."""

    batch: StepBatch
    """The rank's `StepBatch`, in which only `samples` is still to be filled."""
    parts: list[list[SamplePlan]]
    """For each mini-batch, the samples of this rank."""


@dataclass(frozen=True)
class StepGroups:
    """A complete step, divided over the data-parallel ranks."""

    step: int
    plans: list[SharePlan]
    """For each data-parallel rank, its samples."""
    shown: list[Group] = field(default_factory=list)
    """Groups whose text is written to the transcripts."""

    def share(self, data_rank: int) -> StepBatch:
        """The `StepBatch` of `data_rank`; the token arrays must be in this process."""
        return assemble(self.plans[data_rank], in_process)


def in_process(arrays: Sequence[Any]) -> Sequence[TokenArrays]:
    """A `Fetch` for arrays that are in this process already: returns them unchanged."""
    return arrays


def assemble(plan: SharePlan, fetch: Fetch) -> StepBatch:
    """Fetch the token arrays of a rank's samples and return the complete `StepBatch`."""
    segments = [part for samples in plan.parts for one in samples for part in one.segments]
    arrays = iter(fetch([part.arrays for part in segments]))
    return replace(plan.batch, samples=[_columns(samples, arrays) for samples in plan.parts])


def _columns(samples: list[SamplePlan], arrays: Any) -> Samples:
    """Concatenate prompts and segments of `samples` into per-token columns. The tokens are those
    sampled; text is not tokenised again. `arrays` yields the `TokenArrays` of the segments in
    order.
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
    warning: str = "",
) -> StepGroups:
    """Divide the `accepted` groups into mini-batches of whole groups, and each mini-batch over the
    ranks. Samples are balanced by length, and every rank gets equally many packed sequences. Only
    lengths are read.

    With fewer accepted groups than mini-batches there are fewer mini-batches. A step without
    accepted groups trains on nothing.
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
        warning=warning,
    )
    plans = [
        SharePlan(replace(whole, micro_batches=rows), parts)
        for rows, parts in zip(packed, dealt, strict=True)
    ]
    return StepGroups(step, plans, drawn[:transcripts])


def _plans(groups: list[Group]) -> list[SamplePlan]:
    """The samples of `groups`, with consecutive sample ids."""
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
    """Metrics over all drawn groups, also those that dynamic sampling rejected: the accepted groups
    alone would give biased averages.
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
    } | own_metrics([rollout.verdict.metrics for rollout in rollouts])


def own_metrics(returned: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """{"environment/<name>": mean} of the metrics that verifiers returned with their verdicts, each
    over the verdicts that have it.
    """
    values: dict[str, list[float]] = {}
    for metrics in returned:
        for name, value in metrics.items():
            values.setdefault(f"environment/{name}", []).append(value)
    return {name: statistics.fmean(found) for name, found in sorted(values.items())}


def to_transcript(step: int, group: Group, responses: Sequence[str]) -> dict[str, Any]:
    """The record of a group for the transcripts. `responses`: the decoded responses of its
    rollouts.
    """
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
        **({"metrics": rollout.verdict.metrics} if rollout.verdict.metrics else {}),
        "tokens": rollout.num_tokens,
        "finish": rollout.segments[-1].finish,
        "versions": [list(span) for part in rollout.segments for span in part.versions],
    }
