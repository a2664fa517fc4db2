"""GRPO of a published model, megarl against TRL: SmolLM2-135M-Instruct on sums and differences that
are asked in words; same machine, prompts, rewards, samples and optimizer; CPU only.

    python tools/bench/e2e_real.py [--json] [--seeds 1,2,3] [--steps 12] [--systems megarl,trl]
        [--precision float32]

A step is 8 prompts x 8 samples of at most 48 tokens at temperature 1, and one AdamW step at 1e-5
with clipped gradients; a response is right if its last number is the answer.

    trl                   GRPOTrainer with transformers' own `generate`, as its vLLM mode does not
                          run on CPU; a process of two threads
    trl-2-processes       the same, of one thread each
    megarl                launch/recipes/smollm2_arithmetic.yaml, which is on-policy, as TRL is;
                          two threads for engine and trainer, in turns
    megarl-staleness-1    rollout.max_staleness 1: engine and trainer at the same time, a thread
                          each

`--precision bfloat16`: TRL trains under autocast, megarl with bfloat16 weights and float32 master
weights, and its engine has bfloat16 weights. The systems take turns, a run of each per seed.

    s a step   median over the steps but the first, and with staleness 1 the last
    samples/s  over the same steps
    accuracy   of the rollouts, mean of the last quarter of the steps
    same time  the same of the steps that were over after the time of the quickest system's run

Both take the mean of a step's tokens and AdamW with the same settings. Advantages divide by the
deviation of a group: TRL's of a sample, megarl's of a population, which makes megarl's 7 % larger.
A run is refused where a step lacks samples, and the table where mean lengths of the first step,
before any learning, differ by more than a fifth.

`others` is the share of the CPU that processes outside of the run took meanwhile: above a few
percent the times are worth little. TRL lives in an environment of its own, as in e2e.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import ROOT, cell, command_line, numbers, run_tool, spread, warn_if_not_quiet
from e2e_processes import child_environment, launcher, run
from e2e_real_trl import GROUPS, LEARNING_RATE, LIMIT, SAMPLES, right
from e2e_trl import make_trl_environment

RECIPE = ROOT / "launch" / "recipes" / "smollm2_arithmetic.yaml"
REWARD = Path(__file__).with_name("e2e_real_trl.py")
SYNCHRONOUS, OVERLAPPED = "megarl", "megarl-staleness-1"
TRL = {"trl": 1, "trl-2-processes": 2}
"""{name: processes} of TRL's settings."""
SYSTEMS = (SYNCHRONOUS, OVERLAPPED, *TRL)
LENGTHS_AGREE = 0.2
"""By how much the systems' mean lengths of the first step may differ, relative to the smallest."""
THREADS = 2
COLUMNS = {
    "step_s": ".2f",
    "samples_per_s": ".2f",
    "tokens_per_s": ",.0f",
    "accuracy": ".3f",
    "accuracy_at_time": ".3f",
}
"""{column of the table: format of its numbers}"""


def settings_of(
    folder: Path, work: Path, args: argparse.Namespace, seed: int, staleness: int
) -> dict[str, object]:
    """{setting: value} of a run of megarl in `folder`, on top of the recipe."""
    threads = 1 if staleness else THREADS
    return {
        "folder": folder,
        "steps": args.steps,
        "seed": seed,
        "model.path": args.model,
        "prompts.source": work / "task" / "train.jsonl",
        "prompts.shuffle": "false",
        "environment.verifier": f"{REWARD}:{right.__name__}",
        "environment.require_stop": "false",
        "rollout.groups_per_step": GROUPS,
        "rollout.group_size": SAMPLES,
        "rollout.max_new_tokens": LIMIT,
        "rollout.max_staleness": staleness,
        "rollout.dynamic_sampling.enabled": "false",
        "rollout.engine.num_threads": threads,
        "rollout.engine.dtype": args.precision,
        "algorithm.correction.kind": "tis" if staleness else "none",
        "training.num_threads": threads,
        "training.precision": args.precision,
        "training.zero_stage": 0 if args.precision == "float32" else 1,
        "training.optimizer.learning_rate": LEARNING_RATE,
        "training.optimizer.clip_norm": 1.0,
        "training.schedule.kind": "constant",
        "training.checkpoint.every_minutes": 0,
        "evaluation.prompts.source": "",
    }


