"""Tensor parallelism (Megatron-LM, arXiv:1909.08053): modules that replace whole layers.

    column   weight [N / t, K]: each rank computes its outputs from the same input (q, k, v, gate,
        up)
    row      weight [N, K / t]: each rank computes a part of the sum (attention output, down)
    vocab    embedding [V / t, K]: each rank looks up its own tokens; shares may be uneven

Parameters have the same names as in the whole layers. `multiply` is `torch.nn.functional.linear` or
a function like it.
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
    """How ranks split a tensor: rank r has [edges[r], edges[r + 1]) of dimension `dim`."""

    dim: int
    edges: tuple[int, ...]

    @staticmethod
    def even(dim: int, whole: int, parts: int) -> Shard:
        """Split `whole` indices over `parts` ranks as evenly as possible.

        The first ranks get one more.
        """
        base, extra = divmod(whole, parts)
        return Shard(dim, tuple(base * part + min(part, extra) for part in range(parts + 1)))

    @property
    def whole(self) -> int:
        """Size of the whole tensor in dimension `dim`."""
        return self.edges[-1]

    @property
    def lengths(self) -> list[int]:
        """Each rank's size in dimension `dim`."""
        return [b - a for a, b in zip(self.edges[:-1], self.edges[1:], strict=True)]

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A copy of rank `rank`'s part of the whole tensor."""
        return whole.narrow(self.dim, self.edges[rank], self.lengths[rank]).clone(
            memory_format=torch.contiguous_format
        )

    def gather(self, part: torch.Tensor, axis: Axis) -> torch.Tensor:
        """The whole tensor, on all ranks of the axis, from their parts."""
        return all_gather_parts(part, axis, self.dim, self.lengths)

    def whole_shape(self, part: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole tensor, from the shape of a part."""
        return tuple(self.whole if dim == self.dim else length for dim, length in enumerate(part))


def parameter(part: torch.Tensor, like: torch.Tensor) -> nn.Parameter:
    """`part` as a parameter that DeepSpeed counts on every tensor-parallel rank in norms."""
    made = nn.Parameter(part, requires_grad=like.requires_grad)
    made.tensor_model_parallel = True  # type: ignore[attr-defined]
    return made


def sum_gradient_over(parameter: torch.Tensor, axis: Axis) -> None:
    """Make the gradient of `parameter` the sum over the ranks of `axis`, in every backward pass.

    For a parameter of which every rank has a whole copy while its output goes to this rank's heads
    or outputs only, such as the norm of query heads: each rank's gradient is then a part of it.
    """
    parameter.register_hook(
        lambda grad: all_reduce(grad.clone(memory_format=torch.contiguous_format), axis)
    )


def sum_gradient_on_entry(module: nn.Module, axis: Axis) -> None:
    """Sum the gradient of `module`'s input over the axis.

    The input is the first argument or `hidden_states`. One sum serves all column-parallel layers in
    the module, which have the same input and each compute a part of its gradient.
    """

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (sum_gradient(args[0], axis), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": sum_gradient(kwargs["hidden_states"], axis)}

    module.register_forward_pre_hook(enter, with_kwargs=True)


class ColumnParallelLinear(nn.Module):
    """x [..., K] -> this rank's outputs [..., N / t].

    The gradient of x is this rank's part; `sum_gradient_on_entry` sums the parts.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, multiply: Multiply) -> None:
        super().__init__()
        self.weight, self.bias, self.multiply = weight, bias, multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.weight, self.bias)


class SharedColumnLinear(nn.Module):
    """Outputs [first, first + count) of a layer that every rank has whole.

    x [..., K] -> [..., count]. For key and value projections with fewer heads than ranks. The
    weight's gradient is summed over the axis.
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
    """This rank's inputs [..., K / t] -> the sum over ranks [..., N]; the bias is added once."""

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
    """Token ids [...] -> embeddings [..., K].

    Each rank looks up its own tokens, results are summed. Token id `padding`, if given, gets no
    gradient, as in `torch.nn.Embedding`. Embeddings are multiplied by `scale`, rounded to their
    dtype.
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
        found = nn.functional.embedding(local.masked_fill(others, 0), self.weight, self.padding)
        whole = sum_values(found.masked_fill(others[..., None], 0.0), self.axis)
        if self.scale == 1.0:
            return whole
        return whole * torch.tensor(self.scale, dtype=whole.dtype, device=whole.device)


def whole_shapes(model: nn.Module, shards: dict[str, Shard]) -> dict[str, tuple[int, ...]]:
    """{parameter name: shape of the whole parameter}, whatever part this rank has of it."""
    shapes = {}
    for name, owned in model.named_parameters():
        shape = torch.Size(getattr(owned, "ds_shape", owned.shape))
        shapes[name] = shards[name].whole_shape(shape) if name in shards else tuple(shape)
    return shapes
