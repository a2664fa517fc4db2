"""Every algorithm by name on the quick start's task: held-out accuracy over the steps of RL.

    python tools/bench/presets.py [--json] [--seeds 1,2,3] [--steps 80] [--every 20]
                                  [--presets dapo,grpo] [--into runs/presets]

Runs after the quick start, from its fine-tuned model and data. Each run is
launch/recipes/quickstart.yaml with another algorithm and, per run, what the algorithm needs
(`EXTRA`); all are synchronous, so that no correction for stale rollouts takes part. A run that is
in `--into` already, with its last step, is not repeated.

What is shown: greedy accuracy on the 500 held-out problems before and after, the first evaluation
with at least 0.9, and seconds of the whole command.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from common import ROOT, cell, command_line, numbers, require_positive, run_tool, spread

RECIPE = ROOT / "launch" / "recipes" / "quickstart.yaml"
GOOD = 0.9
EXTRA: dict[str, list[str]] = {
    "dapo": [],
    "grpo": [],
    "dr_grpo": ["--algorithm.constant_tokens", "48"],
    "rloo": [],
    "remax": [],
    "reinforce_pp": [],
    "reinforce_pp_baseline": [],
    "ppo": [
        *("--training.epochs_per_step", "2", "--critic.warmup_steps", "2"),
        *("--critic.optimizer.learning_rate", "3e-4", "--critic.value_clip", "0.5"),
    ],
    "gspo": [],
    "cispo": [],
    "sapo": [],
    "gpg": [],
}
"""{preset: options beside its name}"""


def arguments(argv: list[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = command_line(
        __doc__,
        {
            "--seeds": {"type": numbers, "default": [1, 2, 3]},
            "--presets": {"type": lambda text: text.split(","), "default": list(EXTRA)},
            "--steps": {"type": int, "default": 80},
            "--every": {"type": int, "default": 20},
            "--into": {"type": Path, "default": Path("runs/presets")},
        },
    )
    args = parser.parse_args(argv)
    require_positive(parser, args, ["steps", "every"])
    if unknown := [name for name in args.presets if name not in EXTRA]:
        parser.error(f"--presets has {unknown[0]}; set names of {', '.join(EXTRA)}")
    return args


def train(preset: str, seed: int, args: argparse.Namespace) -> float:
    """Run one recipe; returns its seconds. Raises `RuntimeError`, with what it said, if it
    fails.
    """
    folder = args.into / f"{preset}_{seed}"
    tree = yaml.safe_load(RECIPE.read_text()) | {"algorithm": preset}
    recipe = args.into / f"{preset}_{seed}.yaml"
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(yaml.safe_dump(tree))
    command = [
        *(sys.executable, "-m", "megarl", "train", str(recipe), "--folder", str(folder)),
        *("--seed", str(seed), "--steps", str(args.steps)),
        *("--evaluation.every", str(args.every), "--evaluation.sampled_too", "false"),
        *("--rollout.max_staleness", "0"),
        *EXTRA[preset],
    ]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{preset}, seed {seed}: {done.stderr[-2000:]}")
    return time.monotonic() - started


def result_of(folder: Path, steps: int) -> list[tuple[int, float]]:
    """(step, held-out accuracy) of a finished run; empty if it is not there or not finished."""
    file = folder / "evaluations.jsonl"
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    found = [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    return found if found and found[-1][0] == steps else []


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run what is missing; the curves of all presets and seeds."""
    found: dict[str, Any] = {}
    for seed in args.seeds:
        for preset in args.presets:
            folder, took = args.into / f"{preset}_{seed}", None
            if not result_of(folder, args.steps):
                took = train(preset, seed, args)
            curve = result_of(folder, args.steps)
            found.setdefault(preset, {})[seed] = {"curve": curve, "seconds": took}
            shown = " ".join(f"{step}:{accuracy:.3f}" for step, accuracy in curve)
            print(f"{preset}, seed {seed}: {shown}", file=sys.stderr, flush=True)
    return {"runs": found}


def show(result: dict[str, Any]) -> Iterator[str]:
    """One row a preset, over its seeds."""
    yield "| preset | before (median, smallest to largest) | after | 0.9 by step | seeds |"
    yield "|---|---|---|---|---|"
    for preset, seeds in result["runs"].items():
        curves = [one["curve"] for one in seeds.values()]
        after = cell(spread([curve[-1][1] for curve in curves]), ".3f")
        before = cell(spread([curve[0][1] for curve in curves]), ".3f")
        first = [next((step for step, value in curve if value >= GOOD), None) for curve in curves]
        reached = "never" if None in first else str(max(step for step in first if step is not None))
        yield (f"| `{preset}` | {before} | {after} | {reached} | {', '.join(map(str, seeds))} |")


if __name__ == "__main__":
    sys.exit(run_tool("presets", arguments=arguments, measure=measure, show=show))
