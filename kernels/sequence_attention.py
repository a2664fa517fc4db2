"""Attention over a packed row that is split by token over ranks: schedules of block attention over
an injected `Exchange`.

    q [L, Hq, D], k and v [L, Hkv, D] of this rank's tokens  ->  out [L, Hq, D]

Two degrees make every schedule. Inside, `inner.size` ranks (Ulysses) swap tokens for heads, so that
each holds all of their tokens and some of the heads. Outside, keys and values go round by one of
`TRANSPORTS`, and each arriving block is merged by its log-sum-exp:

    ring             inner 1             ring, or ring_lean
    all-gather       inner 1             all_gather
    Ulysses          inner everybody     (outer 1)
    Ulysses x ring   both

Everybody knows everybody's places, so no index is ever sent, and ranks may hold any tokens, in any
number. To add a transport, add an entry to `TRANSPORTS`; to add a block kernel, one to `BLOCKS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.function import once_differentiable

from megarl.kernels.block import Block, Places
from megarl.kernels.blocks import BLOCKS, default_block
from megarl.kernels.exchange import Exchange, Pending

KEYS_CHANNEL, GRADIENTS_CHANNEL = 0, 1


def _hops(places: Sequence[Places], starts: torch.Tensor) -> int:
    """How far keys must travel until nobody can see them any more, 0 to size - 1."""
    size, num_documents = len(places), max(starts.numel() - 1, 1)
    last_query = torch.full((size, num_documents), -1, dtype=torch.int64)
    first_key = torch.full((size, num_documents), torch.iinfo(torch.int64).max)
    edges = starts.to(device="cpu", dtype=torch.int64)
    for rank, owned in enumerate(places):
        document = torch.searchsorted(edges, owned.index, right=True) - 1
        last_query[rank].scatter_reduce_(0, document, owned.index, "amax")
        first_key[rank].scatter_reduce_(0, document, owned.index, "amin")
    # A rank's last query of a document sees the most: it sees another's keys if it sees the first
    # of them.
    sees = (last_query[:, None] >= first_key[None]).any(-1)
    pairs = sees.nonzero()
    return int(((pairs[:, 0] - pairs[:, 1]) % size).max()) if len(pairs) else 0


@dataclass
class AttentionPlan:
    """Who holds which tokens of one micro-batch, and the work lists that follow; made once, used by
    every layer.
    """

    lengths: list[int]
    """Tokens of each rank, in the order of the sequence axis."""
    ulysses: int
    places: list[Places]
    """Per outer rank: the places of its inner ranks' tokens together, in their order."""
    hops: int
    """Steps that keys travel round the outer ring; beyond, nobody sees them."""
    block: Block
    device: torch.device
    _made: dict[tuple[int, int | None], Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        indices: Sequence[torch.Tensor],
        starts: torch.Tensor,
        device: torch.device,
        *,
        ulysses: int = 1,
        block: str | None = None,
    ) -> AttentionPlan:
        """From each rank's token positions [L_r] int64 and the documents' starts [D + 1]; the same
        on every rank.

        `ulysses` divides the number of ranks; `block` is a name in `BLOCKS`, by default that of the
        device.
        """
        if ulysses < 1 or len(indices) % ulysses:
            raise ValueError(
                f"{len(indices)} sequence ranks cannot be split in Ulysses groups of {ulysses}; set"
                " a divisor"
            )
        name = default_block(device) if block is None else block
        if name not in BLOCKS:
            raise ValueError(
                f"no attention block is called {name!r}; set one of {', '.join(BLOCKS)}"
            )
        joined = [
            torch.cat(list(indices[start : start + ulysses]))
            for start in range(0, len(indices), ulysses)
        ]
        places = [Places.of(index, starts) for index in joined]
        lengths = [int(index.numel()) for index in indices]
        return AttentionPlan(
            lengths, ulysses, places, _hops(places, starts), BLOCKS[name](), device
        )

    @property
    def group_lengths(self) -> list[int]:
        """Tokens of each outer rank."""
        return [int(owned.index.numel()) for owned in self.places]

    def work(self, rank: int, owner: int | None) -> Any:
        """The work list of outer rank `rank`'s queries and `owner`'s keys, or everybody's (None);
        None where there is none.
        """
        if (rank, owner) not in self._made:
            if owner is None:
                keys = Places(
                    *(
                        torch.cat(parts)
                        for parts in zip(
                            *((p.index, p.doc_start) for p in self.places), strict=True
                        )
                    )
                )
            else:
                keys = self.places[owner]
            self._made[rank, owner] = self.block.prepare(self.places[rank], keys, self.device)
        return self._made[rank, owner]


