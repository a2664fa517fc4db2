"""TODO"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megarl.kernels.attention_plan import AttentionPlan
from megarl.kernels.exchange import Exchange, Pending

KEYS_CHANNEL, GRADIENTS_CHANNEL = 0, 1


class Call(NamedTuple):
    """What stays the same through one call's forward and backward."""

    plan: AttentionPlan
    inner: Exchange
    outer: Exchange
    scale: float
    transport: Transport


class ForwardSums(NamedTuple):
    """Queries, and the sums over the blocks seen so far."""

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def add(self, call: Call, kv: torch.Tensor, owner: int | None) -> None:
        """Merge the block of `owner`'s keys and values, kv [Lk, 2, Hkv, D]."""
        work = call.plan.work(call.outer.rank, owner)
        if work is not None:
            call.plan.block.forward(
                self.q, kv[:, 0], kv[:, 1], work, call.scale, self.out, self.lse
            )


class BackwardSums(NamedTuple):
    """What the gradients of any block need, and the sum of those of q."""

    grad_out: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grad_q: torch.Tensor

    def add(
        self, call: Call, kv: torch.Tensor, owner: int | None, grad: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Gradient of `owner`'s keys and values [Lk, 2, Hkv, D], as far as these queries go, added
        to `grad` where given.
        """
        if grad is None:
            grad = torch.zeros(kv.shape, dtype=self.grad_q.dtype, device=kv.device)
        work = call.plan.work(call.outer.rank, owner)
        if work is not None:
            call.plan.block.backward(
                *(self.grad_out, self.q, kv[:, 0], kv[:, 1], self.out, self.lse, work, call.scale),
                *(self.grad_q, grad[:, 0], grad[:, 1]),
            )
        return grad


class Transport(Protocol):
    """How a rank's queries meet the keys of the others. On every rank the same calls of the
    exchange, tokens or none.
    """

    def forward(self, call: Call, kv: torch.Tensor, sums: ForwardSums) -> None:
        """Add every block to `sums`; kv [L, 2, Hkv, D] is this rank's."""
        ...

    def backward(self, call: Call, kv: torch.Tensor, sums: BackwardSums) -> torch.Tensor:
        """Add every block to `sums.grad_q`; returns the gradient of this rank's kv over all
        queries.
        """
        ...


@dataclass(frozen=True)
class Ring:
    """Keys and values travel from rank to rank. In backward their gradients follow them, on a
    channel of their own, and go home in one message from where the last rank saw them.

    With `overlap` the next block is on its way while this one is computed, at the price of room for
    both, and for gradients that arrive and leave. Without, each message is waited for: the least
    memory, for links that are fast beside the blocks.
    """

    overlap: bool

    @staticmethod
    def _next(call: Call, kv: torch.Tensor, step: int) -> Pending:
        owner = (call.outer.rank - step - 1) % call.outer.size
        return call.outer.shift(
            kv, (call.plan.group_lengths[owner], *kv.shape[1:]), channel=KEYS_CHANNEL
        )

    def forward(self, call: Call, kv: torch.Tensor, sums: ForwardSums) -> None:
        for step in range(call.plan.hops + 1):
            last = step == call.plan.hops
            coming = self._next(call, kv, step) if self.overlap and not last else None
            sums.add(call, kv, (call.outer.rank - step) % call.outer.size)
            if not last:
                kv = (coming or self._next(call, kv, step)).wait()

    def backward(self, call: Call, kv: torch.Tensor, sums: BackwardSums) -> torch.Tensor:
        outer, hops, lengths = call.outer, call.plan.hops, call.plan.group_lengths
        travelling: Pending | None = None
        for step in range(hops + 1):
            owner, last = (outer.rank - step) % outer.size, step == hops
            coming = self._next(call, kv, step) if self.overlap and not last else None
            # What the ranks before found of these keys: added to afterwards, or (without overlap)
            # in place.
            found = travelling.wait() if travelling is not None and not self.overlap else None
            grad = sums.add(call, kv, owner, found)
            if travelling is not None and self.overlap:
                grad += travelling.wait()
            if last:
                mine = (lengths[outer.rank], *grad.shape[1:])
                return (
                    outer.shift(grad, mine, channel=GRADIENTS_CHANNEL, offset=-hops).wait()
                    if hops
                    else grad
                )
            travelling = outer.shift(
                grad,
                (lengths[(owner - 1) % outer.size], *grad.shape[1:]),
                channel=GRADIENTS_CHANNEL,
            )
            del grad, found
            kv = (coming or self._next(call, kv, step)).wait()
        raise AssertionError("the last step returns")


class AllGather:
    """Everybody's keys and values at once, one pass, and the sum of their gradients by
    reduce-scatter.
    """

    @staticmethod
    def _everybody(call: Call, kv: torch.Tensor) -> torch.Tensor:
        return torch.cat(call.outer.all_gather(kv, call.plan.group_lengths))

    def forward(self, call: Call, kv: torch.Tensor, sums: ForwardSums) -> None:
        sums.add(call, self._everybody(call, kv), None)

    def backward(self, call: Call, kv: torch.Tensor, sums: BackwardSums) -> torch.Tensor:
        grad = sums.add(call, self._everybody(call, kv), None)
        return call.outer.reduce_scatter(grad.split(call.plan.group_lengths))


TRANSPORTS: dict[str, Transport] = {
    "ring": Ring(overlap=True),
    "ring_lean": Ring(overlap=False),
    "all_gather": AllGather(),
}
