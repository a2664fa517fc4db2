"""Every algorithm by name on the quick start's task: held-out accuracy over the steps of RL.

    python tools/bench/presets.py [--json] [--seeds 1,2,3] [--steps 80] [--every 20]
                                  [--presets dapo,grpo] [--into runs/presets]

Runs after the quick start, from its fine-tuned model and data. Each run is
launch/recipes/quickstart.yaml with another algorithm and, per run, what the algorithm needs
(`EXTRA`); all are synchronous, so that no correction for stale rollouts takes part. A run whose
result is in `--into` already is not repeated.

What is shown: greedy accuracy on the 500 held-out problems before and after.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from common import Args, Lines, run_tool, spread, table
from processes import lines_of, megarl
from studies import RECIPES, grouped, run_missing

PRESETS = (
    *("dapo", "grpo", "dr_grpo", "rloo", "remax", "reinforce_pp", "reinforce_pp_baseline", "ppo"),
    *("gspo", "cispo", "sapo", "gpg"),
)
EXTRA: dict[str, dict[str, object]] = {
    "dr_grpo": {"algorithm.constant_tokens": 48},
    "ppo": {
        "training.epochs_per_step": 2,
        "critic.warmup_steps": 2,
        "critic.optimizer.learning_rate": 3e-4,
        "critic.value_clip": 0.5,
    },
}
"""{preset: settings beside its name}"""
OPTIONS = {
    "--seeds": ([1, 2, 3], "seeds"),
    "--presets": (list(PRESETS), "values of `algorithm`", PRESETS),
    "--steps": (80, "steps of a run"),
    "--every": (20, "steps from one evaluation to the next"),
    "--into": (Path("runs/presets"), "folder of the runs"),
}


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run: its seconds, and [step, held-out accuracy] of its evaluations."""
    tree = yaml.safe_load((RECIPES / "quickstart.yaml").read_text()) | {"algorithm": case["preset"]}
    recipe = yaml.safe_dump(tree)
    settings: dict[str, object] = {
        "seed": case["seed"],
        "steps": case["steps"],
        "evaluation.every": case["every"],
        "evaluation.sampled_too": "false",
        "rollout.max_staleness": 0,
    }
    place, started_at = folder / "{preset}_{seed}".format(**case), time.monotonic()
    megarl(recipe, place, settings | EXTRA.get(case["preset"], {}))
    rows = lines_of(place / "evaluations.jsonl")
    curve = [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]
    return {"curve": curve, "seconds": time.monotonic() - started_at}


def measure(args: Args) -> dict[str, Any]:
    """Run what is missing; the curves of all presets and seeds."""
    cases = [
        {"preset": preset, "seed": seed, "steps": args.steps, "every": args.every}
        for seed in args.seeds
        for preset in args.presets
    ]
    return {"runs": run_missing(args.into, cases, partial(run, folder=args.into))}


def show(result: dict[str, Any]) -> Lines:
    """One row a preset, over its seeds."""
    rows = []
    for row, same in grouped(result["runs"], ("preset", "steps")):
        curves = [one["curve"] for one in same]
        for name, place in (("before", 0), ("after", -1)):
            row[name] = spread([curve[place][1] for curve in curves])
        rows.append(row | {"seeds": ", ".join(str(one["seed"]) for one in same)})
    yield from table(rows, "preset; steps d; before .3f; after .3f; seeds")


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
