"""LoRA adapters as files in the format of Hugging Face PEFT, both ways.

adapter_config.json          rank, alpha, adapted layers
adapter_model.safetensors    base_model.model.LAYER.lora_A.weight [rank, K] and
                             base_model.model.LAYER.lora_B.weight [N, rank]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from megarl.checkpoints.manifest import file_digest
from megarl.checkpoints.store import Store
from megarl.settings.schema import require
from megarl.settings.training import LoraConfig
from megarl.system.third_party import opening

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
SCORE = "score.weight"
"""The weight of a score head, which is trained whole, beside the adapters."""
PREFIX = "base_model.model."
"""What PEFT puts before the base model's names."""

PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "lora_bias": False,
    "use_qalora": False,
    "use_bdlora": None,
    "alora_invocation_tokens": None,
    "layer_replication": None,
    "layers_to_transform": None,
    "target_parameters": None,
    "arrow_config": None,
}
"""{key of adapter_config.json: the only supported value}. With another an adapter computes
something else, or has other tensors.
"""
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base model as it is. With others, such as "pissa",
PEFT changes its weights as it loads the adapter.
"""
BASE = "megarl_base_digest"
"""Key of the base model's digest in the metadata of `TENSORS`."""


def adapter_bytes(
    tensors: Mapping[str, torch.Tensor],
    config: LoraConfig,
    *,
    base: str | None,
    base_digest: str = "",
) -> dict[str, bytes]:
    """{file name: content}

    Args:
        tensors: {name in the base model: whole tensor} of all A and B, and of a score head.
        config: rank and alpha.
        base: path or hub name of the base model.
        base_digest: `sampled_digest` of its weights, by which a run knows the base again.
    """
    classifies = SCORE in tensors
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors if ".lora_" in name}
    # Without the settings that are off: older versions of PEFT refuse those that they do not know.
    settings = {key: value for key, value in PLAIN.items() if value} | {
        "task_type": "SEQ_CLS" if classifies else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(layers),
        "modules_to_save": ["score"] if classifies else None,
        "inference_mode": True,
    }
    named = {PREFIX + name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    return {
        CONFIG: json.dumps(settings, indent=2, sort_keys=True).encode(),
        # One entry, or safetensors writes them in random order: equal adapters give equal bytes.
        TENSORS: save(named, metadata={BASE: base_digest} if base_digest else {"format": "pt"}),
    }


def written_for(folder: Path) -> str:
    """Digest of the base model's weights in an adapter's files; "" without one."""
    try:
        with safe_open(str(folder / TENSORS), framework="pt") as file:
            return (file.metadata() or {}).get(BASE, "")
    except (OSError, SafetensorError):
        return ""


def adapter_digest(folder: str) -> str:
    """Of the adapter's weights; "" for no folder."""
    return file_digest(Path(folder) / TENSORS) if folder else ""


def read_adapter(
    config: LoraConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """{name in the base model: whole tensor on the CPU} of `config.adapter`.

    `shapes`: of the parameters that the model adapts, and of its score head; the result has one
    only if the files do. Raises `ValueError`, with what to set, for missing files, another rank,
    alpha or kind, or other tensors.
    """
    folder, setting = Path(config.adapter), f"training.lora.adapter {config.adapter!r}"
    for name in (CONFIG, TENSORS):
        require(
            (folder / name).is_file(),
            f"{setting} has no {name}; set it to a folder that PEFT or a checkpoint's adapter/ has"
            " written",
        )
    with opening(f"{CONFIG} of {setting}", fix="fetch the adapter again"):
        content = dict(json.loads((folder / CONFIG).read_text()))
    start = content.get("init_lora_weights")
    require(
        start in PLAIN_STARTS,
        f"{setting} has init_lora_weights {start!r}, with which PEFT changes the base model too;"
        " convert it to a plain adapter (PEFT: save_pretrained with path_initial_model_for_weight_"
        "conversion), or set another one",
    )
    expected = PLAIN | {"r": config.rank, "lora_alpha": config.alpha}
    require(
        isinstance(content.get("r"), int),
        f"{setting}: its {CONFIG} has no rank (r); fetch the adapter again",
    )
    for key, value in expected.items():
        # What PEFT leaves out has its default, which is the supported one.
        has = content.get(key, PLAIN.get(key)) or PLAIN.get(key)
        setting_of = {"r": "training.lora.rank", "lora_alpha": "training.lora.alpha"}.get(key)
        advice = f"set {setting_of} to {has}" if setting_of else "set another adapter"
        require(has == value, f"{setting} has {key} {has!r} where this run has {value!r}; {advice}")
    store = Store([folder / TENSORS])
    stored = {name.removeprefix(PREFIX): name for name in store.shapes}
    require(
        SCORE in shapes or SCORE not in stored,
        f"{setting} has a {SCORE}, so it is the adapter of a reward model, and the model of this"
        " run has no score head; set an adapter of a language model, or a recipe with task:"
        " reward_model",
    )
    wanted_shapes = {name: shapes[name] for name in shapes if name != SCORE or name in stored}
    missing, further = sorted(wanted_shapes.keys() - stored), sorted(stored.keys() - shapes)
    require(
        not missing and not further,
        f"{setting} adapts other layers: {len(missing)} tensors are missing"
        f" ({', '.join(missing[:2])}), {len(further)} are not of this run"
        f" ({', '.join(further[:2])}); set {_targets_of(content.get('target_modules'))}, or"
        " model.path to the adapter's base model",
    )
    for name, shape in wanted_shapes.items():
        require(
            store.shapes[stored[name]] == shape,
            f"{setting} was made for another base model: its {name} has shape"
            f" {list(store.shapes[stored[name]])}, and that of model.path {list(shape)}; set"
            f" model.path to {content.get('base_model_name_or_path')!r}, or another adapter",
        )
    return {name: store.flat(stored[name]).view(shape) for name, shape in wanted_shapes.items()}


def _targets_of(target_modules: object) -> str:
    """What to set for an adapter with these `target_modules`: layers, or a string, which PEFT reads
    as a regular expression of layers or as "all-linear".
    """
    if target_modules == "all-linear":
        return "training.lora.targets to [] (the adapter's target_modules is 'all-linear')"
    if isinstance(target_modules, str):
        return (
            "training.lora.targets to the layers that the adapter's target_modules"
            f" {target_modules!r}, a regular expression, matches"
        )
    layers = target_modules if isinstance(target_modules, list) else []
    heads = sorted({"lm_head", "embed_tokens"} & set(layers))
    if heads:
        return f"another adapter ({' and '.join(heads)} cannot be adapted here)"
    return f"training.lora.targets to {layers}"
