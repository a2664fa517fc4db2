"""Collective operations over the ranks of an `Axis`. They block; on an axis of size 1 each returns
its input.

Plain operations work in place and have no gradients. The differentiable ones:

    sum_gradient     x -> x           Each rank uses x for a part of the work: gradients are summed.
    sum_values       x -> sum of x    All ranks use the sum alike: the gradient passes unchanged.
    sum_both         x -> sum of x    Each rank uses the sum differently: gradients are summed too.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.parallel.mesh import Axis
from megarl.system.spans import Span, activity

T = TypeVar("T")
Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]

ASK_S = 0.25
"""Longest pause between two reads of torch.distributed's store."""
_waited = itertools.count()


def waits(doing: str, axis: Axis) -> Span:
    """Puts a collective of more than a second into this process's trace."""
    what = f"{doing} over {axis.name}"
    return activity(what, kind="wait", of=axis.ranks, deadline_s=axis.timeout_s, quiet=True)


def all_reduce(
    tensor: torch.Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Reduce a contiguous `tensor` in place. Collective."""
    if axis.size > 1:
        with waits("all-reduce", axis):
            dist.all_reduce(tensor, op=op, group=axis.group)
    return tensor


def all_reduce_max(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    return all_reduce(tensor, axis, dist.ReduceOp.MAX)


def broadcast(tensor: torch.Tensor, axis: Axis, source: int = 0) -> torch.Tensor:
    """Copy rank `source`'s tensor into the other ranks' `tensor`. Collective."""
    if axis.size > 1:
        with waits("broadcast", axis):
            dist.broadcast(tensor, src=axis.ranks[source], group=axis.group)
    return tensor


def broadcast_object(value: T, axis: Axis, source: int = 0) -> T:
    """The small picklable `value` of rank `source`, on all ranks. Collective."""
    if axis.size == 1:
        return value
    box = [value]
    with waits("broadcast", axis):
        dist.broadcast_object_list(box, src=axis.ranks[source], group=axis.group)
    return box[0]


def gather_objects(value: T, axis: Axis) -> list[T]:
    """The small picklable values by rank, on all ranks. Collective."""
    if axis.size == 1:
        return [value]
    values: list[Any] = [None] * axis.size
    with waits("gather", axis):
        dist.all_gather_object(values, value, group=axis.group)
    return values


def on_first(work: Callable[[], object], axis: Axis) -> str:
    """Run `work` on rank 0. Returns everywhere the message of its exception, "" on success.
    Collective.
    """
    failure = ""
    if axis.rank == 0:
        try:
            work()
        except Exception as error:
            failure = str(error) or repr(error)
    return broadcast_object(failure, axis)


def barrier(axis: Axis) -> None:
    """Collective. After the timeout it raises on CPU; with NCCL torch ends the process."""
    if axis.size > 1:
        with waits("barrier", axis):
            dist.barrier(group=axis.group)


def wait_for_first(work: Callable[[], T], axis: Axis, what: str, timeout_s: float) -> T | None:
    """Run `work` on the first rank, which gets its result or error; the others get None.
    Collective.

    They poll torch.distributed's store, because NCCL would keep their GPUs busy, and raise
    `RuntimeError` after `timeout_s` seconds.
    """
    key = f"megarl/{next(_waited)}/{axis.ranks[0] if axis.ranks else 0}"
    if axis.rank == 0:
        result = work()
        if axis.size > 1:
            job_store().set(key, "done")
        return result
    deadline = time.monotonic() + timeout_s
    while not job_store().check([key]):
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank 0 did not end {what} within {timeout_s:g} s")
        time.sleep(ASK_S)
    return None


def job_store() -> Store:
    """torch.distributed's, after `initialise`. Ranks can poll it for hours, unlike a collective."""
    # torch has no public name for it.
    return dist.distributed_c10d._get_default_store()


def all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], axis: Axis
) -> torch.Tensor:
    """Rows [sum(sent), ...], of which each rank gets its part, -> [sum(received), ...] by rank.
    Collective.
    """
    if axis.size == 1:
        return rows
    out = rows.new_empty(sum(received), *rows.shape[1:])
    with waits("all-to-all", axis):
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=axis.group)
    return out


def empty_store(axis: Axis) -> Store:
    """A store without keys, for all ranks of `axis`. Collective."""
    name = broadcast_object(uuid.uuid4().hex, axis)
    return dist.PrefixStore(f"megarl/{name}", job_store()) if axis.size > 1 else dist.HashStore()


def send(tensor: torch.Tensor, axis: Axis, to: int) -> None:
    """Blocks until the contiguous `tensor` may change; rank `to` calls `receive`."""
    with waits("send", axis):
        dist.send(tensor, dst=axis.ranks[to], group=axis.group)


def receive(tensor: torch.Tensor, axis: Axis, source: int) -> torch.Tensor:
    """Fill a contiguous `tensor` with what rank `source` sends. Blocks."""
    with waits("receive", axis):
        dist.recv(tensor, src=axis.ranks[source], group=axis.group)
    return tensor


def gather_parts(tensor: torch.Tensor, axis: Axis, lengths: Sequence[int]) -> list[torch.Tensor]:
    """The tensors by rank, of sizes `lengths` in dimension 0. Collective."""
    if axis.size == 1:
        return [tensor]
    longest = max(lengths)
    # The collective needs equal sizes: short tensors are padded with zeros.
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    whole = tensor.new_empty((axis.size * longest, *tensor.shape[1:]))
    if longest:
        with waits("gather", axis):
            dist.all_gather_single(whole, padded, group=axis.group)
    return [whole[rank * longest : rank * longest + length] for rank, length in enumerate(lengths)]


def all_gather_parts(
    tensor: torch.Tensor, axis: Axis, dim: int, lengths: Sequence[int]
) -> torch.Tensor:
    """Concatenates tensors of sizes `lengths` along `dim`. Collective; without gradients."""
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
    """`x`; its gradient is summed. For the input of column-parallel layers (Megatron's "f")."""
    return x if axis.size == 1 else _SumGradient.apply(x, axis)


def sum_values(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of `x`. For the output of row-parallel layers (Megatron's "g"). Collective."""
    return x if axis.size == 1 else _SumValues.apply(x, axis)


def sum_both(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of `x`, whose gradient is summed too. Collective."""
    return sum_gradient(sum_values(x, axis), axis)
