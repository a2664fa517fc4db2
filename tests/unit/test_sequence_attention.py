"""Attention split by token over simulated ranks, every schedule and block, against dense attention
in float64.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sequence_cases import (
    CPU,
    TOLERANCE,
    Case,
    assert_close,
    cases,
    dense,
    make_plan,
    rank_body,
    split_attention,
)
from support.simulated import SimulatedExchange, simulate
from torch.utils.checkpoint import checkpoint

from megarl.kernels import dense as dense_kernels
from megarl.kernels import mask_regions, region_block
from megarl.kernels.attention_plan import BLOCKS
from megarl.kernels.block import Positions
from megarl.kernels.block_cpu import CpuBlock
from megarl.kernels.block_reference import visible
from megarl.kernels.sequence_attention import TRANSPORTS, AttentionPlan, sequence_attention
from megarl.parallel.sequence import CUTS, cut


def _runs_here(name: str) -> bool:
    """Triton kernels run on a CPU only where they are interpreted, and what is in
    test_block_flash.py and test_attention_cudnn.py not at all.
    """
    if name in ("flash", "cudnn"):
        return False
    return name != "triton" or (importlib.util.find_spec("triton") is not None and INTERPRETED)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BLOCK_NAMES = [name for name in BLOCKS if _runs_here(name)]
DTYPES = {
    name: [torch.float32] if name == "triton" else [torch.float32, torch.float64] for name in BLOCKS
}


@pytest.mark.parametrize("block", BLOCK_NAMES)
@pytest.mark.parametrize("transport", [
    pytest.param(name, marks=pytest.mark.nightly if INTERPRETED else ()) for name in TRANSPORTS
])  # fmt: skip
def test_every_schedule_equals_dense_attention(transport: str, block: str) -> None:
    @settings(max_examples=4 if block == "triton" else 25, deadline=None, derandomize=True)
    @given(cases(width=16 if block == "triton" else None), st.sampled_from(DTYPES[block]))
    def check(case: Case, dtype: torch.dtype) -> None:
        tensors = case.tensors(dtype)
        wanted = dense(case, [x.double() for x in tensors])
        assert_close(split_attention(case, block, transport, tensors)[0], wanted, TOLERANCE[dtype])

    check()


@pytest.mark.parametrize("how", [*CUTS, "permuted"])
@pytest.mark.parametrize(("transport", "more"), [
    *((transport, {}) for transport in TRANSPORTS),
    ("ring", {"cap": 0.8, "has_sinks": True}),
    ("ring", {"window": 100}),
    ("ring", {"window": 100, "parents": (-1, 0, 0, 2, 0)}),
    ("ring", {"window": 1}),
])  # fmt: skip
def test_longer_documents_and_every_cut(
    monkeypatch: pytest.MonkeyPatch, transport: str, more: dict[str, Any], how: str
) -> None:
    """Long enough that the CPU block has rectangles, triangles and tiles of its own, not only
    batches of small pieces; with a soft cap, rectangles of several chunks of queries; within a
    window, bands with both, also over the end of a shared prefix.
    """
    if "cap" in more:
        monkeypatch.setitem(dense_kernels.CHUNK_SCORES, "cpu", 2**14)
    case = replace(Case((301, 300, 7, 450, 1), 4, 2, how, (4, 2), 8, 0.35, 3), **more)
    dtype = torch.float64 if more else torch.float32
    found, _ = split_attention(case, "cpu", transport, case.tensors(dtype))
    assert_close(found, dense(case, case.tensors()), TOLERANCE[dtype])


@pytest.mark.parametrize("how", [*CUTS, "permuted"])
@pytest.mark.parametrize("transport", ["ring", "all_gather"])
def test_wide_tiles_within_a_window(
    monkeypatch: pytest.MonkeyPatch, how: str, transport: str
) -> None:
    """Whose middle needs no mask, and whose edges are calls of fewer queries, also over the ends of
    shared prefixes.
    """
    monkeypatch.setattr(mask_regions, "WIDE_TILE", 24)
    monkeypatch.setattr(mask_regions, "TILE", 10)
    kinds = set[str]()

    def mask_regions_of(*arguments: Any, **named: Any) -> Any:
        spans, limits = mask_regions.mask_regions_of(*arguments, **named)
        for span in spans:
            kinds.add(span.kind)
            seen = (limits.upto - limits.first)[span.q0 : span.q1]
            assert min(span.shape) > 0 and int(seen.min()) > 0
        return spans, limits

    monkeypatch.setattr(region_block, "mask_regions_of", mask_regions_of)
    for parents in ((), (-1, 0, 0, 2, 0)):
        case = Case((301, 300, 70, 450, 9), 4, 2, how, (4, 2), 8, 0.35, 3, parents, 100)
        found, _ = split_attention(case, "cpu", transport, case.tensors())
        assert_close(found, dense(case, case.tensors()), TOLERANCE[torch.float64])
    # Few keys of a striped rank are within a window: no wide tiles.
    is_wide = "striped" not in how or transport == "all_gather"
    assert how == "permuted" or ("edges" in kinds) == is_wide


def _bytes_sent(case: Case, transport: str) -> list[tuple[int, int]]:
    """By rank, the bytes that it sends to others in the forward and in the backward pass."""
    plan, tensors, index = make_plan(case, "cpu"), case.tensors(), case.indices()

    def body(exchange: SimulatedExchange) -> tuple[int, int]:
        q, k, v = (x[index[exchange.rank]].requires_grad_() for x in tensors[:3])
        inner, outer = exchange.split(case.ulysses)
        out = sequence_attention(q, k, v, plan, inner, outer, case.scale, transport)
        forward = outer.bytes_sent
        torch.autograd.grad(out, [q, k, v], tensors[3][index[exchange.rank]])
        return forward, outer.bytes_sent - forward

    return simulate(case.ranks, body)


@pytest.mark.parametrize("how", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("transport", ["ring", "ring_lean"])
@pytest.mark.parametrize("window", [17, 90])
def test_a_ring_within_a_window_sends_the_fewest_bytes(
    how: str, transport: str, window: int
) -> None:
    """A key goes as far as the last rank with a query that attends to it, and its gradients come
    back from each rank that it has reached, in one message each.
    """
    case = Case((250, 6), 4, 1, how, (2, 1), 8, 0.35, 0, (), window)
    sent = _bytes_sent(case, transport)
    index = case.indices()
    mask = visible(case.positions(), case.positions(), window)
    steps = 0
    for rank in range(4):
        for key in index[rank].tolist():
            seen_by = [r for r in range(4) if bool(mask[index[r], key].any())]
            steps += max((r - rank) % 4 for r in seen_by)
    token = 2 * 1 * 8 * 8  # keys and values of one head of 8 numbers in float64
    assert sum(forward for forward, _ in sent) == steps * token > 0
    assert sum(backward for _, backward in sent) == 2 * steps * token


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("how", [*CUTS, "permuted"])
@pytest.mark.parametrize(("lengths", "parents", "window"), [
    ((250, 6), (), 17),
    ((250, 6), (), 90),
    ((60, 50, 7, 80, 30, 29), (), 33),
    ((60, 50, 7, 80, 30, 29), (-1, 0, 1, 0, -1, 4), 33),
    ((32,) * 8, (), 5),
    ((250, 6), (), None),
    ((60, 50, 7, 80, 30, 29), (-1, 0, 1, 0, -1, 4), None),
])  # fmt: skip
def test_an_all_gather_sends_the_fewest_bytes(
    lengths: tuple[int, ...], parents: tuple[int, ...], window: int | None, how: str, ulysses: int
) -> None:
    """Within a window a key goes once to each group with a query that attends to it, and one
    gradient comes back from each; without, to all.
    """
    case = Case(lengths, 4 * ulysses, ulysses, how, (2, 2), 8, 0.35, 0, parents, window)
    sent = _bytes_sent(case, "all_gather")
    mask = visible(case.positions(), case.positions(), window)
    joined = case.indices()
    groups = [torch.cat(joined[n : n + ulysses]) for n in range(0, len(joined), ulysses)]
    copies = 0
    for rank, other in itertools.permutations(range(4), 2):
        seen = mask[groups[other]][:, groups[rank]].any(0)
        copies += int(seen.sum()) if window is not None else len(seen)
    if window is not None:
        assert copies < 3 * sum(lengths), "a case in which all is needed shows nothing"
    token = 2 * 2 * 8 * 8  # keys and values of two heads of 8 numbers in float64
    assert sum(forward for forward, _ in sent) == copies * token
    assert sum(backward for _, backward in sent) == 2 * copies * token


def test_an_all_gather_is_a_collective_in_layers_without_a_window() -> None:
    """Every layer by its own window; where no rank attends to another's keys nothing is sent."""
    case = Case((64,), 2, 1, "contiguous", (2, 1), 8, 0.35, 0)
    collective = ["all_gather", "all_gather", "reduce_scatter"]
    for window, calls in ((None, collective), (64, collective), (40, ["all_to_all"] * 3)):
        narrow = replace(case, window=window)
        assert split_attention(narrow, "cpu", "all_gather", case.tensors())[1][1] == calls
    documents = replace(case, lengths=(32, 32), window=5)
    assert split_attention(documents, "cpu", "all_gather", case.tensors())[1][1] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ulysses", [1, 4])
