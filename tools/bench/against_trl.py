"""What the comparisons with TRL share: TRL's environment, a run of TRL and one of megarl, and the
columns of their steps.

TRL lives in an environment of its own (`--trl-env`), made at first use and kept for the next; torch
is the first package installed, so have pip prefer a CPU build of it (PIP_EXTRA_INDEX_URL) where the
default index offers none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from common import Args, progress, spread
from e2e_task import Setting
from processes import child_environment, launcher, megarl, run

TRL_PINS = (
    "trl==1.16.0",
    "transformers==5.23.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "tokenizers==0.23.3",
)
TORCH_PIN = "torch==2.13.0"
INSTALL_WITHIN_S = 1800.0
TRL_ENV = Path(tempfile.gettempdir()) / "megarl-bench-trl"


def make_trl_environment(folder: Path) -> str:
    """The interpreter of an environment with TRL, made where it is missing."""
    folder = folder.absolute()
    pins = hashlib.sha256(repr((TORCH_PIN, TRL_PINS)).encode()).hexdigest()[:12]
    stamp, python = folder / f".bench-{pins}", str(folder / "bin" / "python")
    if stamp.exists():
        return python
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        raise ValueError(
            f"--trl-env {folder} holds something that is not a virtual environment; name another"
            " folder"
        )
    progress(f"making TRL's environment in {folder}")
    environment = {name: v for name, v in os.environ.items() if not name.startswith("PYTHON")}
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    with tempfile.TemporaryDirectory(prefix="e2e-") as work:
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [*pip, TORCH_PIN],
            [*pip, TORCH_PIN, *TRL_PINS],
        ):
            run(command, Path(work) / "log", INSTALL_WITHIN_S, environment)
    stamp.touch()
    return python


def python_for(args: Args) -> str:
    """The interpreter of TRL's environment where one of `args.systems` is TRL, else ""."""
    uses_trl = any(system.startswith("TRL") for system in args.systems)
    return make_trl_environment(args.trl_env) if uses_trl else ""


def run_trl(
    python: str, work: Path, setting: Setting, given: dict[str, Any], deadline_s: float
) -> dict[str, Any]:
    """One run of TRL, as trl_side.py returns it, with the share of the CPU that others took."""
    path, folder = work / "trl.json", work / "trl"
    given["arguments"]["output_dir"] = str(folder)
    spread_over = {"processes": setting.processes, "threads": setting.threads}
    path.write_text(json.dumps(given | spread_over))
    command = [*launcher(python, setting.processes), str(Path(__file__).with_name("trl_side.py"))]
    try:
        environment = child_environment(work, setting.threads)
        others = run([*command, str(path)], work / "log", deadline_s, environment)
        return json.loads(path.with_suffix(".result").read_text()) | {"others": others}
    finally:
        path.with_suffix(".result").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def run_megarl(
    recipe: Path | str,
    work: Path,
    setting: Setting,
    deadline_s: float,
    settings: Mapping[str, object],
) -> tuple[list[dict[str, Any]], float]:
    """What `processes.megarl` returns of a run on the CPU, in the new folder `work`/run."""
    shutil.rmtree(work / "run", ignore_errors=True)
    return megarl(
        recipe,
        work / "run",
        settings,
        deadline_s,
        environment=child_environment(work, setting.threads),
        processes=setting.processes,
    )


def one_run(
    system: str,
    setting: Setting,
    args: Args,
    *,
    recipe: Path | str,
    settings: Mapping[str, object],
    given: dict[str, Any],
    batch: int,
    samples: int,
    rows: int,
    **arguments: Any,
) -> dict[str, Any]:
    """{"steps": what is compared of each step, "others", "weight_change" of TRL} of a run of GRPO
    by TRL, which is `given` to trl_side.py, or by megarl. `batch`: samples of a step; `samples`: of
    a group; `rows`: padded rows of TRL's micro-batches; `arguments`: more of TRL's GRPOConfig, with
    `max_steps`. Raises `RuntimeError` unless all steps are whole.
    """
    times = batch // setting.processes // rows
    given["arguments"] = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": times,
        "steps_per_generation": times,
        "num_generations": samples,
        "temperature": 1.0,
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "shuffle_dataset": False,
        **arguments,
    }
    change = None
    if system.startswith("TRL"):
        found = run_trl(args.python, args.work, setting, given, args.deadline)
        others, change = found["others"], found["weight_change"]
        steps = [
            {
                "step_s": row["step_s"],
                "accuracy": row["reward"],
                "tokens": row["completions/mean_length"] * row["samples"],
                "samples": row["samples"],
            }
            for row in found["steps"]
        ]
    else:
        rows, others = run_megarl(recipe, args.work, setting, args.deadline, settings)
        steps = [
            {
                "step_s": row["time/step_s"],
                "accuracy": row["accuracy"],
                "tokens": row["tokens/generated"],
                "samples": (row["groups/drawn"] - row["groups/rejected"]) * samples,
            }
            for row in rows
        ]
    if [row["samples"] for row in steps] != [batch] * arguments["max_steps"]:
        raise RuntimeError(f"{system} did not train {arguments['max_steps']} whole steps: {steps}")
    return {"steps": steps, "others": others, "weight_change": change}


def row_of(
    runs: list[dict[str, Any]], timed: Iterable[list[dict[str, float]]], **more: list[float]
) -> dict[str, Any]:
    """The row of a system: spreads of its speeds over the timed steps of each run, and of `more`
    columns with a value of each run.
    """
    for steps in timed:
        seconds = sum(row["step_s"] for row in steps)
        found = {"step_s": statistics.median(row["step_s"] for row in steps)}
        for name in ("samples", "tokens"):
            found[f"{name}_per_s"] = sum(row[name] for row in steps) / seconds
        for name, value in found.items():
            more.setdefault(name, []).append(value)
    columns = {name: spread(values) for name, values in more.items()}
    return {**columns, "others": max(one["others"] for one in runs), "runs": runs}


def refuse_lengths(lengths: dict[str, float], agree: float, where: str) -> None:
    """Raise `RuntimeError` where the mean lengths of two systems differ by more than the share
    `agree` of the smaller.
    """
    if max(lengths.values()) > (1 + agree) * min(lengths.values()):
        raise RuntimeError(
            f"mean lengths {where} differ too much to compare: {lengths}; take more steps or rounds"
        )
