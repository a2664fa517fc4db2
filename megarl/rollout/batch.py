"""A step's groups (all rollouts of a prompt) are divided over the data-parallel ranks as plans:
lengths, rewards and references to token arrays. A rank fetches the arrays of its own samples and
assembles its `StepBatch`.

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
from megarl.rollout.transcripts import about, record_of
from megarl.settings.objectives import TruncatedName
from megarl.types import COLUMNS, Group, Rollout, Samples, Segment, StepBatch, TokenArrays

Fetch = Callable[[Sequence[Any]], Sequence[TokenArrays]]
"""A function that loads token arrays: gets references to them (values of `Segment.arrays`), and
returns the arrays in the same order."""


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """One sample of a step: a prompt with one rollout. So that it is cheap to send, its `segments`
    do not hold the arrays of token ids and log-probs, but references to the arrays in Ray's object
    store.
    """

    sample_id: int
    """Index of the sample in the step, from 0."""
    prompt_ids: np.ndarray
    """[P] int32 prompt tokens; all samples of a group share one array."""
    segments: list[Segment]
    final_reward: float
    """Reward at the end of the rollout; those of earlier turns are in the segments."""
    is_trained: bool = True
    """False for a greedy response, which others are compared with, and for one that was cut off
    and is to be left out of the loss."""

    @property
    def length(self) -> int:
        """Number of tokens of prompt and segments together."""
        return len(self.prompt_ids) + sum(part.num_tokens for part in self.segments)

    @property
    def branches(self) -> np.ndarray:
        """[B, 2] int64, each place where a token does not continue the one before it, as (index of
        that token, index of the token that it continues, or -1 for none), counted from the first
        token of the prompt; no rows for a rollout that is one chain.
        """
        found, end = list[tuple[int, int]](), len(self.prompt_ids)
        lasts = [end - 1]  # of the prompt and of each segment; an empty one ends where it begins
        for part in self.segments:
            before = (
                -1
                if part.follows == -1
                else lasts[-1 if part.follows is None else 1 + part.follows]
            )
            if part.num_tokens and before != end - 1:
                found.append((end, before))
            end += part.num_tokens
            lasts.append(end - 1 if part.num_tokens else before)
        return np.array(found, np.int64).reshape(-1, 2)

    @property
    def computed(self) -> int:
        """Number of tokens that training computes for the sample: its own, and some once more where
        it branches.
        """
        branches = self.branches
        if not len(branches):
            return self.length
        kinds = [False, *(part.kind == "model" and self.is_trained for part in self.segments)]
        tokens = [len(self.prompt_ids), *(part.num_tokens for part in self.segments)]
        return self.length + len(copied(branches, np.repeat(kinds, tokens)))


@dataclass(frozen=True, slots=True)
class SharePlan:
    """The samples of a step that one data-parallel rank trains on, without their token arrays. The
    rollout service sends it to the rank, which makes a `StepBatch` of it by `assemble`.
    """

    batch: StepBatch
    """The rank's `StepBatch`, in which only `samples` is still to be filled."""
    parts: list[list[SamplePlan]]
    """For each mini-batch, the samples of this rank."""


@dataclass(frozen=True)
class StepGroups:
    """All samples of a step, divided over the data-parallel ranks by `shares`: for each rank the
    plan (`SharePlan`) of what it trains on, and the groups to show as text.
    """

    step: int
    plans: list[SharePlan]
    """For each data-parallel rank, its samples."""
    shown: list[Group] = field(default_factory=list)
    """Groups whose text is written to the transcripts."""

    def share(self, data_rank: int) -> StepBatch:
        """The batch that the rank `data_rank` trains on: token ids, log-probs and rewards for each
        mini-batch. Works only if the segments hold their token arrays; for segments with references
        to arrays in Ray's object store use `assemble`.
        """
        return assemble(self.plans[data_rank], list)


def assemble(plan: SharePlan, fetch: Fetch) -> StepBatch:
    """The batch that a data-parallel rank trains on, with the token ids, log-probs and rewards of
    its samples. `plan`: what the rollout service has sent the rank, the samples without these
    arrays; not changed. `fetch`: function that returns the token arrays for a list of references to
    them (`Segment.arrays`), in that order; called once.
    """
    segments = [part for samples in plan.parts for one in samples for part in one.segments]
    arrays = iter(fetch([part.arrays for part in segments]))
    return replace(plan.batch, samples=[_columns(samples, arrays) for samples in plan.parts])