def test_16_bit_inputs_are_summed_in_float32(
    ulysses: int, transport: str, dtype: torch.dtype
) -> None:
    """Four ranks round no more than one does: half a unit in the last place, and the rounding of
    the saved output.
    """
    case = Case((90, 38), 4, ulysses, "zigzag", (4, 2), 16, 0.25, 5)
    tensors = case.tensors(dtype)
    found, _ = split_attention(case, "cpu", transport, tensors)
    assert all(x.dtype == dtype for x in found)
    assert_close(found, dense(case, [x.double() for x in tensors]), torch.finfo(dtype).eps)


@pytest.mark.parametrize("tile", [1, 4, 64])
@pytest.mark.parametrize("small", [0, mask_regions.SMALL_SCORES])
def test_cpu_block_equals_the_reference_block_on_any_places(
    monkeypatch: pytest.MonkeyPatch, tile: int, small: int
) -> None:
    """Any queries and any keys, merged into sums of which some are still empty."""
    monkeypatch.setattr(mask_regions, "TILE", tile)
    monkeypatch.setattr(mask_regions, "SMALL_SCORES", small)

    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(
        st.lists(st.integers(0, 40), min_size=1, max_size=6),
        st.integers(0, 2**16),
        st.sampled_from([None, 0.9]),
    )
    def check(lengths: list[int], seed: int, cap: float | None) -> None:
        draw = torch.Generator().manual_seed(seed)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        size = int(starts[-1])
        order = torch.randperm(size, generator=draw) if seed % 2 else torch.arange(size)
        chosen = [order[torch.rand(len(order), generator=draw) < share] for share in (0.5, 0.7)]
        queries, keys = (Positions.of(index, starts) for index in chosen)
        q = torch.randn(len(chosen[0]), 4, 5, generator=draw)
        k, v = torch.randn(len(chosen[1]), 2, 2, 5, generator=draw).unbind(1)
        upstream = torch.randn(q.shape, generator=draw)
        lse = torch.randn(4, len(q), generator=draw)
        lse.masked_fill_(torch.rand(len(q), generator=draw) < 0.5, -torch.inf)
        out = torch.randn(q.shape, generator=draw) * (lse > -torch.inf).T[:, :, None]
        blocks = [BLOCKS[name]() for name in ("reference", "cpu")]
        works = [block.prepare(queries, keys, CPU) for block in blocks]
        assert (works[0] is None) == (works[1] is None)
        if works[0] is None:
            return
        results = []
        for block, work in zip(blocks, works, strict=True):
            sums, grads = (out.clone(), lse.clone()), [torch.ones_like(x) for x in (q, k, v)]
            block.forward(q, k, v, work, 0.4, *sums, cap)
            final = results[0][:2] if results else sums
            block.backward(upstream, q, k, v, *final, work, 0.4, *grads, cap)
            results.append([*sums, *grads])
        for wanted, found in zip(*results, strict=True):
            assert torch.equal(wanted == -torch.inf, found == -torch.inf)
            assert_close([found.nan_to_num(neginf=0.0)], [wanted.nan_to_num(neginf=0.0)], 1e-5)

    check()


