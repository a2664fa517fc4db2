"""Cuts of a packed row: every token once, even work, labels that do not care."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.kernels.sequence_attention import AttentionPlan
from megarl.parallel.mesh import Axis
from megarl.parallel.sequence import CUTS, cut, imbalance
from megarl.parallel.tensor import Shard
from megarl.trainer.packing import pack, pack_shared
from megarl.types import Samples

ROW = st.lists(st.integers(0, 70), min_size=1, max_size=12)
HOW = [*CUTS, "auto"]


def edges(lengths: list[int]) -> list[int]:
    """First position of each document, then the row's length."""
    return [sum(lengths[:number]) for number in range(len(lengths) + 1)]


@settings(deadline=None, derandomize=True)
@given(lengths=ROW, size=st.integers(1, 16), how=st.sampled_from(HOW))
def test_a_cut_is_a_permutation_that_inverts(lengths: list[int], size: int, how: str) -> None:
    indices = cut(edges(lengths), size, how)
    assert len(indices) == size
    whole = torch.cat(indices)
    assert torch.equal(whole.sort().values, torch.arange(sum(lengths)))
    values = torch.randn(sum(lengths))
    back = torch.empty_like(values)
    back[whole] = torch.cat([values[index] for index in indices])
    assert torch.equal(back, values)


@settings(deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    size=st.integers(2, 8),
    how=st.sampled_from(HOW),
)
def test_labels_are_shifted_before_the_cut(lengths: list[int], size: int, how: str) -> None:
    """Whoever holds a token holds its successor as the label, even where the successor sits on
    another rank.
    """
    samples = Samples.concatenate(
        [
            Samples.one(
                row,
                [100 * row + place for place in range(length)],
                engine_logprobs=[float(place) for place in range(length)],
            )
            for row, length in enumerate(lengths)
        ]
    )
    whole = pack(samples, torch.device("cpu"))
    seen = []
    for rank in range(size):
        axis = Axis("sequence", size, rank, tuple(range(size)), None)
        mine = pack_shared(samples, torch.device("cpu"), axis, how)
        assert len(mine.token_ids) == len(mine.indices[rank]) >= 1
        trained = mine.mask
        assert torch.equal(mine.targets[trained], mine.token_ids[trained] + 1)
        assert torch.equal(mine.engine_logprobs[trained], mine.position_ids[trained].float() + 1)
        seen += mine.token_ids[trained].tolist()
    assert sorted(seen) == sorted(whole.token_ids[whole.mask].tolist())


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_zigzag_shares_the_work_of_one_long_document(size: int) -> None:
    row = [0, 65536]
    assert imbalance(row, cut(row, size, "zigzag"), linear=False) <= 1.02
    assert imbalance(row, cut(row, size, "auto"), linear=False) <= 1.02
    assert imbalance(row, cut(row, size, "contiguous"), linear=False) == pytest.approx(
        (2 * size - 1) / size, rel=1e-3
    )


def chains_of_thought(draw: random.Random, total: int) -> list[int]:
    """A row of log-normal lengths from 16 to 16,384 tokens, as rollouts have."""
    row = [0]
    while row[-1] < total:
        row.append(min(total, row[-1] + int(min(max(draw.lognormvariate(6.5, 1.0), 16), 16384))))
    return row


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_work_of_mixed_lengths_is_even(size: int) -> None:
    for seed in range(8):
        row = chains_of_thought(random.Random(seed), 65536)
        assert imbalance(row, cut(row, size, "zigzag_document"), linear=False) <= 1.05
        assert imbalance(row, cut(row, size, "auto")) <= 1.01
        assert imbalance(row, cut(row, size, "auto"), linear=False) <= 1.05


def trees(draw: random.Random, total: int) -> tuple[list[int], torch.Tensor]:
    """A row of prompts with 2 to 16 responses each, some prompts behind a shared instruction: the
    starts of its documents, and the number of keys that each token attends to. Log-normal lengths:
    prompts from 16 to 4,096 tokens, responses from 16 to 16,384.
    """
    starts, seen = [0], []

    def add(before: int, median: float, longest: int) -> int:
        length = int(min(max(draw.lognormvariate(median, 1.0), 16), longest, total - starts[-1]))
        starts.append(starts[-1] + length)
        seen.append(torch.arange(before + 1, before + length + 1))
        return before + length

    while starts[-1] < total:
        instruction = add(0, 5.5, 4096) if draw.random() < 0.3 else 0
        for _ in range(draw.randint(1, 3) if instruction else 1):
            prompt = add(instruction, 5.5, 4096)
            for _ in range(draw.randint(2, 16)):
                add(prompt, 6.5, 16384)
    return starts, torch.cat(seen)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_work_of_mixed_trees_is_even(size: int) -> None:
    worst = 0.0
    for seed in range(8):
        row, seen = trees(random.Random(seed), 65536)
        indices = cut(row, size, "auto", seen)
        assert imbalance(row, indices, seen=seen) <= 1.01
        worst = max(worst, imbalance(row, indices, linear=False, seen=seen))
    print(f"{size} ranks: attention of the busiest over the mean {worst:.3f}")
    assert worst <= 1.05


def test_a_cut_that_needs_no_messages_is_preferred() -> None:
    """Four documents on four ranks: nobody needs another's keys."""
    row = [0, 64, 128, 192, 256]
    assert all(
        torch.equal(a, b) for a, b in zip(cut(row, 4), cut(row, 4, "contiguous"), strict=True)
    )


@pytest.mark.parametrize(("windows", "hops"), [((1024, 1024), 1), ((1024, None), 7), ((), 7)])
def test_the_cut_within_a_window_lets_a_ring_stop_early(
    windows: tuple[int | None, ...], hops: int
) -> None:
    """Where all layers have a window, contiguous parts are about as even as zigzag ones."""
    axis = Axis("sequence", 8, 0, tuple(range(8)), None)
    sample = Samples.one(0, [0] * 8192)
    micro = pack_shared(sample, torch.device("cpu"), axis, windows=windows)
    plan = AttentionPlan.of(micro.indices, micro.starts, torch.device("cpu"))
    assert plan.within(1024).hops == hops


@settings(deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    parts=st.integers(1, 8),
    data=st.data(),
)
def test_shards_are_a_partition(shape: list[int], parts: int, data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    shard = Shard.even(dim, shape[dim], parts)
    whole = torch.randn(shape)
    pieces = [shard.take(whole, rank) for rank in range(parts)]
    assert torch.equal(torch.cat(pieces, dim), whole)
    assert max(shard.lengths) - min(shard.lengths) <= 1
    assert all(shard.whole_shape(piece.shape) == tuple(shape) for piece in pieces)
