"""One scored answer to each held-out problem, at the weights that are on the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from megarl.rollout.attempts import Attempts
from megarl.rollout.batch import own_metrics, source_metrics
from megarl.rollout.transcripts import about, record_of
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
    attempts: Attempts,
    prompts: Sequence[Prompt],
    temperature: float,
    name: str,
    *,
    num_texts: int,
    inspects: bool = False,
) -> list[dict[str, Any]]:
    """Generate and score one response to each problem: a record of each, those of the first
    `num_texts` problems with their text. The sampling seeds depend only on the problem and `name`.
    Raises `UserError` if too many verdicts have failed, unless `inspects`; then the records also
    hold `segments`, a list of `Segment`.
    """

    async def one(prompt: Prompt) -> tuple[Prompt, list[Segment], Verdict]:
        segments, verdict = await attempts.attempt(
            prompt, name, prompt.index, temperature=temperature
        )
        return prompt, segments, verdict

    running = []
    try:
        for prompt in prompts:
            running.append(asyncio.create_task(one(prompt)))
            await asyncio.sleep(0)  # thousands of tasks at once would block the event loop
        found = await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
    verdicts = [verdict for _, _, verdict in found]
    if not inspects:
        failure_warning(verdicts, attempts.max_failure_share, f"evaluation '{name}'")
    parts = [part for _, segments, _ in found[:num_texts] for part in segments]
    texts = iter(await attempts.environment.texts(parts) if parts else [])
    records = []
    for number, (prompt, segments, verdict) in enumerate(found):
        of_rollout = [next(texts) for _ in segments] if number < num_texts else []
        record = about(prompt) | {"metrics": {}} | record_of(segments, verdict, of_rollout)
        records.append(record | ({"segments": segments} if inspects else {}))
    return records


def summarise(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The metrics of `answers`' records."""
    count = max(1, len(records))

    def mean(values: Iterable[float]) -> float:
        return sum(values) / count

    return (
        {
            "accuracy": mean(one["correct"] for one in records),
            "reward/mean": mean(one["reward"] for one in records),
            "length/mean": mean(one["tokens"] for one in records),
            "length/truncated_share": mean(one["finish"] != "stop" for one in records),
            "verifier/failures": float(sum(bool(one["failure"]) for one in records)),
            "problems": float(len(records)),
        }
        | own_metrics([one["metrics"] for one in records])
        | source_metrics(
            [
                (
                    one.get("environment", ""),
                    one["correct"],
                    one["reward"],
                    one["tokens"],
                    one["finish"] != "stop",
                )
                for one in records
            ]
        )
    )
