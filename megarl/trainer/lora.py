"""LoRA (arXiv:2106.09685): trained low-rank adapters beside the frozen weights of linear layers.

    y = W x + b + (alpha / rank) B A x        W [N, K] frozen, A [rank, K] and B [N, rank] trained

A starts random and B at 0, so that a new adapter changes nothing. Under a tensor axis an adapter is
cut as its layer is:

    layer     A              B
    column    whole          [N / t, rank]
    row       [rank, K / t]  whole
    shared    whole          whole, of which a rank uses its rows

The parameters are `LAYER.lora_A.weight` and `LAYER.lora_B.weight`, as in PEFT's adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from megarl.trainer.config import LoraConfig

A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the names of an adapter's two parameters."""


def is_adapter(name: str) -> bool:
    """Whether `name` is that of an adapter's parameter."""
    return name.endswith((A, B))


class LowRank(nn.Linear):
    """A matrix of an adapter that this rank holds whole, [outputs, inputs]."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs, bias=False, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight)


class Adapters:
    """The adapters of one model."""

    def __init__(self, names: tuple[str, ...], scale: float) -> None:
        """`names`: the adapted layers. `scale`: alpha / rank."""
        self.names, self.scale = names, scale
        self._factor = scale

    @property
    def parameters(self) -> list[str]:
        """Names of all adapter parameters."""
        return [name + suffix for name in self.names for suffix in (A, B)]

    def extend(self, layer: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> Any:
        """A forward hook: the output [..., N] of an adapted layer plus that of its adapter."""
        made: Any = layer
        # With factor 0 the adapter is computed all the same: DeepSpeed's ZeRO 3 expects the same
        # modules in every pass.
        return output + self._factor * made.lora_B(made.lora_A(inputs[0]))

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context manager in which the model computes as its frozen weights alone would."""
        self._factor = 0.0
        try:
            yield
        finally:
            self._factor = self.scale


def layer_names(model: Any) -> list[str]:
    """Names of the linear layers that can be adapted: those of the transformer blocks. Works for a
    whole model and for one that is cut over a tensor axis.
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
    """Names of the layers that `config` adapts, in the model's order. Raises `ValueError` if a
    target is no linear layer of the model.
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
    """Add empty adapters to the layers of a model on the meta device, cut over the ranks of `axis`
    as `shards` says, and freeze everything but adapters and a score head. Adds to `shards` the
    adapters' parameters of which this rank holds a part.
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


class NewAdapters:
    """The tensors of `weights` and those of new adapters: A as PEFT draws it, uniform within
    1 / sqrt(K), and B zero.

    Each A has its own generator, seeded by `seed` and its name, so that all layouts draw the same.
    """

    def __init__(self, weights: Any, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        """`shapes`: {name: whole shape} of the adapters' parameters."""
        self.weights, self.shapes, self.seed = weights, shapes, seed

    def flat(self, name: str) -> torch.Tensor:
        if not is_adapter(name):
            return self.weights.flat(name)
        whole = torch.zeros(self.shapes[name], dtype=torch.float32)
        if name.endswith(A):
            draw = torch.Generator().manual_seed(
                xxhash.xxh3_64_intdigest(f"{self.seed} {name}".encode()) >> 1
            )
            bound = self.shapes[name][1] ** -0.5
            whole.uniform_(-bound, bound, generator=draw)
        return whole.view(-1)

    def has(self, name: str) -> bool:
        return self.weights.has(name)


class MergedWeights(Mapping[str, torch.Tensor]):
    """{name: flat tensor} of the parts of weights that a rank owns, with adapters added: W +
    (alpha / rank) B A, in the dtype of W.

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
        """`owned`: the parts of the frozen weights. `local`: {name: tensor-parallel shard} of the
        adapters' parameters. `slice_number`: under ZeRO 3, which of the equal slices of its shard
        this rank owns; else None.
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
    weights: Any, shapes: Mapping[str, tuple[int, ...]], config: LoraConfig, *, seed: int
) -> Any:
    """The tensors of `weights` and of the adapters, new ones or those of `config.adapter`. A score
    head is that of `config.adapter`, if it has one.

    `shapes`: {name: whole shape} of the adapters' parameters, and of a score head. Raises
    `ValueError` if the adapter does not fit the model or the recipe.
    """
    if not config.adapter:
        return NewAdapters(weights, shapes, seed)
    return StoredAdapters(weights, read_adapter(config, shapes))


class StoredAdapters:
    """The tensors of `weights` and those of an adapter's files, which may have a score head."""

    def __init__(self, weights: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        self.weights, self.tensors = weights, tensors

    def flat(self, name: str) -> torch.Tensor:
        found = self.tensors.get(name)
        return self.weights.flat(name) if found is None else found.reshape(-1)

    def has(self, name: str) -> bool:
        return self.weights.has(name)
