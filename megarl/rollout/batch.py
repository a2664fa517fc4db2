"""A step's groups, divided over the data-parallel ranks as plans without token arrays. A rank
fetches the arrays of its own samples.

    groups --shares--> StepGroups --plan(data rank)--> SharePlan --assemble--> StepBatch
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megarl.parallel.prefix_balance import FamilyBalance
from megarl.parallel.prefix_tree import Size, chains, copied
from megarl.rollout.attempts import path_numbers
from megarl.rollout.transcripts import about, record_of
from megarl.settings.objectives import TruncatedName
from megarl.types import (
    COLUMNS,
    Group,
    Rollout,
    Samples,
    Segment,
    StepBatch,
    TokenArrays,
    unreported_experts,
)

Fetch = Callable[[Sequence[Any]], Sequence[TokenArrays]]
"""Loads token arrays by values of `Segment.arrays`, in their order."""


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """One sample of a step; its segments have references instead of arrays, so that it is cheap to
    send.
    """

    sample_id: int
    """Index in the step."""
    prompt_ids: np.ndarray
    """[P] int32; all samples of a group share one array."""
    segments: list[Segment]
    final_reward: float
    """Those of earlier turns are in the segments."""
    is_trained: bool = True
    """False for a greedy response, and for one that was cut off and is left out."""

    @property
    def length(self) -> int:
        """Tokens of prompt and segments."""
        return len(self.prompt_ids) + sum(segment.num_tokens for segment in self.segments)

    @property
    def branches(self) -> np.ndarray:
        """[B, 2] as `Samples.branches`, counted from the prompt's first token."""
        rows, end = list[tuple[int, int]](), len(self.prompt_ids)
        lasts = [end - 1]  # of the prompt and of each segment; an empty one ends where it begins
        for segment in self.segments:
            before = (
                -1
                if segment.follows == -1
                else lasts[-1 if segment.follows is None else 1 + segment.follows]
            )
            if segment.num_tokens and before != end - 1:
                rows.append((end, before))
            end += segment.num_tokens
            lasts.append(end - 1 if segment.num_tokens else before)
        return np.array(rows, np.int64).reshape(-1, 2)

    @property
    def computed(self) -> int:
        """Tokens that training computes: its own, and some once more where it branches."""
        branches = self.branches
        if not len(branches):
            return self.length
        kinds = [False, *(segment.kind == "model" and self.is_trained for segment in self.segments)]
        tokens = [len(self.prompt_ids), *(segment.num_tokens for segment in self.segments)]
        return self.length + len(copied(branches, np.repeat(kinds, tokens)))


@dataclass(frozen=True, slots=True)
class SharePlan:
    """The samples of a step that one rank trains on, without token arrays."""

    batch: StepBatch
    """The rank's `StepBatch`, still without `samples`."""
    parts: list[list[SamplePlan]]
    """For each mini-batch, the rank's samples."""


@dataclass(frozen=True)
class StepGroups:
    """All samples of a step, divided over the ranks."""

    step: int
    plans: list[SharePlan]
    """By data-parallel rank."""
    shown: list[Group] = field(default_factory=list)
    """Groups whose text goes to the transcripts."""

    def share(self, data_rank: int) -> StepBatch:
        """A rank's batch, if the segments hold their token arrays."""
        return assemble(self.plans[data_rank], list)


def assemble(plan: SharePlan, fetch: Fetch) -> StepBatch:
    """The batch of a rank. `fetch` is called once."""
    segments = [turn for samples in plan.parts for sample in samples for turn in sample.segments]
    arrays = iter(fetch([turn.arrays for turn in segments]))
    return replace(plan.batch, samples=[_columns(samples, arrays) for samples in plan.parts])


