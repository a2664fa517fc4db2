"""Whole steps of GRPO, megarl against TRL: same machine, model, prompts, reward, samples and
optimizer steps; CPU only.

    python tools/bench/e2e.py [--json] [--rounds 3] [--steps 4] [--limits 64,480] [--trial-steps 2]

A step is 32 prompts x 8 samples, at most `limit` new tokens at temperature 1, rewards, advantages
and one AdamW step in float32:

    TRL                   GRPOTrainer with transformers' own `generate`, as its vLLM mode does not
                          run on CPU
    megarl                rollout.max_staleness 0: on-policy, which is what TRL does
    megarl, staleness 1   generates the next step's samples while it trains: a feature TRL's trainer
    has no counterpart of

The model is a small random Qwen2, written once and loaded by all. It ends a reply with a
probability of about 1/vocabulary a token: at a limit of 64 most replies are cut off, at 480 their
lengths vary (with `--vocabulary 4096` nearly all are cut off). The reward is a checksum of the
text: rewards of a group differ, and nothing is learned that would change the lengths.

Prompts have 12 to 24 tokens, or as many as the environment variable BENCH_PROMPT_TOKENS says.

What is measured: seconds from a step's begin to its end, by a TrainerCallback in TRL and by
`time/step_s` in megarl. Of megarl that includes publishing the weights to the engine and the check
that they arrived. Excluded are start-up and the first step, because both compile and allocate
there, and with staleness 1 also one more step at either end: the first has nothing to overlap with,
and during the last nothing is generated for a next one. How far generation is ahead at the two ends
of what is measured may differ by up to a step's samples, so staleness 1 wants `--steps` of 4 or
more. What lies between two steps (logging) is in neither.

Both may use every core, and both choose how by a trial: each setting in `SETTINGS` (processes,
threads, engines) runs a few steps at each limit, and the fastest is measured. Then all take turns,
each run in processes of its own. A run is refused where the weights did not change, samples are
missing, or mean lengths differ by more than 10 %. `others` is the share of the CPU that processes
outside of the run took meanwhile: above a few percent the numbers are worth little, most of all
those of settings with two threads, which wait for each other spinning.

TRL lives in an environment of its own (`--trl-env`), made at first use and kept for the next; torch
is the first package installed, so have pip prefer a CPU build of it (PIP_EXTRA_INDEX_URL) where the
default index offers none.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import cell, command_line, run_tool, spread, warn_if_not_quiet
from e2e_megarl import run_megarl, versions
from e2e_task import (
    BATCH,
    MAX_PROMPT_TOKENS,
    MODEL,
    PROMPTS,
    SAMPLES,
    Measured,
    Setting,
    write_task,
)
from e2e_trl import make_trl_environment, run_trl

LENGTHS_AGREE = 0.1
"""By how much mean lengths of two systems may differ, relative to the smaller."""
SYNCHRONOUS, OVERLAPPED, TRL = "megarl", "megarl, staleness 1", "TRL"
SETTINGS: dict[str, tuple[Setting, ...]] = {
    SYNCHRONOUS: (Setting(2, 1, 2, 1), Setting(2, 1, 1, 2), Setting(1, 2, 1, 2)),
    TRL: (Setting(2, 1), Setting(1, 2), Setting(1, 1)),
    OVERLAPPED: (Setting(2, 1, 1, 1), Setting(1, 1, 1, 1), Setting(2, 1, 2, 1)),
}
"""Per system, what the trial tries; without a trial the first is taken."""


class Bench:
    """Compares megarl with TRL: short trials choose each system's fastest setting, then every round
    measures each system once with its setting.
    """

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args, self.work = args, work
        self.systems = [
            name for name in SETTINGS if not args.only or (name == TRL) == (args.only == "trl")
        ]
        self.python = make_trl_environment(args.trl_env) if TRL in self.systems else ""
        self.trl_versions: dict[str, str] = {}

    def measure(self, system: str, setting: Setting, limit: int, steps: int) -> Measured:
        """One run, checked, with a line of progress."""
        if system == TRL:
            measured, self.trl_versions = run_trl(
                self.python,
                self.work,
                setting,
                steps=steps,
                limit=limit,
                deadline_s=self.args.deadline,
            )
        else:
            staleness = int(system == OVERLAPPED)
            measured = run_megarl(
                self.work,
                setting,
                steps=steps,
                limit=limit,
                staleness=staleness,
                deadline_s=self.args.deadline,
            )
        if not 0 < measured.weight_change < 1:
            raise RuntimeError(
                f"{system} did not train: its weights changed by {measured.weight_change}"
            )
        print(
            f"limit {limit}  {system:20} {setting!s:36} {statistics.median(measured.step_s):7.2f} s"
            f" a step  length {measured.mean_length:.1f}  others {measured.others:.0%}",
            file=sys.stderr,
            flush=True,
        )
        return measured

    def choose(self, system: str, limit: int) -> tuple[Setting, dict[str, Any]]:
        """The fastest setting by a trial -> (setting, seconds a step of each)."""
        settings = SETTINGS[system]
        if not self.args.trial_steps:
            return settings[0], {}
        found = {
            setting: self.measure(system, setting, limit, self.args.trial_steps)
            for setting in settings
        }
        best = max(settings, key=lambda setting: found[setting].samples_per_s)
        return best, {
            str(setting): BATCH / measured.samples_per_s for setting, measured in found.items()
        }

    def compare(self, limit: int) -> dict[str, Any]:
        """All systems at one limit."""
        chosen = {system: self.choose(system, limit) for system in self.systems}
        runs: dict[str, list[Measured]] = {system: [] for system in self.systems}
        for _ in range(self.args.rounds):
            for system in self.systems:
                runs[system].append(self.measure(system, chosen[system][0], limit, self.args.steps))
        lengths = {
            system: statistics.fmean(run.mean_length for run in runs[system])
            for system in self.systems
        }
        if max(lengths.values()) > (1 + LENGTHS_AGREE) * min(lengths.values()):
            raise RuntimeError(
                f"mean lengths at limit {limit} differ too much to compare: {lengths}; raise"
                " --steps or --rounds"
            )
        table = {
            system: {
                "setting": asdict(chosen[system][0]),
                "trial_step_s": chosen[system][1],
                "step_s": spread([statistics.median(run.step_s) for run in runs[system]]),
                "samples_per_s": spread([run.samples_per_s for run in runs[system]]),
                "tokens_per_s": spread([run.tokens_per_s for run in runs[system]]),
                "mean_length": lengths[system],
                "others": max(run.others for run in runs[system]),
                "runs": [asdict(run) for run in runs[system]],
            }
            for system in self.systems
        }
        if TRL in runs:
            for system in self.systems:
                pairs = zip(runs[system], runs[TRL], strict=True)
                table[system]["ratio_to_trl"] = spread(
                    [ours.samples_per_s / theirs.samples_per_s for ours, theirs in pairs]
                )
        return table


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All systems at all limits."""
    work = Path(tempfile.mkdtemp(prefix="e2e-"))
    try:
        (work / "task").mkdir()
        parameters = write_task(work / "task", args.vocabulary)
        bench = Bench(args, work)
        return {
            "parameters": parameters,
            "prompts": PROMPTS,
            "samples": SAMPLES,
            "limits": {str(limit): bench.compare(limit) for limit in args.limits},
            "versions": {"megarl": versions(), "trl": bench.trl_versions},
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)