class _Call(NamedTuple):
    """What stays the same through one call's forward and backward."""

    plan: AttentionPlan
    inner: Exchange
    outer: Exchange
    scale: float
    transport: Transport


class _Forward(NamedTuple):
    """Queries, and the sums over the blocks seen so far."""

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def add(self, call: _Call, kv: torch.Tensor, owner: int | None) -> None:
        """Merge the block of `owner`'s keys and values, kv [Lk, 2, Hkv, D]."""
        work = call.plan.work(call.outer.rank, owner)
        if work is not None:
            call.plan.block.forward(
                self.q, kv[:, 0], kv[:, 1], work, call.scale, self.out, self.lse
            )


class _Backward(NamedTuple):
    """What the gradients of any block need, and the sum of those of q."""

    grad_out: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    grad_q: torch.Tensor

    def add(
        self, call: _Call, kv: torch.Tensor, owner: int | None, grad: torch.Tensor | None = None
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

    def forward(self, call: _Call, kv: torch.Tensor, sums: _Forward) -> None:
        """Add every block to `sums`; kv [L, 2, Hkv, D] is this rank's."""
        ...

    def backward(self, call: _Call, kv: torch.Tensor, sums: _Backward) -> torch.Tensor:
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
    def _next(call: _Call, kv: torch.Tensor, step: int) -> Pending:
        owner = (call.outer.rank - step - 1) % call.outer.size
        return call.outer.shift(
            kv, (call.plan.group_lengths[owner], *kv.shape[1:]), channel=KEYS_CHANNEL
        )

    def forward(self, call: _Call, kv: torch.Tensor, sums: _Forward) -> None:
        for step in range(call.plan.hops + 1):
            last = step == call.plan.hops
            coming = self._next(call, kv, step) if self.overlap and not last else None
            sums.add(call, kv, (call.outer.rank - step) % call.outer.size)
            if not last:
                kv = (coming or self._next(call, kv, step)).wait()

    def backward(self, call: _Call, kv: torch.Tensor, sums: _Backward) -> torch.Tensor:
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
    def _everybody(call: _Call, kv: torch.Tensor) -> torch.Tensor:
        return torch.cat(call.outer.all_gather(kv, call.plan.group_lengths))

    def forward(self, call: _Call, kv: torch.Tensor, sums: _Forward) -> None:
        sums.add(call, self._everybody(call, kv), None)

    def backward(self, call: _Call, kv: torch.Tensor, sums: _Backward) -> torch.Tensor:
        grad = sums.add(call, self._everybody(call, kv), None)
        return call.outer.reduce_scatter(grad.split(call.plan.group_lengths))


TRANSPORTS: dict[str, Transport] = {
    "ring": Ring(overlap=True),
    "ring_lean": Ring(overlap=False),
    "all_gather": AllGather(),
}


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _OverTokens(torch.autograd.Function):
    """Attention of this outer rank's queries to all keys; heads are independent here."""

    @staticmethod
    def forward(ctx, q, k, v, call: _Call):
        dtype = _sum_dtype(q.dtype)
        out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=dtype, device=q.device)
        call.transport.forward(call, torch.stack((k, v), 1), _Forward(q, out, lse))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        grad_q = torch.zeros(q.shape, dtype=_sum_dtype(q.dtype), device=q.device)
        sums = _Backward(grad_out.contiguous(), q, out, lse, grad_q)
        grad_kv = ctx.call.transport.backward(ctx.call, torch.stack((k, v), 1), sums).to(k.dtype)
        return grad_q.to(q.dtype), grad_kv[:, 0], grad_kv[:, 1], None


def _inner_lengths(call: _Call) -> list[int]:
    """Tokens of each rank of this Ulysses group."""
    first = call.outer.rank * call.inner.size
    return call.plan.lengths[first : first + call.inner.size]


def _tokens_to_heads(x: list[torch.Tensor], call: _Call) -> torch.Tensor:
    """Per inner rank the heads it needs of my tokens, [L, H', D] each -> the group's tokens with my
    heads, [sum of L, H', D].
    """
    shapes = [(length, *x[0].shape[1:]) for length in _inner_lengths(call)]
    return torch.cat(call.inner.all_to_all([part.contiguous() for part in x], shapes))


def _heads_to_tokens(x: torch.Tensor, call: _Call) -> list[torch.Tensor]:
    """The way back: per inner rank what it made of my tokens, [L, H', D] each."""
    lengths = _inner_lengths(call)
    shape = (lengths[call.inner.rank], *x.shape[1:])
    return call.inner.all_to_all(list(x.contiguous().split(lengths)), [shape] * call.inner.size)


