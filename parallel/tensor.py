"""Tensor parallelism (Megatron-LM, arXiv:1909.08053): modules that replace whole layers.

    column   weight [N / t, K]: each rank computes its outputs from the same input (q, k, v, gate,
        up)
    row      weight [N, K / t]: each rank computes a part of the sum (attention output, down)
    vocab    embedding [V / t, K]: each rank looks up its own tokens; ranks may differ by one row

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
    """How tensor-parallel ranks split one tensor: rank r has the indices [edges[r], edges[r + 1])
    of dimension `dim`.
    """

    dim: int
    edges: tuple[int, ...]

    @staticmethod
    def even(dim: int, whole: int, parts: int) -> Shard:
        """A split of a tensor whose dimension `dim` has `whole` indices over `parts` ranks, as
        evenly as possible: the first ranks get one index more.
        """
        base, extra = divmod(whole, parts)
        return Shard(dim, tuple(base * part + min(part, extra) for part in range(parts + 1)))

    @property
    def whole(self) -> int:
        """Number of indices of the whole tensor in the dimension that is split."""
        return self.edges[-1]

    @property
    def lengths(self) -> list[int]:
        """By rank, the number of indices that it has of the dimension that is split."""
        return [b - a for a, b in zip(self.edges[:-1], self.edges[1:], strict=True)]

    def take(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A contiguous copy of the part of tensor-parallel rank `rank` (from 0), cut out of the
        `whole` tensor.
        """
        return whole.narrow(self.dim, self.edges[rank], self.lengths[rank]).clone(
            memory_format=torch.contiguous_format
        )

    def gather(self, part: torch.Tensor, axis: Axis) -> torch.Tensor:
        """The whole tensor, returned on all ranks of the tensor-parallel `axis`, from their parts.
        All of these ranks call it together; without gradients.
        """
        return all_gather_parts(part, axis, self.dim, self.lengths)

    def whole_shape(self, part: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole tensor, given the shape `part` of any rank's part."""
        return tuple(self.whole if dim == self.dim else length for dim, length in enumerate(part))


def parameter(part: torch.Tensor, like: torch.Tensor) -> nn.Parameter:
    """`part` (this rank's part of a weight) as a parameter that requires a gradient if `like` does,
    marked so that DeepSpeed counts it on every tensor-parallel rank in gradient norms.
    """
    made = nn.Parameter(part, requires_grad=like.requires_grad)
    made.tensor_model_parallel = True  # type: ignore[attr-defined]
    return made


def sum_gradient_over(parameter: torch.Tensor, axis: Axis) -> None:
    """Register a hook that makes the gradient of `parameter` its sum over the ranks of `axis` (such
    as the tensor-parallel ranks), in every backward pass, which all of them run together.

    For a parameter of which every rank has a whole copy but uses it for its own heads or outputs
    only, such as the norm of query heads: each rank's gradient is then a part of the whole
    gradient.
    """
    parameter.register_hook(
        lambda grad: all_reduce(grad.clone(memory_format=torch.contiguous_format), axis)
    )


def sum_gradient_on_entry(module: nn.Module, axis: Axis) -> None:
    """Register a hook on `module` that, in the backward pass, sums the gradient of its input over
    the ranks of `axis` (the tensor-parallel ranks, which all run it together).

    The input is the first positional argument or else `hidden_states`. One sum serves all
    column-parallel layers in the module, which have the same input and each compute a part of its
    gradient.
    """

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if args:
            return (sum_gradient(args[0], axis), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": sum_gradient(kwargs["hidden_states"], axis)}

    module.register_forward_pre_hook(enter, with_kwargs=True)


class ColumnParallelLinear(nn.Module):
    """A linear layer of which this rank computes some outputs: x [..., K], the same on all ranks,
    -> [..., N / t] for t ranks. `weight` [N / t, K] and `bias` [N / t] are this rank's rows;
    `multiply(x, weight, bias)` computes the product, as `torch.nn.functional.linear` does.

    In the backward pass x gets this rank's part of its gradient; call `sum_gradient_on_entry` on
    the module around it to sum the parts.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, multiply: Multiply) -> None:
        super().__init__()
        self.weight, self.bias, self.multiply = weight, bias, multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x, self.weight, self.bias)


class SharedColumnLinear(nn.Module):
    """A linear layer whose `weight` [N, K] and `bias` [N] every rank has whole, and of which this
    rank computes the outputs [first, first + count): x [..., K] -> [..., count]. For key and value
    projections with fewer heads than ranks. Gradients of weight and bias are summed over the
    tensor-parallel ranks, `axis`. `multiply(x, weight, bias)` computes the product, as
    `torch.nn.functional.linear` does.
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
    """A linear layer of which each rank has some inputs: [..., K / t] for t ranks -> the sum over
    the tensor-parallel ranks, `axis`, [..., N], the same on all. `weight` [N, K / t] are this
    rank's columns; `bias` [N] is whole and added once. `multiply(x, weight, None)` computes the
    product, as `torch.nn.functional.linear` does.
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
    """Embedding whose vocabulary is split over the ranks: token ids [...] int64 -> embeddings
    [..., K], the same on all ranks of `axis`. `weight` [V / t, K] are this rank's rows, for the
    token ids from `first` on.

    Each rank looks up its own tokens, and results are summed. Token id `padding` (of the whole
    vocabulary), if given, gets no gradient, as in `torch.nn.Embedding`. Embeddings are multiplied
    by `scale`, which is rounded to their dtype first.
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
    """{parameter name: shape of the whole parameter} for all parameters of `model`, of which this
    rank may have only a tensor-parallel part (`shards`: {parameter name: how ranks split it}) or a
    ZeRO 3 partition.
    """
    shapes = {}
    for name, owned in model.named_parameters():
        shape = torch.Size(getattr(owned, "ds_shape", owned.shape))
        shapes[name] = shards[name].whole_shape(shape) if name in shards else tuple(shape)
    return shapes
