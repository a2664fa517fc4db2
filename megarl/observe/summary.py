"""Reads a run folder: metrics over steps, evaluations, and a summary in a few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megarl.observe.observer import EVALUATIONS, METRICS, PROVENANCE, TRANSCRIPTS
from megarl.observe.rotated import spread
from megarl.observe.sinks import read_records

ENDS = 5
"""Without evaluations, "before" and "after" are means over at most so many steps."""

USUAL: dict[str, float] = {
    **dict.fromkeys(
        ("verifier/errors", "verifier/timeouts", "verifier/nans", "skipped_steps"), 0.0
    ),
    **{"groups/rejected": 0.5, "length/truncated_share": 0.1, "clip_share": 0.2},
    **dict.fromkeys(("mismatch/mean_abs", "mismatch/outside_share"), 0.05),
    **dict.fromkeys(("correction/dropped_share", "correction/clipped_share"), 0.05),
}
"""{metric: largest value that docs/metrics.md calls usual}, groups/rejected as a share of
groups/drawn.
"""


@dataclass(slots=True)
class Evaluation:
    """Of the weights after `step` steps. `transcripts`: a dict for each problem."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    transcripts: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """The content of a run folder."""

    metrics: list[dict[str, Any]]
    """Of each step, ordered by step."""
    evaluations: list[Evaluation]
    """Ordered by step; only the first and the last with transcripts keep them."""
    groups: list[dict[str, Any]]
    """Transcripts of training, by step: dicts with step, prompt, answer and rollouts. Of a long run
    those of some steps, evenly.
    """

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """([n] steps, [n] values), float64, of the n steps that have the metric; NaN where it was
        not finite.
        """
        return _series(
            [(record["step"], record[name]) for record in self.metrics if name in record]
        )

    @property
    def failures(self) -> dict[str, int]:
        """{why the verifier could not score: number of rollouts}"""
        return {
            reason: int(sum(record.get(f"verifier/{reason}") or 0 for record in self.metrics))
            for reason in ("errors", "timeouts", "nans", "response_limits")
        }

    def evaluated(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """`series` of a metric such as eval/accuracy over the evaluations."""
        return _series(
            [
                (entry.step, entry.metrics[name])
                for entry in self.evaluations
                if name in entry.metrics
            ]
        )


def _series(pairs: list[tuple[int, float | None]]) -> tuple[np.ndarray, np.ndarray]:
    steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    return steps, values


def read_run(folder: Path, *, transcripts: bool = True) -> Run:
    """Metrics, evaluations and, if asked for, a sample of the transcripts of a run folder. The last
    of several lines of a step counts. Raises `ValueError` where there is no
    `metrics.jsonl`, or a file is damaged before its last line.
    """
    folder = Path(folder)
    if not (folder / METRICS).exists():
        raise ValueError(f"{folder} has no {METRICS}; give the folder of a run")
    metrics = {record["step"]: record for record in read_records(folder / METRICS, numbers=True)}
    return Run(
        metrics=[metrics[step] for step in sorted(metrics)],
        evaluations=_read_evaluations(folder / EVALUATIONS),
        groups=spread(folder / TRANSCRIPTS) if transcripts else [],
    )


def usual_bounds(recipe: Mapping[str, Any]) -> dict[str, float]:
    """`USUAL`, and bounds that depend on the recipe's staleness and precision."""
    bounds = dict(USUAL)
    with suppress(LookupError, TypeError):  # a recipe of another command, or a damaged one
        rollout = recipe["rollout"]
        bounds["staleness/max"] = rollout["max_staleness"] + 0.0
        kinds = {recipe["training"]["precision"], rollout["engine"]["dtype"]}
        if kinds == {"float32"} and rollout["max_staleness"] == 0:
            bounds["mismatch/mean_abs"] = 1e-3
    return bounds


def read_starts(folder: Path) -> list[dict[str, str]]:
    """{fact: text} of each start of a run, in order. Instead of a damaged line and those after it:
    {"step": ..., "damaged": which line, how to delete it}.
    """
    starts: list[dict[str, str]] = []
    try:
        for record in read_records(Path(folder) / PROVENANCE):
            starts.append({name: str(value) for name, value in record.items()})
    except ValueError as error:
        starts.append({"step": starts[-1]["step"] if starts else "0", "damaged": str(error)})
    return starts


