"""Rollouts as text: the dicts ("records") that transcripts, evaluations and reports hold.

segments, verdict, one text for each segment --record_of--> {response, reward, correct, turns, ...}
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from megarl.types import Group, Prompt, Segment, Verdict, total_reward


def record_of(
    segments: Sequence[Segment], verdict: Verdict, texts: Sequence[str]
) -> dict[str, Any]:
    """The dict for one rollout in transcripts and evaluations: "response" (text), "correct",
    "reward" (of all turns), "failure", "detail" (the verifier's error, "" for none), "tokens"
    (generated), "finish" (why generation stopped), and, where there are any, "metrics", "turns"
    and "left_out" (there is no verdict: correct and reward mean nothing).
    `segments`: the parts of the rollout, in order, by model and environment. `verdict`: the result
    of scoring. `texts`: each of the `segments` as text, or empty to leave the text out.
    """
    return {
        "response": "".join(texts),
        "correct": verdict.correct,
        "reward": total_reward(segments, verdict),
        "failure": verdict.failure,
        "detail": verdict.detail,
        "tokens": sum(part.num_tokens for part in segments if part.kind == "model"),
        "finish": segments[-1].finish if segments else "",
        **({"left_out": True} if verdict.left_out else {}),
        **({"metrics": verdict.metrics} if verdict.metrics else {}),
        **({"turns": turns(segments, verdict, texts)} if texts and len(segments) > 1 else {}),
    }


def about(prompt: Prompt) -> dict[str, Any]:
    """The part of a transcript's dict about its prompt: {"prompt": text, "answer": reference
    answer}, in a mixture of verifiers also "environment", the verifier's name.
    """
    named = {"environment": prompt.environment} if prompt.environment else {}
    return {"prompt": prompt.text, "answer": prompt.answer, **named}


def turns(
    segments: Sequence[Segment], verdict: Verdict, texts: Sequence[str]
) -> list[dict[str, Any]]:
    """The segments of one rollout in the order in which they were made, each as {"by": "model" or
    "environment", "text", "tokens": number}, with "follows" where it does not continue the one
    before it: the number, from 0, of the one that it continues, or -1 for none. Model segments also
    have "reward", which the environment gave for that turn (for the last one the verdict's reward),
    and "finish", why generation stopped. `texts`: each segment as text.
    """
    found: list[dict[str, Any]] = []
    answer: dict[str, Any] = {}
    for part, text in zip(segments, texts, strict=True):
        turn = {"by": part.kind, "text": text, "tokens": part.num_tokens}
        if part.follows is not None:
            turn["follows"] = part.follows
        if part.kind == "model":
            answer = turn
            turn |= {"reward": 0.0, "finish": part.finish}
        elif answer:
            answer["reward"] += part.reward
        found.append(turn)
    answer["reward"] = verdict.reward  # the last segment is the model's
    return found


async def group_records(
    step: int,
    groups: Sequence[Group],
    decode: Callable[[Sequence[Segment]], Awaitable[Sequence[str]]],
) -> list[dict[str, Any]]:
    """The dicts of several groups of rollouts for the transcripts, one for each: "step" (the number
    given), "ordinal" (position in the training order), "prompt", "answer", and "rollouts", a list
    of dicts (`record_of`) with also "versions", [weight version, number of tokens] pairs. `decode`:
    async function that returns the text of each of the segments it gets.
    """
    shown = {group.ordinal: [*group.rollouts, *group.left_out] for group in groups}
    segments = [part for rollouts in shown.values() for one in rollouts for part in one.segments]
    texts = iter(await decode(segments) if segments else [])
    found = []
    for group in groups:
        rollouts = []
        for one in shown[group.ordinal]:
            record = record_of(one.segments, one.verdict, [next(texts) for _ in one.segments])
            record["versions"] = [list(span) for part in one.segments for span in part.versions]
            rollouts.append(record)
        about_group = {"step": step, "ordinal": group.ordinal, **about(group.prompt)}
        found.append(about_group | {"rollouts": rollouts})
    return found