def _columns(samples: list[SamplePlan], arrays: Any) -> Samples:
    """Per-token columns of the samples: prompt and segments, one after the other. `arrays` yields
    the segments' `TokenArrays`, in order. A segment's reward goes to the model's last token so far.
    """
    offsets = np.cumsum([0, *(sample.length for sample in samples)], dtype=np.int64)
    columns = {name: np.zeros(offsets[-1], dtype) for name, dtype in COLUMNS.items()}
    branches, experts = [np.zeros((0, 2), np.int64)], _Experts(int(offsets[-1]))
    for sample, start in zip(samples, offsets[:-1].tolist(), strict=True):
        branches.append(sample.branches)
        branches[-1][branches[-1] >= 0] += start  # -1: continues no token
        first, end = start, start + len(sample.prompt_ids)
        columns["token_ids"][start:end] = sample.prompt_ids
        answered, places = end - 1, [np.arange(start, end)]
        for number, segment in enumerate(sample.segments):
            start, end = end, end + segment.num_tokens
            token_ids, logprobs, chosen = next(arrays)
            places.append(np.arange(start, end))
            if chosen is not None:
                path = path_numbers(sample.segments, number)  # what it continues, in a tree
                experts.fill([places[0], *(places[1 + n] for n in path)], chosen)
            columns["token_ids"][start:end] = token_ids
            if sample.is_trained and segment.reward and answered >= first:
                columns["rewards"][answered] += segment.reward
            if segment.kind == "model":
                columns["engine_logprobs"][start:end] = logprobs
                columns["mask"][start:end] = sample.is_trained
                answered = end - 1  # the last token of the model segment made last
        if end > 0 and sample.is_trained:
            columns["rewards"][end - 1] = sample.final_reward  # the last segment is the model's
    return Samples(
        ids=np.array([sample.sample_id for sample in samples], np.int64),
        offsets=offsets,
        prompts=np.array([len(sample.prompt_ids) for sample in samples], np.int64),
        branches=np.concatenate(branches),
        experts=experts.column,
        **columns,
    )


@dataclass
class _Experts:
    """`Samples.experts` of `num_tokens` tokens, made at the first report."""

    num_tokens: int
    column: np.ndarray | None = None

    def fill(self, places: Sequence[np.ndarray], experts: np.ndarray) -> None:
        """`experts` [C, layers, K]: of the last C of the tokens at `places`, in order."""
        missing = unreported_experts(experts.dtype)
        if self.column is None:
            self.column = np.full((self.num_tokens, *experts.shape[1:]), missing, experts.dtype)
        is_told = experts[:, 0, 0] != missing
        self.column[np.concatenate(places)[-len(experts) :][is_told]] = experts[is_told]


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
    truncated: TruncatedName = "train",
    sends_untrained: bool = False,
    skips_equal: bool = False,
    stale: int | None = None,
    carried: Collection[int] = (),
    prefix_saves: float = math.inf,
    windows: Sequence[int | None] = (),
) -> StepGroups:
    """Divide the `accepted` groups of a step into mini-batches of whole groups, and each mini-batch
    over the ranks, balanced by length. Every rank gets equally many packed sequences.

    `drawn`: also the rejected groups. `seconds`: duration of the rollouts. `transcripts`: groups to
    show as text. `truncated`: "leave_out" does not train on rollouts that were cut off.
    `sends_untrained`: send their tokens too, for a reward model. `skips_equal`: send no groups of
    equal rewards, whose advantages are 0; a mini-batch of such groups sends one sample, so that its
    optimizer step is taken. `stale`: groups given up for their age; None if the policy gives up
    none. `carried`: ordinals of groups from a checkpoint. `prefix_saves`: a common prefix is
    computed once if this saves at least this fraction of tokens. `windows`: each layer's sliding
    attention window, None for full attention.
    """
    accepted, samples = _plans(accepted, truncated)
    rollouts = [rollout for group in accepted for rollout in _members(group)]
    group_of = np.repeat(np.arange(len(accepted)), [len(_members(group)) for group in accepted])
    sizes = _sizes(samples, accepted, group_of, prefix_saves)
    num_parts = min(num_mini_batches, len(accepted))
    mini_batch_of = group_of * num_parts // max(1, len(accepted))
    is_equal = np.array(
        [
            skips_equal and len({rollout.reward for rollout in group.rollouts}) == 1
            for group in accepted
        ],
        dtype=bool,
    )
    numbers = [np.flatnonzero(mini_batch_of == batch) for batch in range(num_parts)]
    parts = [_sent(members, samples, group_of, is_equal, sends_untrained) for members in numbers]
    dealt, packed = _deal(
        parts, sizes, num_data_ranks, micro_batch_tokens, saves=prefix_saves, windows=windows
    )
    whole = StepBatch(
        step=step,
        samples=[],
        micro_batches=[],
        rewards=np.array([rollout.reward for rollout in rollouts], dtype=np.float64),
        groups=group_of,
        response_tokens=np.array(
            [
                rollout.num_tokens * plan.is_trained
                for rollout, plan in zip(rollouts, samples, strict=True)
            ],
            dtype=np.int64,
        ),
        mini_batch_of=mini_batch_of,
        metrics=describe(step, drawn, accepted, seconds, carried)
        | {"samples/computed": sum(samples[n].is_trained for batch in parts for n in batch)}
        | ({"groups/stale": stale} if stale is not None else {})
        | ({"groups/equal": int(is_equal.sum())} if skips_equal else {}),
        warning=warning,
    )
    plans = [
        SharePlan(
            replace(whole, micro_batches=rows),
            [[samples[n] for n in batch] for batch in batches],
        )
        for rows, batches in zip(packed, dealt, strict=True)
    ]
    return StepGroups(step, plans, drawn[:transcripts])


