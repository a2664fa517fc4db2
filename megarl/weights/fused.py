"""Tensors that transformers joins at loading, such as the experts of a layer, and the published
tensors that they are made of: a matrix for each expert.

    mlp.experts.gate_up_proj [E, 2 I, H]    gate [I, H] and up [I, H] of expert 0, of expert 1, ...
    mlp.experts.down_proj    [E, H, I]      down [H, I] of expert 0, of expert 1, ...

Everything outside of the model has the published tensors: checkpoints, exports, engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from megarl.parallel.reshard.owned import Fused


def fused_tensors(model: Any) -> dict[str, list[tuple[str, tuple[int, int]]]]:
    """`Fused` of a whole or sharded transformers model: by the model's names, before transformers'
    renamings.
    """
    parameters = {name: tuple(value.shape) for name, value in model.named_parameters()}
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
    return dict(_published(shapes, fused))


def _published(
    shapes: Mapping[str, tuple[int, ...]], fused: Fused
) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in shapes.items():
        yield from fused.get(name, [(name, shape)])
