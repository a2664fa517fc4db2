"""Collectives over an `Axis`. On an axis of size 1 each returns its input: to torch, no group would
mean everybody.

Plain ones work in place and know no gradients. Differentiable ones come in three kinds, by what is
the same on all ranks:

    sum_gradient     x -> x            each rank goes on with a part of the work: the parts'
                                       gradients are summed
    sum_values       x -> sum of x     each rank made a part of the sum, and all go on alike: the
                                       gradient passes
    sum_both         x -> sum of x     each rank goes on in its own way: gradients are summed too
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.parallel.mesh import Axis

T = TypeVar("T")


def all_reduce(
    tensor: torch.Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Reduce `tensor` in place over the axis, and return it."""
    if axis.size > 1:
        if not tensor.is_contiguous():
            raise ValueError(
                "all_reduce needs a contiguous tensor: the result of a copy would be lost"
            )
        dist.all_reduce(tensor, op=op, group=axis.group)
    return tensor


def all_reduce_max(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Elementwise maximum over the axis, in place."""
    return all_reduce(tensor, axis, dist.ReduceOp.MAX)


def broadcast(tensor: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Copy `tensor` of the axis's rank `source` to all, in place."""
    if axis.size > 1:
        dist.broadcast(tensor, src=axis.ranks[source], group=axis.group)
    return tensor


def broadcast_object(value: T, axis: Axis, source: int = 0) -> T:
    """The small picklable `value` of the axis's rank `source`, on all."""
    if axis.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=axis.ranks[source], group=axis.group)
    return box[0]


def gather_objects(value: T, axis: Axis) -> list[T]:
    """The small picklable `value` of every rank of the axis, in their order, on all."""
    if axis.size == 1:
        return [value]
    found: list[Any] = [None] * axis.size
    dist.all_gather_object(found, value, group=axis.group)
    return found


def on_first(work: Callable[[], object], axis: Axis) -> str:
    """Have the axis's rank 0 do `work`; why it failed, on every rank, or nothing: so that none
    waits for one that raised.
    """
    failure = ""
    if axis.rank == 0:
        try:
            work()
        except Exception as error:
            failure = str(error) or repr(error)
    return broadcast_object(failure, axis)


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here; the group's timeout is the deadline."""
    if axis.size > 1:
        dist.barrier(group=axis.group)


def send(tensor: torch.Tensor, axis: Axis, to: int) -> None:
    """Send a contiguous tensor to the axis's rank `to`, which calls `receive`; waits until the
    tensor can be overwritten.
    """
    dist.send(tensor, dst=axis.ranks[to], group=axis.group)


def receive(tensor: torch.Tensor, axis: Axis, source: int) -> torch.Tensor:
    """Fill a contiguous `tensor` with what the axis's rank `source` sends, and return it."""
    dist.recv(tensor, src=axis.ranks[source], group=axis.group)
    return tensor


def gather_parts(tensor: torch.Tensor, axis: Axis, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Every rank's tensor, in their order, on all; they differ in length (dimension 0) only, which
    is `lengths`.
    """
    if axis.size == 1:
        return [tensor]
    longest = max(lengths)
    # Collectives want equal sizes: short ones travel with a tail of zeros.
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    found = tensor.new_empty((axis.size * longest, *tensor.shape[1:]))
    if longest:
        dist.all_gather_single(found, padded, group=axis.group)
    return [found[rank * longest : rank * longest + length] for rank, length in enumerate(lengths)]


def all_gather_parts(
    tensor: torch.Tensor, axis: Axis, dim: int, lengths: Sequence[int]
) -> torch.Tensor:
    """The ranks' tensors one after the other along `dim`, where rank r's has `lengths[r]`; on every
    rank of the axis.
    """
    if axis.size == 1:
        return tensor
    return torch.cat(gather_parts(tensor.movedim(dim, 0), axis, lengths)).movedim(0, dim)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _SumValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def sum_gradient(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """`x`, the same on all ranks; its gradient is the sum of theirs."""
    return x if axis.size == 1 else _SumGradient.apply(x, axis)


def sum_values(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of the ranks' `x`, from which all go on alike."""
    return x if axis.size == 1 else _SumValues.apply(x, axis)


def sum_both(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of the ranks' `x`, from which each goes on in its own way: d(sum over ranks of their
    losses)/dx.
    """
    return sum_gradient(sum_values(x, axis), axis)
