"""`task: preference` and `task: sft` against TRL's DPOTrainer and SFTTrainer: tokens a second on
the same machine, model and data; CPU only.

    python tools/bench/tune.py [--json] [--kinds preference,sft] [--rounds 3] [--steps 8]
                               [--rows 32] [--padded 8] [--model FOLDER] [--trl-env FOLDER]

A step is 32 pairs (`--rows`), or twice as many demonstrations, in float32, with one AdamW step. The
model is the random Qwen2 of e2e.py, or that of `--model`, f.e. one that tools/real_model.py made.
Prompts have 12 to 24 tokens, responses 20 to 400, most of them short. Both pack:
megarl up to 8,192 tokens in a row; TRL's SFT in blocks of 2,048 (`packing`), while its DPO has no
packing that runs on a CPU, and pads eight pairs (`--padded`) to their longest. The reference's
log-probs are computed before training by both, and are not measured.

What is measured: tokens of prompts and responses, padding not counted, by the seconds from a step's
begin to its end; of TRL by a TrainerCallback, of megarl by `time/step_s`. The first step is left
out, because both allocate there. Each system runs as two processes of one thread and as one process
of two threads; the faster is compared. They take turns, each run in processes of its own.
"""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

from against_trl import TRL_ENV, make_trl_environment, run_megarl, run_trl
from common import Args, Lines, in_turns, progress, ratios, run_tool, spread, table
from e2e import weight_change
from e2e_task import (
    LEARNING_RATE,
    LETTERS,
    MAX_PROMPT_TOKENS,
    MICRO_BATCH_TOKENS,
    SEED,
    Setting,
    write_task,
)
from studies import newest_model

KINDS = {"preference": 1, "sft": 2}
"""{kind: rows of one optimizer step for each of `--rows`}."""
BLOCK_TOKENS = 2048
"""Tokens of a row of TRL's packing."""
SPREADS = (Setting(2, 1), Setting(1, 2))
DEADLINE_S = 900.0
RECIPE = f"""
seed: {SEED}
training: {{micro_batch_tokens: {MICRO_BATCH_TOKENS},
  optimizer: {{learning_rate: {LEARNING_RATE}, clip_norm: 1.0}}}}
observe: {{tensorboard: false, progress: false}}
"""
OPTIONS = {
    "--kinds": (list(KINDS), "what is trained", tuple(KINDS)),
    "--rounds": (3, "runs of each system in each way"),
    "--steps": (8, "timed steps of a run"),
    "--rows": (32, "pairs of a step; of demonstrations twice as many"),
    "--padded": (8, "pairs of one forward pass of TRL's DPO; fewer where memory is short"),
    "--model": ("", "folder of a model; without it a random one"),
    "--trl-env": (TRL_ENV, "folder of TRL's environment"),
}


def words_of(model: Path) -> list[str]:
    """Texts of one token each, from which the data's texts are put together: letters for the random
    model, else words of the model's vocabulary with the space before them.
    """
    from transformers import AutoTokenizer

    vocabulary = sorted(AutoTokenizer.from_pretrained(model).get_vocab())
    words = [f" {word[1:]}" for word in vocabulary if word[0] == "Ġ" and word[1:].isalpha()]
    return [word for word in words if word.isascii()] or list(LETTERS)


