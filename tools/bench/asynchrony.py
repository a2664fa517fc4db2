"""Asynchronous against synchronous training on long, uneven answers: throughput and accuracy.

    python tools/bench/asynchrony.py [--rounds 3] [--steps 40] [--kinds sync,ordered1,...] [--json]

The task: a prompt is a letter and a digit, such as `c4=`. The answer begins with the digit plus 3
(modulo 10), which is what the reward asks for, and goes on with dots, whose number depends on the
letter: the means of the eight letters are log-normal, the longest 16 times the median. A small
model learns it from demonstrations, of which a quarter has the right digit; then each kind of
training continues from that model, with a penalty on the divergence from it, which keeps the
lengths:

    sync                  rollout.max_staleness 0
    ordered1, ordered2    staleness 1 and 2, groups consumed in order
    windowed1, windowed2  staleness 1 and 2, groups consumed as they finish

In every round each kind runs once, in turns, with the round's seed. Throughput is the tokens
trained over the time of the steps but the first three. `bound` is what overlapping the phases of
the round's synchronous run could bring at most: the whole step over the longer of generation (the
time the trainer waits) and everything else. Accuracy is the mean of the last quarter of the steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import (
    ROOT,
    Others,
    adopt_orphans,
    command_line,
    reap_orphans,
    require_positive,
    run_tool,
    warn_if_not_quiet,
)

sys.path.insert(0, str(ROOT / "tools"))

from make_addition import write_model, write_rows

LETTERS, MEDIAN, LONGEST = "abcdefgh", 24, 16.0
"""Letters of the prompts; median of their mean lengths in tokens; longest mean over the median."""
MAX_TOKENS = 512
SKIPPED = 3
"""Steps at the start of a run that are not timed."""
DEADLINE_S = 900.0
KINDS: dict[str, dict[str, Any]] = {
    "sync": {"max_staleness": 0},
    "ordered1": {"max_staleness": 1},
    "ordered2": {"max_staleness": 2},
    "windowed1": {"max_staleness": 1, "dispatch": "windowed"},
    "windowed2": {"max_staleness": 2, "dispatch": "windowed"},
}
OPTIONS = {
    "--rounds": {"type": int, "default": 3, "help": "runs of each kind"},
    "--steps": {"type": int, "default": 40, "help": "steps of a run"},
    "--kinds": {"default": ",".join(KINDS), "help": f"of {', '.join(KINDS)}"},
}
REWARD = """
def score(prompt, response):
    return float(response[:1] == str((int(prompt.text[1]) + 3) % 10))
