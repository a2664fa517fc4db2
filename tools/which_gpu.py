"""The smallest GPU on which a model trains, by arithmetic, as the table of docs/howto/which_gpu.md.

python tools/which_gpu.py [--tokens 4096]

Ranks and engines share the GPUs (`placement: colocated`), layout data = GPUs, ZeRO 3, bfloat16,
`gradient_checkpointing`, micro-batches of `--tokens`. Nothing of it was run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megarl.parallel.layout import Layout
from megarl.settings.config import RunConfig, from_tree
from megarl.settings.training import ModelConfig
from megarl.trainer.memory import SizedParameter, engine_memory, role_memory, sized_parameters
from megarl.trainer.working_memory import BUCKET_ELEMENTS, kept_memory

GIB = 2**30
GPU_BYTES = {16: 16e9, 24: 24e9, 80: 80e9, 141: 141e9}
"""{name of a GPU by its memory: bytes}"""
NUM_GPUS = (1, 2, 8, 32)
MODELS = {
    "0.5B": ("qwen2", 24, 896, 4864, 14, 2, 151936, True),
    "1.5B": ("qwen2", 28, 1536, 8960, 12, 2, 151936, True),
    "7B": ("qwen2", 28, 3584, 18944, 28, 4, 152064, False),
    "14B": ("qwen2", 48, 5120, 13824, 40, 8, 152064, False),
    "32B": ("qwen2", 64, 5120, 27648, 40, 8, 152064, False),
    "70B": ("llama", 80, 8192, 28672, 64, 8, 128256, False),
}
"""{parameters: model type and sizes}: Qwen2.5, and Llama 3.1 of 70B."""
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
SIZES += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
LEFT_FOR_ENGINE = 4 * GIB
"""Keys and values, and what an engine needs for itself."""
LORA_RANK = {"all weights": 0, "LoRA": 16}


def parameters_of(model: str) -> list[SizedParameter]:
    model_type, *sizes = MODELS[model]
    with tempfile.TemporaryDirectory() as folder:
        tree = {"model_type": model_type, **dict(zip(SIZES, sizes, strict=True))}
        (Path(folder) / "config.json").write_text(json.dumps(tree))
        return sized_parameters(ModelConfig(path=folder), 1)


def step_memory(model: str, tokens: int) -> float:
    """Bytes that a training step needs beside states and gathered weights: inputs of layers, one
    recomputed layer, the head's gradient, a chunk of logits and a reduce bucket.
    """
    _, layers, hidden, inner, _, _, vocab, _ = MODELS[model]
    activations = 2 * tokens * (layers * hidden + 8 * hidden + 5 * inner)
    return activations + 6 * vocab * hidden + GIB / 2 + 2 * BUCKET_ELEMENTS


def most_memory(
    model: str, parameters: Sequence[SizedParameter], recipe: dict[str, object], tokens: int
) -> float:
    """Bytes on a GPU while ranks train or while engines generate, whichever is more."""
    config = from_tree(RunConfig, recipe, where="the plan")
    layout = Layout(data=config.training.layout.data)
    kept = kept_memory(parameters, layout, config)
    states = role_memory(parameters, layout, config.training, trains=True)
    training = kept + states.gradients + states.optimizer + step_memory(model, tokens)
    heads = MODELS[model][4]
    tensor = max(t for t in (1, 2, 4, 8) if t <= layout.data and heads % t == 0)
    return max(training, kept + engine_memory(parameters, tensor, "bfloat16") + LEFT_FOR_ENGINE)


def cell(
    model: str, parameters: Sequence[SizedParameter], lora_rank: int, num_gpus: int, tokens: int
) -> str:
    """The smallest GPU, and a smaller one that needs `training.offload_optimizer`."""
    smallest = []
    for offload in (False, True):
        training = {"precision": "bfloat16", "zero_stage": 3, "offload_optimizer": offload}
        training |= {"layout": {"data": num_gpus}, "lora": {"rank": lora_rank}}
        recipe = {
            "task": "rl",
            "folder": "runs/planned",
            "model": {"path": model},
            "prompts": {"source": "problems.jsonl"},
            "environment": {"verifier": "math"},
            "rollout": {"placement": "colocated", "max_staleness": 0},
            "training": training,
        }
        most = most_memory(model, parameters, recipe, tokens)
        smallest.append(next((str(name) for name, size in GPU_BYTES.items() if most <= size), ""))
    whole, offloaded = smallest
    parts = [whole] if whole == offloaded else [whole, f"{offloaded} offloaded"]
    return ", ".join(filter(None, parts)) or "-"


def table(tokens: int) -> str:
    """The whole table in Markdown."""
    heads = ["model", "trained", *(f"{n} GPU{'s' * (n > 1)}" for n in NUM_GPUS)]
    rows: list[list[str]] = []
    for model in MODELS:
        parameters = parameters_of(model)
        for name, rank in LORA_RANK.items():
            cells = [cell(model, parameters, rank, n, tokens) for n in NUM_GPUS]
            rows.append([model, name, *cells])
    lines = [f"| {' | '.join(row)} |" for row in [heads, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(heads), *lines[1:]])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a micro-batch")
    print(table(parser.parse_args().tokens))