def show(result: dict[str, Any]) -> Iterator[str]:
    """Lines of the table, with its heading and warnings, for the benchmark result `result`."""
    here, task = result["machine"], result["task"]
    yield (
        f"{here['cpu']}, {here['cores']} cores; {result['parameters']:,} parameters; {PROMPTS} x"
        f" {SAMPLES} samples a step"
    )
    yield (
        f"{task['rounds']} rounds of {task['steps']} steps; median (smallest to largest) over"
        " rounds"
    )
    head = (
        f"{'limit':>5}  {'system':20} {'s a step':>22} {'samples/s':>22} {'tokens/s':>24}"
        f" {'length':>7} {'others':>6}"
    )
    yield f"{head}  {'x TRL':19}  setting"
    for limit, table in result["limits"].items():
        for system, row in table.items():
            seconds, samples, tokens = (
                row[name] for name in ("step_s", "samples_per_s", "tokens_per_s")
            )
            ratio = cell(row["ratio_to_trl"], ".2f") if "ratio_to_trl" in row else ""
            yield (
                f"{limit:>5}  {system:20}"
                f" {cell(seconds, '.2f'):>22} {cell(samples, '.1f'):>22} {cell(tokens, ',.0f'):>24}"
                f" {row['mean_length']:7.1f} {row['others']:6.0%}  {ratio:19} "
                f" {Setting(**row['setting'])}"
            )
    yield from warn_if_not_quiet(
        max(row["others"] for table in result["limits"].values() for row in table.values())
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "--rounds": {"type": int, "default": 3, "help": "runs of each system"},
    "--steps": {"type": int, "default": 4, "help": "steady steps measured in a run"},
    "--trial-steps": {
        "type": int,
        "default": 2,
        "help": "the same in a trial; 0: no trial, the first of each system's settings",
    },
    "--limits": {"default": "64,480", "help": "most new tokens, separated by commas"},
    "--only": {"choices": ("megarl", "trl"), "default": "", "help": "leave out the other system"},
    "--vocabulary": {"type": int, "default": 512, "help": "vocab size of the model"},
    "--deadline": {"type": float, "default": 3600.0, "help": "seconds a single run may take"},
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
        args.limits = [int(word) for word in args.limits.split(",")]
    except ValueError:
        parser.error(f"--limits is {args.limits!r}; set it to whole numbers, for example 64,480")
    most = MODEL["max_position_embeddings"] - MAX_PROMPT_TOKENS
    if not all(1 <= limit <= most for limit in args.limits):
        parser.error(f"--limits must lie between 1 and {most}")
    if (
        args.rounds < 1
        or args.steps < 1
        or args.trial_steps < 0
        or args.vocabulary < 64
        or args.vocabulary > 20000
    ):
        parser.error(
            "--rounds and --steps must be 1 or more, --trial-steps 0 or more, --vocabulary between"
            " 64 and 20000"
        )
    args.trl_env = args.trl_env.absolute()
    return args


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    return run_tool("e2e", arguments=arguments, measure=measure, show=show, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