def write_data(folder: Path, words: list[str], rows: int, steps: int) -> dict[str, float]:
    """Rows for `steps` steps of both kinds; returns the mean tokens of a step of each."""
    draw, tokens = random.Random(SEED), {}

    def text(shortest: int, longest: int) -> tuple[str, int]:
        length = shortest + int((longest - shortest) * draw.random() ** 3)
        return "".join(draw.choices(words, k=length)), length

    for kind, times in KINDS.items():
        names = ("chosen", "rejected") if kind == "preference" else ("completion",)
        count, lines = 0, []
        for _ in range(rows * times * steps):
            prompt, before = text(MAX_PROMPT_TOKENS // 2, MAX_PROMPT_TOKENS)
            row = {"prompt": prompt}
            for name in names:
                row[name], length = text(20, 400)
                count += before + length + 1
            lines.append(json.dumps(row) + "\n")
        (folder / f"{kind}.jsonl").write_text("".join(lines))
        tokens[kind] = count / steps
    return tokens


def settings_of(kind: str, work: Path, setting: Setting, args: Args) -> dict[str, object]:
    """{setting: value} of a run of megarl, on top of `RECIPE`."""
    section = "preferences" if kind == "preference" else "demonstrations"
    own = {"reference.cache": work / "reference"}
    if kind == "sft":
        own = {"demonstrations.response_column": "completion"}
    return {
        "steps": 1 + args.steps,
        "samples_per_step": KINDS[kind] * args.rows,
        "model.path": args.model,
        f"{section}.source": work / "task" / f"{kind}.jsonl",
        f"{section}.max_tokens": 4096,
        f"{section}.shuffle": False,
        "training.num_threads": setting.threads,
        **own,
    }


def trl_given(kind: str, work: Path, setting: Setting, args: Args, tokens: float) -> dict[str, Any]:
    """The run as trl_side.py takes it. `tokens`: of a step."""
    rows = KINDS[kind] * args.rows // setting.processes
    arguments: dict[str, Any] = {
        "max_steps": 1 + args.steps,
        "learning_rate": LEARNING_RATE,
        "seed": SEED,
    }
    if kind == "preference":
        arguments |= {
            "beta": 0.1,
            "max_length": 4096,
            "per_device_train_batch_size": min(args.padded, rows),
            "gradient_accumulation_steps": max(1, rows // args.padded),
            "precompute_ref_log_probs": True,
        }
    else:
        blocks = max(1, round(tokens / BLOCK_TOKENS / setting.processes))
        arguments |= {
            "packing": True,
            "max_length": BLOCK_TOKENS,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": blocks,
        }
    return {
        "trainer": "DPO" if kind == "preference" else "SFT",
        "model": str(args.model),
        "rows": str(work / "task" / f"{kind}.jsonl"),
        "arguments": arguments,
    }


def measure(args: Args) -> dict[str, Any]:
    """Both systems in turns, each with both ways to use the cores."""
    python, made = make_trl_environment(args.trl_env), []
    work = args.work
    parameters = write_task(work / "task")
    args.model = Path(args.model or work / "task" / "model").expanduser().absolute()
    tokens = write_data(work / "task", words_of(args.model), args.rows, 1 + args.steps)

    def one_run(kind: str, system: str, setting: Setting) -> float:
        """Tokens a second."""
        if system == "megarl":
            settings = settings_of(kind, work, setting, args)
            rows, _ = run_megarl(f"task: {kind}\n{RECIPE}", work, setting, DEADLINE_S, settings)
            found = rows[1:]
            change = weight_change(args.model, newest_model(work / "run"))
            seconds = [one["time/step_s"] for one in found]
            trained = sum(one["tokens/trained_per_s"] * one["time/step_s"] for one in found)
        else:
            given = trl_given(kind, work, setting, args, tokens[kind])
            answer = run_trl(python, work, setting, given, DEADLINE_S)
            first, *rest = answer["steps"]
            change, seconds = answer["weight_change"], [step["step_s"] for step in rest]
            trained = rest[-1]["num_tokens"] - first["num_tokens"]
        if not change > 0:
            raise RuntimeError(f"{kind}: the weights did not change")
        progress(f"{kind}, {system}, {setting}: {trained / sum(seconds):,.0f} tokens/s")
        return trained / sum(seconds)

    for kind in args.kinds:
        ways = {
            (system, str(setting)): partial(one_run, kind, system, setting)
            for setting in SPREADS
            for system in ("TRL", "megarl")
        }
        made += [
            {"kind": kind, "system": system, "cores": cores, "rate": spread(values)}
            for (system, cores), values in in_turns(args.rounds, ways).items()  # type: ignore[arg-type]
        ]
    return {"parameters": parameters, "tokens_a_step": tokens, "rows": made}


def show(result: dict[str, Any]) -> Lines:
    """The table, and for each kind the ratio of the faster settings."""
    columns = "what=kind; system; cores as=cores; tokens/s=rate ,.0f"
    rows = result["rows"]
    yield from table(rows, columns)
    for kind in dict.fromkeys(row["kind"] for row in rows):
        best = {}
        for row in sorted(rows, key=lambda row: row["rate"]["median"]):
            if row["kind"] == kind:
                best[row["system"]] = row["rate"]["all"]
        times = ratios(best["megarl"], best["TRL"])
        yield "{}: {median:.2f} ({min:.2f} to {max:.2f}) times TRL".format(kind, **times)


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
