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

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

from common import Args, Lines, progress, ratios, run_tool, spread, table
from make_addition import write_model, write_rows
from processes import megarl
from studies import last_quarter, newest_model

LETTERS, MEDIAN, LONGEST = "abcdefgh", 24, 16.0
"""Letters of the prompts; median of their mean lengths in tokens; longest mean over the median."""
MAX_TOKENS = 512
SKIPPED = 3
"""Steps at the start of a run that are not timed."""
KINDS: dict[str, dict[str, Any]] = {
    "sync": {"rollout.max_staleness": 0},
    "ordered1": {"rollout.max_staleness": 1},
    "ordered2": {"rollout.max_staleness": 2},
    "windowed1": {"rollout.max_staleness": 1, "rollout.dispatch": "windowed"},
    "windowed2": {"rollout.max_staleness": 2, "rollout.dispatch": "windowed"},
}
SFT = f"""
task: sft
samples_per_step: 64
demonstrations: {{source: "", max_tokens: {MAX_TOKENS + 8}}}
training: {{micro_batch_tokens: 8192, num_threads: 2, schedule: {{warmup_steps: 10}},
  optimizer: {{learning_rate: 3.0e-3, beta2: 0.98, clip_norm: 1.0}}, checkpoint: {{keep: 1}}}}
"""
RECIPE = f"""
task: rl
prompts: {{source: "", answer_column: "", max_prompt_tokens: 8}}
environment: {{verifier: "", require_stop: false}}
rollout: {{groups_per_step: 16, group_size: 8, max_new_tokens: {MAX_TOKENS},
  engine: {{num_threads: 1}}, dynamic_sampling: {{enabled: false}}}}
algorithm: {{correction: {{kind: tis}}, kl: {{coefficient: 0.1}}}}
training: {{num_mini_batches: 1, micro_batch_tokens: 8192, num_threads: 1,
  optimizer: {{learning_rate: 5.0e-4, clip_norm: 1.0}}, checkpoint: {{keep: 1}}}}
"""
OPTIONS = {
    "--rounds": (3, "runs of each kind"),
    "--steps": (40, "steps of a run"),
    "--kinds": (list(KINDS), "of training", tuple(KINDS)),
}
REWARD = """
def score(prompt, response):
    return float(response[:1] == str((int(prompt.text[1]) + 3) % 10))
"""


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
    longest = {"config": "max_position_embeddings", "tokenizer_config": "model_max_length"}
    for name, key in longest.items():
        path = folder / "model" / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: 2 * MAX_TOKENS}))
    pairs = [(letter, digit) for letter in LETTERS for digit in range(10)]
    drawn = [draw.choice(pairs) for _ in range(12000)]
    rows = [{"prompt": f"{a}{b}=", "response": answer(a, b, draw)} for a, b in drawn]
    write_rows(folder / "whole.jsonl", rows)
    write_rows(folder / "digits.jsonl", ({**row, "response": row["response"][:1]} for row in rows))
    write_rows(folder / "train.jsonl", ({"prompt": f"{a}{b}="} for a, b in pairs))
    (folder / "reward.py").write_text(REWARD)


def fine_tune(folder: Path, seed: int) -> Path:
    """Teach first the digits, which are few among the tokens of whole answers, and then those;
    returns the model's folder.
    """
    model = folder / "model"
    for data, steps in (("digits", 300), ("whole", 200)):
        settings = {
            "steps": steps,
            "seed": seed,
            "model.path": model,
            "model.from_scratch": data == "digits",
            "demonstrations.source": folder / f"{data}.jsonl",
        }
        megarl(SFT, folder / data, settings)
        model = newest_model(folder / data)
    return model


def run(kind: str, folder: Path, model: Path, seed: int, steps: int) -> dict[str, float]:
    """One run; returns its throughput, its times and its accuracy."""
    settings = {
        "steps": steps,
        "seed": seed,
        "model.path": model,
        "prompts.source": folder / "train.jsonl",
        "environment.verifier": f"{folder}/reward.py:score",
        **KINDS[kind],
    }
    rows, _ = megarl(RECIPE, folder / kind, settings)
    timed = rows[SKIPPED:]

    def mean(name: str) -> float:
        return statistics.fmean(row.get(name, 0.0) for row in timed)

    return {
        "tokens_per_s": mean("tokens/trained") / mean("time/step_s"),
        "step_s": mean("time/step_s"),
        "wait_s": mean("time/wait_s"),
        "length": mean("length/mean"),
        "accuracy": last_quarter([row["accuracy"] for row in rows]),
    }


def measure(args: Args) -> dict[str, Any]:
    """`args.rounds` rounds; in each, every kind in turn from the same fine-tuned model."""
    if args.steps <= SKIPPED + 1:
        raise ValueError(f"--steps is {args.steps}; set it to {SKIPPED + 2} or more")
    rounds = []
    for number in range(args.rounds):
        folder = args.work / f"round-{number}"
        write_task(folder, number)
        model = fine_tune(folder, number + 1)
        first = number % len(args.kinds)
        order = args.kinds[first:] + args.kinds[:first]
        rounds.append({kind: run(kind, folder, model, number + 1, args.steps) for kind in order})
        progress(f"round {number + 1}: {rounds[-1]}")
    return {"rounds": rounds}


def show(result: dict[str, Any]) -> Lines:
    """Lines of a table."""
    rounds, rows = result["rounds"], []
    for kind in sorted(rounds[0], key=list(KINDS).index):
        columns = {name: [one[kind][name] for one in rounds] for name in rounds[0][kind]}
        row = {"kind": kind} | {name: spread(values) for name, values in columns.items()}
        if "sync" in rounds[0]:
            alone = [one["sync"]["tokens_per_s"] for one in rounds]
            row["to_sync"] = ratios(columns["tokens_per_s"], alone)
        rows.append(row)
    columns = (
        "kind; tokens/s=tokens_per_s ,.0f; to sync=to_sync .2f; step s=step_s .2f;"
        " wait s=wait_s .2f; length .1f; accuracy .3f"
    )
    yield from table(rows, columns, middle="mean")
    for one in rounds if "sync" in rounds[0] else ():
        step_s, wait_s = one["sync"]["step_s"], one["sync"]["wait_s"]
        yield f"bound by overlap of the phases: {step_s / max(wait_s, step_s - wait_s):.2f}"


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
