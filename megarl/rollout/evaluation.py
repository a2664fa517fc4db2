"""One scored answer to each held-out problem, at the weights that are on the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from megarl.rollout.attempts import Attempts
from megarl.rollout.batch import own_metrics
from megarl.rollout.verdicts import failure_warning
from megarl.types import Prompt, Segment, Verdict

Evaluated = tuple[dict[str, float], list[dict[str, Any]]]
"""Result of an evaluation: (metrics, transcripts)."""

NUM_TRANSCRIPTS = 128
"""Number of problems, from the first, whose responses are kept as text; this bounds the size of the
transcripts."""


async def evaluate(
    attempts: Attempts, prompts: Sequence[Prompt], temperature: float, name: str
) -> Evaluated:
    """Generate and score one response to each problem: (metrics over all problems, transcripts of
    the first `NUM_TRANSCRIPTS`). The sampling seeds depend only on the problem and `name`.
    """
    records = await answers(attempts, prompts, temperature, name, num_texts=NUM_TRANSCRIPTS)
    return summarise(records), records[:NUM_TRANSCRIPTS]


async def answers(
    attempts: Attempts, prompts: Sequence[Prompt], temperature: float, name: str, *, num_texts: int
) -> list[dict[str, Any]]:
    """Generate and score one response to each problem: a record of each, those of the first
    `num_texts` problems with their text. The sampling seeds depend only on the problem and `name`.
    Raises `UserError` if too many verdicts have failed.
    """

    async def one(prompt: Prompt, *, shown: bool) -> tuple[dict[str, Any], list[Segment], Verdict]:
        segments, verdict = await attempts.attempt(
            prompt, name, prompt.index, temperature=temperature
        )
        record = {
            "prompt": prompt.text,
            "answer": prompt.answer,
            "response": "",
            "correct": verdict.correct,
            "reward": verdict.reward,
            "failure": verdict.failure,
            "detail": verdict.detail,
            "tokens": sum(part.num_tokens for part in segments if part.kind == "model"),
            "finish": segments[-1].finish,
            "metrics": verdict.metrics,
        }
        return record, segments if shown else [], verdict

    running = []
    try:
        for prompt in prompts:
            shown = len(running) < num_texts
            running.append(asyncio.create_task(one(prompt, shown=shown)))
            await asyncio.sleep(0)  # thousands of tasks at once would block the event loop
        found = await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
    verdicts = [verdict for _, _, verdict in found]
    failure_warning(verdicts, attempts.max_failure_share, f"evaluation '{name}'")
    parts = [part for _, segments, _ in found for part in segments]
    texts = iter(await attempts.environment.texts(parts) if parts else [])
    for record, segments, _ in found:
        record["response"] = "".join(next(texts) for _ in segments)
    return [record for record, _, _ in found]


def summarise(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The metrics of `answers`' records."""
    count = max(1, len(records))

    def mean(values: Iterable[float]) -> float:
        return sum(values) / count

    return {
        "accuracy": mean(one["correct"] for one in records),
        "reward/mean": mean(one["reward"] for one in records),
        "length/mean": mean(one["tokens"] for one in records),
        "length/truncated_share": mean(one["finish"] == "length" for one in records),
        "verifier/failures": float(sum(bool(one["failure"]) for one in records)),
        "problems": float(len(records)),
    } | own_metrics([one["metrics"] for one in records])
