"""Expert parallelism: tokens travel to the ranks that have their experts, and back.

    rows [S, H] of `pairs`             --send-->  rows [R, H] sorted by this rank's experts
    their outputs [R, H]               --back-->  outputs [S, H] on the ranks that sent them

Counts are exact: no capacity, nothing is dropped or padded. Expert e of E is on rank e // (E / n)
of the `experts` axis with n ranks, which is expert x tensor: tensor ranks have the same tokens and
different experts, so tokens travel along `expert` only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.parallel.collectives import all_to_all, waits
from megarl.parallel.mesh import Axis


class _AllToAll(torch.autograd.Function):
    """Rows [sum(sent), H] -> [sum(received), H]; `sent` and `received` are rows by rank."""

    @staticmethod
    def forward(ctx, rows, sent, received, axis):
        ctx.sizes, ctx.axis = (sent, received), axis
        return all_to_all(rows, sent, received, axis)

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.sizes
        return all_to_all(grad, received, sent, ctx.axis), None, None, None


@dataclass(frozen=True)
class TokenRoute:
    """Which rows of which tokens are computed here, for one layer and micro-batch."""

    pairs: torch.Tensor
    """[S] indices into T x K of what this rank sends, sorted by expert."""
    order: torch.Tensor
    """[T, K] index in `pairs` of each pair; S for those that only other tensor ranks send."""
    counts: list[int]
    """Rows of each expert of this rank, from all ranks of the axis."""
    sent: list[int]
    received: list[int]
    by_expert: torch.Tensor | None
    """[R] order of received rows that sorts them by expert; None on an axis of one rank."""
    axis: Axis

    @staticmethod
    def of(index: torch.Tensor, num_experts: int, axis: Axis, experts: Axis) -> TokenRoute:
        """`index` [T, K]: experts of each token. Collective over `axis`, the mesh's `expert`."""
        flat, tensor_size = index.reshape(-1), experts.size // axis.size
        counts = torch.bincount(flat, minlength=num_experts)
        pairs = flat.argsort(stable=True)
        if tensor_size > 1:
            owners = torch.arange(num_experts, device=flat.device) // (num_experts // experts.size)
            is_here = owners % tensor_size == experts.rank % tensor_size
            pairs, counts = pairs[is_here[flat[pairs]]], counts[is_here]
        order = torch.full_like(flat, len(pairs))
        order[pairs] = torch.arange(len(pairs), device=flat.device)
        order = order.view_as(index)
        counts = counts.view(axis.size, -1)  # [rank, its experts]
        if axis.size == 1:
            return TokenRoute(pairs, order, counts[0].tolist(), [], [], None, axis)
        arriving = torch.empty_like(counts)
        with waits("all-to-all", axis):
            dist.all_to_all_single(arriving, counts, group=axis.group)
        numbers = torch.arange(counts.shape[1], device=flat.device).repeat(axis.size)
        by_expert = numbers.repeat_interleave(arriving.view(-1)).argsort(stable=True)
        sizes = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        row_counts = arriving.sum(0).tolist()
        return TokenRoute(pairs, order, row_counts, sizes[0], sizes[1], by_expert, axis)

    @property
    def tokens(self) -> torch.Tensor:
        """[S] the token of each of `pairs`."""
        return self.pairs // self.order.shape[1]

    @property
    def is_local(self) -> bool:
        """Whether nothing is sent."""
        return self.by_expert is None

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [S, H] of `pairs` -> this rank's rows [R, H] sorted by expert; of one expert by
        rank, then by token.
        """
        if self.by_expert is None:
            return rows
        return _AllToAll.apply(rows, self.sent, self.received, self.axis)[self.by_expert]

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Outputs [R, H] of `send`'s rows -> outputs [S, H] of `pairs`."""
        if self.by_expert is None:
            return rows
        order = torch.empty_like(self.by_expert)
        order[self.by_expert] = torch.arange(len(order), device=order.device)
        return _AllToAll.apply(rows[order], self.received, self.sent, self.axis)
