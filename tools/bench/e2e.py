"""Whole steps of GRPO, megarl against TRL: same machine, model, prompts, reward, samples and
optimizer steps; CPU only.

    python tools/bench/e2e.py [--json] [--rounds 3] [--steps 4] [--limits 64,480]

A step is 32 prompts x 8 samples, at most `limit` new tokens at temperature 1, rewards, advantages
and one AdamW step in float32:

    TRL                   GRPOTrainer with transformers' own `generate`, as its vLLM mode does not
                          run on CPU; two processes of one thread
    TRL, 1 process        the same, of two threads; by --systems only
    megarl                rollout.max_staleness 0: on-policy, which is what TRL does
    megarl, staleness 1   generates the next step's samples while it trains: a feature TRL's trainer
                          has no counterpart of

The model is a small random Qwen2, written once and loaded by all. It ends a reply with a
probability of about 1/512 a token: at a limit of 64 most replies are cut off, at 480 their lengths
vary. The reward is a checksum of the text: rewards of a group differ, and nothing is learned that
would change the lengths.

Prompts have 12 to 24 tokens, or as many as the environment variable BENCH_PROMPT_TOKENS says.

What is measured: seconds from a step's begin to its end, by a TrainerCallback in TRL and by
`time/step_s` in megarl. Of megarl that includes publishing the weights to the engine and the check
that they arrived. Excluded are start-up and the first step, because both compile and allocate
there, and with staleness 1 also one more step at either end: the first has nothing to overlap with,
and during the last nothing is generated for a next one. How far generation is ahead at the two ends
of what is measured may differ by up to a step's samples, so staleness 1 wants `--steps` of 4 or
more. What lies between two steps (logging) is in neither.

All take turns, each run in processes of its own. A run is refused where the weights did not change,
samples are missing, or mean lengths differ by more than 10 %. `others` is the share of the CPU that
processes outside of the run took meanwhile: above a few percent the numbers are worth little.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import against_trl as trl
from common import Args, Lines, in_turns, progress, ratios, run_tool, table, weights_of
from e2e_task import (
    BATCH,
    LEARNING_RATE,
    MAX_PROMPT_TOKENS,
    MICRO_BATCH_TOKENS,
    PROMPTS,
    SAMPLES,
    SEED,
    Setting,
    write_task,
)

LENGTHS_AGREE = 0.1
"""By how much mean lengths of two systems may differ, relative to the smaller."""
OVERLAPPED = "megarl, staleness 1"
SETTINGS = {
    "megarl": Setting(2, 1, 2, 1),
    "TRL": Setting(2, 1),
    OVERLAPPED: Setting(2, 1, 1, 1),
    "TRL, 1 process": Setting(1, 2),
}
RECIPE = f"""
task: rl
seed: {SEED}
prompts: {{source: "", max_prompt_tokens: {MAX_PROMPT_TOKENS}, shuffle: false}}
environment: {{verifier: "", require_stop: false}}
rollout: {{group_size: {SAMPLES}, dynamic_sampling: {{enabled: false}}}}
algorithm: {{advantage: grpo, loss: ppo_clip, aggregation: token, clip_low: 0.2, clip_high: 0.28}}
training: {{micro_batch_tokens: {MICRO_BATCH_TOKENS},
  optimizer: {{learning_rate: {LEARNING_RATE}, clip_norm: 1.0}}}}
