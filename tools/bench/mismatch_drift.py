"""Does the difference of trainer and engine log-probs drift from version to version?

    python tools/bench/mismatch_drift.py [--rounds 1] [--steps 50] [--control 1e-4] [--json]

`megarl train` with weights that stay as they are: every step trains, makes an optimizer step and
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

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asynchrony import megarl
from common import ROOT, command_line, require_positive, run_tool

sys.path.insert(0, str(ROOT / "tools"))

from make_addition import make

MAX_TOKENS = 64
REWARD = """
def score(prompt, response):
    return len(response) / 64
"""
STILL = 1e-30
"""Learning rate with which no weight changes."""
METRICS = ("mismatch/mean_abs", "mismatch/k1", "mismatch/max_abs")
OPTIONS = {
    "--rounds": {"type": int, "default": 1, "help": "runs of each kind"},
    "--steps": {"type": int, "default": 50, "help": "steps of a run"},
    "--control": {"type": float, "default": 1e-4, "help": "learning rate of the control; 0: none"},
}


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    require_positive(parser, args, ["rounds"])
    if args.steps < 8:
        parser.error(f"--steps is {args.steps}; set it to 8 or more")
    if not 0 <= args.control <= 1:
        parser.error(f"--control is {args.control}; set it to a learning rate, or to 0")
    return args


def trend(values: Sequence[float]) -> dict[str, float]:
    """The least-squares line through values 0, 1, 2, ...: its slope and the slope's standard error,
    and the means of the first and last quarter of the values. Needs 3 values.
    """
    count, quarter = len(values), max(1, len(values) // 4)
    middle, mean = (count - 1) / 2, statistics.fmean(values)
    spread = sum((place - middle) ** 2 for place in range(count))
    products = ((place - middle) * (value - mean) for place, value in enumerate(values))
    slope = sum(products) / spread
    rest = sum((value - mean - slope * (place - middle)) ** 2 for place, value in enumerate(values))
    return {
        "mean": mean,
        "slope": slope,
        "slope_error": math.sqrt(rest / (count - 2) / spread),
        "first_quarter": statistics.fmean(values[:quarter]),
        "last_quarter": statistics.fmean(values[-quarter:]),
        "largest": max(values),
    }


def receipts_of(run: Path) -> dict[int, list[str]]:
    """{version: receipts of what the engines held}, from the run's ledger."""
    from megarl.ledger.events import Published, from_record
    from megarl.ledger.journal import FILE, Reader

    events = map(from_record, Reader(run / FILE))
    return {one.version: one.receipts for one in events if isinstance(one, Published)}


def changed_weights(first: Path, last: Path) -> list[str]:
    """Names of the tensors whose bits differ between two folders of the same model."""
    from safetensors.torch import load_file

    before, after = (
        {name: tensor for file in sorted(folder.glob("*.safetensors"))
         for name, tensor in load_file(file).items()}
        for folder in (first, last)
    )  # fmt: skip
    if not before or before.keys() != after.keys():
        raise RuntimeError(f"{first} and {last} are not the same model")
    return [
        name
        for name, tensor in before.items()
        if tensor.numpy().tobytes() != after[name].numpy().tobytes()
    ]


def write_task(folder: Path, seed: int) -> None:
    """Model, demonstrations, prompts and reward."""
    sizes = {"demonstrations": 12800, "prompts": 2000, "held_out": 1, "validation": 1}
    make(folder, {"seed": seed, **sizes})
    (folder / "reward.py").write_text(REWARD)


def fine_tune(folder: Path, seed: int) -> Path:
    """Teach the model to answer; returns its folder."""
    tree = {
        "folder": str(folder / "sft"),
        "steps": 200,
        "seed": seed,
        "samples_per_step": 64,
        "model": {"path": str(folder / "model"), "from_scratch": True},
        "demonstrations": {"source": str(folder / "sft.jsonl"), "max_tokens": MAX_TOKENS},
        "training": {
            "micro_batch_tokens": 4096,
            "num_threads": 1,
            "optimizer": {"learning_rate": 3e-3, "beta2": 0.98, "clip_norm": 1.0},
            "schedule": {"warmup_steps": 20},
            "checkpoint": {"keep": 1},
        },
    }
    megarl("sft", tree, folder / "sft.yaml")
    return max((folder / "sft" / "checkpoints").glob("step_*")) / "model"


