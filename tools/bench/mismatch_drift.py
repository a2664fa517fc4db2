"""Does the difference of trainer and engine log-probs drift from version to version?

    python tools/bench/mismatch_drift.py [--rounds 1] [--steps 50] [--json]

`task: rl` with weights that stay as they are: every step trains, makes an optimizer step and
publishes a new version, and the engines generate with `rollout.max_staleness` 1, so that rollouts
are of the version before. Since all versions are equal, the metrics `mismatch/...` are rounding
alone, and a slope over the versions would be an error that builds up on the way: in what is
published, in an engine's cache, or in the log-probs of either side.

A recipe cannot set a learning rate of 0. At 1e-30 AdamW does all of its work, but its update, at
most about 30 times the learning rate, rounds away beside every float32 weight above 1e-21; a weight
of exactly 0 would change, and the fine-tuned model that the run begins with has none that is
trained. The tool does not rely on that: it raises `RuntimeError` unless the receipts of all
versions, which are digests of what each engine holds, are one and the same, and the model of the
last checkpoint has the bits of the first. The control run has a learning rate that learns, and
must have other receipts: there the mismatch is that of weights one version apart.

The model is that of tools/make_addition.py after 200 steps of fine-tuning; a response's reward is
its length, so that every group has something to learn. The slope is of a least-squares line over
the versions. Nothing is timed.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import Args, progress, run_tool, table, weights_of
from make_addition import write_task
from processes import megarl
from studies import last_quarter, newest_model

MAX_TOKENS = 64
REWARD = """
def score(prompt, response):
    return len(response) / 64
"""
SFT = f"""
task: sft
steps: 200
samples_per_step: 64
model: {{path: "", from_scratch: true}}
demonstrations: {{source: "", max_tokens: {MAX_TOKENS}}}
training: {{micro_batch_tokens: 4096, num_threads: 1, schedule: {{warmup_steps: 20}},
  optimizer: {{learning_rate: 3.0e-3, beta2: 0.98, clip_norm: 1.0}}, checkpoint: {{keep: 1}}}}
"""
RECIPE = f"""
task: rl
prompts: {{source: "", max_prompt_tokens: 16}}
environment: {{verifier: "", require_stop: false}}
rollout: {{groups_per_step: 8, group_size: 8, max_new_tokens: {MAX_TOKENS}, max_staleness: 1,
  engine: {{num_threads: 1}}, dynamic_sampling: {{enabled: false}}}}
algorithm: {{correction: {{kind: tis}}}}
training: {{num_mini_batches: 1, micro_batch_tokens: 4096, num_threads: 1,
  optimizer: {{clip_norm: 1.0}}, checkpoint: {{keep: 1}}}}
"""
STILL = 1e-30
"""Learning rate with which no weight changes."""
CONTROL = 1e-4
"""That of the control."""
METRICS = ("mismatch/mean_abs", "mismatch/k1", "mismatch/max_abs")
OPTIONS = {
    "--rounds": (1, "runs of each kind"),
    "--steps": (50, "steps of a run"),
}


def trend(values: Sequence[float]) -> dict[str, float]:
    """The least-squares line through values 0, 1, 2, ...: its slope and the slope's standard error,
    and the means of the first and last quarter of the values. Needs 3 values.
    """
    (slope, _), covariance = np.polyfit(np.arange(len(values)), values, 1, cov=True)
    return {
        "mean": statistics.fmean(values),
        "slope": float(slope),
        "slope_error": math.sqrt(covariance[0, 0]),
        "first_quarter": last_quarter(values[::-1]),
        "last_quarter": last_quarter(values),
        "largest": max(values),
    }


def receipts_of(run: Path) -> dict[int, list[str]]:
    """{version: receipts of what the engines held}, from the run's ledger."""
    from megarl.ledger.events import Published, from_record
    from megarl.ledger.journal import FILE, Reader

    events = map(from_record, Reader(run / FILE))
    return {one.version: one.receipts for one in events if isinstance(one, Published)}


def changed_weights(first: Path, last: Path) -> int:
    """Number of tensors whose bits differ between two folders of the same model."""
    before, after = weights_of(first), weights_of(last)
    pairs = ((one.numpy(), after[name].numpy()) for name, one in before.items())
    return sum(one.tobytes() != other.tobytes() for one, other in pairs)


def run(rate: float, folder: Path, model: Path, seed: int, steps: int) -> dict[str, Any]:
    """One run; returns the trends of its metrics, and what became of its weights."""
    place = folder / f"rate-{rate:g}"
    settings = {
        "steps": steps,
        "seed": seed,
        "model.path": model,
        "prompts.source": folder / "train.jsonl",
        "environment.verifier": f"{folder}/reward.py:score",
        "training.optimizer.learning_rate": rate,
    }
    rows = [row for row in megarl(RECIPE, place, settings)[0] if METRICS[0] in row]
    receipts = receipts_of(place)
    if len(rows) != steps or sorted(receipts) != list(range(steps + 1)):
        raise RuntimeError(f"{place} has {len(rows)} steps and versions {sorted(receipts)}")
    values = {name: [row[name] for row in rows] for name in METRICS}
    return {
        "rate": rate,
        "versions": len(receipts),
        "receipts": len({tuple(of_version) for of_version in receipts.values()}),
        "changed": changed_weights(model, newest_model(place)),
        "trends": {name: trend(each) for name, each in values.items()},
        "values": values,
    }


def measure(args: Args) -> dict[str, Any]:
    """`args.rounds` rounds; in each, a run of either kind from the same fine-tuned model. Raises
    `RuntimeError` if weights have changed that should not, or have not that should.
    """
    if args.steps < 8:
        raise ValueError(f"--steps is {args.steps}; set it to 8 or more")
    runs = []
    sizes = {"demonstrations": 12800, "prompts": 2000, "held_out": 1, "validation": 1}
    for number in range(args.rounds):
        folder = args.work / f"round-{number}"
        folder.mkdir()
        write_task(folder, {"seed": number, **sizes})
        (folder / "reward.py").write_text(REWARD)
        settings = {"seed": number + 1, "model.path": folder / "model"}
        settings["demonstrations.source"] = folder / "sft.jsonl"
        megarl(SFT, folder / "sft", settings)
        model = newest_model(folder / "sft")
        for rate in (STILL, CONTROL):
            found = run(rate, folder, model, number + 1, args.steps)
            runs.append(found)
            progress(json.dumps(found))
            is_still = found["receipts"] == 1 and not found["changed"]
            if is_still != (rate == STILL):
                raise RuntimeError(
                    "with learning rate {rate:g}, {versions} versions have {receipts} receipts, and"
                    " {changed} tensors changed".format(**found)
                )
    return {"runs": runs}


def show(result: dict[str, Any]) -> Iterator[str]:
    """Format what `measure` returns as the lines of tables."""
    trends = (
        {"rate": run["rate"], "metric": metric, **line}
        for run in result["runs"]
        for metric, line in run["trends"].items()
    )
    numbers = ("mean", "first_quarter", "last_quarter", "slope", "slope_error", "largest")
    columns = "learning rate=rate g; metric; "
    yield from table(trends, columns + "; ".join(f"{name} .3e" for name in numbers))
    yield from table(result["runs"], "learning rate=rate g; versions d; receipts d; changed d")


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
