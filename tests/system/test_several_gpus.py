"""Runs whose engines have GPUs of their own: ten versions that travel as messages by NCCL, and three
by gloo on the CPU, to two engines of two ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import PROBE_BOUND, megarl, records, tiny_run, write_recipe
from support.tiny import write_model

pytestmark = pytest.mark.slow


def words(folder: Path, *, gpu: bool) -> list[str]:
    """The words after `megarl run`: one rank and two engines of two ranks."""
    versions = 10 if gpu else 3
    tree: dict[str, Any] = tiny_run(folder, write_model(folder / "model"), versions)
    tree |= {"weight_sync": {"transport": "point_to_point"}, "evaluation": {}}
    tree["training"] |= {"zero_stage": 1, "checkpoint": {"every": versions}}
    engine: dict[str, Any] = {"tensor": 2}
    if gpu:
        tree["training"]["precision"] = "bfloat16"
        engine |= {"dtype": "bfloat16", "gpu_memory_utilization": 0.3}
    tree["rollout"] |= {"num_engines": 2, "engine": engine}
    path = write_recipe(folder / "recipe.yaml", tree)
    return [path, "--ranks", "1", *(() if gpu else ("--cpu",))]


def test_the_run_on_five_gpus_is_planned(tmp_path: Path) -> None:
    done = megarl("run", *words(tmp_path, gpu=True), "--dry-run", "--gpus-per-node", "5")
    assert done.code == 0 and done.out.count("CUDA_VISIBLE_DEVICES=1,2,3,4") == 1, done.out


@pytest.mark.parametrize(
    "gpu",
    [pytest.param(False, marks=pytest.mark.nightly), pytest.param(True, marks=pytest.mark.gpu)],
)
def test_versions_as_messages_to_two_engines_of_two_ranks(
    tmp_path: Path, gpu: bool, record_property: Any
) -> None:
    done = megarl("run", *words(tmp_path, gpu=gpu), timeout_s=500)
    assert done.code == 0, done.err[-4000:]
    rows = [row for row in records(tmp_path / "run/metrics.jsonl") if "publish/bytes" in row]
    numbers = [(row["time/publish_s"], row["probe/max_abs"]) for row in rows]
    record_property("numbers", json.dumps(numbers))
    assert len(rows) == (10 if gpu else 3), numbers
    for row in rows:
        assert row["publish/bytes"] > 0 and row["engines/replaced"] == 0, row
        assert gpu or row["probe/max_abs"] < PROBE_BOUND, row  # in 16 bit the run itself judges it