def _columns(samples: list[SamplePlan], arrays: Any) -> Samples:
    """Concatenate prompts and segments of `samples` into per-token columns. The tokens are those
    sampled; text is not tokenised again. `arrays` yields the `TokenArrays` of the segments in
    order.
    """
    offsets = np.cumsum([0, *(one.length for one in samples)], dtype=np.int64)
    made = {name: np.zeros(offsets[-1], dtype) for name, dtype in COLUMNS.items()}
    branches = [np.zeros((0, 2), np.int64)]
    for one, start in zip(samples, offsets[:-1].tolist(), strict=True):
        branches.append(one.branches)
        branches[-1][branches[-1] >= 0] += start
        first, end = start, start + len(one.prompt_ids)
        made["token_ids"][start:end] = one.prompt_ids
        answered = end - 1
        for part in one.segments:
            start, end = end, end + part.num_tokens
            token_ids, logprobs = next(arrays)
            made["token_ids"][start:end] = token_ids
            if one.is_trained and part.reward and answered >= first:
                made["rewards"][answered] += part.reward
            if part.kind == "model":
                made["engine_logprobs"][start:end] = logprobs
                made["mask"][start:end] = one.is_trained
                answered = end - 1  # the last token of the model segment made last
        if end > 0 and one.is_trained:
            made["rewards"][end - 1] = one.final_reward  # the last segment is the model's
    return Samples(
        ids=np.array([one.sample_id for one in samples], np.int64),
        offsets=offsets,
        prompts=np.array([len(one.prompt_ids) for one in samples], np.int64),
        branches=np.concatenate(branches),
        **made,
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
    truncated: TruncatedName = "train",
    sends_untrained: bool = False,
    skips_equal: bool = False,
    stale: int | None = None,
    carried: Collection[int] = (),
    prefix_saves: float = math.inf,
    windows: Sequence[int | None] = (),
) -> StepGroups:
    """Divide the `accepted` groups (all rollouts of a prompt) of a step into mini-batches of whole
    groups, and each mini-batch over the data ranks, balanced by length; every rank gets equally
    many packed sequences, of at most `micro_batch_tokens` tokens. Token arrays are not read. With
    fewer accepted groups than `num_mini_batches`, there are only as many mini-batches as groups.

    `drawn`: accepted and rejected groups, for the metrics. `seconds`: duration of the step's
    rollouts. `transcripts`: number of groups to write as text. `warning`: text to show to the user,
    "" for none.

    `truncated`: with "leave_out", rollouts that were cut off are not trained on; they count in the
    mean of their group, unless a greedy response is compared with. `sends_untrained`: send the
    ranks also the tokens of samples that are not trained on, which get a reward from a reward model
    there. `skips_equal`: do not send groups of equal rewards, whose advantages are 0; their rewards
    and token counts still count in the step. A mini-batch of such groups alone sends one sample, so
    that its optimizer step, of momentum alone, is taken.

    `stale`: number of groups that the dispatch policy gave up for their age, for the metrics; None
    if the policy gives up none. `carried`: ordinals (positions in the training order) of the groups
    that came from a checkpoint. `prefix_saves`: a common beginning of prompts is computed only once
    if this saves at least this fraction of the samples' tokens; infinite: never. `windows`: for
    each layer the model's sliding attention window in tokens, None for full attention; empty if all
    layers have full attention.
    """
    accepted, samples = _plans(accepted, truncated)
    rollouts = [rollout for group in accepted for rollout in _members(group)]
    group_of = np.repeat(np.arange(len(accepted)), [len(_members(group)) for group in accepted])
    sizes = _sizes(samples, accepted, group_of, prefix_saves)
    num_parts = min(num_mini_batches, len(accepted))
    mini_batch_of = group_of * num_parts // max(1, len(accepted))
    is_equal = np.array(
        [skips_equal and len({one.reward for one in group.rollouts}) == 1 for group in accepted],
        dtype=bool,
    )
    numbers = [np.flatnonzero(mini_batch_of == part) for part in range(num_parts)]
    parts = [_sent(one, samples, group_of, is_equal, sends_untrained) for one in numbers]
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
            [one.num_tokens * plan.is_trained for one, plan in zip(rollouts, samples, strict=True)],
            dtype=np.int64,
        ),
        mini_batch_of=mini_batch_of,
        metrics=describe(step, drawn, accepted, seconds, carried)
        | {"samples/computed": sum(samples[n].is_trained for part in parts for n in part)}
        | ({"groups/stale": stale} if stale is not None else {})
        | ({"groups/equal": int(is_equal.sum())} if skips_equal else {}),
        warning=warning,
    )
    plans = [
        SharePlan(replace(whole, micro_batches=rows), [[samples[n] for n in part] for part in mine])
        for rows, mine in zip(packed, dealt, strict=True)
    ]
    return StepGroups(step, plans, drawn[:transcripts])


