"""Rollouts as text: the records that transcripts, evaluations and reports hold.

segments, verdict, one text for each segment --record_of--> {response, reward, correct, turns, ...}
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megarl.types import Group, Prompt, Segment, Verdict, total_reward


def record_of(
    segments: Sequence[Segment], verdict: Verdict, texts: Sequence[str]
) -> dict[str, Any]:
    """The record of a rollout. `texts`: its decoded segments, or none to leave the text out."""
    return {
        "response": "".join(texts),
        "correct": verdict.correct,
        "reward": total_reward(segments, verdict),
        "failure": verdict.failure,
        "detail": verdict.detail,
        "tokens": sum(part.num_tokens for part in segments if part.kind == "model"),
        "finish": segments[-1].finish,
        **({"metrics": verdict.metrics} if verdict.metrics else {}),
        **({"turns": turns(segments, verdict, texts)} if texts and len(segments) > 1 else {}),
    }


def about(prompt: Prompt) -> dict[str, Any]:
    """What a record says of its prompt."""
    named = {"environment": prompt.environment} if prompt.environment else {}
    return {"prompt": prompt.text, "answer": prompt.answer, **named}


def turns(
    segments: Sequence[Segment], verdict: Verdict, texts: Sequence[str]
) -> list[dict[str, Any]]:
    """The segments of a rollout in order, as {by, text, tokens} and for the model's, which are the
    ones trained on, also {reward, finish}. The reward of a turn is what the environment gave for
    it; that of the last one is the verdict's.
    """
    found: list[dict[str, Any]] = []
    for number, (part, text) in enumerate(zip(segments, texts, strict=True)):
        turn = {"by": part.kind, "text": text, "tokens": part.num_tokens}
        if part.kind == "model":
            is_last = number + 1 == len(segments)
            reward = verdict.reward if is_last else segments[number + 1].reward
            turn |= {"reward": reward, "finish": part.finish}
        found.append(turn)
    return found


def group_record(step: int, group: Group, texts: Sequence[str]) -> dict[str, Any]:
    """The record of a group for the transcripts. `texts`: the decoded segments of its rollouts, one
    rollout after another.
    """
    left, rollouts = iter(texts), []
    for rollout in group.rollouts:
        of_rollout = [next(left) for _ in rollout.segments]
        record = record_of(rollout.segments, rollout.verdict, of_rollout)
        record["versions"] = [list(span) for part in rollout.segments for span in part.versions]
        rollouts.append(record)
    return {
        "step": step,
        "ordinal": group.ordinal,
        **about(group.prompt),
        "rollouts": rollouts,
    }


async def group_records(
    step: int,
    groups: Sequence[Group],
    decode: Callable[[Sequence[Segment]], Awaitable[Sequence[str]]],
) -> list[dict[str, Any]]:
    """The records of several groups. `decode`: the environment's, which returns the text of each
    segment.
    """
    segments = [part for group in groups for one in group.rollouts for part in one.segments]
    texts = iter(await decode(segments) if segments else [])
    return [
        group_record(step, group, [next(texts) for one in group.rollouts for _ in one.segments])
        for group in groups
    ]
