"""Tensor parallelism: one layer's weight cut over the ranks of an axis, as modules that take the
place of whole ones.

    column   weight [N / t, K]: each rank makes its outputs of the same input       (queries, keys,
    values, gate, up)
    row      weight [N, K / t]: each rank adds its part to the same output          (attention
    output, down)
    words    embedding [V / t, K]: each rank looks up its own words                 (uneven shares
    where t does not divide V)

The modules hold parameters under the names that whole ones have. `multiply` is
`torch.nn.functional.linear` or one like it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from megarl.parallel.collectives import all_gather_parts, all_reduce, sum_gradient, sum_values
from megarl.parallel.mesh import Axis

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class Shard:
    """The part of a whole tensor that rank r of an axis holds: `[edges[r], edges[r + 1])` of
    dimension `dim`.
    """

    dim: int
    edges: tuple[int, ...]

    @staticmethod
    def even(dim: int, whole: int, parts: int) -> Shard:
        """As even as whole rows allow; the first ranks hold one more."""
        base, extra = divmod(whole, parts)
        return Shard(dim, tuple(base * part + min(part, extra) for part in range(parts + 1)))

    @property
    def whole(self) -> int:
        """Length of the whole tensor along `dim`."""
        return self.edges[-1]

    @property
    def lengths(self) -> list[int]:
        """Each rank's share of `whole`."""
        return [b - a for a, b in zip(self.edges[:-1], self.edges[1:], strict=True)]

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Rank `rank`'s part, in memory of its own."""
        return whole.narrow(self.dim, self.edges[rank], self.lengths[rank]).clone(
            memory_format=torch.contiguous_format
        )

    def gather(self, part: torch.Tensor, axis: Axis) -> torch.Tensor:
        """The whole tensor from every rank's part; all ranks of the axis call it."""
        return all_gather_parts(part, axis, self.dim, self.lengths)

    def whole_shape(self, part: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """The whole tensor's shape, from that of a part."""
        return tuple(self.whole if dim == self.dim else length for dim, length in enumerate(part))


def parameter(part: torch.Tensor, like: torch.Tensor) -> nn.Parameter:
    """`part` as a parameter of a tensor-parallel layer; the mark makes DeepSpeed count it on every
    rank in gradient norms.
    """
    made = nn.Parameter(part, requires_grad=like.requires_grad)
    made.tensor_model_parallel = True  # type: ignore[attr-defined]
    return made


def sum_gradient_over(parameter: torch.Tensor, axis: Axis) -> None:
    """Have the gradient of a parameter that all ranks hold whole, but use in part, summed over the
    axis.
    """
    parameter.register_hook(
        lambda grad: all_reduce(grad.clone(memory_format=torch.contiguous_format), axis)
    )


def sum_gradient_on_entry(module: nn.Module, axis: Axis) -> None:
    """Have the gradient of what enters `module` (its first argument, or `hidden_states`) summed
    over the axis.

    Once for all column-parallel layers in it, which see the same input: each makes a part of what
    comes of it.
    """

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (sum_gradient(args[0], axis), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": sum_gradient(kwargs["hidden_states"], axis)}

    module.register_forward_pre_hook(enter, with_kwargs=True)


class ColumnParallelLinear(nn.Module):
    """x [..., K] -> this rank's columns [..., N / t]. The gradient of x is this rank's part (see
    `sum_gradient_on_entry`).
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, multiply: Multiply) -> None:
        super().__init__()
        self.weight, self.bias, self.multiply = weight, bias, multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.weight, self.bias)


class SharedColumnLinear(nn.Module):
    """Some columns of a weight that every rank holds whole: key or value heads, where there are
    fewer than ranks.

    x [..., K] -> columns [first, first + count). The gradient of the whole weight is summed over
    the axis.
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
    """This rank's columns of an input [..., K / t] -> the sum over ranks [..., N]; the bias is
    added once.
    """

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
    """Word ids [...] -> [..., K]: each rank looks up the words it holds, the sum puts them
    together.

    The word `padding`, where there is one, gets no gradient here, as in `torch.nn.Embedding`.
    """

    def __init__(self, weight: nn.Parameter, first: int, padding: int | None, axis: Axis) -> None:
        super().__init__()
        self.weight, self.first, self.axis = weight, first, axis
        holds_padding = padding is not None and first <= padding < first + weight.shape[0]
        self.padding = padding - first if padding is not None and holds_padding else None

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mine = words - self.first
        others = (mine < 0) | (mine >= self.weight.shape[0])
        found = nn.functional.embedding(mine.masked_fill(others, 0), self.weight, self.padding)
        return sum_values(found.masked_fill(others[..., None], 0.0), self.axis)


def whole_shapes(model: nn.Module, shards: dict[str, Shard]) -> dict[str, tuple[int, ...]]:
    """{parameter name: shape of the whole parameter}, whatever this rank and its ZeRO stage hold of
    it.
    """
    shapes = {}
    for name, owned in model.named_parameters():
        shape = torch.Size(getattr(owned, "ds_shape", owned.shape))
        shapes[name] = shards[name].whole_shape(shape) if name in shards else tuple(shape)
    return shapes
