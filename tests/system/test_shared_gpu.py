"""Trainer and engine that take turns on one device: every way for weights and every ZeRO
stage. On the CPU two of them, on a GPU all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import (
    PROBE_BOUND,
    Done,
    megarl,
    records,
    tiny_run,
    write_recipe,
)
from support.tiny import write_model

STEPS = 3
HIDDEN: dict[str, Any] = {"CUDA_VISIBLE_DEVICES": ""}
"""Environment in which a run takes the CPU."""


def recipe(
    folder: Path,
    transport: str,
    stage: int,
    *,
    gpu: bool,
    offload: bool = False,
    compiled: bool = False,
) -> str:
    """A colocated run of one rank and one engine, on a GPU with CUDA graphs if `compiled`."""
    tree: dict[str, Any] = tiny_run(folder, write_model(folder / "model"), STEPS)
    tree["training"] |= {"zero_stage": stage, "offload_optimizer": offload}
    tree["weight_sync"] = {"transport": transport}
    tree["rollout"]["placement"] = "colocated"
    if gpu:
        tree["training"]["precision"] = "bfloat16" if stage else "float32"
        engine = {"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "compile": compiled}
        tree["rollout"]["engine"] = engine
    return write_recipe(folder / "recipe.yaml", tree)


def check(done: Done, folder: Path, gpu: bool) -> list[dict[str, Any]]:
    """The run ended well, every version arrived, and every group is accounted for. In 16 bits the
    run itself judges the mean of the probe, and single tokens may differ by more than 1."""
    assert done.code == 0, done.err[-4000:]
    assert done.survivors == []
    rows = [row for row in records(folder / "run/metrics.jsonl") if "publish/replaced" in row]
    assert len(rows) == STEPS
    for row in rows:
        assert row["publish/bytes"] > 0 and (gpu or row["probe/max_abs"] < PROBE_BOUND), row
        assert row["groups/drawn"] - row["groups/rejected"] == 4
    audit = megarl("ledger", str(folder / "run"), **HIDDEN)
    assert audit.code == 0, audit.out + audit.err
    json.loads(done.out)
    return rows


ON_GPU = pytest.mark.gpu
CASES = [
    pytest.param("point_to_point", 3, True, False, False, marks=pytest.mark.nightly),
    *(pytest.param(transport, stage, offload, compiled, True, marks=ON_GPU)
      for transport, stage, offload, compiled in (
          ("cuda_ipc", 2, False, False), ("shared_memory", 1, False, False),
          ("cuda_ipc", 3, False, False), ("cuda_ipc", 3, False, True),
          ("point_to_point", 3, True, False), ("shared_memory", 0, False, False))),
]  # fmt: skip


@pytest.mark.parametrize(("transport", "stage", "offload", "compiled", "gpu"), CASES)
def test_taking_turns(
    tmp_path: Path, transport: str, stage: int, offload: bool, compiled: bool, gpu: bool
) -> None:
    path = recipe(tmp_path, transport, stage, gpu=gpu, offload=offload, compiled=compiled)
    hidden = {} if gpu else HIDDEN
    rows = check(megarl("run", path, timeout_s=300, **hidden), tmp_path, gpu)
    assert [row["publish/replaced"] for row in rows] == [0] * STEPS
