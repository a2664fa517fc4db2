"""Seconds from `megarl train` to the end of its first step, on the quick start's task and model.

    python tools/bench/startup.py --rounds 3

The model is random, the recipe is launch/recipes/quickstart.yaml without evaluation, one step. A
round is a whole run: the clock starts with the command and stops when the first step's metrics are
on disk. A first round that is not counted warms the file cache up.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import ROOT, Others, command_line, require_positive, run_tool, spread

DEADLINE_S = 300.0
POLL_S = 0.02
OPTIONS = {"--rounds": {"type": int, "default": 3, "help": "counted runs"}}


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    require_positive(parser, args, ["rounds"])
    return args


def seconds_to_first_step(data: Path, folder: Path) -> float:
    """Run `megarl train` for one step; raises `RuntimeError` where it fails or takes too long."""
    command = [sys.executable, "-m", "megarl", "train", "launch/recipes/quickstart.yaml"]
    settings = {
        "folder": folder,
        "steps": 1,
        "model.path": data / "model",
        "model.from_scratch": True,
        "prompts.source": data / "train.jsonl",
        "evaluation.prompts.source": "",
        "evaluation.sampled_too": False,
    }
    command += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    log = folder.with_suffix(".log")
    started_at = time.monotonic()
    with log.open("w") as output:
        run = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        try:
            metrics = folder / "metrics.jsonl"
            while not (metrics.exists() and metrics.stat().st_size):
                late = time.monotonic() - started_at > DEADLINE_S
                if late or run.poll() not in (None, 0):
                    raise RuntimeError(f"no first step: {log.read_text()[-2000:]}")
                time.sleep(POLL_S)
            seconds = time.monotonic() - started_at
            run.wait(DEADLINE_S)
        finally:
            if run.poll() is None:
                run.kill()
                run.wait()
    return seconds


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Time `args.rounds` runs after one that is not counted; returns their seconds and spread."""
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        subprocess.run([sys.executable, "tools/make_addition.py", str(data)], cwd=ROOT, check=True)
        seconds_to_first_step(data, Path(scratch) / "warm-up")
        with Others() as others:
            found = [
                seconds_to_first_step(data, Path(scratch) / f"round-{number}")
                for number in range(args.rounds)
            ]
    return {"seconds": spread(found), "rounds": found, "others": others.share}


def show(result: dict[str, Any]) -> Iterator[str]:
    """Lines of a table."""
    yield f"{'first step after':20} {result['seconds']}"
    yield f"{'rounds':20} {', '.join(f'{seconds:.1f} s' for seconds in result['rounds'])}"


if __name__ == "__main__":
    sys.exit(run_tool("startup", arguments=arguments, measure=measure, show=show))