def _sent(
    numbers: np.ndarray,
    samples: Sequence[SamplePlan],
    group_of: np.ndarray,
    is_equal: np.ndarray,
    sends_untrained: bool,
) -> list[int]:
    """Which of a mini-batch's samples are sent to the ranks: not those that are not trained on,
    unless `sends_untrained`, and not those of groups of equal rewards (`is_equal`), but at least
    one sample.
    """
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
    """Divide each mini-batch of `parts`, the numbers of its samples, over ranks. Returns by rank
    and mini-batch (the numbers of the rank's samples, its packed sequences of at most `budget`
    tokens as positions among these).
    """
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    packed: list[list[list[list[int]]]] = [[] for _ in range(ranks)]
    for part in parts:
        even = FamilyBalance([sizes[n] for n in part], saves, windows=windows)
        split = even.split(ranks, budget)
        rows = even.rows_in_step(split, budget)
        for rank, positions in enumerate(split):
            dealt[rank].append([part[position] for position in positions])
            packed[rank].append(rows[rank])
    return dealt, packed


def _members(group: Group) -> list[Rollout]:
    """The rollouts of a group and, at the end, its greedy response if it has one."""
    return group.rollouts if group.greedy is None else [*group.rollouts, group.greedy]


def _sizes(
    samples: Sequence[SamplePlan],
    groups: Sequence[Group],
    group_of: np.ndarray,
    prefix_saves: float,
) -> list[Size]:
    """What each of `samples` costs to compute, for dividing the samples over ranks: its number of
    tokens, and the prefix that it has in common with other samples. `group_of` [N]: index in
    `groups` of each sample's group. The prefix is the prompt without its last token, which each
    sample computes for itself, since it predicts the response. There are no prefixes where
    `prefix_saves` is infinite.
    """
    if math.isinf(prefix_saves):
        return [Size(one.computed) for one in samples]
    prompts = [np.asarray(group.prompt.token_ids[:-1], np.int32) for group in groups]
    prefixes = chains(prompts)
    return [
        # A rollout may begin with a conversation of its own, without the prompt.
        Size(one.computed, prefixes[group] if len(one.prompt_ids) else ())
        for one, group in zip(samples, group_of, strict=True)
    ]


def _plans(groups: list[Group], truncated: TruncatedName) -> tuple[list[Group], list[SamplePlan]]:
    """(the `groups` to train on, their samples with consecutive sample ids)."""
    if truncated == "leave_out":
        groups = [
            replace(group, rollouts=[one for one in group.rollouts if not one.truncated])
            if group.greedy
            else group
            for group in groups
        ]
    made: list[SamplePlan] = []
    for group in groups:
        prompt_ids = np.asarray(group.prompt.token_ids, dtype=np.int32)
        for rollout in _members(group):
            begins_anew = rollout.segments[0].follows == -1
            made.append(
                SamplePlan(
                    len(made),
                    prompt_ids[:0] if begins_anew else prompt_ids,
                    rollout.segments,
                    rollout.verdict.reward,
                    is_trained=rollout is not group.greedy
                    and not (truncated == "leave_out" and rollout.truncated),
                )
            )
    return groups, made