@pytest.mark.parametrize("how", ["contiguous", "zigzag", "striped"])
def test_regular_cuts_need_no_masks(how: str) -> None:
    starts = torch.tensor([0, 3000, 4096])
    positions = [Positions.of(index, starts) for index in cut(starts, 4, how)]
    works = [CpuBlock().prepare(queries, keys, CPU) for queries in positions for keys in positions]
    found = [piece for work in works if work is not None for piece in work.pieces]
    assert found and all(piece.mask is None for piece in found)
    assert max(len(work.pieces) for work in works if work is not None) <= 6


def test_tiles_of_a_band_share_their_masks() -> None:
    """The masks of a long document within a window are as many as those of a short one."""
    made = []
    for length in (4096, 16384):
        keys = Positions.of(torch.arange(length), torch.tensor([0, length]))
        work = CpuBlock().prepare(keys.views(512)[0], keys, CPU)
        assert work is not None
        made.append({id(piece.mask) for piece in work.pieces if piece.mask is not None})
    assert len(made[0]) == len(made[1]) < 20


def test_irregular_cuts_stay_in_small_masks() -> None:
    starts = torch.tensor([0, 8192])
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(8192, generator=draw)
    queries, keys = (Positions.of(half, starts) for half in order.chunk(2))
    work = CpuBlock().prepare(queries, keys, CPU)
    assert work is not None
    masks = [piece.mask for piece in work.pieces if piece.mask is not None]
    assert sum(mask.numel() for mask in masks) < 2 * 4096 * mask_regions.TILE


