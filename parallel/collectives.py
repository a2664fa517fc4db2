"""Collectives over an `Axis`. On an axis of size 1 each returns its input: to torch, no group would mean everybody."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.parallel.mesh import Axis

T = TypeVar("T")


def all_reduce(tensor: torch.Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce `tensor` in place over the axis, and return it."""
    if axis.size > 1:
        if not tensor.is_contiguous():
            raise ValueError("all_reduce needs a contiguous tensor: the result of a copy would be lost")
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


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here; the group's timeout is the deadline."""
    if axis.size > 1:
        dist.barrier(group=axis.group)