def describe(
    step: int,
    drawn: list[Group],
    accepted: list[Group],
    seconds: float,
    carried: Collection[int] = (),
) -> dict[str, float]:
    """Metrics {name: value} of the rollouts of `step`, which took `seconds`. Most are over the
    groups `drawn`, those that dynamic sampling rejected included, since the `accepted` groups alone
    would give biased averages; only the metrics of token age are over `accepted`. Those of rewards
    are over the "reward/responses" rollouts that have a verdict, all others over all rollouts.
    `carried`: ordinals (positions in the training order) of groups that came from a checkpoint;
    their tokens are left out of tokens per second.

    The staleness of a rollout is `step` minus the oldest weight version that generated one of its
    tokens. `staleness/mean` and `staleness/max` are over all rollouts, greedy responses included.
    """
    greedy = [group.greedy for group in drawn if group.greedy is not None]
    scored = [rollout for group in drawn for rollout in group.rollouts]
    every = [rollout for group in drawn for rollout in group.members]
    sampled = [
        (group.prompt, one)
        for group in drawn
        for one in group.members
        if one is not group.greedy and one.sample >= 0
    ]
    without = [rollout.verdict.missing for rollout in every]
    oldest = [rollout.oldest_version for rollout in every if rollout.segments]
    of_greedy = (
        {
            "reward/greedy_mean": statistics.fmean(one.reward for one in greedy),
            "accuracy_greedy": statistics.fmean(one.verdict.correct for one in greedy),
        }
        if greedy
        else {}
    )
    generated = sum(one.num_tokens for one in every)
    before = [one for group in drawn if group.ordinal in carried for one in group.members]
    generated_now = generated - sum(one.num_tokens for one in before)
    return (
        {
            "reward/std": statistics.pstdev([one.reward for one in scored] or [0.0]),
            "length/max": max(one.num_tokens for _, one in sampled),
            "length/penalty": statistics.fmean([one.verdict.penalty for one in scored] or [0.0]),
            "groups/drawn": len(drawn),
            "groups/rejected": len(drawn) - len(accepted),
            "staleness/max": max((step - version for version in oldest), default=0),
            "staleness/mean": statistics.fmean([step - version for version in oldest] or [0.0]),
            **{f"verifier/{name}": without.count(kind) for kind, name in COUNTED.items()},
            "tokens/generated": generated,
            "tokens/generated_per_s": generated_now / max(seconds, 1e-9),
            "time/rollout_s": seconds,
        }
        | token_ages(step, accepted)
        | of_greedy
        | response_metrics(
            [about(prompt) | record_of(one.segments, one.verdict, ()) for prompt, one in sampled]
        )
    )


COUNTED = {
    "error": "errors",
    "timeout": "timeouts",
    "nan": "nans",
    "response_limit": "response_limits",
    "abstained": "abstained",
}
"""{why a verifier gave no score: its metric, after "verifier/"}"""


def token_ages(step: int, accepted: Sequence[Group]) -> dict[str, float]:
    """The metrics `staleness/token_mean` and `staleness/token_max`: age in versions of the tokens
    that the model generated in the rollouts of the `accepted` groups, without greedy responses. A
    token's age is `step`, the trainer's version, less the version of the weights that generated the
    token. Both are 0 without tokens.
    """
    spans = [
        (step - version, count)
        for group in accepted
        for rollout in group.rollouts
        for part in rollout.segments
        for version, count in part.versions
        if count > 0
    ]
    tokens = sum(count for _, count in spans)
    return {
        "staleness/token_mean": sum(age * count for age, count in spans) / max(1, tokens),
        "staleness/token_max": max((age for age, _ in spans), default=0),
    }


def own_metrics(returned: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """{"environment/<name>": mean} of the metrics that verifiers gave. `returned`: for each
    response, {name: value}; the mean of a name is over the responses that have it, of which
    "environment/<name>/responses" is the number.
    """
    values: dict[str, list[float]] = {}
    for metrics in returned:
        for name, value in metrics.items():
            values.setdefault(f"environment/{name}", []).append(value)
    means = {name: statistics.fmean(found) for name, found in sorted(values.items())}
    return means | {f"{name}/responses": float(len(values[name])) for name in means}


def response_metrics(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics {name: value} of a step's or an evaluation's responses: means "accuracy",
    "reward/mean", "length/mean" and "length/truncated_share", and those of the verifier's own
    metrics. The first two are over the "reward/responses" responses that are not left out, 0 if
    there are none. Where `environment.mixture` has several verifiers, also "source/<name>/<mean>"
    for the responses of each, and "source/<name>/responses", their number. `records`: a dict for
    each response, as `record_of` and `about` make them; texts are not needed.
    """
    found = _means(records) | own_metrics([one.get("metrics", {}) for one in records])
    for name in sorted({one.get("environment", "") for one in records} - {""}):
        chosen = [one for one in records if one.get("environment") == name]
        found |= {f"source/{name}/{mean}": value for mean, value in _means(chosen).items()}
        found[f"source/{name}/responses"] = float(len(chosen))
    return found


def _means(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    scored = [one for one in records if not one.get("left_out")]
    count, num_scored = max(1, len(records)), max(1, len(scored))
    return {
        "accuracy": sum(one["correct"] for one in scored) / num_scored,
        "reward/mean": math.fsum(one["reward"] for one in scored) / num_scored,
        "reward/responses": float(len(scored)),
        "length/mean": sum(one["tokens"] for one in records) / count,
        "length/truncated_share": sum(one["finish"] not in ("stop", "") for one in records) / count,
    }
