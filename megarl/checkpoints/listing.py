"""The checkpoints of a run folder in order: the newest, and the best by an evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from megarl.errors import UserError
from megarl.observe.observer import EVALUATIONS
from megarl.observe.sinks import read_records
from megarl.settings.recipe_file import read_tree
from megarl.settings.schema import leaves


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in `folder`; empty if it does not exist."""
    return sorted(folder.glob("step_*"), key=step_of, reverse=True) if folder.is_dir() else []


def step_of(checkpoint: Path) -> tuple[int, str]:
    """Sort key (step, name), with step -1 without a number. By name alone step_1000000 would come
    before step_999999.
    """
    number = checkpoint.name.removeprefix("step_")
    return (int(number) if number.isdecimal() else -1), checkpoint.name


def score_of(best: str, metrics: Mapping[str, float | None]) -> float | None:
    """The metric that `best` names, negative with "min:" before the name, so that larger is better;
    None where it is missing or not finite.
    """
    value = metrics.get(best.removeprefix("min:"))
    if value is None or not math.isfinite(value):
        return None
    return -value if best.startswith("min:") else value


def evaluated_scores(run: Path, best: str) -> dict[int, float]:
    """{steps done: score by `best`} of the evaluations in a run folder."""
    records = read_records(run / EVALUATIONS) if best else ()
    pairs = ((record["step"], score_of(best, record)) for record in records)
    return {step: score for step, score in pairs if score is not None}


def best_of(checkpoints: Iterable[Path], scores: Mapping[int, float]) -> Path | None:
    """The highest score, of equal ones the newest; None without any."""
    known = [path for path in checkpoints if step_of(path)[0] in scores]
    return max(known, key=lambda path: (scores[step_of(path)[0]], step_of(path)), default=None)


def checkpoint_of(run: Path, *, best: bool = False) -> Path:
    """The newest checkpoint in a run folder, or the best by its recipe's
    `training.checkpoint.best`. Raises `UserError` if there is none.
    """
    saved = newest_first(run / "checkpoints")
    if not saved:
        raise UserError(f"{run} has no checkpoint yet; name a model folder, or wait for the first")
    if not best:
        return saved[0]
    try:
        settings = dict(leaves(read_tree(run / "recipe.yaml")))
    except ValueError as error:
        raise UserError(str(error)) from error
    if not (name := str(settings.get("training.checkpoint.best") or "")):
        raise UserError(
            f"{run} has no best checkpoint: its recipe does not set training.checkpoint.best; set"
            " it for the next run, or leave --best out for the newest"
        )
    if (path := best_of(saved, evaluated_scores(run, name))) is None:
        raise UserError(
            f"{run} has no best checkpoint yet: none of its checkpoints has an evaluation with a"
            f" finite {name.removeprefix('min:')}; leave --best out for the newest"
        )
    return path