def _sent(
    numbers: np.ndarray,
    samples: Sequence[SamplePlan],
    group_of: np.ndarray,
    is_equal: np.ndarray,
    sends_untrained: bool,
) -> list[int]:
    """A mini-batch's samples that are sent to the ranks, at least one."""
    every = numbers.tolist()
    members = [n for n in every if sends_untrained or samples[n].is_trained]
    return [n for n in members if not is_equal[group_of[n]]] or (members or every)[:1]


def _deal(
    parts: Sequence[Sequence[int]],
    sizes: Sequence[Size],
    ranks: int,
    budget: int,
    *,
    saves: float,
    windows: Sequence[int | None],
) -> tuple[list[list[list[int]]], list[list[list[list[int]]]]]:
    """By rank and mini-batch: (numbers of the rank's samples, its packed sequences of at most
    `budget` tokens as positions among these).
    """
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    packed: list[list[list[list[int]]]] = [[] for _ in range(ranks)]
    for batch in parts:
        even = FamilyBalance([sizes[n] for n in batch], saves, windows=windows)
        split = even.split(ranks, budget)
        rows = even.rows_in_step(split, budget)
        for rank, positions in enumerate(split):
            dealt[rank].append([batch[position] for position in positions])
            packed[rank].append(rows[rank])
    return dealt, packed


def _members(group: Group) -> list[Rollout]:
    """The greedy response, if there is one, is last."""
    return group.rollouts if group.greedy is None else [*group.rollouts, group.greedy]


def _sizes(
    samples: Sequence[SamplePlan],
    groups: Sequence[Group],
    group_of: np.ndarray,
    prefix_saves: float,
) -> list[Size]:
    """What each sample costs: its tokens, and the prefix in common with others, the prompt without
    its last token. `group_of` [N]: index in `groups`.
    """
    if math.isinf(prefix_saves):
        return [Size(sample.computed) for sample in samples]
    prompts = [np.asarray(group.prompt.token_ids[:-1], np.int32) for group in groups]
    prefixes = chains(prompts)
    return [
        # A rollout may begin with a conversation of its own, without the prompt.
        Size(sample.computed, prefixes[group] if len(sample.prompt_ids) else ())
        for sample, group in zip(samples, group_of, strict=True)
    ]


def _plans(groups: list[Group], truncated: TruncatedName) -> tuple[list[Group], list[SamplePlan]]:
    """(the groups to train on, their samples with consecutive ids)."""
    if truncated == "leave_out":
        groups = [
            replace(
                group, rollouts=[rollout for rollout in group.rollouts if not rollout.truncated]
            )
            if group.greedy
            else group
            for group in groups
        ]
    plans: list[SamplePlan] = []
    for group in groups:
        prompt_ids = np.asarray(group.prompt.token_ids, dtype=np.int32)
        for rollout in _members(group):
            begins_anew = rollout.segments[0].follows == -1
            plans.append(
                SamplePlan(
                    len(plans),
                    prompt_ids[:0] if begins_anew else prompt_ids,
                    rollout.segments,
                    rollout.verdict.reward,
                    is_trained=rollout is not group.greedy
                    and not (truncated == "leave_out" and rollout.truncated),
                )
            )
    return groups, plans


