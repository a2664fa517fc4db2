"""How queries of one rank meet keys and values of all ranks under context parallelism: ring
attention or all-gather.

To add a transport, write a class with the two methods of `Transport` and add it to `TRANSPORTS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megarl.kernels.attention_plan import AttentionPlan


class Pending(Protocol):
    """Interface of a tensor that is being received from another rank in the background: `wait`
    blocks until it has arrived. `Exchange.shift` returns one.
    """

    def wait(self) -> torch.Tensor:
        """Block until the tensor has arrived, and return it; to be called once."""
        ...


class Exchange(Protocol):
    """Interface of the communication that attention over split sequences needs: `shift` around a
    ring of ranks, `all_gather`, `reduce_scatter` and `all_to_all`. `rank` is this rank's number in
    the ring, `size` the number of ranks. All of the ranks call the same methods in the same order.
    """

    rank: int
    """This rank's number in the ring of ranks, from 0."""
    size: int
    """Number of ranks in the ring."""

    def shift(
        self, tensor: torch.Tensor, shape: Sequence[int], *, channel: int = 0, offset: int = 1
    ) -> Pending:
        """Send `tensor` to rank + `offset` and start to receive a tensor from rank - `offset`,
        modulo the size. Does not block: `wait` of the result blocks and returns the tensor.

        The received tensor has `shape` and the dtype of `tensor`. Do not write to `tensor` before
        `wait` has returned. Messages on different channels (0 or 1) do not wait for each other.
        """
        ...

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """The tensors of all ranks, as a list by rank; blocks. `lengths`: by rank, its tensor's
        size in dimension 0; the other dimensions and the dtype are equal.
        """
        ...

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over all ranks of their `pieces[self.rank]`, where `self.rank` is this rank's
        number. `pieces`: one tensor for each rank; these may differ in the size of dimension 0
        only. Blocks.
        """
        ...

    def all_to_all(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Send `pieces[r]` to each rank r; all have one dtype. Returns the tensors received, as a
        list by rank. `shapes`: by rank, the shape of the tensor received from it. Blocks.
        """
        ...


KEYS_CHANNEL, GRADIENTS_CHANNEL = 0, 1
"""Numbers that keep two kinds of messages in the ring apart: keys and values, and their
gradients."""


class AttentionCall(NamedTuple):
    """What forward and backward of one call of `sequence_attention` share: which rank has which
    tokens (`plan`), the communication within this rank's Ulysses group (`inner`; ranks that
    exchange tokens for heads) and with other groups (`outer`), how keys and values travel between
    groups (`transport`), the factor of the scores (`scale`) and their soft cap (`cap`).
    """

    plan: AttentionPlan
    inner: Exchange
    """Communication with the ranks of this rank's Ulysses group, which exchange tokens for
    heads."""
    outer: Exchange
    """Communication with the ranks of the same number in the other Ulysses groups, which exchange
    keys and values."""
    scale: float
    transport: Transport
    cap: float | None = None
    """Soft cap of the scaled scores: a score s becomes cap tanh(s / cap); None for none."""


class ForwardSums(NamedTuple):
    """This rank's queries `q` [Lq, Hq, D], and their attention over the keys seen so far: the
    normalised output `out` [Lq, Hq, D] and the log-sum-exp of the scaled scores `lse` [Hq, Lq].
    `add` merges more keys into these in place, as they arrive from other ranks.
    """

    q: torch.Tensor
    """Queries [Lq, Hq, D]."""
    out: torch.Tensor
    """Attention output over the keys seen so far, [Lq, Hq, D] float32 or float64."""
    lse: torch.Tensor
    """Log-sum-exp of the scaled scores seen so far, [Hq, Lq] float32 or float64."""

    def add(self, call: AttentionCall, kv: torch.Tensor, owner: int | None) -> None:
        """Merge attention of this rank's queries to the keys and values `kv` [Lk, 2, Hkv, D] (keys
        first) into `out` and `lse`, in place. `owner` is the number of the Ulysses group whose
        tokens they are; None for those gathered from all groups, concatenated. `call`: plan,
        communication and settings of this attention call.
        """
        for work in call.plan.works(call.outer.rank, owner):
            call.plan.block.forward(
                self.q, kv[:, 0], kv[:, 1], work, call.scale, self.out, self.lse, call.cap
            )


