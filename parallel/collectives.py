"""Collective operations over the ranks of an `Axis`. All ranks of the axis call them together, and
they block. On an axis of size 1 each returns its input.

Plain operations work in place and have no gradients. Differentiable ones come in three kinds, by
what ranks have in common:

    sum_gradient     x -> x           Each rank uses x for a part of the work: gradients are summed.
    sum_values       x -> sum of x    All ranks use the sum alike: the gradient passes unchanged.
    sum_both         x -> sum of x    Each rank uses the sum differently: gradients are summed too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.parallel.mesh import Axis
from megarl.system.spans import Span, activity

T = TypeVar("T")

ASK_S = 0.25
"""Longest pause, in seconds, between two reads of torch.distributed's store by a rank that waits
for what another rank writes there."""
_waited = itertools.count()
"""Numbers of the calls of `wait_for_first`, the same on all ranks."""


def waits(doing: str, axis: Axis) -> Span:
    """A context manager to put around a collective operation of this rank. An operation that lasts
    longer than a second is written to this process's trace, with its name (`doing`, such as
    "all-reduce"), the ranks of `axis` (a group of ranks that communicate) and its timeout.
    """
    what = f"{doing} over {axis.name}"
    return activity(what, kind="wait", of=axis.ranks, deadline_s=axis.timeout_s, quiet=True)


def all_reduce(
    tensor: torch.Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Reduce `tensor` over the ranks of `axis` (a group of ranks that communicate, such as
    `ProcessMesh.data`), in place; returns `tensor`, which must be contiguous. All ranks of the axis
    call it together; blocks.
    """
    if axis.size > 1:
        with waits("all-reduce", axis):
            dist.all_reduce(tensor, op=op, group=axis.group)
    return tensor


