"""Makes a mixture of experts of a dense model: each expert is a copy of the layer's feed-forward,
and the router is random. Its outputs are at first those of the dense model, since the weights of
the chosen experts add up to 1 (arXiv:2212.05055).

    python tools/upcycle.py MODEL FOLDER [--experts 4] [--top-k 2] [--seed 1]

A Llama (SmolLM2) becomes a Mixtral, a Qwen3 a Qwen3-MoE. Tensors are written as published.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megarl.checkpoints.store import open_whole

LAYER = "model.layers.{layer}."
KINDS: dict[str, dict[str, Any]] = {
    "llama": {
        "config": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
        "counts": ("num_local_experts", None),
        "gate": "block_sparse_moe.gate.weight",
        "expert": "block_sparse_moe.experts.{expert}.{part}.weight",
        "parts": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    },
    "qwen3": {
        "config": {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
        "counts": ("num_experts", "moe_intermediate_size"),
        "gate": "mlp.gate.weight",
        "expert": "mlp.experts.{expert}.{part}.weight",
        "parts": {name: name for name in ("gate_proj", "up_proj", "down_proj")},
    },
}


def upcycle(source: Path, target: Path, experts: int, top_k: int, seed: int) -> None:
    """Write the mixture to the new folder `target`. Raises `ValueError` for another model type."""
    config = json.loads((source / "config.json").read_text())
    kind = KINDS.get(config["model_type"])
    if kind is None:
        known = ", ".join(KINDS)
        raise ValueError(f"model type {config['model_type']} of {source} is none of {known}")
    store, draw = open_whole(source), torch.Generator().manual_seed(seed)
    tensors = {name: store.flat(name).view(shape) for name, shape in store.shapes.items()}
    for layer in range(config["num_hidden_layers"]):
        prefix = LAYER.format(layer=layer)
        for part, stored in kind["parts"].items():
            dense = tensors.pop(f"{prefix}mlp.{part}.weight")
            for expert in range(experts):
                name = prefix + kind["expert"].format(expert=expert, part=stored)
                tensors[name] = dense.clone()
        gate = torch.randn(experts, config["hidden_size"], generator=draw)
        gate *= config["initializer_range"]
        tensors[prefix + kind["gate"]] = gate.to(tensors["model.norm.weight"].dtype)
    count, width = kind["counts"]
    config |= kind["config"] | {count: experts, "num_experts_per_tok": top_k}
    if width:
        config[width] = config["intermediate_size"]
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    for option, default in (("experts", 4), ("top-k", 2), ("seed", 1)):
        parser.add_argument(f"--{option}", type=int, default=default)
    args = parser.parse_args(argv)
    if not 1 <= args.top_k <= args.experts:
        parser.error(f"--top-k is {args.top_k}; set it to 1 to {args.experts}")
    try:
        upcycle(args.model, args.folder, args.experts, args.top_k, args.seed)
    except (OSError, ValueError) as error:
        print(f"upcycle: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
