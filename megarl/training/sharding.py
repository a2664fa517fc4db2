"""Automatic tensor parallelism: the model's own `tp_plan` says which layers are cut, and how.

    model (whole, on every rank)  ->  the same model with this rank's parts, and {parameter name: Shard}

Embedding and head are cut by words, whatever the plan says of them: our head never gathers logits. To support another
style of the plan, add an entry to `STYLES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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

HEAD = "lm_head"


@dataclass
class _Work:
    """What one call of `shard_model` is about."""

    axis: Axis
    shards: dict[str, Shard]
    entered: set[int] = field(default_factory=set)
    """Modules that own column-parallel layers and sum the gradient of their input."""

    def cut(self, name: str, whole: torch.Tensor, dim: int) -> nn.Parameter:
        """This rank's part of a parameter, noted under its name."""
        self.shards[name] = Shard.even(dim, whole.shape[dim], self.axis.size)
        return parameter(self.shards[name].take(whole.detach(), self.axis.rank), whole)

    def enter(self, parent: nn.Module, name: str, plan: Mapping[str, str]) -> None:
        """The input of `parent` goes to column-parallel layers only; its gradient is summed over the axis, once."""
        if id(parent) not in self.entered:
            whole = [f"{name}.{child}" for child, layer in parent.named_children() if isinstance(layer, nn.Linear)]
            lost = [layer for layer in whole if pattern(layer) not in plan]
            if lost:
                raise ValueError(
                    f"the tp_plan cuts some layers of {name} but not {', '.join(lost)}, whose gradients would be wrong; "
                    "set training.layout.tensor to 1"
                )
            self.entered.add(id(parent))
            sum_gradient_on_entry(parent, self.axis)


def _column(work: _Work, name: str, layer: nn.Module, parent: nn.Module) -> nn.Module:
    assert isinstance(layer, nn.Linear)
    width = getattr(parent, "head_dim", None)
    heads = layer.out_features // width if width else 0
    if width and heads < work.axis.size:
        # Fewer key-value heads than ranks: neighbours share one, and each keeps the whole small weight.
        head = work.axis.rank * heads // work.axis.size
        return SharedColumnLinear(layer.weight, layer.bias, head * width, width, work.axis, linear)
    bias = work.cut(f"{name}.bias", layer.bias, 0) if layer.bias is not None else None
    return ColumnParallelLinear(work.cut(f"{name}.weight", layer.weight, 0), bias, linear)


def _row(work: _Work, name: str, layer: nn.Module, parent: nn.Module) -> nn.Module:
    assert isinstance(layer, nn.Linear)
    return RowParallelLinear(work.cut(f"{name}.weight", layer.weight, 1), layer.bias, work.axis, linear)


def _shared(work: _Work, name: str, layer: nn.Module, parent: nn.Module) -> nn.Module:
    for whole in layer.parameters():
        sum_gradient_over(whole, work.axis)
    return layer


STYLES: dict[str, Callable[[_Work, str, nn.Module, nn.Module], nn.Module]] = {
    "colwise": _column,
    "rowwise": _row,
    "replicated_with_grad_allreduce": _shared,
}


WORD_STYLES = ("embedding_rowwise", "colwise_gather_output")
"""What plans say of embedding and head."""


def pattern(name: str) -> str:
    """A module's name as plans write it: numbers of layers are `*`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def shard_model(model: PreTrainedModel, axis: Axis) -> dict[str, Shard]:
    """Cut `model` for this rank of `axis`, in place; the returned names are the parameters of which it now holds a part."""
    if axis.size == 1:
        return {}
    refuse_tensor(model.config, axis.size)
    plan, work = model.tp_plan, _Work(axis, {})
    for owner, parent in list(model.named_modules()):
        for child, layer in list(parent.named_children()):
            name = f"{owner}.{child}" if owner else child
            style = plan.get(pattern(name))
            if style is not None and style not in WORD_STYLES:
                if style == "colwise":
                    work.enter(parent, owner, plan)
                setattr(parent, child, STYLES[style](work, name, layer, parent))
    _cut_words(model, work)
    return work.shards


def _cut_words(model: PreTrainedModel, work: _Work) -> None:
    """Embedding and head, which are one parameter where they are tied."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)
    names = {id(module): name for name, module in model.named_modules()}
    tied = head.weight is embedding.weight
    name = f"{names[id(embedding)]}.weight"
    words = work.cut(name, embedding.weight, 0)
    first = work.shards[name].edges[work.axis.rank]
    model.set_input_embeddings(VocabularyParallelEmbedding(words, first, embedding.padding_idx, work.axis))
    head.weight = words if tied else work.cut(f"{names[id(head)]}.weight", head.weight, 0)


def head_shard(shards: dict[str, Shard]) -> Shard | None:
    """How the words of the head are cut, or None on one rank. A tied head is cut like the embedding."""
    found = [shard for name, shard in shards.items() if name == f"{HEAD}.weight"]
    words = [shard for name, shard in shards.items() if name.endswith("embed_tokens.weight")]
    return (found or words or [None])[0]


def refuse_tensor(config: transformers.PretrainedConfig, tensor: int) -> None:
    """Raise `ValueError` where a model cannot be cut over `tensor` ranks, with what to set instead."""
    if tensor == 1:
        return
    text = config.get_text_config()
    plan: dict[str, str] = dict(getattr(text, "base_model_tp_plan", None) or {})
    if not plan:
        raise ValueError(
            f"model type {config.model_type} has no tp_plan in transformers, which says how its layers are cut; "
            "set training.layout.tensor to 1 (training.zero_stage 3 splits any model)"
        )
    unknown = sorted({style for style in plan.values() if style not in STYLES and style not in WORD_STYLES})
    if unknown:
        raise ValueError(
            f"the tp_plan of model type {config.model_type} asks for {', '.join(unknown)}, which is not supported "
            f"(known: {', '.join(STYLES)}); set training.layout.tensor to 1"
        )
    sizes = {"num_attention_heads": text.num_attention_heads, "intermediate_size": text.intermediate_size}
    for name, size in sizes.items():
        if size % tensor:
            raise ValueError(
                f"training.layout.tensor is {tensor}, which does not divide the model's {name} = {size}; set it to a divisor"
            )
    heads = text.num_key_value_heads
    if heads % tensor and tensor % heads:
        raise ValueError(
            f"training.layout.tensor is {tensor} and the model's num_key_value_heads {heads}: neither divides the other; "
            "set training.layout.tensor to a divisor or a multiple"
        )
    if text.vocab_size < tensor:
        raise ValueError(f"training.layout.tensor is {tensor}, but the model has {text.vocab_size} words; lower it")


def whole_shapes(model: nn.Module, shards: dict[str, Shard]) -> dict[str, tuple[int, ...]]:
    """{parameter name: shape of the whole parameter}, whatever this rank and its ZeRO stage hold of it."""
    shapes = {}
    for name, held in model.named_parameters():
        shape = torch.Size(getattr(held, "ds_shape", held.shape))
        shapes[name] = shards[name].whole_shape(shape) if name in shards else tuple(shape)
    return shapes