def all_reduce_max(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Elementwise maximum of `tensor` over the ranks of `axis` (a group of ranks that communicate,
    such as `ProcessMesh.data`), in place; returns `tensor`, which must be contiguous. All ranks of
    the axis call it together; blocks.
    """
    return all_reduce(tensor, axis, dist.ReduceOp.MAX)


def broadcast(tensor: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Copy `tensor` from rank number `source` of `axis` (a group of ranks that communicate,
    numbered from 0) to the other ranks, whose `tensor` has the same shape and dtype and is
    overwritten. Returns `tensor`. All ranks of the axis call it together; blocks.
    """
    if axis.size > 1:
        with waits("broadcast", axis):
            dist.broadcast(tensor, src=axis.ranks[source], group=axis.group)
    return tensor


def broadcast_object(value: T, axis: Axis, source: int = 0) -> T:
    """The small picklable `value` of rank number `source` of `axis` (a group of ranks that
    communicate, numbered from 0), returned on all ranks; what the other ranks pass is ignored. All
    ranks of the axis call it together; blocks.
    """
    if axis.size == 1:
        return value
    box = [value]
    with waits("broadcast", axis):
        dist.broadcast_object_list(box, src=axis.ranks[source], group=axis.group)
    return box[0]


def gather_objects(value: T, axis: Axis) -> list[T]:
    """The small picklable `value` of every rank of `axis` (a group of ranks that communicate), as a
    list by rank, returned on all ranks. All ranks of the axis call it together; blocks.
    """
    if axis.size == 1:
        return [value]
    found: list[Any] = [None] * axis.size
    with waits("gather", axis):
        dist.all_gather_object(found, value, group=axis.group)
    return found


def on_first(work: Callable[[], object], axis: Axis) -> str:
    """Run `work` on rank 0 of `axis` (a group of ranks that communicate) alone, while the others
    wait. Returns on every rank the message of the exception that `work` raised, "" on success; the
    exception itself is not raised.

    An exception on rank 0 therefore does not leave the other ranks waiting. All ranks of the axis
    call it together.
    """
    failure = ""
    if axis.rank == 0:
        try:
            work()
        except Exception as error:
            failure = str(error) or repr(error)
    return broadcast_object(failure, axis)


def barrier(axis: Axis) -> None:
    """Block until every rank of `axis` (a group of ranks that communicate) has called this. After
    the timeout of the axis's process group the call raises an exception on CPU; with NCCL torch
    ends the process.
    """
    if axis.size > 1:
        with waits("barrier", axis):
            dist.barrier(group=axis.group)


def wait_for_first(work: Callable[[], T], axis: Axis, what: str, timeout_s: float) -> T | None:
    """Call `work` on the first rank of `axis` (a group of ranks that communicate) and return its
    result there; the other ranks wait until it has returned, and get None. All ranks of the axis
    call it together.

    The others read the store of torch.distributed every 0.25 s: in a collective of NCCL they would
    keep their GPUs busy. `what`: the work in words, for the error. Raises `RuntimeError` on the
    others after `timeout_s` seconds; an error of `work` is raised on the first rank alone.
    """
    key = f"megarl/{next(_waited)}/{axis.ranks[0] if axis.ranks else 0}"
    if axis.rank == 0:
        found = work()
        if axis.size > 1:
            job_store().set(key, "done")
        return found
    deadline = time.monotonic() + timeout_s
    while not job_store().check([key]):
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank 0 did not end {what} within {timeout_s:g} s")
        time.sleep(ASK_S)
    return None


def job_store() -> dist.Store:  # pyright: ignore[reportPrivateImportUsage]
    """torch.distributed's key-value store, by which the ranks of this job have found each other.
    Ranks can poll it for hours, whereas a collective has a timeout. Fails before `initialise`.
    """
    # torch has no public name for it.
    return dist.distributed_c10d._get_default_store()


def send(tensor: torch.Tensor, axis: Axis, to: int) -> None:
    """Send a contiguous tensor to rank number `to` of `axis` (a group of ranks that communicate,
    numbered from 0), which calls `receive`. Blocks until the tensor may be overwritten.
    """
    with waits("send", axis):
        dist.send(tensor, dst=axis.ranks[to], group=axis.group)


def receive(tensor: torch.Tensor, axis: Axis, source: int) -> torch.Tensor:
    """Fill a contiguous `tensor`, in place, with what rank number `source` of `axis` (a group of
    ranks that communicate, numbered from 0) passes to `send`, and return it. Blocks. The sender's
    tensor has the same shape and dtype.
    """
    with waits("receive", axis):
        dist.recv(tensor, src=axis.ranks[source], group=axis.group)
    return tensor


def gather_parts(tensor: torch.Tensor, axis: Axis, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Gather the tensors of all ranks of `axis` (a group of ranks that communicate) on every rank,
    as a list by rank. They may differ in the size of dimension 0 only. `lengths`: by rank, that
    size. All ranks of the axis call it together; blocks.
    """
    if axis.size == 1:
        return [tensor]
    longest = max(lengths)
    # The collective needs equal sizes: short tensors are padded with zeros.
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    found = tensor.new_empty((axis.size * longest, *tensor.shape[1:]))
    if longest:
        with waits("gather", axis):
            dist.all_gather_single(found, padded, group=axis.group)
    return [found[rank * longest : rank * longest + length] for rank, length in enumerate(lengths)]


def all_gather_parts(
    tensor: torch.Tensor, axis: Axis, dim: int, lengths: Sequence[int]
) -> torch.Tensor:
    """Concatenate the tensors of all ranks of `axis` (a group of ranks that communicate) along
    `dim`, on every rank. They may differ in the size of `dim` only. `lengths`: by rank, that size.
    All ranks of the axis call it together; blocks; without gradients.
    """
    if axis.size == 1:
        return tensor
    return torch.cat(gather_parts(tensor.movedim(dim, 0), axis, lengths)).movedim(0, dim)


class _SumGradient(torch.autograd.Function):
    """Autograd function of `sum_gradient`: identity in forward, all-reduce in backward."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _SumValues(torch.autograd.Function):
    """Autograd function of `sum_values`: all-reduce in forward, identity in backward."""

    @staticmethod
    def forward(ctx, x, axis):
        return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def sum_gradient(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return `x`, which is equal on all ranks of `axis` (a group of ranks that communicate); in the
    backward pass its gradient is summed over the ranks, which all run it together. For the input of
    column-parallel layers (Megatron's "f").
    """
    return x if axis.size == 1 else _SumGradient.apply(x, axis)


def sum_values(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum `x` over the ranks of `axis` (a group of ranks that communicate, which all call this),
    into a new tensor, for a result that all ranks use in the same way: the gradient passes
    unchanged. For the output of row-parallel layers (Megatron's "g").
    """
    return x if axis.size == 1 else _SumValues.apply(x, axis)


def sum_both(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum `x` over the ranks of `axis` (a group of ranks that communicate, which all call this),
    into a new tensor, for a result that each rank uses differently: in the backward pass the
    gradient is summed over the ranks too.
    """
    return sum_gradient(sum_values(x, axis), axis)
