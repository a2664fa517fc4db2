"""Names and shapes of the tensors that a model is published as, where its parameters differ.

transformers joins the experts of a layer at loading:

    mlp.experts.gate_up_proj [E, 2 I, H]    gate [I, H] and up [I, H] of expert 0, of expert 1, ...
    mlp.experts.down_proj    [E, H, I]      down [H, I] of expert 0, of expert 1, ...

and renames some tensors. Everything outside of the model has the published tensors: checkpoints,
exports, engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from megarl.parallel.reshard.owned import Fused


def fused_tensors(model: Any) -> dict[str, list[tuple[str, tuple[int, int]]]]:
    """`Fused` of a whole or sharded transformers model: by the model's names, before transformers'
    renamings.
    """
    named: Any = model.named_parameters()  # empty under ZeRO 3, which has their shape
    parameters = {name: getattr(value, "ds_shape", value.shape) for name, value in named}
    config, fused = model.config.get_text_config(), {}
    for converter in get_model_conversion_mapping(model):
        if not _joins_experts(converter):
            continue
        (target,), sources = converter.target_patterns, converter.source_patterns
        for name in [name for name in parameters if name.endswith(target)]:
            owner = name.removesuffix(target)
            width, height = parameters[name][2], parameters[name][1] // len(sources)
            fused[name] = [
                (owner + source.replace("*", str(expert)), (height, width))
                for expert in range(config.num_local_experts)
                for source in sources
            ]
    return fused


def _joins_experts(converter: Any) -> bool:
    """Whether the converter stacks one tensor for each expert, or several along their rows."""
    if not isinstance(converter, WeightConverter):
        return False
    merge, *rest = converter.operations
    is_stack = isinstance(merge, MergeModulelist) and merge.dim == 0
    return is_stack and all(isinstance(one, Concatenate) and one.dim == 1 for one in rest)


def published(shapes: Mapping[str, tuple[int, ...]], fused: Fused) -> dict[str, tuple[int, ...]]:
    """{tensor: shape}, with the tensors that fused ones are made of in their place."""
    parts = [part for name, shape in shapes.items() for part in fused.get(name, [(name, shape)])]
    return dict(parts)


def whole_published(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """{published tensor: shape} of a whole model's weights and kept buffers."""
    named = dict(model.named_parameters()) | kept_buffers(model)
    return published({n: tuple(value.shape) for n, value in named.items()}, fused_tensors(model))


def kept_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """{name: buffer} of those that checkpoints have, such as a router's correction bias."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def renamed(model: PreTrainedModel, stored: Iterable[str], folder: Path) -> dict[str, str]:
    """{model's name: checkpoint's name} of the tensors that transformers renames at loading.
    `stored`: names in the checkpoint, which is in `folder`. Raises `ValueError` for a tensor that
    it joins with others or splits, other than experts.
    """
    state: Any = stored_shapes(model)
    stored, (renamings, converters), names = set(stored), _conversions(model), dict[str, str]()
    for name in sorted(stored - set(state)):
        new, _ = rename_source_key(name, renamings, [], model.base_model_prefix, state)
        if new not in state and rename_source_key(name, renamings, converters)[1] is not None:
            raise ValueError(
                f"model type {model.config.model_type} of {folder} stores {name}, which"
                " transformers joins with other tensors or splits at loading; training does not"
                " support that, choose another model"
            )
        if new in state and new not in stored:
            names[new] = name
    return names


def exported_names(model: PreTrainedModel) -> dict[str, str]:
    """{model's name: checkpoint's name} of the tensors that transformers renames at saving."""
    renamings = reversed(_conversions(model)[0])
    back: Any = [r.reverse_transform() for r in renamings if type(r) is WeightRenaming]
    names = {
        name: rename_source_key(name, back, [], reverse=True)[0] for name in stored_shapes(model)
    }
    stored = renamed(model, names.values(), Path(model.name_or_path or ""))
    return {name: new for name, new in names.items() if stored.get(name) == new}


def stored_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """{name: shape} of parameters and persistent buffers, with what fused ones are published as."""
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    return published(shapes, fused_tensors(model))


def _conversions(model: PreTrainedModel) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """What transformers does with tensors at loading: (renamings, joins and splits)."""
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    return renamings, [c for c in conversions if isinstance(c, WeightConverter)]
