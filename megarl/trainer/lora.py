"""LoRA (arXiv:2106.09685): trained low-rank adapters beside the frozen weights of linear layers.

    y = W x + b + (alpha / rank) B A x        W [N, K] frozen, A [rank, K] and B [N, rank] trained

Over t tensor-parallel ranks an adapter is cut as its layer is:

    layer     A              B
    column    whole          [N / t, rank]
    row       [rank, K / t]  whole
    shared    whole          whole, of which a rank uses its rows

Parameters are named as in PEFT: `LAYER.lora_A.weight` and `LAYER.lora_B.weight`.
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
from megarl.trainer.experts import num_experts
from megarl.trainer.weights import OtherTensors, Weights

A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the names of an adapter's two parameters."""


def is_adapter(name: str) -> bool:
    return name.endswith((A, B))


class LowRank(nn.Linear):
    """The matrix A or B of an adapter, whole, on the meta device."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs, bias=False, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight)


class Adapters:
    """The LoRA adapters of one model. `add_adapters` makes one."""

    def __init__(self, names: tuple[str, ...], scale: float) -> None:
        """`names`: of the layers that have an adapter. `scale`: alpha / rank."""
        self.names, self.scale = names, scale
        self._factor = scale

    @property
    def parameters(self) -> list[str]:
        """Names of all adapter parameters, A and B of each layer."""
        return [name + suffix for name in self.names for suffix in (A, B)]

    def extend(self, layer: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> Any:
        """A layer's forward hook: its output [..., N] plus scale x B A x."""
        adapted: Any = layer
        # With factor 0 the adapter is computed all the same: DeepSpeed's ZeRO 3 expects the same
        # modules in every pass.
        return output + self._factor * adapted.lora_B(adapted.lora_A(inputs[0]))

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context in which the model computes without the adapters."""
        self._factor = 0.0
        try:
            yield
        finally:
            self._factor = self.scale


def layer_names(model: Any) -> list[str]:
    """Names of the linear layers of the transformer blocks, whole or cut over tensor-parallel
    ranks.
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
    """Names of the layers that get an adapter: `config.targets`, or all linear ones of the blocks.
    Raises `ValueError` for an unknown target.
    """
    names = layer_names(model)
    last = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    if unknown := [target for target in config.targets if target not in last]:
        none = " (experts and routers get no adapters)" if num_experts(model.config) else ""
        raise ValueError(
            f"training.lora.targets names {', '.join(unknown)}, which the model has not; its linear"
            f" layers are {', '.join(last)}{none}"
        )
    targets = config.targets or last
    return tuple(name for name in names if name.rpartition(".")[2] in targets)


def add_adapters(model: Any, shards: dict[str, Shard], axis: Axis, config: LoraConfig) -> Adapters:
    """Add adapters without values to a model on the meta device, in place, and freeze all but these
    and a score head. The model is cut over `axis` already; split adapter parameters are added to
    `shards`. Raises `ValueError` as `chosen_layers`.
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
    """The whole parameter `name`: A as PEFT draws it, uniform within 1 / sqrt(K) for K inputs, and
    B zero; None for other names. `seed` and the name seed each A, so that all layouts draw the
    same.
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
    """{parameter name: flat tensor} of this rank's part of every weight, merged with its adapter, W
    + (alpha / rank) B A, when it is asked for. The last few are kept.
    """

    def __init__(
        self,
        owned: Mapping[str, torch.Tensor],
        local: Mapping[str, torch.Tensor],
        adapters: Adapters,
        *,
        slice_number: int | None,
    ) -> None:
        """`owned`: this rank's part of the frozen weights. `local`: its tensor-parallel shards of
        the adapters. `slice_number`: under ZeRO 3, which slice of the shard it owns.
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
"""Merged weights that are kept, since regions of one weight are asked for in turn."""


def adapter_weights(
    weights: Weights, shapes: Mapping[str, tuple[int, ...]], config: LoraConfig, *, seed: int
) -> Weights:
    """`weights` with LoRA adapters: new ones, or those of the folder `config.adapter`, which may
    also have a score head. `shapes`: {name: whole shape} of both. Raises `ValueError` if the files
    do not fit.
    """
    if config.adapter:
        return OtherTensors(weights, read_adapter(config, shapes).get)
    return OtherTensors(weights, partial(new_adapter, shapes=shapes, seed=seed))
