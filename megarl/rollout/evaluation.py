"""One scored answer to each held-out problem, with the weights that the engines have, and the
metrics of several answers to each: avg@n, pass@k, maj@n."""

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
"""Result of an evaluation: (metrics {name: value}, transcripts: a dict for each of the first
problems, with its response as text)."""

NUM_TRANSCRIPTS = 128
"""Number of problems, from the first, whose responses are kept as text; this bounds the size of the
transcripts."""


async def evaluate_problems(
    attempts: Attempts, prompts: Sequence[Prompt], temperature: float, name: str
) -> Evaluated:
    """Generate and score one response to each problem. Returns ({metric: value} over all problems,
    transcripts: a dict for each of the first 128 problems, with the keys "prompt", "answer",
    "response", "reward", "correct" and others). The sampling seeds depend only on the problem and
    on `name`, that of the evaluation. Raises `UserError` if the verifier failed for at least the
    fraction `environment.max_failure_share` of the responses.
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
    """Generate and score one response to each problem. Returns a dict for each, in the order of
    `prompts`: "prompt", "answer" (reference), "response" (text), "correct", "reward", "failure",
    "tokens" (generated), "finish", "metrics" and others. `num_texts`: number of problems, from the
    first, that get their text; "response" is "" for the others. The sampling seeds depend only on
    the problem and on `name`, that of the evaluation.

    Raises `UserError` if the verifier failed for at least the fraction
    `environment.max_failure_share` of the responses, unless `inspects`. With `inspects` each dict
    also has "segments", the response's `Segment` objects (token ids, log-probs, weight versions).
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


def summarise_records(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Metrics {name: value} over an evaluation's responses, such as "accuracy" and "reward/mean".
    `records`: a dict for each response, as `answers` returns them, texts not needed.
    """
    abstained = [one for one in records if one.get("left_out") and not one["failure"]]
    return response_metrics(records) | {
        "verifier/failures": float(sum(bool(one["failure"]) for one in records)),
        "verifier/abstained": float(len(abstained)),
        "problems": float(len(records)),
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of `k` responses, drawn without repetition from `num_samples`
    of which `num_correct` are correct, is correct: 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374,
    eq. 1).
    """
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def majority_is_correct(answers: Sequence[str | None], correct: Sequence[bool]) -> bool:
    """Whether the most frequent answer to one problem is correct (maj@n). `answers`: the final
    answers of n responses, None for a response without one, which has no vote; `correct`: whether
    each is correct. Of equally frequent answers the one given first counts.
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
    """Means over all problems of avg@n, pass@k for k = 1, 2, 4 ... n, and maj@n, as fractions from
    0 to 1: {"avg@8": 0.25, "pass@1": 0.25, ..., "maj@8": 0.3}. A problem of which fewer than k
    responses have a verdict is not in the mean of pass@k; a mean of nothing is None.

    Args:
        correct: for each problem, whether each of its responses is correct: of the n responses
            those that have a verdict.
        answers: for each problem, the final answers of these; None where answers cannot be told
            apart, and maj@n is then None.
        n: number of responses to each problem; 0: as many as the most of `correct`.
    """
    n = n or max(map(len, correct))
    powers = [2**power for power in range(n.bit_length()) if 2**power < n] + [n]
    found = {f"avg@{n}": _mean([sum(one) / len(one) for one in correct if one])}
    for k in powers:
        rows = [pass_at_k(len(one), sum(one), k) for one in correct if len(one) >= k]
        found[f"pass@{k}"] = _mean(rows)
    found[f"maj@{n}"] = None
    if answers is not None:
        pairs = zip(answers, correct, strict=True)
        found[f"maj@{n}"] = _mean([majority_is_correct(*pair) for pair in pairs if pair[1]])
    return found


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


WARN_SHARE = 0.1
"""Fraction of failed verdicts from which a warning is given."""


def failure_warning(verdicts: Sequence[Verdict], limit: float, where: str) -> str:
    """A warning, one line with the first failure's message, if the verifier failed for at least the
    fraction 0.1 of the responses that were given to it; "" otherwise. `verdicts`: results of
    scoring, one for each response. `where` names the step or evaluation in the warning. Responses
    that no verifier was asked about (cut off) do not count. A verifier that abstains does not fail;
    there is a warning if it does so of all responses, as a function without `return` would.

    Raises `UserError` with that message instead if the fraction is at least `limit`, 0 to 1. Below
    0.1 nothing is raised, however low `limit` is.
    """
    judged = [verdict for verdict in verdicts if verdict.judged]
    failed = [verdict for verdict in judged if verdict.failure]
    if judged and all(verdict.missing == "abstained" for verdict in judged):
        return f"{where}: the verifier returned None for all {len(judged)} responses"
    if not failed or len(failed) < WARN_SHARE * len(judged):
        return ""
    first = " ".join((failed[0].detail or failed[0].failure).split())
    said = f"{where}: the verifier failed for {len(failed)} of {len(judged)} responses; {first}"
    if len(failed) < limit * len(judged):
        return said
    raise UserError(
        f"{said}; mend the verifier, or set environment.max_failure_share above {limit:g} (1 stops"
        " only where all fail)"
    )
