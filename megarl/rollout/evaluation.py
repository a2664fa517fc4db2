"""One scored answer to each held-out problem, and metrics of several answers: avg@n, pass@k,
maj@n.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from math import comb
from typing import Any

from megarl.errors import UserError
from megarl.rollout.attempts import Attempts
from megarl.rollout.batch import response_metrics
from megarl.rollout.transcripts import about, record_of
from megarl.types import Prompt, Segment, Verdict

Evaluated = tuple[dict[str, float], list[dict[str, Any]]]
"""(metrics {name: value}, records of the first problems)."""

NUM_TRANSCRIPTS = 128
"""Problems whose responses are kept as text."""


async def evaluate_problems(
    attempts: Attempts, prompts: Sequence[Prompt], temperature: float, name: str
) -> Evaluated:
    """One scored response to each problem. Seeds depend on the problem and `name`. Raises
    `UserError` as `answers`.
    """
    records = await answers(attempts, prompts, temperature, name, num_texts=NUM_TRANSCRIPTS)
    return summarise_records(records), records[:NUM_TRANSCRIPTS]


async def answers(
    attempts: Attempts,
    prompts: Sequence[Prompt],
    temperature: float,
    name: str,
    *,
    num_texts: int,
    inspects: bool = False,
) -> list[dict[str, Any]]:
    """A record (`record_of`) for each prompt, in order, with text for the first `num_texts`.

    Raises `UserError` if at least the fraction `environment.max_failure_share` of verdicts failed,
    unless `inspects`, which adds "segments" to each record.
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
        attempted = await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
    verdicts = [verdict for _, _, verdict in attempted]
    if not inspects:
        failure_warning(verdicts, attempts.max_failure_share, f"evaluation '{name}'")
    parts = [segment for _, segments, _ in attempted[:num_texts] for segment in segments]
    texts = iter(await attempts.environment.texts(parts) if parts else [])
    records = []
    for number, (prompt, segments, verdict) in enumerate(attempted):
        of_rollout = [next(texts) for _ in segments] if number < num_texts else []
        record = about(prompt) | {"metrics": {}} | record_of(segments, verdict, of_rollout)
        records.append(record | ({"segments": segments} if inspects else {}))
    return records


def summarise_records(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics over an evaluation's records."""
    abstained = [record for record in records if record.get("left_out") and not record["failure"]]
    return response_metrics(records) | {
        "verifier/failures": float(sum(bool(record["failure"]) for record in records)),
        "verifier/abstained": float(len(abstained)),
        "problems": float(len(records)),
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), the probability that one of `k` responses drawn without repetition
    is correct (arXiv:2107.03374, eq. 1).
    """
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def majority_is_correct(answers: Sequence[str | None], correct: Sequence[bool]) -> bool:
    """Whether the most frequent answer is correct (maj@n); of equally frequent ones the first
    counts. None is no answer.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    chosen = votes.most_common(1)[0][0]  # insertion order breaks ties
    return correct[answers.index(chosen)]


def repeated_metrics(
    correct: Sequence[Sequence[bool]],
    answers: Sequence[Sequence[str | None]] | None,
    n: int = 0,
) -> dict[str, float | None]:
    """{"avg@8": 0.25, "pass@1": ..., "pass@8": ..., "maj@8": 0.3}, means over all problems.

    `correct`: by problem, of its responses that have a verdict. `answers`: their final answers;
    None: no maj@n. `n`: responses to each problem; 0: as many as the most of `correct`. A problem
    with fewer than k verdicts is not in pass@k; a mean of nothing is None.
    """
    n = n or max(map(len, correct))
    powers = [2**power for power in range(n.bit_length()) if 2**power < n] + [n]
    metrics = {f"avg@{n}": _mean([sum(marks) / len(marks) for marks in correct if marks])}
    for k in powers:
        rows = [pass_at_k(len(marks), sum(marks), k) for marks in correct if len(marks) >= k]
        metrics[f"pass@{k}"] = _mean(rows)
    metrics[f"maj@{n}"] = None
    if answers is not None:
        pairs = zip(answers, correct, strict=True)
        metrics[f"maj@{n}"] = _mean([majority_is_correct(*pair) for pair in pairs if pair[1]])
    return metrics


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


WARN_SHARE = 0.1
"""Fraction of failed verdicts from which a warning is given."""


def failure_warning(verdicts: Sequence[Verdict], limit: float, where: str) -> str:
    """A warning if the verifier failed for at least a tenth of the responses given to it, or
    abstained for all; else "". Raises `UserError` instead if also the fraction `limit` failed.
    """
    judged = [verdict for verdict in verdicts if verdict.judged]
    failed = [verdict for verdict in judged if verdict.failure]
    if judged and all(verdict.missing == "abstained" for verdict in judged):
        return f"{where}: the verifier returned None for all {len(judged)} responses"
    if not failed or len(failed) < WARN_SHARE * len(judged):
        return ""
    first = " ".join((failed[0].detail or failed[0].failure).split())
    message = f"{where}: the verifier failed for {len(failed)} of {len(judged)} responses; {first}"
    if len(failed) < limit * len(judged):
        return message
    raise UserError(
        f"{message}; mend the verifier, or set environment.max_failure_share above {limit:g} (1"
        " stops only where all fail)"
    )
