"""What a run folder holds, read back: the series of its numbers and the few that sum it up."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megarl.observe.observer import EVALUATIONS, METRICS, TRANSCRIPTS
from megarl.observe.sinks import read_records

ENDS = 5
"""Without evaluations, before and after are means over this many steps at either end."""


@dataclass(slots=True)
class Evaluation:
    """One evaluation, of the weights after `step` steps."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    transcripts: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """The files of a run folder."""

    metrics: list[dict[str, Any]]
    """A record a step, in order."""
    evaluations: list[Evaluation]
    """In order of steps; only the first and the last that have transcripts still hold them."""
    groups: list[dict[str, Any]]
    """Transcripts of the first and of the last step that has some."""

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """([n] steps, [n] values) of a metric of the steps; NaN where it was not finite. Empty
        where no step has it.
        """
        return _series(
            [(record["step"], record[name]) for record in self.metrics if name in record]
        )

    def evaluated(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """([n] steps, [n] values) of a metric of the evaluations."""
        return _series(
            [(one.step, one.metrics[name]) for one in self.evaluations if name in one.metrics]
        )


def _series(pairs: list[tuple[int, float | None]]) -> tuple[np.ndarray, np.ndarray]:
    steps = np.array([step for step, _ in pairs], dtype=float)
    return steps, np.array([np.nan if value is None else value for _, value in pairs], dtype=float)


def read_run(folder: Path) -> Run:
    """Read a run folder; a record that was written twice counts once, as it was last.

    Raises:
        ValueError: the folder has no `metrics.jsonl`, or a file is damaged before its last line.
    """
    folder = Path(folder)
    if not (folder / METRICS).exists():
        raise ValueError(f"{folder} has no {METRICS}; give the folder of a run")
    metrics = {record["step"]: record for record in read_records(folder / METRICS)}
    return Run(
        metrics=[metrics[step] for step in sorted(metrics)],
        evaluations=_read_evaluations(folder / EVALUATIONS),
        groups=_read_groups(folder / TRANSCRIPTS),
    )


def _read_evaluations(path: Path) -> list[Evaluation]:
    """Evaluations by step; greedy transcripts go before those of another kind. Keeps few
    transcripts in memory.
    """
    found: dict[int, Evaluation] = {}
    greedy: set[int] = set()
    for record in read_records(path):
        step = record.pop("step")
        transcripts = record.pop("transcripts", None)
        one = found.setdefault(step, Evaluation(step))
        one.metrics |= record
        is_greedy = any(name.startswith("eval/") for name in record)
        if transcripts and (is_greedy or step not in greedy):
            one.transcripts = transcripts
            greedy |= {step} if is_greedy else set()
        with_words = sorted(step for step, kept in found.items() if kept.transcripts)
        for between in with_words[1:-1]:
            found[between].transcripts = []
    return [found[step] for step in sorted(found)]


def _read_groups(path: Path) -> list[dict[str, Any]]:
    first: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    for record in read_records(path):
        if not first or record["step"] == first[0]["step"]:
            first.append(record)
        else:
            last = [kept for kept in last if kept["step"] == record["step"]] + [record]
    return first + last


def summary(folder: Path) -> dict[str, Any]:
    """The run in a few numbers; None where the files do not say.

    Returns:
        accuracy_before, accuracy_after, length_before, length_after (tokens): from the greedy
        evaluations (`measured_on` is "evaluation"), or, in a run that was never evaluated, means
        over the first and last steps' rollouts ("rollouts"); steps; seconds (sum of `time/step_s`);
        generated_tokens_per_s and trained_tokens_per_s (means over time).

    Raises:
        ValueError: the folder is not one of a run.
    """
    return summarise(read_run(folder))


def summarise(run: Run) -> dict[str, Any]:
    """`summary` of files already read."""
    evaluated = any(
        "eval/accuracy" in one.metrics or "eval/length/mean" in one.metrics
        for one in run.evaluations
    )
    ends = _evaluated_ends if evaluated else _rollout_ends
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
    """Time of all steps but the first five over that of their longer part, rollout or training: 1
    is perfect overlap.
    """
    parts = {
        name: dict(zip(*map(np.ndarray.tolist, run.series(f"time/{name}_s")), strict=True))
        for name in ("step", "rollout", "train")
    }
    steps = sorted(set.intersection(*(set(found) for found in parts.values())))[5:]
    longer = sum(max(parts["rollout"][step], parts["train"][step]) for step in steps)
    return round(sum(parts["step"][step] for step in steps) / longer, 3) if longer else None


def _evaluated_ends(run: Run, name: str) -> tuple[float | None, float | None]:
    """First and last evaluation; a single one is the state before training only if no step had been
    done.
    """
    steps, values = run.evaluated("eval/" + name)
    if len(values) == 0:
        return None, None
    if len(values) == 1:
        return (_number(values[0]), None) if steps[0] == 0 else (None, _number(values[0]))
    return _number(values[0]), _number(values[-1])


def _rollout_ends(run: Run, name: str) -> tuple[float | None, float | None]:
    """Means over the first and last steps, which do not overlap; a single step is no change."""
    _, values = run.series(name)
    values = values[np.isfinite(values)]
    count = min(ENDS, len(values) // 2)
    if count == 0:
        return (_number(values[0]), None) if len(values) else (None, None)
    return _number(values[:count].mean()), _number(values[-count:].mean())


def _rate(run: Run, name: str, weight: str) -> float | None:
    """Mean of a rate, each step weighted by the seconds of its phase where the run has them: tokens
    over seconds.
    """
    records = [record for record in run.metrics if record.get(name) is not None]
    if not records:
        return None
    rates = np.array([record[name] for record in records], dtype=float)
    weights = np.array(
        [record.get(weight) or record.get("time/step_s") or 0.0 for record in records], dtype=float
    )
    return round(
        float(np.average(rates, weights=weights) if weights.sum() > 0 else rates.mean()), 1
    )


def _number(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None
