"""Distribute samples evenly over ranks and packed sequences. Pure arithmetic on their lengths.

Every rank computes the same result, so that nothing is communicated:

    lengths of samples -> split over ranks -> packed sequences of at most a token budget, equally
        many on every rank

Where samples have a prefix in common, which is computed once, `prefix_balance.py` does the same.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

ATTENTION_TOKENS = 4096.0
"""Number of keys to which attention costs a token about as much as its linear layers."""

MOST_BOUNDED = 16
"""`rows` first computes how many packed sequences are needed at least, from the samples of which at
most 1, 2, ... up to this number fit into one."""

Work = Callable[[int], float]
"""Function from the number of tokens of a sample to its relative cost, such as `attention_work`."""


def attention_work(length: int) -> float:
    """Relative cost of a sample of `length` tokens with full causal attention: linear layers plus
    attention. The unit is the cost of the linear layers for one token. For every model, attention
    of a token to 4096 keys is taken to cost as much as that.
    """
    return length + length * length / (2 * ATTENTION_TOKENS)


def work_within(windows: Sequence[int | None]) -> Work:
    """A function from the number of tokens of a sample to its relative cost (in the unit of
    `attention_work`: the linear layers for one token), for a model with sliding windows. `windows`:
    for each layer its window in tokens, or None for full attention over the sample. Returns
    `attention_work` if no layer has a window.

    In a layer with a window W, the first W tokens of a sample attend to all tokens before them and
    each later one to W tokens. A sample of L > W tokens has W * W / 2 + (L - W) * W pairs of query
    and key there, instead of L * L / 2.
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
    """Assign samples to `parts` ranks: sample counts differ by at most 1, and work is about even.
    `works`: the relative cost of each sample.

    Returns for each rank the ascending indices into `works`. The algorithm is greedy: the sample of
    most work first, each to the rank with the least work among those that may take one more.
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
    """Pack samples into packed sequences of at most `budget` tokens, evenly filled. `lengths`:
    tokens of each sample. A sample of more than `budget` tokens gets a packed sequence of its own.

    Returns for each packed sequence the ascending indices into `lengths`. There are at least
    `at_least` packed sequences, of which some are empty if there are too few samples.
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
    """Pack each rank's samples into packed sequences of at most `budget` tokens, equally many on
    every rank, so that ranks take their micro-batches in step. Some may be empty; a sample of more
    than `budget` tokens is alone.

    `lengths_per_rank`: by rank, the tokens of each of its samples. Returns by rank and packed
    sequence the indices into that rank's lengths.
    """
    needed = max(len(rows(lengths, budget)) for lengths in lengths_per_rank)
    while True:
        packed = [rows(lengths, budget, at_least=needed) for lengths in lengths_per_rank]
        most = max(len(made) for made in packed)
        if all(len(made) == most for made in packed):
            return packed
        needed = most