def _read_evaluations(path: Path) -> list[Evaluation]:
    """By step, with the greedy evaluation's transcripts if there are several kinds."""
    by_step: dict[int, Evaluation] = {}
    greedy: set[int] = set()
    for record in read_records(path, numbers=True):
        step = record.pop("step")
        transcripts = record.pop("transcripts", None)
        entry = by_step.setdefault(step, Evaluation(step))
        entry.metrics |= record
        is_greedy = any(name.startswith("eval/") for name in record)
        if transcripts and (is_greedy or step not in greedy):
            entry.transcripts = transcripts
            greedy |= {step} if is_greedy else set()
        with_transcripts = sorted(step for step, kept in by_step.items() if kept.transcripts)
        for between in with_transcripts[1:-1]:
            by_step[between].transcripts = []
    return [by_step[step] for step in sorted(by_step)]


def summary(folder: Path) -> dict[str, Any]:
    """`summarise_run` of a run folder."""
    return summarise_run(read_run(folder))


def summarise_run(run: Run) -> dict[str, Any]:
    """A run in a few numbers, None where unknown: accuracy_before, accuracy_after (0 to 1),
    length_before, length_after (tokens), measured_on ("evaluation": greedy, or "rollouts": of the
    first and last steps), steps, seconds, generated_tokens_per_s, trained_tokens_per_s,
    step_over_longer_part.
    """
    evaluated = any(
        "eval/accuracy" in entry.metrics or "eval/length/mean" in entry.metrics
        for entry in run.evaluations
    )
    ends = evaluated_ends if evaluated else rollout_ends
    accuracy, length = ends(run, "accuracy"), ends(run, "length/mean")
    _, step_s = run.series("time/step_s")
    return {
        "accuracy_before": accuracy[0],
        "accuracy_after": accuracy[1],
        "length_before": length[0],
        "length_after": length[1],
        "measured_on": "evaluation" if evaluated else "rollouts",
        "steps": len(run.metrics),
        "seconds": round(float(np.nansum(step_s)), 3) if len(step_s) else None,
        "generated_tokens_per_s": _rate(run, "tokens/generated_per_s", "time/rollout_s"),
        "trained_tokens_per_s": _rate(run, "tokens/trained_per_s", "time/train_s"),
        "step_over_longer_part": _overlap(run),
    }


def _overlap(run: Run) -> float | None:
    """Seconds of all steps but the first five, divided by the sum of the longer of each step's
    rollout and training: 1 if the two overlap wholly, up to 2 if they take turns.
    """
    parts = {
        name: dict(zip(*map(np.ndarray.tolist, run.series(f"time/{name}_s")), strict=True))
        for name in ("step", "rollout", "train")
    }
    steps = sorted(set.intersection(*(set(seconds) for seconds in parts.values())))[5:]
    longer = sum(max(parts["rollout"][step], parts["train"][step]) for step in steps)
    return round(sum(parts["step"][step] for step in steps) / longer, 3) if longer else None


def evaluated_ends(run: Run, name: str) -> tuple[float | None, float | None]:
    """(before, after): `eval/NAME` of the first and the last evaluation. A single one is before if
    it is of step 0, else after.
    """
    steps, values = run.evaluated("eval/" + name)
    if len(values) < 2:
        values = [*values, np.nan] if 0 in steps else [np.nan, *values]
    return _number(values[0]), _number(values[-1])


def rollout_ends(run: Run, name: str) -> tuple[float | None, float | None]:
    """(before, after): means of metric `name` over its first and its last finite values, up to
    `ENDS` each, disjoint; None where missing.
    """
    _, values = run.series(name)
    values = values[np.isfinite(values)]
    if len(values) < 2:
        values = np.append(values, np.nan)
    count = max(1, min(ENDS, len(values) // 2))
    return _number(values[:count].mean()), _number(values[-count:].mean())


def _rate(run: Run, name: str, weight: str) -> float | None:
    """Mean of a rate over time: each step is weighted by the seconds in metric `weight`."""
    records = [record for record in run.metrics if record.get(name) is not None]
    if not records:
        return None
    rates = np.array([record[name] for record in records], dtype=float)
    seconds = [record.get(weight) or record.get("time/step_s") or 0.0 for record in records]
    mean = np.average(rates, weights=seconds) if sum(seconds) > 0 else rates.mean()
    return round(float(mean), 1)


def _number(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None