def _needed(x: torch.Tensor, size: int, rank: int) -> slice:
    """The heads of x [L, H, D] that inner rank `rank` works on: a share, or the one it has in
    common with others.
    """
    num_heads = x.shape[1]
    first = rank * num_heads // size
    return slice(first, first + max(1, num_heads // size))


class _ToHeads(torch.autograd.Function):
    """q, k and v of my tokens and all heads -> of the Ulysses group's tokens and my heads, in one
    message to each.
    """

    @staticmethod
    def forward(ctx, q, k, v, call: _Call):
        size = call.inner.size
        parts = [
            torch.cat([x[:, _needed(x, size, rank)] for x in (q, k, v)], 1) for rank in range(size)
        ]
        mine = _tokens_to_heads(parts, call)
        heads = [x.shape[1] for x in (q, k, v)]
        ctx.call, ctx.heads, ctx.dtype = call, heads, q.dtype
        return mine.split([max(1, count // size) for count in heads], 1)

    @staticmethod
    def backward(ctx, *grads):
        size = ctx.call.inner.size
        # Where ranks share a key head its gradient is summed over them, and that not in 16 bit.
        dtype = _sum_dtype(ctx.dtype) if ctx.heads[1] % size else ctx.dtype
        parts = _heads_to_tokens(torch.cat([grad.to(dtype) for grad in grads], 1), ctx.call)
        sums = [
            parts[0].new_zeros((parts[0].shape[0], count, parts[0].shape[2])) for count in ctx.heads
        ]
        for rank, part in enumerate(parts):
            for total, grad in zip(
                sums, part.split([max(1, count // size) for count in ctx.heads], 1), strict=True
            ):
                total[:, _needed(total, size, rank)] += grad
        return *(total.to(ctx.dtype) for total in sums), None


class _ToTokens(torch.autograd.Function):
    """The output, of the Ulysses group's tokens and my heads -> of my tokens and all heads."""

    @staticmethod
    def forward(ctx, out, call: _Call):
        ctx.call = call
        return torch.cat(_heads_to_tokens(out, call), 1)

    @staticmethod
    def backward(ctx, grad):
        return _tokens_to_heads(list(grad.chunk(ctx.call.inner.size, 1)), ctx.call), None


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    inner: Exchange,
    outer: Exchange,
) -> None:
    if inner.size != plan.ulysses or inner.size * outer.size != len(plan.lengths):
        raise ValueError(
            f"the plan is for {len(plan.lengths)} sequence ranks in Ulysses groups of"
            f" {plan.ulysses}, but the exchanges have {outer.size} groups of {inner.size}"
        )
    expected = plan.lengths[outer.rank * inner.size + inner.rank]
    if (
        q.shape[0] != expected
        or k.shape != v.shape
        or (k.shape[0], k.shape[2]) != (q.shape[0], q.shape[2])
    ):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit; the plan"
            f" has {expected} tokens here"
        )
    query_heads, kv_heads, degree = q.shape[1], k.shape[1], inner.size
    if query_heads % kv_heads:
        raise ValueError(f"{kv_heads} key heads do not divide {query_heads} query heads")
    if query_heads % degree or (kv_heads % degree and degree % kv_heads):
        fitting = [
            n
            for n in range(1, query_heads + 1)
            if query_heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
        ]
        raise ValueError(
            f"Ulysses groups of {degree} cannot share {query_heads} query heads and {kv_heads} key"
            f" heads; set the Ulysses degree to one of {', '.join(map(str, fitting))} and leave the"
            " rest to the ring"
        )


def sequence_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    inner: Exchange,
    outer: Exchange,
    scale: float,
    transport: str,
) -> torch.Tensor:
    """Causal attention inside each document, whoever holds its tokens; returns [L, Hq, D] in the
    dtype of q. Differentiable once.

    q [L, Hq, D], k and v [L, Hkv, D]: this rank's tokens in the order of its index array; it is
    number `outer.rank * inner.size + inner.rank` of the plan. Every rank must call forward and
    backward equally often and in the same order; one without tokens too, so its loss must depend on
    the output. Raises `ValueError` where shapes, exchanges or head numbers do not fit.
    """
    if transport not in TRANSPORTS:
        raise ValueError(
            f"no attention transport is called {transport!r}; set one of {', '.join(TRANSPORTS)}"
        )
    _check(q, k, v, plan, inner, outer)
    call = _Call(plan, inner, outer, scale, TRANSPORTS[transport])
    if inner.size == 1:
        return _OverTokens.apply(q, k, v, call)
    mine = _OverTokens.apply(*_ToHeads.apply(q, k, v, call), call)
    return _ToTokens.apply(mine, call)
