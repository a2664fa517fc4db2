"""tools/cluster_steps.toml: its commands are ones that this checkout has, and what can be planned
without GPUs is planned.
"""

from __future__ import annotations

import importlib
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_steps import CLUSTER as STEPS
from gpu_steps import ClusterStep, listed
from support.commands import ROOT, python

BENCHES = [step for step in STEPS if "tools/bench/" in step.command]
PLANS = sorted({step.dry_run for step in STEPS if step.dry_run})


def test_every_file_of_a_command_exists() -> None:
    for step in STEPS:
        for word in [*shlex.split(step.command, comments=True), *shlex.split(step.dry_run)]:
            if word.startswith(("tests/", "tools/", "launch/")):
                assert (ROOT / word).exists(), (step.name, word)


def test_the_list_says_of_each_what_is_healthy() -> None:
    lines = list(listed(STEPS))
    assert sum(line.startswith("   healthy  ") for line in lines) == len(STEPS)
    assert all(step.shows and step.look and step.healthy for step in STEPS)
    told = python("tools/run_gpu.py", "--cluster")
    assert told.returncode == 0 and told.stdout.splitlines() == lines


@pytest.mark.parametrize("step", BENCHES, ids=lambda step: step.name)
def test_a_benchmark_takes_its_options(step: ClusterStep, monkeypatch: pytest.MonkeyPatch) -> None:
    _, script, *options = shlex.split(step.command)
    monkeypatch.syspath_prepend(ROOT / "tools" / "bench")
    bench = importlib.import_module(Path(script).stem)
    args = importlib.import_module("common").command_line("", bench.OPTIONS).parse_args(options)
    assert all(math.prod(layout) == 8 for layout in args.layouts)
    assert args.dtype == "bfloat16" and 0 not in args.zero


@pytest.mark.nightly  # dry runs are in test_launch.py and test_plan_text.py
@pytest.mark.parametrize("plan", PLANS)
def test_what_can_be_planned_is_planned(plan: str) -> None:
    words = shlex.split(plan)
    if words[0] == "megarl":
        words = [sys.executable, "-m", *words]
    words = [sys.executable if word == "python" else word for word in words]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