def run_megarl(work: Path, args: argparse.Namespace, seed: int, staleness: int) -> dict[str, Any]:
    """One run of megarl: {steps: a record of each, others}."""
    folder = work / f"megarl-{staleness}-{seed}"
    settings = settings_of(folder, work, args, seed, staleness)
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "megarl", "train", str(RECIPE), *words]
    environment = child_environment(work, 1 if staleness else THREADS)
    others, _ = run(command, environment, work / "log", args.deadline)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [
        {
            "step_s": row["time/step_s"],
            "accuracy": row["accuracy"],
            "tokens": row["tokens/generated"],
            "samples": (row["groups/drawn"] - row["groups/rejected"]) * SAMPLES,
        }
        for row in rows
    ]
    return {"steps": steps, "others": others}


def run_trl(work: Path, args: argparse.Namespace, seed: int, processes: int) -> dict[str, Any]:
    """One run of TRL, in its environment, as `run_megarl`."""
    given = {
        "model": str(args.model),
        "prompts": str(work / "task" / "train.jsonl"),
        "folder": str(work / "trl"),
        "steps": args.steps,
        "seed": seed,
        "processes": processes,
        "threads": THREADS // processes,
        "precision": args.precision,
    }
    path = work / f"trl-{processes}-{seed}.json"
    path.write_text(json.dumps(given))
    command = [*launcher(args.python, processes), str(REWARD), str(path)]
    environment = child_environment(work, THREADS // processes)
    others, _ = run(command, environment, work / "log", args.deadline)
    return json.loads(path.with_suffix(".result").read_text()) | {"others": others}


def steady(steps: list[dict[str, float]], system: str) -> list[dict[str, float]]:
    """The steps that are timed."""
    return steps[1 : -1 if system == OVERLAPPED else None]


def last_quarter(steps: list[dict[str, float]]) -> float:
    """Mean accuracy of the last quarter of the steps."""
    return statistics.fmean(row["accuracy"] for row in steps[-max(1, len(steps) // 4) :])


def within(steps: list[dict[str, float]], limit_s: float) -> list[dict[str, float]]:
    """The steps that were over after `limit_s` seconds, at least the first."""
    passed, kept = 0.0, list[dict[str, float]]()
    for row in steps:
        passed += row["step_s"]
        if kept and passed > limit_s:
            break
        kept.append(row)
    return kept


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All systems with all seeds."""
    args.python = make_trl_environment(args.trl_env) if set(TRL) & set(args.systems) else ""
    with tempfile.TemporaryDirectory(prefix="e2e-") as name:
        work = Path(name)
        tools = ROOT / "tools"
        environment = child_environment(work, 1)
        for command in (
            [str(tools / "real_model.py"), "smollm2", "--folder", str(args.model)],
            [str(tools / "make_arithmetic.py"), str(work / "task")],
        ):
            run([sys.executable, *command], environment, work / "log", args.deadline)
        runs: dict[str, list[dict[str, Any]]] = {system: [] for system in args.systems}
        for seed in args.seeds:
            for system in args.systems:
                if system in TRL:
                    found = run_trl(work, args, seed, TRL[system])
                else:
                    found = run_megarl(work, args, seed, int(system == OVERLAPPED))
                if [row["samples"] for row in found["steps"]] != [GROUPS * SAMPLES] * args.steps:
                    raise RuntimeError(f"{system} did not train {args.steps} whole steps: {found}")
                runs[system].append(found)
                kept = steady(found["steps"], system)
                print(
                    f"seed {seed}  {system:20}"
                    f" {statistics.median(row['step_s'] for row in kept):7.2f} s a step  accuracy"
                    f" {last_quarter(found['steps']):.3f}  others {found['others']:.0%}",
                    file=sys.stderr,
                    flush=True,
                )
    firsts = [
        statistics.fmean(one["steps"][0]["tokens"] for one in found) for found in runs.values()
    ]
    if max(firsts) > (1 + LENGTHS_AGREE) * min(firsts):
        raise RuntimeError(f"lengths of the first step differ too much to compare: {firsts}")
    return {"systems": table(runs)}


def table(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """{system: its row}."""
    rows = {}
    for system, found in runs.items():
        columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
        for number, one in enumerate(found):
            timed = steady(one["steps"], system)
            seconds = sum(row["step_s"] for row in timed)
            limit_s = min(
                sum(row["step_s"] for row in other[number]["steps"]) for other in runs.values()
            )
            columns["step_s"].append(statistics.median(row["step_s"] for row in timed))
            columns["samples_per_s"].append(GROUPS * SAMPLES * len(timed) / seconds)
            columns["tokens_per_s"].append(sum(row["tokens"] for row in timed) / seconds)
            columns["accuracy"].append(last_quarter(one["steps"]))
            columns["accuracy_at_time"].append(last_quarter(within(one["steps"], limit_s)))
        rows[system] = {name: spread(values) for name, values in columns.items()}
        rows[system] |= {"others": max(one["others"] for one in found), "runs": found}
    return rows


def show(result: dict[str, Any]) -> Iterator[str]:
    """Lines of the table, with its heading and warnings, for the benchmark result `result`."""
    here, task = result["machine"], result["task"]
    yield f"{here['cpu']}, {here['cores']} cores; SmolLM2-135M, {GROUPS} x {SAMPLES} samples a step"
    yield (
        f"{task['precision']}; {task['steps']} steps; median (smallest to largest) over seeds"
        f" {task['seeds']}"
    )
    yield (
        f"{'system':20} {'s a step':>22} {'samples/s':>22} {'tokens/s':>22} {'accuracy':>22}"
        f" {'same time':>22} {'others':>6}"
    )
    for system, row in result["systems"].items():
        cells = "".join(f" {cell(row[name], form):>22}" for name, form in COLUMNS.items())
        yield f"{system:20}{cells} {row['others']:6.0%}"
    yield from warn_if_not_quiet(max(row["others"] for row in result["systems"].values()))


OPTIONS: dict[str, dict[str, Any]] = {
    "--seeds": {"default": "1,2,3", "help": "seeds, a run of each system for each"},
    "--steps": {"type": int, "default": 12, "help": "steps of a run, 4 or more"},
    "--precision": {"choices": ("float32", "bfloat16"), "default": "float32", "help": "of all"},
    "--systems": {"default": ",".join(SYSTEMS), "help": "systems to compare, as listed above"},
    "--model": {
        "type": Path,
        "default": Path.home() / ".cache" / "megarl" / "smollm2",
        "help": "folder of the model, made by tools/real_model.py where it is missing",
    },
    "--deadline": {"type": float, "default": 7200.0, "help": "seconds a single run may take"},
    "--trl-env": {
        "type": Path,
        "default": Path(tempfile.gettempdir()) / "megarl-bench-trl",
        "help": "folder of TRL's environment",
    },
}


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    try:
        args.seeds = numbers(args.seeds)
    except ValueError:
        parser.error(f"--seeds is {args.seeds!r}; set it to whole numbers, for example 1,2,3")
    if args.steps < 4:
        parser.error(f"--steps is {args.steps}; set it to 4 or more")
    args.model, args.trl_env = args.model.absolute(), args.trl_env.absolute()
    args.systems = args.systems.split(",")
    if unknown := set(args.systems) - set(SYSTEMS):
        parser.error(f"--systems names {sorted(unknown)}; choose from {', '.join(SYSTEMS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return run_tool("e2e_real", arguments=arguments, measure=measure, show=show, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
