"""One scored answer to each held-out problem, at the weights that are on the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from megarl.rollout.attempts import Attempts
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

    async def one(
        prompt: Prompt, *, shown: bool
    ) -> tuple[Verdict, int, bool, list[Segment], Prompt | None]:
        segments, verdict = await attempts.attempt(
            prompt, name, prompt.index, temperature=temperature
        )
        length = sum(part.num_tokens for part in segments if part.kind == "model")
        truncated = segments[-1].finish == "length"
        return verdict, length, truncated, segments if shown else [], prompt if shown else None

    running = []
    try:
        for prompt in prompts:
            shown = len(running) < NUM_TRANSCRIPTS
            running.append(asyncio.create_task(one(prompt, shown=shown)))
            await asyncio.sleep(0)  # thousands of tasks at once would block the event loop
        answers = await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
    count = max(1, len(answers))
    metrics = {
        "accuracy": sum(verdict.correct for verdict, *_ in answers) / count,
        "reward/mean": sum(verdict.reward for verdict, *_ in answers) / count,
        "length/mean": sum(length for _, length, *_ in answers) / count,
        "length/truncated_share": sum(truncated for _, _, truncated, *_ in answers) / count,
        "problems": float(len(answers)),
    }
    kept = [answer for answer in answers if answer[-1] is not None]
    parts = [part for *_, segments, _ in kept for part in segments]
    texts = iter(await attempts.environment.texts(parts) if parts else [])
    transcripts = [
        {
            "prompt": prompt.text,
            "answer": prompt.answer,
            "response": "".join(next(texts) for _ in segments),
            "correct": verdict.correct,
            "reward": verdict.reward,
            "tokens": length,
        }
        for verdict, length, _, segments, prompt in kept
        if prompt is not None
    ]
    return metrics, transcripts
