"""How queries of one rank meet keys and values of all ranks: ring attention or all-gather."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megarl.kernels.attention_plan import AttentionPlan


class Pending(Protocol):
    def wait(self) -> torch.Tensor:
        """Block until the tensor has arrived; to be called once."""
        ...


class Exchange(Protocol):
    """Communication on a ring of ranks, which all call the same methods in the same order."""

    rank: int
    size: int

    def shift(
        self, tensor: torch.Tensor, shape: Sequence[int], *, channel: int = 0, offset: int = 1
    ) -> Pending:
        """Send `tensor` to rank + `offset`, and receive one of `shape` and the same dtype from rank
        - `offset`, modulo the size. Do not write to `tensor` before `wait` has returned. Channels 0
        and 1 do not wait for each other.
        """
        ...

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """The tensors by rank, of sizes `lengths` in dimension 0; blocks."""
        ...

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over ranks of `pieces[self.rank]`, which may differ in dimension 0. Blocks."""
        ...

    def all_to_all(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Send `pieces[r]` to rank r; returns those received, of `shapes`. Blocks."""
        ...


KEYS_CHANNEL, GRADIENTS_CHANNEL = 0, 1
"""Numbers that keep two kinds of messages in the ring apart: keys and values, and their
gradients."""


class AttentionCall(NamedTuple):
    """What forward and backward of `sequence_attention` share."""

    plan: AttentionPlan
    inner: Exchange
    """Within this rank's Ulysses group."""
    outer: Exchange
    """With the ranks of the same number in the other groups."""
    scale: float
    transport: Transport
    cap: float | None = None
    """A scaled score s becomes cap tanh(s / cap); None for no cap."""


class ForwardSums(NamedTuple):
    """This rank's queries, and their attention over the keys seen so far."""

    q: torch.Tensor
    """[Lq, Hq, D]"""
    out: torch.Tensor
    """[Lq, Hq, D] float32 or float64, normalised."""
    lse: torch.Tensor
    """[Hq, Lq] log-sum-exp of the scaled scores, float32 or float64."""

    def add(self, call: AttentionCall, kv: torch.Tensor, owner: int | None) -> None:
        """Merge attention to `kv` [Lk, 2, Hkv, D], keys first, of group `owner`; None: of all."""
        for work in call.plan.works(call.outer.rank, owner):
            call.plan.block.forward(
                self.q, kv[:, 0], kv[:, 1], work, call.scale, self.out, self.lse, call.cap
            )


class BackwardSums(NamedTuple):
    """Backward of this rank's queries. `out` and `lse` are over all keys; `grad_q` [Lq, Hq, D] is a
    sum.
    """

    grad_out: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grad_q: torch.Tensor

    def add(
        self,
        call: AttentionCall,
        kv: torch.Tensor,
        owner: int | None,
        grad: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add to `grad_q` the gradient from attention to `kv` [Lk, 2, Hkv, D], keys first, of group
        `owner`; None: of all. Returns the gradient of `kv`, added in place to `grad` if given.
        """
        if grad is None:
            grad = torch.zeros(kv.shape, dtype=self.grad_q.dtype, device=kv.device)
        for work in call.plan.works(call.outer.rank, owner):
            call.plan.block.backward(
                *(self.grad_out, self.q, kv[:, 0], kv[:, 1], self.out, self.lse, work, call.scale),
                *(self.grad_q, grad[:, 0], grad[:, 1], call.cap),
            )
        return grad


class Transport(Protocol):
    """All ranks call `forward` and `backward` together, also one without tokens."""

    def forward(self, call: AttentionCall, kv: torch.Tensor, sums: ForwardSums) -> None:
        """Merge attention to the keys of all ranks into `sums`. `kv` [L, 2, Hkv, D] are this rank's
        own, keys first.
        """
        ...

    def backward(self, call: AttentionCall, kv: torch.Tensor, sums: BackwardSums) -> torch.Tensor:
        """Add to `sums.grad_q`. Returns the gradient of this rank's own `kv`, from the queries of
        all ranks.
        """
        ...


@dataclass(frozen=True)
class Ring:
    """Ring attention (arXiv:2310.01889): each rank passes keys and values on to the next, and its
    queries attend to what has arrived.

    In backward the gradients travel on a separate channel; the last rank sends them to the owner.
    Within a sliding window only keys that later ranks attend to travel, and each rank sends the
    owner their gradients, for the fewest bytes.
    """

    overlap: bool
    """Receive the next keys and values while the current ones are used, which needs memory for
    both.
    """

    @staticmethod
    def _next(call: AttentionCall, kv: torch.Tensor, step: int) -> Pending:
        rank, size, plan = call.outer.rank, call.outer.size, call.plan
        coming = plan.travels((rank - step - 1) % size, step + 1)
        leaving = plan.passed_on(kv, (rank - step) % size, step)
        return call.outer.shift(leaving, (coming, *kv.shape[1:]), channel=KEYS_CHANNEL)

    def forward(self, call: AttentionCall, kv: torch.Tensor, sums: ForwardSums) -> None:
        for step in range(call.plan.hops + 1):
            last = step == call.plan.hops
            coming = self._next(call, kv, step) if self.overlap and not last else None
            sums.add(call, kv, (call.outer.rank - step) % call.outer.size)
            if not last:
                kv = (coming or self._next(call, kv, step)).wait()

    def backward(self, call: AttentionCall, kv: torch.Tensor, sums: BackwardSums) -> torch.Tensor:
        if call.plan.window is not None:
            return self._backward_within(call, kv, sums)
        outer, hops, lengths = call.outer, call.plan.hops, call.plan.group_lengths
        travelling: Pending | None = None
        for step in range(hops + 1):
            owner, last = (outer.rank - step) % outer.size, step == hops
            coming = self._next(call, kv, step) if self.overlap and not last else None
            # Gradient of these keys from earlier ranks; without overlap it is added to in place.
            earlier = travelling.wait() if travelling is not None and not self.overlap else None
            grad = sums.add(call, kv, owner, earlier)
            if travelling is not None and self.overlap:
                grad += travelling.wait()
            if last and not hops:
                return grad
            if last:
                own_shape = (lengths[outer.rank], *grad.shape[1:])
                return outer.shift(grad, own_shape, channel=GRADIENTS_CHANNEL, offset=-hops).wait()
            travelling = outer.shift(
                grad,
                (lengths[(owner - 1) % outer.size], *grad.shape[1:]),
                channel=GRADIENTS_CHANNEL,
            )
            del grad, earlier
            kv = (coming or self._next(call, kv, step)).wait()
        raise AssertionError("the last step returns")

    def _backward_within(
        self, call: AttentionCall, kv: torch.Tensor, sums: BackwardSums
    ) -> torch.Tensor:
        outer, plan = call.outer, call.plan
        total = torch.empty(0)
        # Gradients of this rank's keys, from `step - 1` farther on.
        returning: Pending | None = None
        for step in range(plan.hops + 1):
            last = step == plan.hops
            coming = self._next(call, kv, step) if self.overlap and not last else None
            grad = sums.add(call, kv, (outer.rank - step) % outer.size)
            if returning is not None:
                _add_rows(total, plan.part(outer.rank, step - 1), returning.wait())
            if step == 0:
                total = grad
            else:
                own_shape = (plan.travels(outer.rank, step), *grad.shape[1:])
                returning = outer.shift(grad, own_shape, channel=GRADIENTS_CHANNEL, offset=-step)
            if not last:
                kv = (coming or self._next(call, kv, step)).wait()
        if returning is not None:
            _add_rows(total, plan.part(outer.rank, plan.hops), returning.wait())
        return total


def _add_rows(total: torch.Tensor, chosen: torch.Tensor | None, part: torch.Tensor) -> None:
    """Add `part` [n, ...] to the rows `chosen` [n] of `total`, or to all for None."""
    if chosen is None:
        total.add_(part)
    else:
        total.index_add_(0, chosen.to(total.device), part)


class AllGather:
    """All-gather of keys and values; in backward a reduce-scatter of their gradients. Within a
    sliding window, all-to-all of those that queries attend to, both ways.
    """

    @staticmethod
    def _gathered(call: AttentionCall, kv: torch.Tensor) -> list[torch.Tensor]:
        """By Ulysses group, those of its keys and values that are used here, [n, 2, Hkv, D]."""
        outer, plan = call.outer, call.plan
        if plan.window is None:
            return outer.all_gather(kv, plan.group_lengths)
        parts = [kv[:0]] * outer.size
        if plan.hops:  # otherwise no group attends to another's keys
            for rank in range(outer.size):
                if plan.num_sent(outer.rank, rank):
                    chosen = plan.sent(outer.rank, rank)
                    parts[rank] = kv if chosen is None else kv[chosen.to(kv.device)]
            counts = [plan.num_sent(owner, outer.rank) for owner in range(outer.size)]
            parts = outer.all_to_all(parts, [(count, *kv.shape[1:]) for count in counts])
        parts[outer.rank] = kv
        return parts

    def forward(self, call: AttentionCall, kv: torch.Tensor, sums: ForwardSums) -> None:
        sums.add(call, torch.cat(self._gathered(call, kv)), None)

    def backward(self, call: AttentionCall, kv: torch.Tensor, sums: BackwardSums) -> torch.Tensor:
        outer, plan = call.outer, call.plan
        parts = self._gathered(call, kv)
        lengths = [len(kv_part) for kv_part in parts]
        grads = list(sums.add(call, torch.cat(parts), None).split(lengths))
        if plan.window is None:
            return outer.reduce_scatter(grads)
        total = grads[outer.rank].clone()  # a slice would keep the gradients of all groups
        if not plan.hops:
            return total
        grads[outer.rank] = total[:0]
        counts = [plan.num_sent(outer.rank, rank) for rank in range(outer.size)]
        received = outer.all_to_all(grads, [(count, *total.shape[1:]) for count in counts])
        # In the order of groups, so that a repetition is equal to the last bit.
        for rank, grad in enumerate(received):
            if len(grad):
                _add_rows(total, plan.sent(outer.rank, rank), grad)
        return total


TRANSPORTS: dict[str, Transport] = {
    "ring": Ring(overlap=True),
    "ring_lean": Ring(overlap=False),
    "all_gather": AllGather(),
}
"""{`training.sequence.transport`: transport}"""
