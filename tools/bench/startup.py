"""Seconds from `megarl run` to the end of its first step, on the quick start's task and model.

    python tools/bench/startup.py --rounds 3

The model is random, the recipe is launch/recipes/quickstart.yaml without evaluation, one step. A
round is a whole run: the clock starts with the command and stops when the first step's metrics are
on disk. A first round that is not counted warms the file cache up.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from common import Args, Lines, run_tool, spread, table
from make_addition import main as make_addition
from processes import megarl
from studies import RECIPES

OPTIONS = {"--rounds": (3, "counted runs")}


def seconds_to_first_step(data: Path, folder: Path) -> float:
    """Run the recipe for one step; raises `RuntimeError` where it fails or takes too long."""
    settings = {
        "steps": 1,
        "model.path": data / "model",
        "model.from_scratch": True,
        "prompts.source": data / "train.jsonl",
        "evaluation.prompts.source": "",
        "evaluation.sampled_too": False,
    }
    metrics, started_at = folder / "metrics.jsonl", time.time()
    try:
        megarl(RECIPES / "quickstart.yaml", folder, settings, 300.0)
    except RuntimeError:  # such as that a step in which all rewards are equal trains nothing
        if not metrics.exists():
            raise
    return metrics.stat().st_mtime - started_at


def measure(args: Args) -> dict[str, Any]:
    """Time `args.rounds` runs after one that is not counted."""
    data, runs = args.work / "data", range(args.rounds + 1)
    make_addition([str(data)])
    found = [seconds_to_first_step(data, args.work / f"round-{n}") for n in runs][1:]
    return {"seconds": spread(found), "rounds": found}


def show(result: dict[str, Any]) -> Lines:
    """Lines of a table."""
    yield from table([result], "first step after, s=seconds .1f")
    yield ", ".join(f"{seconds:.1f} s" for seconds in result["rounds"])


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
