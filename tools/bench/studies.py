"""What the studies share: runs of megarl, and results that are lines of FOLDER/results.jsonl.

A study may be ended at any time and gone on with: a case whose result is there is not run again.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import ROOT, progress
from processes import megarl

RECIPES = ROOT / "launch" / "recipes"
DEADLINE_S = 1800.0
"""Seconds that one run may take."""


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; empty if the file does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def newest_model(folder: Path) -> Path:
    """Path of the Hugging Face model in the newest checkpoint of the run folder `folder`. Raises
    `ValueError` if the run has no checkpoint.
    """
    return max((folder / "checkpoints").glob("step_*")) / "model"


def train(
    command: str, recipe: Path | str, folder: Path, settings: Mapping[str, object]
) -> list[dict[str, Any]]:
    """Run a command of megarl in `folder`, with its output beside it; returns the metrics of all
    steps. `recipe`: a file, or a recipe's text, which is written to one. `settings`: {name: value}.
    """
    if isinstance(recipe, str):
        path = folder.with_suffix(".yaml")
        path.write_text(recipe)
        recipe = path
    megarl(command, recipe, {"folder": folder, **settings}, folder.with_suffix(".log"), DEADLINE_S)
    return lines_of(folder / "metrics.jsonl")


def run_missing(
    folder: Path, cases: Sequence[dict[str, Any]], run: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """All results in `folder`, after those of `cases` that were missing have been run. A result is
    its case and what `run` returns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.jsonl"
    for case in cases:
        if not any(case.items() <= one.items() for one in lines_of(path)):
            progress(case)
            with path.open("a") as file:
                file.write(json.dumps(case | run(case)) + "\n")
    return lines_of(path)


def grouped(
    records: Iterable[Mapping[str, Any]], keys: Sequence[str]
) -> list[tuple[dict[str, Any], list[Any]]]:
    """[(the values of `keys`, the records that have them)], in the order of the first of each."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for one in records:
        found.setdefault(tuple(one[key] for key in keys), []).append(one)
    return [(dict(zip(keys, values, strict=True)), same) for values, same in found.items()]


def last_quarter(values: Sequence[float]) -> float:
    """Mean of the last quarter of the values."""
    return statistics.fmean(values[-max(1, len(values) // 4) :])
