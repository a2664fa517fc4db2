"""Rollouts as text: the dicts ("records") that transcripts, evaluations and reports hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megarl.types import Group, Prompt, Segment, Verdict, total_reward


def record_of(
    segments: Sequence[Segment], verdict: Verdict, texts: Sequence[str]
) -> dict[str, Any]:
    """The record of a rollout: "response", "correct", "reward" (of all turns), "failure", "detail",
    "tokens" (generated), "finish" and, where there are any, "metrics", "turns", "left_out".

    `texts`: of the segments; empty to leave the text out.
    """
    return {
        "response": "".join(texts),
        "correct": verdict.correct,
        "reward": total_reward(segments, verdict),
        "failure": verdict.failure,
        "detail": verdict.detail,
        "tokens": sum(segment.num_tokens for segment in segments if segment.kind == "model"),
        "finish": segments[-1].finish if segments else "",
        **({"left_out": True} if verdict.left_out else {}),
        **({"metrics": verdict.metrics} if verdict.metrics else {}),
        **({"turns": turns(segments, verdict, texts)} if texts and len(segments) > 1 else {}),
    }


def about(prompt: Prompt) -> dict[str, Any]:
    """{"prompt": text, "answer"}, in a mixture also "environment"."""
    named = {"environment": prompt.environment} if prompt.environment else {}
    return {"prompt": prompt.text, "answer": prompt.answer, **named}


def turns(
    segments: Sequence[Segment], verdict: Verdict, texts: Sequence[str]
) -> list[dict[str, Any]]:
    """The segments, each as {"by": "model" or "environment", "text", "tokens"}, with "follows"
    where it does not continue the one before. Model segments have "reward" and "finish".
    """
    records: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}
    for segment, text in zip(segments, texts, strict=True):
        turn = {"by": segment.kind, "text": text, "tokens": segment.num_tokens}
        if segment.follows is not None:
            turn["follows"] = segment.follows
        if segment.kind == "model":
            answer = turn
            turn |= {"reward": 0.0, "finish": segment.finish}
        elif answer:
            answer["reward"] += segment.reward
        records.append(turn)
    answer["reward"] = verdict.reward  # the last segment is the model's
    return records


async def group_records(
    step: int,
    groups: Sequence[Group],
    decode: Callable[[Sequence[Segment]], Awaitable[Sequence[str]]],
) -> list[dict[str, Any]]:
    """For each group "step", "ordinal", "prompt", "answer" and "rollouts": records with "versions",
    [version, tokens] pairs. `decode`: returns the text of each segment.
    """
    shown = {group.ordinal: [*group.rollouts, *group.left_out] for group in groups}
    segments = [turn for rows in shown.values() for rollout in rows for turn in rollout.segments]
    texts = iter(await decode(segments) if segments else [])
    records = []
    for group in groups:
        rollouts = []
        for rollout in shown[group.ordinal]:
            parts = rollout.segments
            record = record_of(parts, rollout.verdict, [next(texts) for _ in parts])
            record["versions"] = [list(span) for segment in parts for span in segment.versions]
            rollouts.append(record)
        about_group = {"step": step, "ordinal": group.ordinal, **about(group.prompt)}
        records.append(about_group | {"rollouts": rollouts})
    return records