@pytest.mark.parametrize("block", BLOCK_NAMES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ulysses", [1, 2])
def test_the_same_call_twice_is_bitwise_equal(ulysses: int, transport: str, block: str) -> None:
    case = Case((33, 1, 20), 4, ulysses, "zigzag_document", (4, 2), 16, 0.35, 2)
    tensors = case.tensors(torch.float32)
    first, second = (split_attention(case, block, transport, tensors)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_gradient_checkpointing(ulysses: int, transport: str) -> None:
    """The forward pass runs again during backward, so exchanges of both are interleaved, alike on
    every rank.
    """
    case = Case((40, 13), 4, ulysses, "zigzag", (4, 2), 8, 0.35, 4)
    tensors = case.tensors()

    def body(exchange: SimulatedExchange, recompute: bool) -> list[torch.Tensor]:
        inner, outer = exchange.split(ulysses)
        plan = make_plan(case, "cpu")
        mine = case.indices()[exchange.rank]
        q, k, v = (x[mine].requires_grad_() for x in tensors[:3])

        def layer(x: torch.Tensor) -> torch.Tensor:
            seen = sequence_attention(x, k, v, plan, inner, outer, case.scale, transport)
            return (x + seen).tanh()

        x = q
        for _ in range(2):
            out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
            assert isinstance(out, torch.Tensor)
            x = out
        return [x.detach(), *torch.autograd.grad(x, (q, k, v), tensors[3][mine])]

    for plain, again in zip(simulate(4, body, False), simulate(4, body, True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


# Of 12 x 5, 7 or 8 tokens a rank: a document reaches into the second next.
@pytest.mark.parametrize(("lengths", "how", "hops"), [
    ((64,), "contiguous", 7), ((64,), "zigzag", 7), ((64,), "striped", 7),
    ((8,) * 8, "contiguous", 0), ((12,) * 5, "contiguous", 2), ((1,) * 64, "striped", 0),
    ((20, 44), "contiguous", 5),
])  # fmt: skip
def test_the_ring_stops_when_nobody_sees_what_comes(
    lengths: tuple[int, ...], how: str, hops: int
) -> None:
    case = Case(lengths, 8, 1, how, (2, 1), 4, 0.5, 6)
    assert make_plan(case, "cpu").hops == hops
    _, (inner, outer) = split_attention(case, "cpu", "ring", case.tensors())
    assert not inner
    keys, gradients = (sum(call.endswith(f"on {channel}") for call in outer) for channel in (0, 1))
    assert keys == 2 * hops  # forward, and again in backward
    assert gradients == (hops + 1 if hops else 0)  # and home


def test_hops_are_those_that_the_masks_ask_for() -> None:
    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(cases())
    def check(case: Case) -> None:
        plan = make_plan(case, "reference")
        size = len(plan.positions)
        seen = [(r, s) for r in range(size) for s in range(size) if plan.works(r, s)]
        assert plan.hops == max((r - s) % size for r, s in seen)

    check()


def test_a_row_without_tokens() -> None:
    case = Case((0,), 3, 1, "contiguous", (2, 1), 4, 0.5, 0)
    for transport in TRANSPORTS:
        found, _ = split_attention(case, "cpu", transport, case.tensors())
        assert all(x.numel() == 0 for x in found)


@pytest.mark.parametrize(("heads", "ulysses", "message"), [
    ((6, 2), 4, "one of 1, 2, 6 and"),
    ((12, 6), 4, "one of 1, 2, 3, 6, 12"),
    ((3, 2), 1, "do not divide 3"),
])  # fmt: skip
def test_heads_that_cannot_be_shared_are_refused(
    heads: tuple[int, int], ulysses: int, message: str
) -> None:
    case = Case((8,), 4, ulysses, "contiguous", heads, 4, 0.5, 0)
    with pytest.raises(ValueError, match=message):
        split_attention(case, "cpu", "ring", case.tensors())


def test_what_does_not_fit_is_refused() -> None:
    case = Case((8,), 2, 1, "contiguous", (2, 1), 4, 0.5, 0)
    with pytest.raises(ValueError, match="set one of ring, ring_lean, all_gather"):
        split_attention(case, "cpu", "pigeon", case.tensors())
    with pytest.raises(ValueError, match="set one of reference, cpu"):
        make_plan(case, "abacus")
    with pytest.raises(ValueError, match=r"training\.sequence\.ulysses to a divisor"):
        AttentionPlan.of(case.indices(), case.starts, CPU, ulysses=3)
    of_two = AttentionPlan.of(case.indices(), case.starts, CPU, ulysses=2)
    uneven = AttentionPlan.of([torch.arange(3), torch.arange(3, 8)], case.starts, CPU)
    for plan, said in (
        (of_two, "groups of 2, but the exchanges have 2 groups of 1"),
        (uneven, "rank has 3 tokens in the plan"),
    ):
        with pytest.raises(ValueError, match=said):
            simulate(2, rank_body, case, plan, "ring", case.tensors())