"""


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    require_positive(parser, args, ["rounds"])
    args.kinds = args.kinds.split(",")
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"--kinds has {', '.join(sorted(unknown))}; choose of {', '.join(KINDS)}")
    if args.steps <= SKIPPED + 1:
        parser.error(f"--steps is {args.steps}; set it to {SKIPPED + 2} or more")
    return args


def mean_lengths() -> list[float]:
    """Mean answer length of each letter: quantiles of a log-normal distribution."""
    quantiles = [(number + 0.5) / len(LETTERS) for number in range(len(LETTERS))]
    normal = statistics.NormalDist()
    sigma = math.log(LONGEST) / normal.inv_cdf(quantiles[-1])
    return [MEDIAN * math.exp(sigma * normal.inv_cdf(quantile)) for quantile in quantiles]


def answer(letter: str, digit: int, draw: random.Random) -> str:
    """A demonstration: the right digit in a quarter of them, and dots of geometric number."""
    right = (digit + 3) % 10
    first = right if draw.random() < 0.25 else draw.randrange(10)
    mean = mean_lengths()[LETTERS.index(letter)]
    dots = int(math.log(1.0 - draw.random()) / math.log(1.0 - 1.0 / mean))
    return f"{first}{'.' * min(dots, MAX_TOKENS - 2)}"


def write_task(folder: Path, seed: int) -> None:
    """Model, demonstrations, prompts and reward."""
    folder.mkdir()
    draw = random.Random(f"asynchrony/{seed}")
    write_model(folder / "model", "0123456789=." + LETTERS)
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / "model" / name
        described = json.loads(path.read_text())
        for key in ("max_position_embeddings", "model_max_length"):
            if key in described:
                described[key] = 2 * MAX_TOKENS
        path.write_text(json.dumps(described))
    pairs = [(letter, digit) for letter in LETTERS for digit in range(10)]
    drawn = [draw.choice(pairs) for _ in range(12000)]
    rows = [{"prompt": f"{a}{b}=", "response": answer(a, b, draw)} for a, b in drawn]
    write_rows(folder / "whole.jsonl", rows)
    write_rows(folder / "digits.jsonl", ({**row, "response": row["response"][:1]} for row in rows))
    write_rows(folder / "train.jsonl", ({"prompt": f"{a}{b}="} for a, b in pairs))
    (folder / "reward.py").write_text(REWARD)


def megarl(command: str, tree: dict[str, Any], path: Path) -> None:
    """Run a command of megarl with a recipe; raises `RuntimeError` where it fails."""
    path.write_text(json.dumps(tree))  # JSON is YAML
    done = subprocess.run(
        [sys.executable, "-m", "megarl", command, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    time.sleep(1.0)  # Ray's last processes end
    reap_orphans()
    if done.returncode:
        raise RuntimeError(f"megarl {command} {path} failed: {done.stderr[-1500:]}")


def fine_tune(folder: Path, seed: int) -> Path:
    """Teach first the digits, which are few among the tokens of whole answers, and then those;
    returns the model's folder.
    """
    first = fine_tune_on("digits", folder, folder / "model", seed, steps=300, from_scratch=True)
    return fine_tune_on("whole", folder, first, seed, steps=200)


def fine_tune_on(
    data: str, folder: Path, model: Path, seed: int, *, steps: int, from_scratch: bool = False
) -> Path:
    """Train `model` on the demonstrations `data`.jsonl; returns the folder of the result."""
    tree = {
        "folder": str(folder / data),
        "steps": steps,
        "seed": seed,
        "samples_per_step": 64,
        "model": {"path": str(model), "from_scratch": from_scratch},
        "demonstrations": {"source": str(folder / f"{data}.jsonl"), "max_tokens": MAX_TOKENS + 8},
        "training": {
            "micro_batch_tokens": 8192,
            "num_threads": 2,
            "optimizer": {"learning_rate": 3e-3, "beta2": 0.98, "clip_norm": 1.0},
            "schedule": {"warmup_steps": 10},
            "checkpoint": {"keep": 1},
        },
    }
    megarl("sft", tree, folder / f"{data}.yaml")
    return max((folder / data / "checkpoints").glob("step_*")) / "model"


def train(kind: str, folder: Path, model: Path, seed: int, steps: int) -> dict[str, float]:
    """One run; returns its throughput, its times and its accuracy."""
    run = folder / kind
    tree = {
        "folder": str(run),
        "steps": steps,
        "seed": seed,
        "model": {"path": str(model)},
        "prompts": {
            "source": str(folder / "train.jsonl"),
            "answer_column": "",
            "max_prompt_tokens": 8,
        },
        "environment": {"verifier": f"{folder}/reward.py:score", "require_stop": False},
        "rollout": {
            "groups_per_step": 16,
            "group_size": 8,
            "max_new_tokens": MAX_TOKENS,
            "engine": {"num_threads": 1},
            "dynamic_sampling": {"enabled": False},
            **KINDS[kind],
        },
        "algorithm": {"correction": {"kind": "tis"}, "kl": {"coefficient": 0.1}},
        "training": {
            "num_mini_batches": 1,
            "micro_batch_tokens": 8192,
            "num_threads": 1,
            "optimizer": {"learning_rate": 5e-4, "clip_norm": 1.0},
            "checkpoint": {"keep": 1},
        },
    }
    megarl("train", tree, folder / f"{kind}.yaml")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed, last = rows[SKIPPED:], rows[-max(1, steps // 4) :]
    seconds = sum(row["time/step_s"] for row in timed)
    return {
        "tokens_per_s": sum(row["tokens/trained"] for row in timed) / seconds,
        "step_s": seconds / len(timed),
        "wait_s": sum(row["time/wait_s"] for row in timed) / len(timed),
        "train_s": sum(row["time/train_s"] for row in timed) / len(timed),
        "length": statistics.mean(row["length/mean"] for row in timed),
        "accuracy": statistics.mean(row["accuracy"] for row in last),
        "age": statistics.mean(row.get("staleness/mean", 0.0) for row in timed),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """`args.rounds` rounds; in each, every kind in turn from the same fine-tuned model."""
    rounds = []
    adopt_orphans()
    with tempfile.TemporaryDirectory() as scratch, Others() as others:
        for number in range(args.rounds):
            folder = Path(scratch) / f"round-{number}"
            write_task(folder, number)
            model = fine_tune(folder, number + 1)
            order = args.kinds[number % len(args.kinds) :] + args.kinds[: number % len(args.kinds)]
            rounds.append(
                {kind: train(kind, folder, model, number + 1, args.steps) for kind in order}
            )
            print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr, flush=True)
    return {"rounds": rounds, "others": others.share}


def show(result: dict[str, Any]) -> Iterator[str]:
    """Lines of a table."""
    rounds = result["rounds"]
    if "sync" in rounds[0]:
        phases = [one["sync"] for one in rounds]
        bounds = [
            one["step_s"] / max(one["wait_s"], one["step_s"] - one["wait_s"]) for one in phases
        ]
        yield f"bound by overlap of the phases: {', '.join(f'{one:.2f}' for one in bounds)}"
    names = ("tokens/s", "to sync", "step s", "wait s", "accuracy")
    yield f"{'kind':10} {'  '.join(names)}"
    for kind in sorted(rounds[0], key=list(KINDS).index):
        found = [one[kind] for one in rounds]
        rates = [one["tokens_per_s"] for one in found]
        ratios = [
            rate / one["sync"]["tokens_per_s"] if "sync" in one else math.nan
            for rate, one in zip(rates, rounds, strict=True)
        ]
        accuracies = [one["accuracy"] for one in found]
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        yield (
            f"{kind:10} {statistics.mean(rates):7,.0f} ({min(rates):,.0f}-{max(rates):,.0f})"
            f" {statistics.mean(ratios):7.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            f" {statistics.mean(one['step_s'] for one in found):7.2f}"
            f" {statistics.mean(one['wait_s'] for one in found):7.2f}"
            f" {statistics.mean(accuracies):7.3f} +- {spread:.3f}"
        )
    yield from warn_if_not_quiet(result["others"])


if __name__ == "__main__":
    sys.exit(run_tool("asynchrony", arguments=arguments, measure=measure, show=show))
