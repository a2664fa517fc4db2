"""Automatic tensor parallelism: the model's own `tp_plan` says which layers are cut, and how.

Embedding and head are cut by words, whatever the plan says of them: our head never gathers logits.
To support another style of the plan, add an entry to `STYLES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from megarl.kernels.linear import linear
from megarl.parallel.mesh import Axis
from megarl.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    Shard,
    SharedColumnLinear,
    VocabularyParallelEmbedding,
    parameter,
    sum_gradient_on_entry,
    sum_gradient_over,
)
from megarl.trainer.role_placement import kv_heads, refuse_sizes


@dataclass
class _Work:
    """State of one call of `shard_model`."""

    axis: Axis
    kv_heads: int
    shards: dict[str, Shard] = field(default_factory=dict)
    owners: dict[str, nn.Module] = field(default_factory=dict)
    """{name: parent module of column-parallel layers}. The gradient of its input is summed over the
    tensor-parallel ranks."""

    def cut(self, name: str, whole: torch.Tensor, dim: int) -> nn.Parameter:
        """This rank's shard of the parameter `name`, split evenly along `dim`; noted in
        `shards`.
        """
        self.shards[name] = Shard.even(dim, whole.shape[dim], self.axis.size)
        return parameter(self.shards[name].take(whole.detach(), self.axis.rank), whole)


def _column(work: _Work, name: str, layer: nn.Linear, parent: nn.Module) -> nn.Module:
    owner = name.rpartition(".")[0]
    if owner not in work.owners:
        work.owners[owner] = parent
        sum_gradient_on_entry(parent, work.axis)
    size, width = work.axis.size, getattr(parent, "head_dim", 0)
    if work.kv_heads < size and layer.out_features == work.kv_heads * width:
        # Fewer key-value heads than ranks: neighbours share one, and each keeps the whole small
        # weight.
        head = work.axis.rank * work.kv_heads // size
        return SharedColumnLinear(layer.weight, layer.bias, head * width, width, work.axis, linear)
    if layer.out_features % size:
        raise ValueError(
            f"training.layout.tensor is {size}, which does not divide the {layer.out_features}"
            f" outputs of {name}; set it to a divisor"
        )
    bias = work.cut(f"{name}.bias", layer.bias, 0) if layer.bias is not None else None
    return ColumnParallelLinear(work.cut(f"{name}.weight", layer.weight, 0), bias, linear)


def _row(work: _Work, name: str, layer: nn.Linear, parent: nn.Module) -> nn.Module:
    return RowParallelLinear(
        work.cut(f"{name}.weight", layer.weight, 1), layer.bias, work.axis, linear
    )


def _shared(work: _Work, name: str, layer: nn.Module, parent: nn.Module) -> nn.Module:
    for whole in layer.parameters():
        sum_gradient_over(whole, work.axis)
    return layer


STYLES: dict[str, Callable[[_Work, str, Any, nn.Module], nn.Module]] = {
    "colwise": _column,
    "rowwise": _row,
    "replicated_with_grad_allreduce": _shared,
}


WORD_STYLES = ("embedding_rowwise", "colwise_gather_output")
"""Styles of the embedding and the output head."""

LINEAR_STYLES = ("colwise", "rowwise")

SCALED_EMBEDDINGS = (
    *("GemmaTextScaledWordEmbedding", "Gemma2TextScaledWordEmbedding"),
    "Gemma3TextScaledWordEmbedding",
)
"""Classes that multiply a plain embedding by `scalar_embed_scale`."""


def pattern(name: str) -> str:
    """A module's name as in tensor-parallel plans: "layers.3.mlp.up_proj" becomes
    "layers.*.mlp.up_proj".
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def dense_plan(plan: Mapping[str, str]) -> dict[str, str]:
    """A tensor-parallel plan without the experts, which are divided whole (`shard_experts`)."""
    return {name: style for name, style in plan.items() if ".experts" not in name}


