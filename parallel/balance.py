"""Distribute samples evenly over ranks and packed sequences, without communication."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

ATTENTION_TOKENS = 4096.0
"""Number of keys to which attention costs a token about as much as its linear layers."""

MOST_BOUNDED = 16
"""`rows` bounds their number by the samples of which at most 1, 2, ... so many fit into one."""

Work = Callable[[int], float]


def attention_work(length: int) -> float:
    """Cost of a sample with full causal attention; 1 is the linear layers for one token."""
    return length + length * length / (2 * ATTENTION_TOKENS)


def work_within(windows: Sequence[int | None]) -> Work:
    """`attention_work` for layers with sliding `windows` in tokens (None: full attention). In a
    window W a sample of L > W tokens has W * W / 2 + (L - W) * W pairs of query and key.
    """
    layers = Counter(windows)
    if set(layers) <= {None}:
        return attention_work

    def pairs(length: int, window: int | None) -> float:
        within = length if window is None else min(length, window)
        return within * within / 2 + (length - within) * within

    def cost(length: int) -> float:
        total = sum(count * pairs(length, window) for window, count in layers.items())
        return length + total / (layers.total() * ATTENTION_TOKENS)

    return cost


def split_by_work(works: Sequence[float], parts: int) -> list[list[int]]:
    """Assign samples to `parts` ranks greedily, the most work first: counts differ by at most 1.
    Returns by rank the ascending indices.
    """
    base, extra = divmod(len(works), parts)
    # (load, rank, count); `extra` ranks may take one sample more than `base`.
    heap = [(0.0, rank, 0) for rank in range(parts)]
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for position in sorted(range(len(works)), key=lambda p: (-works[p], p)):
        skipped = []
        while True:
            load, rank, count = heapq.heappop(heap)
            if count < base or (count == base and extra > 0):
                break
            skipped.append((load, rank, count))
        if count == base:
            extra -= 1
        dealt[rank].append(position)
        heapq.heappush(heap, (load + works[position], rank, count + 1))
        for item in skipped:
            heapq.heappush(heap, item)
    return [sorted(positions) for positions in dealt]


def rows(lengths: Sequence[int], budget: int, at_least: int = 1) -> list[list[int]]:
    """Pack samples evenly into at least `at_least` packed sequences of at most `budget` tokens; a
    longer sample is alone. Returns indices by packed sequence.
    """
    if not lengths:
        return [[] for _ in range(at_least)]
    order = sorted(range(len(lengths)), key=lambda p: (-lengths[p], p))
    # The part of a sample beyond the budget fills no other row.
    count = max(at_least, -(-sum(min(length, budget) for length in lengths) // budget), 1)
    for most in range(1, MOST_BOUNDED + 1):  # samples of which a row has room for so many only
        large = sum(length * (most + 1) > budget for length in lengths)
        count = max(count, -(-large // most))
    while True:
        # The least filled row first, so that rows and hence ranks are even; if a sample does not
        # fit, start again with one row more.
        heap = [(0, index) for index in range(count)]
        packed: list[list[int]] = [[] for _ in range(count)]
        for position in order:
            filled, index = heap[0]
            if filled and filled + lengths[position] > budget:
                break
            heapq.heapreplace(heap, (filled + lengths[position], index))
            packed[index].append(position)
        else:
            return [sorted(row) for row in packed]
        count += 1


def rows_in_step(lengths_per_rank: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
    """`rows` of each rank, equally many, so that ranks stay in step."""
    needed = max(len(rows(lengths, budget)) for lengths in lengths_per_rank)
    while True:
        packed = [rows(lengths, budget, at_least=needed) for lengths in lengths_per_rank]
        most = max(len(of_rank) for of_rank in packed)
        if all(len(of_rank) == most for of_rank in packed):
            return packed
        needed = most