def train(rate: float, folder: Path, model: Path, seed: int, steps: int) -> dict[str, Any]:
    """One run; returns the trends of its metrics, and what became of its weights."""
    run = folder / f"rate-{rate:g}"
    tree = {
        "folder": str(run),
        "steps": steps,
        "seed": seed,
        "model": {"path": str(model)},
        "prompts": {
            "source": str(folder / "train.jsonl"),
            "max_prompt_tokens": 16,
        },
        "environment": {"verifier": f"{folder}/reward.py:score", "require_stop": False},
        "rollout": {
            "groups_per_step": 8,
            "group_size": 8,
            "max_new_tokens": MAX_TOKENS,
            "max_staleness": 1,
            "engine": {"num_threads": 1},
            "dynamic_sampling": {"enabled": False},
        },
        "algorithm": {"correction": {"kind": "tis"}},
        "training": {
            "num_mini_batches": 1,
            "micro_batch_tokens": 4096,
            "num_threads": 1,
            "optimizer": {"learning_rate": rate, "clip_norm": 1.0},
            "checkpoint": {"keep": 1},
        },
    }
    megarl("train", tree, folder / f"rate-{rate:g}.yaml")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if METRICS[0] in row]
    receipts = receipts_of(run)
    last = max((run / "checkpoints").glob("step_*")) / "model"
    if len(rows) != steps or sorted(receipts) != list(range(steps + 1)):
        raise RuntimeError(f"{run} has {len(rows)} steps and versions {sorted(receipts)}")
    return {
        "rate": rate,
        "versions": len(receipts),
        "receipts": len({tuple(of_version) for of_version in receipts.values()}),
        "changed": len(changed_weights(model, last)),
        "age": statistics.fmean(row["staleness/mean"] for row in rows),
        "grad_norm": statistics.fmean(row["grad_norm"] for row in rows),
        "tokens": sum(row["tokens/trained"] for row in rows),
        "trends": {name: trend([row[name] for row in rows]) for name in METRICS},
        "values": {name: [row[name] for row in rows] for name in METRICS},
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """`args.rounds` rounds; in each, a run of either kind from the same fine-tuned model. Raises
    `RuntimeError` if weights have changed that should not, or have not that should.
    """
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(args.rounds):
            folder = Path(scratch) / f"round-{number}"
            write_task(folder, number)
            model = fine_tune(folder, number + 1)
            for rate in filter(None, (STILL, args.control)):
                found = train(rate, folder, model, number + 1, args.steps)
                runs.append(found)
                print(json.dumps(found), file=sys.stderr, flush=True)
                is_still = found["receipts"] == 1 and not found["changed"]
                if is_still != (rate == STILL):
                    raise RuntimeError(
                        f"with learning rate {rate:g}, {found['versions']} versions have"
                        f" {found['receipts']} receipts, and {found['changed']} tensors changed"
                    )
    return {"runs": runs}


def show(result: dict[str, Any]) -> Iterator[str]:
    """Lines of a table."""
    names = ("mean", "first quarter", "last quarter", "slope", "+-", "largest")
    yield f"{'learning rate':>13} {'metric':18}" + "".join(f"{name:>15}" for name in names)
    for run in result["runs"]:
        for metric, line in run["trends"].items():
            cells = [line[name.replace(" ", "_")] for name in names[:4]]
            cells += [line["slope_error"], line["largest"]]
            told = "".join(f"{cell:>15.3e}" for cell in cells)
            yield f"{run['rate']:>13g} {metric:18}{told}"
        yield (
            f"{'':13} {run['versions']} versions, {run['receipts']} receipts, {run['changed']}"
            f" tensors changed; {run['tokens']:,.0f} tokens, mean age {run['age']:.2f}, mean"
            f" gradient norm {run['grad_norm']:.3g}"
        )


if __name__ == "__main__":
    sys.exit(run_tool("mismatch_drift", arguments=arguments, measure=measure, show=show))
