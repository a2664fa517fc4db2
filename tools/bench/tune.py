"""`megarl preference` and `megarl sft` against TRL's DPOTrainer and SFTTrainer: tokens a second on
the same machine, model and data; CPU only.

    python tools/bench/tune.py [--json] [--kinds preference,sft] [--rounds 3] [--steps 8]
                               [--trl-env FOLDER]

A step is 32 pairs, or 64 demonstrations, in float32, with one AdamW step. The model is the random
Qwen2 of e2e.py. Prompts have 12 to 24 tokens, responses 20 to 400, most of them short. Both pack:
megarl up to 8,192 tokens in a row; TRL's SFT in blocks of 2,048 (`packing`), while its DPO has no
packing that runs on a CPU, and pads eight pairs to their longest. The reference's log-probs are
computed before training by both, and are not measured.

What is measured: tokens of prompts and responses, padding not counted, by the seconds from a step's
begin to its end; of TRL by a TrainerCallback, of megarl by `time/step_s`. The first step is left
out, because both allocate there. Each system runs as two processes of one thread and as one process
of two threads; the faster is compared. They take turns, each run in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import cell, command_line, require_positive, run_tool, spread, warn_if_not_quiet
from e2e_megarl import weight_change
from e2e_processes import child_environment, launcher, run
from e2e_task import (
    LEARNING_RATE,
    LETTERS,
    MAX_PROMPT_TOKENS,
    MICRO_BATCH_TOKENS,
    SEED,
    Setting,
    write_task,
)
from e2e_trl import make_trl_environment

ROWS = {"preference": 32, "sft": 64}
"""Rows of one optimizer step."""
SPREADS = (Setting(2, 1), Setting(1, 2))
DEADLINE_S = 900.0


def arguments(argv: list[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = command_line(
        __doc__,
        {
            "--kinds": {"type": lambda text: text.split(","), "default": list(ROWS)},
            "--rounds": {"type": int, "default": 3},
            "--steps": {"type": int, "default": 8},
            "--trl-env": {"type": Path, "default": Path.home() / ".cache" / "megarl" / "trl"},
        },
    )
    args = parser.parse_args(argv)
    require_positive(parser, args, ["rounds", "steps"])
    return args


def write_data(folder: Path, steps: int) -> dict[str, float]:
    """Rows for `steps` steps of both kinds; returns the mean tokens of a step of each."""
    draw, tokens = random.Random(SEED), {}

    def text(shortest: int, longest: int) -> str:
        length = shortest + int((longest - shortest) * draw.random() ** 3)
        return "".join(draw.choices(LETTERS, k=length))

    for kind, per_step in ROWS.items():
        names = ("chosen", "rejected") if kind == "preference" else ("completion",)
        count, lines = 0, []
        for _ in range(per_step * steps):
            prompt = text(MAX_PROMPT_TOKENS // 2, MAX_PROMPT_TOKENS)
            row = {"prompt": prompt} | {name: text(20, 400) for name in names}
            count += sum(len(prompt) + len(row[name]) + 1 for name in names)
            lines.append(json.dumps(row) + "\n")
        (folder / f"{kind}.jsonl").write_text("".join(lines))
        tokens[kind] = count / steps
    return tokens


def megarl_recipe(kind: str, task: Path, folder: Path, setting: Setting, steps: int) -> Any:
    """The run as megarl's configuration. JSON is YAML."""
    source = str(task / f"{kind}.jsonl")
    data = {"source": source, "max_tokens": 4096, "shuffle": False}
    section = {"preferences": data, "reference": {"cache": str(folder.parent / "reference")}}
    if kind == "sft":
        section = {"demonstrations": data | {"response_column": "completion"}}
    return {
        "folder": str(folder),
        "steps": steps,
        "seed": SEED,
        "samples_per_step": ROWS[kind],
        "model": {"path": str(task / "model")},
        **section,
        "training": {
            "num_threads": setting.threads,
            "micro_batch_tokens": MICRO_BATCH_TOKENS,
            "optimizer": {"learning_rate": LEARNING_RATE, "clip_norm": 1.0},
        },
        "observe": {"tensorboard": False, "progress": False},
    }


