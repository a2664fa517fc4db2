"""What the studies share: runs of megarl whose results are lines of FOLDER/results.jsonl.

A study may be ended at any time and gone on with: a run whose result is there is not repeated.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "launch" / "recipes"
DEADLINE_S = 1800.0
"""Seconds that one run may take."""


def megarl(*words: str) -> None:
    """Run a command of megarl. Raises `RuntimeError` with its last words where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "megarl", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"megarl {' '.join(words)} failed: {done.stderr[-1500:]}")


def results(folder: Path, case_type: type[Any], result_type: type[Any]) -> list[Any]:
    """The results in `folder`, each a `result_type` whose field `case` is a `case_type`."""
    path = folder / "results.jsonl"
    records = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return [result_type(**{**one, "case": case_type(**one["case"])}) for one in records]


def run_missing(
    folder: Path, cases: Sequence[Any], done: Sequence[Any], run: Callable[[Any], Any]
) -> None:
    """Add the results of `run` for those of `cases` that are not in `done`, one after the other.
    Raises `RuntimeError` or `subprocess.TimeoutExpired` where a run fails.
    """
    for case in cases:
        if case in done:
            continue
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        found = run(case)
        with (folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(asdict(found)) + "\n")


def mean_and_deviation(values: Sequence[float]) -> str:
    """ "mean +- standard deviation", of one value without the latter, and of none "-"."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} +- {statistics.stdev(values):.3f}"
