"""LoRA (arXiv:2106.09685): trained low-rank adapters beside the frozen weights of linear layers.

    y = W x + b + (alpha / rank) B A x        W [N, K] frozen, A [rank, K] and B [N, rank] trained

A starts random and B at 0, so that a new adapter changes nothing. Over t tensor-parallel ranks an
adapter is cut as its layer is:

    layer     A              B
    column    whole          [N / t, rank]
    row       [rank, K / t]  whole
    shared    whole          whole, of which a rank uses its rows

The parameters are `LAYER.lora_A.weight` and `LAYER.lora_B.weight`, as in PEFT's adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import xxhash
from torch import nn

from megarl.checkpoints.adapter_files import read_adapter
from megarl.kernels.linear import linear
from megarl.parallel.mesh import Axis
from megarl.parallel.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    Shard,
    SharedColumnLinear,
    parameter,
    sum_gradient_over,
)
from megarl.settings.training import LoraConfig
from megarl.trainer.weights import OtherTensors, Weights

A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the names of an adapter's two parameters."""


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to a LoRA adapter: names end with ".lora_A.weight"
    or ".lora_B.weight".
    """
    return name.endswith((A, B))


class LowRank(nn.Linear):
    """The matrix A or B of a LoRA adapter that this rank holds whole: a linear layer without bias,
    of weight [num_outputs, num_inputs], made on the meta device.
    """

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs, bias=False, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight)


class Adapters:
    """The LoRA adapters of one model: which layers have one (`names`), and the factor alpha / rank
    (`scale`) of what they add. `add_adapters` makes one; `off()` turns the adapters off for a
    block.
    """

    def __init__(self, names: tuple[str, ...], scale: float) -> None:
        """`names`: names of the layers that have an adapter, such as
        "model.layers.0.self_attn.q_proj". `scale`: alpha / rank.
        """
        self.names, self.scale = names, scale
        self._factor = scale

    @property
    def parameters(self) -> list[str]:
        """Names of all adapter parameters, for each layer those of A and B, such as
        "model.layers.0.self_attn.q_proj.lora_A.weight".
        """
        return [name + suffix for name in self.names for suffix in (A, B)]

    def extend(self, layer: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> Any:
        """A forward hook for a layer with the submodules `lora_A` and `lora_B`: returns the layer's
        output [..., N] plus scale x B A x, with x = `inputs[0]`.
        """
        made: Any = layer
        # With factor 0 the adapter is computed all the same: DeepSpeed's ZeRO 3 expects the same
        # modules in every pass.
        return output + self._factor * made.lora_B(made.lora_A(inputs[0]))

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context manager in whose block the model computes with its frozen weights alone,
        without the adapters.
        """
        self._factor = 0.0
        try:
            yield
        finally:
            self._factor = self.scale


def layer_names(model: Any) -> list[str]:
    """Names of the linear layers of a Hugging Face model that can have a LoRA adapter: those of the
    transformer blocks, not the embedding, the output head or a score head. The model may be whole
    or cut over tensor-parallel ranks.
    """
    kinds = (nn.Linear, ColumnParallelLinear, RowParallelLinear, SharedColumnLinear)
    outside = {id(model.get_input_embeddings()), id(getattr(model, "score", None))}
    if hasattr(model, "get_output_embeddings"):
        outside.add(id(model.get_output_embeddings()))
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, kinds) and id(layer) not in outside
    ]


def chosen_layers(model: Any, config: LoraConfig) -> tuple[str, ...]:
    """Names of the layers that get a LoRA adapter by `config.targets`, in the model's order; all
    linear layers of the transformer blocks if `targets` is empty. Raises `ValueError` if a target
    is not the last part of the name of such a layer.
    """
    names = layer_names(model)
    last = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    if unknown := [target for target in config.targets if target not in last]:
        raise ValueError(
            f"training.lora.targets names {', '.join(unknown)}, which the model has not; its linear"
            f" layers are {', '.join(last)}"
        )
    wanted = config.targets or last
    return tuple(name for name in names if name.rpartition(".")[2] in wanted)


def add_adapters(model: Any, shards: dict[str, Shard], axis: Axis, config: LoraConfig) -> Adapters:
    """Add LoRA adapters without values to a Hugging Face model on the meta device, in place, and
    freeze everything but the adapters and a score head. The model's parameters are already cut over
    the tensor-parallel ranks of `axis`, as `shards` ({parameter name: how it is split}) says; the
    adapter parameters that are split are added to `shards`. Raises `ValueError` if the model lacks
    a layer that `config` names.
    """
    adapters = Adapters(chosen_layers(model, config), config.alpha / config.rank)
    model.requires_grad_(False)
    if (score := getattr(model, "score", None)) is not None:
        score.requires_grad_(True)
    for name in adapters.names:
        layer = model.get_submodule(name)
        layer.lora_A, layer.lora_B = _pair(layer, name, shards, axis, config.rank)
        layer.register_forward_hook(adapters.extend)
    return adapters