def describe(
    step: int,
    drawn: list[Group],
    accepted: list[Group],
    seconds: float,
    carried: Collection[int] = (),
) -> dict[str, float]:
    """Metrics of a step's rollouts. Those of token age are over `accepted`; all others over
    `drawn`, since accepted groups alone would give biased averages. Groups `carried` from a
    checkpoint are left out of tokens per second. A rollout's staleness is `step` minus its
    oldest weight version.
    """
    greedy = [group.greedy for group in drawn if group.greedy is not None]
    scored = [rollout for group in drawn for rollout in group.rollouts]
    every = [rollout for group in drawn for rollout in group.members]
    sampled = [
        (group.prompt, rollout)
        for group in drawn
        for rollout in group.members
        if rollout is not group.greedy and rollout.sample >= 0
    ]
    without = [rollout.verdict.missing for rollout in every]
    oldest = [rollout.oldest_version for rollout in every if rollout.segments]
    of_greedy = (
        {
            "reward/greedy_mean": statistics.fmean(rollout.reward for rollout in greedy),
            "accuracy_greedy": statistics.fmean(rollout.verdict.correct for rollout in greedy),
        }
        if greedy
        else {}
    )
    generated = sum(rollout.num_tokens for rollout in every)
    before = [rollout for group in drawn if group.ordinal in carried for rollout in group.members]
    generated_now = generated - sum(rollout.num_tokens for rollout in before)
    return (
        {
            "reward/std": statistics.pstdev([rollout.reward for rollout in scored] or [0.0]),
            "length/max": max(rollout.num_tokens for _, rollout in sampled),
            "length/penalty": statistics.fmean(
                [rollout.verdict.penalty for rollout in scored] or [0.0]
            ),
            "groups/drawn": len(drawn),
            "groups/rejected": len(drawn) - len(accepted),
            "staleness/max": max((step - version for version in oldest), default=0),
            "staleness/mean": statistics.fmean([step - version for version in oldest] or [0.0]),
            **{f"verifier/{name}": without.count(reason) for reason, name in COUNTED.items()},
            "tokens/generated": generated,
            "tokens/generated_per_s": generated_now / max(seconds, 1e-9),
            "time/rollout_s": seconds,
        }
        | token_ages(step, accepted)
        | of_greedy
        | response_metrics(
            [
                about(prompt) | record_of(rollout.segments, rollout.verdict, ())
                for prompt, rollout in sampled
            ]
        )
    )


COUNTED = {
    "error": "errors",
    "timeout": "timeouts",
    "nan": "nans",
    "response_limit": "response_limits",
    "abstained": "abstained",
}
"""{why there is no score: its metric, after "verifier/"}"""


def token_ages(step: int, accepted: Sequence[Group]) -> dict[str, float]:
    """`staleness/token_mean` and `staleness/token_max`: `step` minus the version of each generated
    token, without greedy responses; 0 without tokens.
    """
    spans = [
        (step - version, count)
        for group in accepted
        for rollout in group.rollouts
        for segment in rollout.segments
        for version, count in segment.versions
        if count > 0
    ]
    tokens = sum(count for _, count in spans)
    return {
        "staleness/token_mean": sum(age * count for age, count in spans) / max(1, tokens),
        "staleness/token_max": max((age for age, _ in spans), default=0),
    }


def own_metrics(returned: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """{"environment/<name>": mean} of the verifiers' metrics {name: value}, over the responses that
    have the name, and ".../responses", their number.
    """
    values: dict[str, list[float]] = {}
    for metrics in returned:
        for name, value in metrics.items():
            values.setdefault(f"environment/{name}", []).append(value)
    means = {name: statistics.fmean(numbers) for name, numbers in sorted(values.items())}
    return means | {f"{name}/responses": float(len(values[name])) for name in means}


def response_metrics(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of responses, given by their records: "accuracy", "reward/mean" (both over those not
    left out), "length/mean", "length/truncated_share", `own_metrics`. In a mixture also
    "source/<name>/<mean>".
    """
    metrics = _means(records) | own_metrics([record.get("metrics", {}) for record in records])
    for name in sorted({record.get("environment", "") for record in records} - {""}):
        chosen = [record for record in records if record.get("environment") == name]
        metrics |= {f"source/{name}/{mean}": value for mean, value in _means(chosen).items()}
        metrics[f"source/{name}/responses"] = float(len(chosen))
    return metrics


def _means(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    scored = [row for row in records if not row.get("left_out")]
    count, num_scored = max(1, len(records)), max(1, len(scored))
    return {
        "accuracy": sum(row["correct"] for row in scored) / num_scored,
        "reward/mean": math.fsum(row["reward"] for row in scored) / num_scored,
        "reward/responses": float(len(scored)),
        "length/mean": sum(row["tokens"] for row in records) / count,
        "length/truncated_share": sum(row["finish"] not in ("stop", "") for row in records) / count,
    }
