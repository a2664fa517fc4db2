"""A step of GRPO with a reference model, split into its parts: one rank and one engine, which take
turns on one device; random weights.

    python tools/bench/grpo_step.py [--json] [--prompts 32] [--samples 8] [--response 512]
    python tools/bench/grpo_step.py --size tiny --prompts 2 --samples 2 --response 8        on CPU

The model hardly ever ends a response, so nearly all have `--response` tokens. The reward is a
checksum of the text. On a GPU the run is as the recipes for GPUs: bfloat16, ZeRO 1, weights by
cuda_ipc, engine with CUDA graphs. Seconds of a step, by the run's own record:

    generation   until the step's samples are there
    sleep, wake  of the engine
    scoring      log-probs of the reference
    training     everything else between sleep and wake that trains
    publication  until the engine has the new weights, with digests and probe
    rest         such as the optimizer state, on its way to the host and back

The first step does not count.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from common import QWEN3, Args, Lines, run_tool, spread, table, write_config
from e2e_task import LETTERS, checksum
from processes import megarl

PARTS = {
    "generation": "rollouts of step",
    "sleep": "putting the engines to sleep",
    "scoring": "logprobs of the reference",
    "training": "training of step",
    "wake": "waking the engines up",
    "publication": "publication of weights",
}
"""{part: what the spans of rank 0 begin with}"""
PROMPT = 64
"""Tokens of a prompt."""
OPTIONS = {
    "--size": ("0.6b", "of a Qwen3", tuple(QWEN3)),
    "--prompts": (32, "prompts of a step"),
    "--samples": (8, "responses to each"),
    "--response": (512, "most tokens of a response"),
    "--steps": (2, "counted steps"),
}
RECIPE = """
task: rl
prompts: {source: "", shuffle: false}
environment: {verifier: "", require_stop: false}
rollout: {placement: colocated, dynamic_sampling: {enabled: false}}
algorithm: {advantage: grpo, loss: ppo_clip, kl: {coefficient: 0.001}, correction: {kind: tis}}
training: {micro_batch_tokens: 16384, optimizer: {learning_rate: 1e-6}}
observe: {tensorboard: false, transcripts_per_step: 0, progress: false}
"""
ON_GPU = {
    "rollout.engine.dtype": "bfloat16",
    "rollout.engine.gpu_memory_utilization": 0.4,
    "training.precision": "bfloat16",
    "training.zero_stage": 1,
    "training.norms": "torch",
    "training.elementwise": "triton",
    "training.gradient_checkpointing": "true",
    "weight_sync.transport": "cuda_ipc",
}


def write_task(folder: Path, args: Args) -> None:
    """Config, tokenizer and prompts; every token of the model is a character."""
    from make_addition import write_tokenizer

    folder.mkdir()
    config = QWEN3[args.size] | {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    write_config(folder, config)
    others = (chr(0x10000 + n) for n in range(config["vocab_size"] - 2 - len(LETTERS)))
    write_tokenizer(folder, [*LETTERS, *others])
    count = args.prompts * (2 + args.steps)
    texts = (LETTERS[n % 26] + LETTERS[n // 26 % 26] * (PROMPT - 1) for n in range(count))
    rows = (json.dumps({"prompt": text, "answer": "none"}) + "\n" for text in texts)
    (folder / "prompts.jsonl").write_text("".join(rows))


def parts_of(run: Path) -> list[dict[str, float]]:
    """{part: seconds} of each step that another one follows, by the trace of rank 0."""
    from megarl.system.spans import FOLDER
    from megarl.system.trace_files import read_traces

    (rank,) = (trace for trace in read_traces(run / FOLDER) if trace.name == "rank0")
    found = []
    for begin, end in itertools.pairwise(step["ts"] for step in rank.steps):
        spans = [span for span in rank.spans.values() if begin <= span["ts"] < end]
        row = {
            part: sum(one["end"] - one["ts"] for one in spans if one["name"].startswith(name)) / 1e6
            for part, name in PARTS.items()
        }
        row["training"] -= row["scoring"]
        step = (end - begin) / 1e6
        found.append(row | {"rest": step - sum(row.values()), "step": step})
    return found


def measure(args: Args) -> dict[str, Any]:
    """Run megarl, and read its trace."""
    import torch

    task, run = args.work / "task", args.work / "run"
    write_task(task, args)
    settings = {
        "steps": 2 + args.steps,  # one to begin with, and one that ends the last counted one
        "model.path": task,
        "model.from_scratch": "true",
        "prompts.source": task / "prompts.jsonl",
        "prompts.max_prompt_tokens": PROMPT,
        "environment.verifier": f"{Path(__file__).with_name('e2e_task.py')}:{checksum.__name__}",
        "rollout.groups_per_step": args.prompts,
        "rollout.group_size": args.samples,
        "rollout.max_new_tokens": args.response,
        **(ON_GPU if torch.cuda.is_available() else {}),
    }
    metrics, _ = megarl(RECIPE, run, settings, args.deadline)
    steps, counted = parts_of(run)[1:], metrics[1:-1]
    names = ("tokens/generated", "tokens/trained", "mismatch/mean_abs", "publish/bytes")
    return {
        "parts": {part: spread([step[part] for step in steps]) for part in steps[0]},
        "metrics": [{name: one[name] for name in names if name in one} for one in counted],
    }


def show(result: dict[str, Any]) -> Lines:
    """A table of the parts, and the counts of each step."""
    rows = [{"part": part, "s": seconds} for part, seconds in result["parts"].items()]
    yield from table(rows, "part; s .3f")
    yield from map(str, result["metrics"])


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
