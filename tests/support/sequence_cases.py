"""Attention split by token over simulated ranks: random cases, the split computation, and dense
attention in float64 to compare with.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from megarl.kernels.block import Positions
from megarl.kernels.block_reference import reference_attention, visible
from megarl.kernels.sequence_attention import AttentionPlan, sequence_attention
from megarl.parallel.sequence import CUTS, cut
from support.simulated import SimulatedExchange, simulate

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@dataclass(frozen=True)
class Case:
    """A packed sequence, how it is cut over ranks, and the heads."""

    lengths: tuple[int, ...]
    ranks: int
    ulysses: int
    how: str
    heads: tuple[int, int]
    width: int
    scale: float
    seed: int
    parents: tuple[int, ...] = ()
    window: int | None = None
    cap: float | None = None
    has_sinks: bool = False
    begins: tuple[int, ...] = ()

    @property
    def starts(self) -> torch.Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def indices(self) -> list[torch.Tensor]:
        if self.how in CUTS:
            return cut(self.starts, self.ranks, self.how, self.seen())
        draw = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(int(self.starts[-1]), generator=draw)
        borders = torch.randint(0, len(order) + 1, (self.ranks - 1,), generator=draw).sort().values
        return list(order.tensor_split(borders))  # uneven, and now and then empty

    def positions(self) -> Positions:
        """Those of the whole sequence."""
        return Positions.of(
            torch.arange(int(self.starts[-1])), self.starts, self.parents, self.begins
        )

    def seen(self) -> torch.Tensor:
        """Number of keys that each token attends to."""
        return visible(self.positions(), self.positions(), self.window).sum(1)

    def sinks(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The sink of each query head, if the case has sinks."""
        if not self.has_sinks:
            return None
        return torch.linspace(-2.0, 3.0, self.heads[0], dtype=torch.float64).to(dtype)

    def tensors(self, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
        """q, k, v and the gradient of the output, over the whole sequence."""
        draw = torch.Generator().manual_seed(self.seed)
        query_heads, kv_heads = self.heads
        counts = (query_heads, kv_heads, kv_heads, query_heads)
        shapes = [(int(self.starts[-1]), count, self.width) for count in counts]
        return [
            torch.randn(shape, dtype=torch.float64, generator=draw).to(dtype) for shape in shapes
        ]


def degrees() -> st.SearchStrategy[tuple[int, int, tuple[int, int]]]:
    """(ranks, Ulysses degree, heads) that fit: also fewer KV heads than Ulysses ranks."""
    every = [
        (ranks, ulysses, (kv * group, kv))
        for ranks in range(1, 9)
        for ulysses in range(1, ranks + 1)
        for kv in (1, 2, 4)
        for group in (1, 2, 4)
        if ranks % ulysses == 0
        and kv * group % ulysses == 0
        and (kv % ulysses == 0 or ulysses % kv == 0)
    ]
    return st.sampled_from(every)


@st.composite
def cases(draw: st.DrawFn, longest: int = 24, width: int | None = None) -> Case:
    ranks, ulysses, heads = draw(degrees())
    lengths = tuple(draw(st.lists(st.integers(1, longest), min_size=1, max_size=7)))
    parents: list[int] = []
    begins: list[int] = []
    how_much = draw(st.sampled_from(["nothing", "all", "a part"]))
    for document in range(len(lengths) if how_much != "nothing" else 0):
        # In depth-first order a document continues the one before it, or one of its ancestors.
        path = [-1] if not document else [document - 1, *_path(parents, document - 1)]
        parents.append(draw(st.sampled_from(path)))
        if how_much == "a part" and (parent := parents[-1]) >= 0:
            begins.append(begins[parent] + draw(st.integers(1, lengths[parent])))
        elif how_much == "a part":
            begins.append(0)
    how = draw(st.sampled_from([*CUTS, "permuted"]))
    widths = st.sampled_from([1, 3, 8]) if width is None else st.just(width)
    return Case(
        lengths,
        ranks,
        ulysses,
        how,
        heads,
        draw(widths),
        draw(st.sampled_from([0.1, 0.35, 1.0])),
        draw(st.integers(0, 99)),
        tuple(parents),
        # With a window of 1 the gradient of q is 0: in float32, rounding and nothing else.
        draw(st.none() | st.integers(2, 40)),
        draw(st.sampled_from([None, None, 0.7, 4.0])),
        draw(st.booleans()),
        tuple(begins),
    )


def _path(parents: list[int], document: int) -> list[int]:
    """The ancestors of a document, the nearest first, and -1."""
    found = [parents[document]]
    while found[-1] >= 0:
        found.append(parents[found[-1]])
    return found


class Locked:
    """A block that only one simulated rank may use at a time: Triton's interpreter is not made for
    threads.
    """

    lock = threading.Lock()

    def __init__(self, block: Any) -> None:
        self.prepare, self.block = block.prepare, block

    def forward(self, *arguments: Any) -> None:
        with self.lock:
            self.block.forward(*arguments)

    def backward(self, *arguments: Any) -> None:
        with self.lock:
            self.block.backward(*arguments)


def make_plan(case: Case, block: str) -> AttentionPlan:
    plan = AttentionPlan.of(
        *(case.indices(), case.starts, CPU),
        parents=case.parents,
        begins=case.begins,
        ulysses=case.ulysses,
        block=block,
    ).within(case.window)
    if block == "triton":
        plan.block = Locked(plan.block)
    return plan


def rank_body(
    exchange: SimulatedExchange,
    case: Case,
    plan: AttentionPlan,
    transport: str,
    tensors: list[torch.Tensor],
) -> Any:
    """One rank's output, gradients, and the calls it made."""
    inner, outer = exchange.split(case.ulysses)
    mine = case.indices()[exchange.rank]
    q, k, v = (x[mine].requires_grad_() for x in tensors[:3])
    sinks = case.sinks(q.dtype)
    inputs = [q, k, v] if sinks is None else [q, k, v, sinks.requires_grad_()]
    out = sequence_attention(
        *(q, k, v, plan, inner, outer, case.scale, transport), cap=case.cap, sinks=sinks
    )
    grads = torch.autograd.grad(out, inputs, tensors[3][mine])
    return [out.detach(), *grads], (inner.calls, outer.calls)


def split_attention(
    case: Case, block: str, transport: str, tensors: list[torch.Tensor]
) -> tuple[list[torch.Tensor], Any]:
    """Output and gradients over the whole sequence, put together from the ranks', and the calls that all
    of them made. The gradients of sinks, if there are any, are summed over ranks.
    """
    found = simulate(case.ranks, rank_body, case, make_plan(case, block), transport, tensors)
    made = found[0][1]
    assert all(calls == made for _, calls in found), "ranks called the exchange differently"
    index = torch.cat(case.indices())
    joined = [torch.cat([results[i] for results, _ in found]) for i in range(4)]
    whole = [torch.empty_like(x).index_copy_(0, index, x) for x in joined]
    if case.has_sinks:
        whole.append(torch.stack([results[4] for results, _ in found]).sum(0))
    return whole, made


def dense(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    sinks = case.sinks(q.dtype)
    inputs = [q, k, v] if sinks is None else [q, k, v, sinks.requires_grad_()]
    out = reference_attention(
        *(q, k, v, case.positions(), case.scale), window=case.window, cap=case.cap, sinks=sinks
    )
    return [out.detach(), *torch.autograd.grad(out, inputs, tensors[3])]


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and torch.isfinite(a).all()
        assert (a.double() - b.double()).norm() <= tolerance * max(1.0, float(b.norm()))