class BackwardSums(NamedTuple):
    """What the backward pass needs of this rank's queries, and the gradient `grad_q` of the
    queries, to which `add` adds the part of some keys in place. `grad_out` (gradient of the
    output), `q`, `out` and `grad_q` are [Lq, Hq, D] and `lse` [Hq, Lq]; `out` and `lse` are the
    final ones, over all keys.
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
        """Backward pass of the attention of this rank's queries to the keys and values `kv`
        [Lk, 2, Hkv, D] (keys first). `owner` is the number of the Ulysses group whose tokens they
        are; None for those gathered from all groups, concatenated. `call`: plan, communication and
        settings of this attention call.

        Adds the gradient of the queries to `grad_q`, in place. Returns the gradient of `kv`, in the
        shape of `kv`; if `grad` is given, the gradient is added to `grad` in place, and `grad` is
        returned.
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
    """Interface of the algorithms (ring, all-gather) by which a rank's queries attend to the keys
    and values of all ranks. All ranks call `forward` and `backward` together, also a rank without
    tokens.
    """

    def forward(self, call: AttentionCall, kv: torch.Tensor, sums: ForwardSums) -> None:
        """Merge attention of this rank's queries `sums.q` [Lq, Hq, D] to the keys of all ranks into
        `sums.out` [Lq, Hq, D] and `sums.lse` [Hq, Lq], in place; both begin as those of no keys (0
        and -inf). `kv` [L, 2, Hkv, D] are this rank's own keys and values, keys first; `call` has
        plan, communication and settings of this attention call. All ranks call it together.
        """
        ...

    def backward(self, call: AttentionCall, kv: torch.Tensor, sums: BackwardSums) -> torch.Tensor:
        """Add the gradients of this rank's queries to `sums.grad_q`, in place.

        Returns the gradient [L, 2, Hkv, D] of this rank's own keys and values `kv`, from the
        queries of all ranks. `call` has plan, communication and settings of this attention call.
        All ranks call it together.
        """
        ...


@dataclass(frozen=True)
class Ring:
    """Ring attention (arXiv:2310.01889), for `sequence_attention`: each rank passes keys and values
    on to the next rank, and its queries attend to what has arrived. With `overlap` the next ones
    are received meanwhile, which needs memory for both; without it every message is waited for.
    `forward` and `backward` are called on all ranks together.

    In the backward pass the gradients of keys and values are passed on too, on a separate channel.
    The last rank whose queries attend to them sends the gradients back to their owner in one
    message. Within a sliding window a rank passes on only those keys and values that queries of
    later ranks in the ring attend to, and each rank sends their gradients to the owner directly, to
    send the fewest bytes.
    """

    overlap: bool
    """Receive the next keys and values while the current ones are used; this needs memory for both.
    Without overlap every message is waited for, which needs the least memory."""

    @staticmethod
    def _next(call: AttentionCall, kv: torch.Tensor, step: int) -> Pending:
        """Pass `kv` on, and start receiving the next ring step's keys and values."""
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
            found = travelling.wait() if travelling is not None and not self.overlap else None
            grad = sums.add(call, kv, owner, found)
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
            del grad, found
            kv = (coming or self._next(call, kv, step)).wait()
        raise AssertionError("the last step returns")

    def _backward_within(
        self, call: AttentionCall, kv: torch.Tensor, sums: BackwardSums
    ) -> torch.Tensor:
        """`backward` within a sliding window."""
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
    """Add `part` [n, ...] to the rows `chosen` [n] of `total`, or to all for None, in place."""
    if chosen is None:
        total.add_(part)
    else:
        total.index_add_(0, chosen.to(total.device), part)


class AllGather:
    """All-gather of keys and values, then attention to all of them at once; in the backward pass a
    reduce-scatter of their gradients. `forward` and `backward` are called on all ranks together.

    Within a sliding window each rank is sent only those keys and values that one of its queries
    attends to, and sends only their gradients back. All-to-all does both, with the fewest bytes.
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
        lengths = [len(part) for part in parts]
        grads = list(sums.add(call, torch.cat(parts), None).split(lengths))
        if plan.window is None:
            return outer.reduce_scatter(grads)
        total = grads[outer.rank].clone()  # a slice would keep the gradients of all groups
        if not plan.hops:
            return total
        grads[outer.rank] = total[:0]
        counts = [plan.num_sent(outer.rank, rank) for rank in range(outer.size)]
        found = outer.all_to_all(grads, [(count, *total.shape[1:]) for count in counts])
        # In the order of groups, so that a repetition is equal to the last bit.
        for rank, grad in enumerate(found):
            if len(grad):
                _add_rows(total, plan.sent(outer.rank, rank), grad)
        return total


TRANSPORTS: dict[str, Transport] = {
    "ring": Ring(overlap=True),
    "ring_lean": Ring(overlap=False),
    "all_gather": AllGather(),
}
"""{name in `training.sequence.transport`: the object that exchanges keys and values so}.
"ring_lean" is the ring without overlap."""
