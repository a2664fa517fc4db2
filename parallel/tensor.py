"""Tensor parallelism (Megatron-LM, arXiv:1909.08053): modules that replace whole layers.

    column   weight [N / t, K]: each rank computes its outputs from the same input (q, k, v, gate,
             up)
    row      weight [N, K / t]: each rank computes a part of the sum (attention output, down)
    vocab    embedding [V / t, K]: each rank looks up its own tokens; ranks may differ by one row

Parameters have the names of the whole layers. `multiply(x, weight, bias)` computes as
`torch.nn.functional.linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from megarl.parallel.collectives import all_gather_parts, all_reduce, sum_gradient, sum_values
from megarl.parallel.mesh import Axis, ProcessMesh

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class Shard:
    """Rank r of `axis` has the indices [edges[r], edges[r + 1]) of dimension `dim`."""

    dim: int
    edges: tuple[int, ...]
    axis: Literal["tensor", "experts"] = "tensor"
    """Of the `ProcessMesh`."""

    @staticmethod
    def even(
        dim: int, whole: int, parts: int, axis: Literal["tensor", "experts"] = "tensor"
    ) -> Shard:
        """The first ranks get one index more."""
        base, extra = divmod(whole, parts)
        edges = tuple(base * rank + min(rank, extra) for rank in range(parts + 1))
        return Shard(dim, edges, axis)

    @property
    def whole(self) -> int:
        return self.edges[-1]

    @property
    def lengths(self) -> list[int]:
        """Those of each rank."""
        return [b - a for a, b in zip(self.edges[:-1], self.edges[1:], strict=True)]

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        return whole.narrow(self.dim, self.edges[rank], self.lengths[rank]).clone(
            memory_format=torch.contiguous_format
        )

    def of(self, mesh: ProcessMesh) -> Axis:
        """The axis whose ranks have the parts."""
        return mesh.tensor if self.axis == "tensor" else mesh.experts

    def gather(self, part: torch.Tensor, mesh: ProcessMesh) -> torch.Tensor:
        """The whole tensor, on all ranks. Collective; without gradients."""
        return all_gather_parts(part, self.of(mesh), self.dim, self.lengths)

    def whole_shape(self, part: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.whole if dim == self.dim else length for dim, length in enumerate(part))


def replicas(shard: Shard | None, mesh: ProcessMesh) -> Axis:
    """The ranks with the same part of a weight, whose gradients are summed."""
    return mesh.gradient if shard is None or shard.axis == "tensor" else mesh.expert_gradient


def parameter(part: torch.Tensor, like: torch.Tensor) -> nn.Parameter:
    """A parameter like `like`, which DeepSpeed counts on every rank in gradient norms."""
    weight = nn.Parameter(part, requires_grad=like.requires_grad)
    weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    return weight


def sum_gradient_over(parameter: torch.Tensor, axis: Axis) -> None:
    """Have every backward pass sum the gradient over `axis`: for whole weights that each rank uses
    for its own heads, as the norm of queries.
    """
    parameter.register_hook(
        lambda grad: all_reduce(grad.clone(memory_format=torch.contiguous_format), axis)
    )


def sum_gradient_on_entry(module: nn.Module, axis: Axis) -> None:
    """As `sum_gradient_over` for the module's input: once for all its column-parallel layers."""

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (sum_gradient(args[0], axis), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": sum_gradient(kwargs["hidden_states"], axis)}

    module.register_forward_pre_hook(enter, with_kwargs=True)


class ColumnParallelLinear(nn.Module):
    """x [..., K], the same on all ranks, -> this rank's outputs [..., N / t]. The gradient of x is
    this rank's part; see `sum_gradient_on_entry`.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, multiply: Multiply) -> None:
        super().__init__()
        self.weight, self.bias, self.multiply = weight, bias, multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.weight, self.bias)


class SharedColumnLinear(nn.Module):
    """Outputs [first, first + count) of whole `weight` [N, K] and `bias` [N], whose gradients are
    summed over `axis`: keys and values with fewer heads than ranks.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        first: int,
        count: int,
        axis: Axis,
        multiply: Multiply,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.multiply = weight, bias, multiply
        self.first, self.count = first, count
        for whole in (weight, bias):
            if whole is not None:
                sum_gradient_over(whole, axis)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = slice(self.first, self.first + self.count)
        return self.multiply(
            x, self.weight[rows], self.bias[rows] if self.bias is not None else None
        )


class RowParallelLinear(nn.Module):
    """This rank's inputs [..., K / t] -> the sum over `axis` [..., N]. `bias` [N] is added once."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, axis: Axis, multiply: Multiply
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.axis, self.multiply = axis, multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = sum_values(self.multiply(x, self.weight, None), self.axis)
        return out if self.bias is None else out + self.bias


class VocabularyParallelEmbedding(nn.Module):
    """Token ids [...] -> embeddings [..., K], the same on all ranks. `weight` [V / t, K] begins at
    token id `first`; `padding` gets no gradient; `scale` is rounded to the embeddings' dtype.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        first: int,
        padding: int | None,
        axis: Axis,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight, self.first, self.axis, self.scale = weight, first, axis, scale
        holds_padding = padding is not None and first <= padding < first + weight.shape[0]
        self.padding = padding - first if padding is not None and holds_padding else None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        local = token_ids - self.first
        others = (local < 0) | (local >= self.weight.shape[0])
        rows = nn.functional.embedding(local.masked_fill(others, 0), self.weight, self.padding)
        whole = sum_values(rows.masked_fill(others[..., None], 0.0), self.axis)
        if self.scale == 1.0:
            return whole
        return whole * torch.tensor(self.scale, dtype=whole.dtype, device=whole.device)


def whole_shapes(model: nn.Module, shards: dict[str, Shard]) -> dict[str, tuple[int, ...]]:
    """{parameter: shape of the whole}, where this rank may have a shard or ZeRO 3 partition."""
    shapes = {}
    for name, owned in model.named_parameters():
        shape = torch.Size(getattr(owned, "ds_shape", owned.shape))
        shapes[name] = shards[name].whole_shape(shape) if name in shards else tuple(shape)
    return shapes