def _pair(
    layer: Any, name: str, shards: dict[str, Shard], axis: Axis, rank: int
) -> tuple[nn.Module, nn.Module]:
    """The modules A and B of a layer."""
    num_outputs, num_inputs = layer.weight.shape
    a, b = LowRank(num_inputs, rank), LowRank(rank, num_outputs)
    if isinstance(layer, ColumnParallelLinear):
        sum_gradient_over(a.weight, axis)
        shards[name + B] = shards[name + ".weight"]
        return a, ColumnParallelLinear(parameter(b.weight, b.weight), None, linear)
    if isinstance(layer, SharedColumnLinear):
        sum_gradient_over(a.weight, axis)
        return a, SharedColumnLinear(b.weight, None, layer.first, layer.count, axis, linear)
    if isinstance(layer, RowParallelLinear):
        shards[name + A] = shards[name + ".weight"]
        return RowParallelLinear(parameter(a.weight, a.weight), None, axis, linear), b
    return a, b


def new_adapter(
    name: str, *, shapes: Mapping[str, tuple[int, ...]], seed: int
) -> torch.Tensor | None:
    """The whole parameter `name` of a new LoRA adapter: A as PEFT draws it, uniform within 1 /
    sqrt(K) for K inputs of the layer, and B zero; None for other names. `shapes`: {name: whole
    shape} of all adapters.

    Each A has its own generator, seeded by `seed` and its name, so that all layouts draw the same.
    """
    if not is_adapter(name):
        return None
    whole = torch.zeros(shapes[name], dtype=torch.float32)
    if name.endswith(A):
        digest = xxhash.xxh3_64_intdigest(f"{seed} {name}".encode())
        bound = shapes[name][1] ** -0.5
        whole.uniform_(-bound, bound, generator=torch.Generator().manual_seed(digest >> 1))
    return whole


class MergedWeights(Mapping[str, torch.Tensor]):
    """A mapping {parameter name: flat tensor} of this rank's part of every weight, with LoRA
    adapters added: W + (alpha / rank) B A, in the dtype of W. It has no entries for the adapters
    themselves.

    An adapted weight is computed when it is asked for; the last few are kept. No second copy of the
    model is made.
    """

    def __init__(
        self,
        owned: Mapping[str, torch.Tensor],
        local: Mapping[str, torch.Tensor],
        adapters: Adapters,
        *,
        slice_number: int | None,
    ) -> None:
        """`owned`: {name: flat tensor} of this rank's part of the frozen weights. `local`: {name:
        this rank's tensor-parallel shard} of the adapters' parameters. `slice_number`: under ZeRO
        3, which of the equal slices of its shard this rank has in `owned`; else None.
        """
        self._owned, self._local, self._adapters = owned, local, adapters
        self._slice_number = slice_number
        self._layers = {name + ".weight": name for name in adapters.names}
        self._merged: dict[str, torch.Tensor] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._owned)

    def __len__(self) -> int:
        return len(self._owned)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._layers:
            return self._owned[name]
        if name not in self._merged:
            while len(self._merged) >= KEPT:
                self._merged.pop(next(iter(self._merged)))
            self._merged[name] = self._merge(name)
        return self._merged[name]

    def _merge(self, name: str) -> torch.Tensor:
        layer, frozen = self._layers[name], self._owned[name]
        a, b = self._local[layer + A].float(), self._local[layer + B].float()
        if self._slice_number is None:
            change = (b @ a).view(-1)
        else:
            # The slice's elements in the order of rows, of which the last slice may have fewer.
            begin = self._slice_number * len(frozen)
            end = min(begin + len(frozen), len(b) * a.shape[1])
            first, width = begin // a.shape[1], a.shape[1]
            rows = b[first : -(-end // width)] @ a
            change = rows.view(-1)[begin - first * width : max(begin, end) - first * width]
        merged = frozen.clone()
        merged[: len(change)] = (frozen[: len(change)].float() + self._adapters.scale * change).to(
            frozen.dtype
        )
        return merged


KEPT = 4
"""Number of merged weights that `MergedWeights` keeps: regions of one weight are asked for in turn.
"""


def adapter_weights(
    weights: Weights, shapes: Mapping[str, tuple[int, ...]], config: LoraConfig, *, seed: int
) -> Weights:
    """A source of a model's tensors that has the tensors of `weights` and LoRA adapters: new ones
    drawn from `seed`, or where `config.adapter` names a folder those of its files, which may also
    have a score head.

    `shapes`: {name: whole shape} of the adapters' parameters, and of a score head. Raises
    `ValueError` if the files in `config.adapter` do not fit `config` or `shapes`.
    """
    if config.adapter:
        return OtherTensors(weights, read_adapter(config, shapes).get)
    return OtherTensors(weights, partial(new_adapter, shapes=shapes, seed=seed))