class Bench:
    """Runs both systems on one task."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work, self.task = args, work, work / "task"
        self.task.mkdir()
        self.python = make_trl_environment(args.trl_env)
        self.parameters = write_task(self.task, 512)
        self.tokens = write_data(self.task, 1 + args.steps)
        self.others: list[float] = []

    def megarl(self, kind: str, setting: Setting) -> float:
        """Tokens a second of one run of megarl."""
        folder, steps = self.work / "megarl", 1 + self.args.steps
        recipe = self.work / "megarl.json"
        recipe.write_text(json.dumps(megarl_recipe(kind, self.task, folder, setting, steps)))
        module = ["-m", "megarl", kind, str(recipe)]
        command = [*launcher(sys.executable, setting.processes), *module]
        try:
            self._run(command, setting)
            rows = (folder / "metrics.jsonl").read_text().splitlines()[1:]
            saved = next((folder / "checkpoints").glob("step_*")) / "model"
            self._refuse_idle(kind, weight_change(self.task / "model", saved))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        found = [json.loads(row) for row in rows]
        tokens = sum(one["tokens/trained_per_s"] * one["time/step_s"] for one in found)
        return tokens / sum(one["time/step_s"] for one in found)

    def trl(self, kind: str, setting: Setting) -> float:
        """Tokens a second of one run of TRL."""
        path = self.work / "trl.json"
        given = {
            "kind": kind,
            "task": str(self.task),
            "steps": 1 + self.args.steps,
            "rows": ROWS[kind],
            "tokens": self.tokens[kind],
            "processes": setting.processes,
            "threads": setting.threads,
        }
        path.write_text(json.dumps(given))
        script = str(Path(__file__).with_name("tune_trl.py").resolve())
        try:
            self._run([*launcher(self.python, setting.processes), script, str(path)], setting)
            found = json.loads(path.with_suffix(".result").read_text())
        finally:
            path.with_suffix(".result").unlink(missing_ok=True)
            shutil.rmtree(self.work / "trl", ignore_errors=True)
        self._refuse_idle(kind, found["weight_change"])
        first, *rest = found["steps"]
        tokens = rest[-1]["tokens_so_far"] - first["tokens_so_far"]
        return tokens / sum(step["step_s"] for step in rest)

    def _run(self, command: list[str], setting: Setting) -> None:
        environment = child_environment(self.work, setting.threads)
        share, _ = run(command, environment, self.work / "log", DEADLINE_S)
        self.others.append(share)

    def _refuse_idle(self, kind: str, change: float) -> None:
        if not change > 0:
            raise RuntimeError(f"{kind}: the weights did not change")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both systems in turns, each with both ways to use the cores."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tune-") as work:
        bench = Bench(args, Path(work))
        for kind in args.kinds:
            rates: dict[str, dict[str, list[float]]] = {"megarl": {}, "TRL": {}}
            for number in range(args.rounds):
                for setting in SPREADS:
                    for system, call in (("TRL", bench.trl), ("megarl", bench.megarl)):
                        rate = call(kind, setting)
                        rates[system].setdefault(str(setting), []).append(rate)
                        shown = f"round {number + 1}: {kind}, {system}, {setting}"
                        print(f"{shown}: {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
            found[kind] = {
                system: {name: spread(values) for name, values in by_setting.items()}
                for system, by_setting in rates.items()
            }
        return {
            "parameters": bench.parameters,
            "tokens_a_step": bench.tokens,
            "others": max(bench.others),
            "rates": found,
        }


def show(result: dict[str, Any]) -> Iterator[str]:
    """The table, and for each kind the ratio of the faster settings."""
    yield f"{result['parameters']:,} parameters"
    yield from warn_if_not_quiet(result["others"])
    yield "| what | system | cores as | tokens/s, median (smallest to largest) |"
    yield "|---|---|---|---|"
    ratios = []
    for kind, systems in result["rates"].items():
        best = {}
        for system, settings in systems.items():
            for name, found in settings.items():
                yield f"| {kind} | {system} | {name} | {cell(found, ',.0f')} |"
            best[system] = max(settings.values(), key=lambda found: found["median"])
        pairs = zip(best["megarl"]["all"], best["TRL"]["all"], strict=True)
        each = spread([mine / theirs for mine, theirs in pairs])
        ratios.append(f"{kind}: {cell(each, '.2f')} times TRL, round by round")
    yield from ratios


if __name__ == "__main__":
    sys.exit(run_tool("tune", arguments=arguments, measure=measure, show=show))
