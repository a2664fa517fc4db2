"""LoRA adapters as files in the format of Hugging Face PEFT: `PeftModel.from_pretrained` and vLLM
read what is written here, and an adapter that PEFT wrote can be trained on.

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
from safetensors.torch import save

from megarl.checkpoints.store import Store
from megarl.schema import require
from megarl.third_party import opening
from megarl.trainer.config import LoraConfig

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
SCORE = "score.weight"
"""The score head of a reward model, which is trained whole beside its adapters."""
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
}
"""{key of adapter_config.json: the only value that is supported}"""


def write_adapter(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: LoraConfig,
    *,
    base: str | None,
) -> list[Path]:
    """Write an adapter into `folder`, which is made; returns the paths. The other arguments are
    those of `adapter_bytes`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in adapter_bytes(tensors, config, base=base).items():
        (folder / name).write_bytes(content)
    return [folder / CONFIG, folder / TENSORS]


def adapter_bytes(
    tensors: Mapping[str, torch.Tensor], config: LoraConfig, *, base: str | None
) -> dict[str, bytes]:
    """{file name: content} of an adapter in PEFT's format.

    Args:
        tensors: {name in the base model: whole tensor} of all A and B, and of a score head.
        config: rank and alpha.
        base: path or hub name of the base model.
    """
    classifies = SCORE in tensors
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors if ".lora_" in name}
    settings = PLAIN | {
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
        TENSORS: save(named, metadata={"format": "pt"}),
    }


def read_adapter(
    config: LoraConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """The tensors {name in the base model: whole tensor} of the adapter that `config` names.

    `shapes`: {name: whole shape} of the adapters' parameters in the model. Raises `ValueError` if
    the adapter has another rank, alpha or kind, other layers, or was made for another base model.
    """
    folder, setting = Path(config.adapter), f"training.lora.adapter {config.adapter!r}"
    for name in (CONFIG, TENSORS):
        require(
            (folder / name).is_file(),
            f"{setting} has no {name}; set it to a folder that PEFT or a checkpoint's adapter/ has"
            " written",
        )
    with opening(f"{CONFIG} of {setting}", fix="fetch the adapter again"):
        found = dict(json.loads((folder / CONFIG).read_text()))
    wanted = PLAIN | {"r": config.rank, "lora_alpha": config.alpha}
    for key, value in wanted.items():
        # What PEFT leaves out has its default, which is the supported one.
        has = found.get(key, PLAIN.get(key)) or PLAIN.get(key)
        setting_of = {"r": "training.lora.rank", "lora_alpha": "training.lora.alpha"}.get(key)
        advice = f"set {setting_of} to {has}" if setting_of else "set another adapter"
        require(
            has == value,
            f"{setting} has {key} {has!r} where this run has {value!r}; {advice}",
        )
    store = Store([folder / TENSORS])
    stored = {name.removeprefix(PREFIX): name for name in store.shapes}
    missing, further = sorted(shapes.keys() - stored), sorted(stored.keys() - shapes)
    require(
        not missing and all(name == SCORE for name in further),
        f"{setting} adapts other layers: {len(missing)} tensors are missing"
        f" ({', '.join(missing[:2])}), {len(further)} are not of this run"
        f" ({', '.join(further[:2])}); set training.lora.targets to"
        f" {list(found.get('target_modules') or ())}, or model.path to the adapter's base model",
    )
    for name, shape in shapes.items():
        require(
            store.shapes[stored[name]] == shape,
            f"{setting} was made for another base model: its {name} has shape"
            f" {list(store.shapes[stored[name]])}, and that of model.path {list(shape)}; set"
            f" model.path to {found.get('base_model_name_or_path')!r}, or another adapter",
        )
    return {name: store.flat(stored[name]).view(shape) for name, shape in shapes.items()}
