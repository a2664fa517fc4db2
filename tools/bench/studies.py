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
from processes import lines_of

RECIPES = ROOT / "launch" / "recipes"


def newest_model(folder: Path) -> Path:
    """Path of the Hugging Face model in the newest checkpoint of the run folder `folder`. Raises
    `ValueError` if the run has no checkpoint.
    """
    return max((folder / "checkpoints").glob("step_*")) / "model"


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