observe: {{tensorboard: false, transcripts_per_step: 0, progress: false}}
"""
OPTIONS = {
    "--rounds": (3, "runs of each system"),
    "--steps": (4, "steady steps measured in a run"),
    "--limits": ([64, 480], "most new tokens"),
    "--systems": (["megarl", "TRL", OVERLAPPED], "what is compared", tuple(SETTINGS)),
    "--trl-env": (trl.TRL_ENV, "folder of TRL's environment"),
}


def settings_of(
    task: Path, setting: Setting, *, steps: int, limit: int, staleness: int, groups: int = PROMPTS
) -> dict[str, object]:
    """{setting: value} of a run of megarl, on top of `RECIPE`."""
    return {
        "steps": steps,
        "model.path": task / "model",
        "prompts.source": task / "prompts.jsonl",
        "environment.verifier": f"{Path(__file__).with_name('e2e_task.py')}:checksum",
        "rollout.num_engines": setting.engines,
        "rollout.engine.num_threads": setting.engine_threads,
        "rollout.groups_per_step": groups,
        "rollout.max_new_tokens": limit,
        "rollout.max_staleness": staleness,
        "algorithm.correction.kind": "tis" if staleness else "none",
        "training.num_threads": setting.threads,
    }


def weight_change(before: Path, after: Path) -> float:
    """Largest difference of any weight between two model folders."""
    old, new = weights_of(before), weights_of(after)
    return max(float((new[name] - old[name]).abs().max()) for name in old)


def one_run(system: str, limit: int, args: Args) -> dict[str, Any]:
    """The timed steps of one run, checked."""
    setting, model = SETTINGS[system], args.work / "task" / "model"
    staleness = int(system == OVERLAPPED)
    total = 1 + staleness + args.steps + staleness
    share, fits = BATCH // setting.processes, MICRO_BATCH_TOKENS // (MAX_PROMPT_TOKENS + limit)
    given = {"trainer": "GRPO", "reward": "checksum", "model": str(model)}
    sizes = {"steps": total, "limit": limit, "staleness": staleness}
    found = trl.one_run(
        system,
        setting,
        args,
        recipe=RECIPE,
        settings=settings_of(args.work / "task", setting, **sizes),
        given=given | {"rows": str(args.work / "task" / "prompts.jsonl")},
        batch=BATCH,
        samples=SAMPLES,
        rows=max(1, min(share, 2 ** (fits.bit_length() - 1))),
        max_completion_length=limit,
        epsilon_high=0.28,
        max_steps=total,
        learning_rate=LEARNING_RATE,
        seed=SEED,
    )
    change = found["weight_change"]
    if change is None:
        saved = args.work / "run" / "checkpoints" / f"step_{total:06d}" / "model"
        change = weight_change(model, saved)
    if not 0 < change < 1:
        raise RuntimeError(f"{system} did not train: its weights changed by {change}")
    kept = found["steps"][1 + staleness :][: args.steps]
    step_s = statistics.median(row["step_s"] for row in kept)
    progress(f"limit {limit}  {system:20} {step_s:7.2f} s a step  others {found['others']:.0%}")
    return found | {"steps": kept, "weight_change": change}


def compare(limit: int, args: Args) -> dict[str, Any]:
    """All systems at one limit: {system: its row}."""
    ways = {system: partial(one_run, system, limit, args) for system in args.systems}
    rows = {}
    for system, runs in in_turns(args.rounds, ways).items():
        tokens = [row["tokens"] for one in runs for row in one["steps"]]
        rows[system] = {
            "limit": limit,
            "system": system,
            "setting": str(SETTINGS[system]),
            "mean_length": statistics.fmean(tokens) / BATCH,
            **trl.row_of(runs, [one["steps"] for one in runs]),
        }
    lengths = {system: row["mean_length"] for system, row in rows.items()}
    trl.refuse_lengths(lengths, LENGTHS_AGREE, f"at limit {limit}")
    for row in rows.values() if "TRL" in rows else ():
        pair = (one["samples_per_s"]["all"] for one in (row, rows["TRL"]))
        row["ratio_to_trl"] = ratios(*pair)
    return rows


def measure(args: Args) -> dict[str, Any]:
    """All systems at all limits."""
    args.python = trl.python_for(args)
    parameters = write_task(args.work / "task")
    limits = {str(limit): compare(limit, args) for limit in args.limits}
    return {"parameters": parameters, "limits": limits}


def show(result: dict[str, Any]) -> Lines:
    """Format what `measure` returns as the lines of a table."""
    yield f"{result['parameters']:,} parameters; {PROMPTS} x {SAMPLES} samples a step"
    columns = (
        "limit d; system; s a step=step_s .2f; samples/s=samples_per_s .1f;"
        " tokens/s=tokens_per_s ,.0f; length=mean_length .1f; others .0%; x TRL=ratio_to_trl .2f;"
        " setting"
    )
    yield from table((row for rows in result["limits"].values() for row in rows.values()), columns)


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