def shard_model(model: PreTrainedModel, axis: Axis) -> dict[str, Shard]:
    """Replace the layers of `model`, in place, by this rank's parts of them; `axis` has the
    tensor-parallel ranks. Works on any device and sends nothing. Returns {parameter name: how it is
    split}. Raises `ValueError`, with the setting to change, if the model cannot be split.
    """
    if axis.size == 1:
        return {}
    plan, work = dense_plan(model.tp_plan), _Work(axis, kv_heads(model.config))
    for owner, parent in list(model.named_modules()):
        for child, layer in list(parent.named_children()):
            name = f"{owner}.{child}" if owner else child
            style = plan.get(pattern(name))
            if style is None or style in WORD_STYLES:
                continue
            if style in LINEAR_STYLES:
                _refuse_other(name, layer, nn.Linear)
            setattr(parent, child, STYLES[style](work, name, layer, parent))
        for leaf, vector in list(parent.named_parameters(recurse=False)):
            name = f"{owner}.{leaf}"
            if plan.get(pattern(name)) == "colwise" and vector.dim() == 1:  # one number for a head
                setattr(parent, leaf, work.cut(name, vector, 0))
    _refuse_forgotten(work, plan)
    _cut_words(model, work)
    return work.shards


def _refuse_other(name: str, layer: nn.Module | None, expected: type[nn.Module]) -> None:
    """Raise `ValueError` unless the layer is exactly of class `expected`: a subclass may compute
    something else.
    """
    if type(layer) is not expected:
        raise ValueError(
            f"{name} is a {type(layer).__name__}, and only a plain {expected.__name__} can be cut;"
            " set training.layout.tensor to 1"
        )


def _refuse_forgotten(work: _Work, plan: Mapping[str, str]) -> None:
    """Raise `ValueError` if a module has, beside layers that are split, a parameter that is not in
    `plan`: gradients would be wrong.
    """
    for owner, parent in work.owners.items():
        for path, layer in parent.named_modules():
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear | SharedColumnLinear):
                continue
            name = f"{owner}.{path}" if path else owner
            owned = [name for name, _ in layer.named_parameters(recurse=False)]
            owned = [leaf for leaf in owned if f"{name}.{leaf}" not in work.shards]
            if owned and pattern(name) not in plan:
                raise ValueError(
                    f"the model's tp_plan cuts layers of {owner}, but does not say what becomes of"
                    f" {name}.{owned[0]}; set training.layout.tensor to 1"
                )


def _cut_words(model: PreTrainedModel, work: _Work) -> None:
    """Split embedding and output head, in place, along the vocabulary. Tied weights stay tied."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    scale = 1.0
    if type(embedding).__name__ in SCALED_EMBEDDINGS:
        scaled: Any = embedding
        scale = float(scaled.scalar_embed_scale)
    else:
        _refuse_other("the model's embedding", embedding, nn.Embedding)
    assert isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)
    tied, name = head.weight is embedding.weight, _name(model, embedding)
    words = work.cut(name, embedding.weight, 0)
    first = work.shards[name].edges[work.axis.rank]
    model.set_input_embeddings(
        VocabularyParallelEmbedding(words, first, embedding.padding_idx, work.axis, scale)
    )
    head.weight = words if tied else work.cut(_name(model, head), head.weight, 0)


def _name(model: nn.Module, layer: nn.Module | None) -> str:
    """Name of the weight of module `layer` in `model`."""
    return next(f"{name}.weight" for name, module in model.named_modules() if module is layer)


def head_shard(model: PreTrainedModel, shards: Mapping[str, Shard]) -> Shard | None:
    """How the rows of the output head are divided, if they are. Tied weights are divided as the
    embedding.
    """
    names = (
        _name(model, model.get_output_embeddings()),
        _name(model, model.get_input_embeddings()),
    )
    return next((shards[name] for name in names if name in shards), None)


def refuse_tensor(config: transformers.PretrainedConfig, tensor: int) -> None:
    """Raise `ValueError`, with the setting to change, if a model cannot be split over `tensor`
    ranks: its tensor-parallel plan is missing or unknown, or a size is not divisible.
    """
    if tensor == 1:
        return
    text = config.get_text_config()
    plan = dense_plan(getattr(text, "base_model_tp_plan", None) or {})
    if not plan:
        raise ValueError(
            f"model type {config.model_type} has no tp_plan in transformers, which says how its"
            " layers are cut; set training.layout.tensor to 1 (training.zero_stage 3 splits any"
            " model)"
        )
    unknown = sorted(
        {style for style in plan.values() if style not in STYLES and style not in WORD_STYLES}
    )
    if unknown:
        raise ValueError(
            f"the tp_plan of model type {config.model_type} asks for {', '.join(unknown)}, which is"
            f" not supported (known: {', '.join(STYLES)}); set training.layout.tensor to 1"
        )
    refuse_sizes(text, tensor)
    if text.vocab_size < tensor:
        raise ValueError(
            f"training.layout.tensor is {tensor}, but the model has {text.vocab_size} words;"
            " lower it"
        )
