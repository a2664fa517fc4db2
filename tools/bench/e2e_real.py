"""GRPO of a published model, megarl against TRL: SmolLM2-135M-Instruct on sums and differences that
are asked in words; same machine, prompts, rewards, samples and optimizer; CPU only.

    python tools/bench/e2e_real.py [--json] [--seeds 1,2,3] [--steps 12] [--systems megarl,TRL]

A step is 8 prompts x 8 samples of at most 48 tokens at temperature 1, and one AdamW step at 1e-5
with clipped gradients; a response is right if its last number is the answer.

    TRL                   GRPOTrainer with transformers' own `generate`, as its vLLM mode does not
                          run on CPU; a process of two threads
    TRL-2-processes       the same, of one thread each
    megarl                launch/recipes/smollm2_arithmetic.yaml, which is on-policy, as TRL is;
                          two threads for engine and trainer, in turns
    megarl-staleness-1    rollout.max_staleness 1: engine and trainer at the same time, a thread
                          each

All is in float32. The systems take turns, a run of each per seed.

    s a step   median over the steps but the first, and with staleness 1 the last
    samples/s  over the same steps
    accuracy   of the rollouts, mean of the last quarter of the steps

Both take the mean of a step's tokens and AdamW with the same settings. Advantages divide by the
deviation of a group: TRL's of a sample, megarl's of a population, which makes megarl's 7 % larger.
megarl does not compute groups of equal rewards in training, whose gradient is 0; TRL does.
A run is refused where a step lacks samples, and the table where mean lengths of the first step,
before any learning, differ by more than a fifth.

`others` is the share of the CPU that processes outside of the run took meanwhile: above a few
percent the times are worth little.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import against_trl as trl
import make_arithmetic
import real_model
from common import Args, Lines, progress, run_tool, table
from e2e_task import Setting
from studies import RECIPES, last_quarter

RECIPE = RECIPES / "smollm2_arithmetic.yaml"
REWARD = Path(__file__).with_name("e2e_task.py")
GROUPS, SAMPLES, LIMIT = 8, 8, 48
"""Prompts of a step, responses to each, and most tokens of a response."""
ROWS = 16
"""Padded rows of TRL's micro-batches."""
LEARNING_RATE = 1e-5
SYNCHRONOUS, OVERLAPPED = "megarl", "megarl-staleness-1"
SETTINGS = {
    SYNCHRONOUS: Setting(1, 2),
    OVERLAPPED: Setting(1, 1),
    "TRL": Setting(1, 2),
    "TRL-2-processes": Setting(2, 1),
}
LENGTHS_AGREE = 0.2
"""By how much the systems' mean lengths of the first step may differ, relative to the smallest."""
COLUMNS = (
    "system; s a step=step_s .2f; samples/s=samples_per_s .2f; tokens/s=tokens_per_s ,.0f;"
    " accuracy .3f; others .0%"
)
OPTIONS = {
    "--seeds": ([1, 2, 3], "seeds, a run of each system for each"),
    "--steps": (12, "steps of a run, 4 or more"),
    "--systems": (list(SETTINGS), "what is compared", tuple(SETTINGS)),
    "--model": (real_model.default_folder("smollm2"), "its folder, made where it is missing"),
    "--trl-env": (trl.TRL_ENV, "folder of TRL's environment"),
}


def settings_of(work: Path, args: Args, seed: int, system: str) -> dict[str, object]:
    """{setting: value} of a run of megarl, on top of the recipe."""
    staleness, threads = int(system == OVERLAPPED), SETTINGS[system].threads
    return {
        "steps": args.steps,
        "seed": seed,
        "model.path": args.model.absolute(),
        "prompts.source": work / "task" / "train.jsonl",
        "prompts.shuffle": "false",
        "environment.verifier": f"{REWARD}:right",
        "environment.require_stop": "false",
        "rollout.groups_per_step": GROUPS,
        "rollout.group_size": SAMPLES,
        "rollout.max_new_tokens": LIMIT,
        "rollout.max_staleness": staleness,
        "rollout.dynamic_sampling.enabled": "false",
        "rollout.engine.num_threads": threads,
        "algorithm.correction.kind": "tis" if staleness else "none",
        "training.num_threads": threads,
        "training.optimizer.learning_rate": LEARNING_RATE,
        "training.optimizer.clip_norm": 1.0,
        "training.schedule.kind": "constant",
        "training.checkpoint.every_minutes": 0,
        "evaluation.prompts.source": "",
    }


def one_run(system: str, seed: int, args: Args) -> dict[str, Any]:
    """One run, checked: {steps: a record of each, others}."""
    given = {"trainer": "GRPO", "reward": "right", "is_chat": True}
    given |= {"model": str(args.model.absolute()), "rows": str(args.work / "task/train.jsonl")}
    found = trl.one_run(
        system,
        SETTINGS[system],
        args,
        recipe=RECIPE,
        settings=settings_of(args.work, args, seed, system),
        given=given,
        batch=GROUPS * SAMPLES,
        samples=SAMPLES,
        rows=ROWS,
        max_completion_length=LIMIT,
        max_steps=args.steps,
        learning_rate=LEARNING_RATE,
        seed=seed,
    )
    step_s = statistics.median(row["step_s"] for row in steady(found["steps"], system))
    progress(
        f"seed {seed}  {system:20} {step_s:7.2f} s a step  accuracy"
        f" {accuracy_of(found['steps']):.3f}  others {found['others']:.0%}"
    )
    return found


def steady(steps: list[dict[str, float]], system: str) -> list[dict[str, float]]:
    """The steps that are timed."""
    return steps[1 : -1 if system == OVERLAPPED else None]


def accuracy_of(steps: list[dict[str, float]]) -> float:
    """Mean accuracy of the last quarter of the steps."""
    return last_quarter([row["accuracy"] for row in steps])


def measure(args: Args) -> dict[str, Any]:
    """All systems with all seeds, in turns."""
    if args.steps < 4:
        raise ValueError(f"--steps is {args.steps}; set it to 4 or more")
    args.python = trl.python_for(args)
    real_model.make("smollm2", args.model.absolute())
    make_arithmetic.main([str(args.work / "task")])
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in args.systems}
    for seed, system in itertools.product(args.seeds, args.systems):
        runs[system].append(one_run(system, seed, args))
    first = {s: statistics.fmean(o["steps"][0]["tokens"] for o in each) for s, each in runs.items()}
    trl.refuse_lengths(first, LENGTHS_AGREE, "of the first step")
    return {"systems": rows_of(runs)}


def rows_of(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """{system: its row}."""
    return {
        system: trl.row_of(
            found,
            [steady(one["steps"], system) for one in found],
            accuracy=[accuracy_of(one["steps"]) for one in found],
        )
        for system, found in runs.items()
    }


def show(result: dict[str, Any]) -> Lines:
    """Format what `measure` returns as the lines of a table."""
    yield f"SmolLM2-135M, {GROUPS} x {SAMPLES} samples a step"
    rows = ({"system": system, **row} for system, row in result["systems"].items())
    yield from table(rows, COLUMNS)


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
