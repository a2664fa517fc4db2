"""Arithmetic of key-value memory for kv_waste.py, without vLLM.

A block is memory for the keys and values of `block_size` consecutive tokens of a sequence; a slot
is a block's memory for one token. A share of waste is 1 - slots with a token / allocated slots.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

SIGMA = 0.8
"""Standard deviation of the logarithm of response lengths."""


class Running(NamedTuple):
    """A sequence while it is generated."""

    prompt: int
    """The same number for sequences of the same prompt."""
    prompt_tokens: int
    tokens: int
    """Tokens so far that have keys and values, those of the prompt included."""
    max_tokens: int
    """Tokens that the response will have in the end."""


class Sample(NamedTuple):
    """Key-value memory of an engine at one engine step."""

    allocated: int
    """Blocks that vLLM's block pool does not count as free."""
    listed: int
    """Different blocks in the block tables of the running sequences."""
    filled: int
    """Slots of these blocks that hold a token."""
    running: list[Running]


class Waste(NamedTuple):
    """Shares of waste at one engine step."""

    paged: float
    """Of the engine's own blocks."""
    contiguous: float
    """If each sequence had memory for the prompt and the longest response there may be."""
    oracle: float
    """If each sequence had memory for exactly the tokens that it will have in the end."""
    empty: float
    """Blocks' worth of slots without a token, a sequence; half a block is expected."""
    computed: dict[int, float]
    """{block size: share} of blocks of other sizes, by `blocks_needed`."""
    off: int
    """Allocated blocks minus the blocks that `blocks_needed` gives for the engine's block size."""


def response_lengths(mean: int, cap: int, count: int, seed: int) -> list[int]:
    """`count` lengths in random order: quantiles of a log-normal distribution whose logarithm has
    the deviation `SIGMA`, cut off at `cap`, so that their mean is `mean` but for rounding. Raises
    `ValueError` if `cap` is not above `mean`.
    """
    if cap <= mean:
        raise ValueError(f"lengths of mean {mean} cannot all be at most {cap}; set a larger cap")
    normal = statistics.NormalDist(0.0, SIGMA)
    ratios = [math.exp(normal.inv_cdf((number + 0.5) / count)) for number in range(count)]
    low, high = 0.0, float(cap) * count  # medians with a mean below and above the wanted one
    for _ in range(80):
        median = (low + high) / 2
        is_short = sum(min(cap, median * ratio) for ratio in ratios) < mean * count
        low, high = (median, high) if is_short else (low, median)
    lengths = [min(cap, max(1, round(low * ratio))) for ratio in ratios]
    random.Random(f"kv_waste/{seed}").shuffle(lengths)
    return lengths


def occupied(tables: Iterable[tuple[Sequence[int], int]], block_size: int) -> tuple[int, int]:
    """(different blocks, slots of them that hold a token) of block tables [(block ids in the order
    of the sequence, tokens with keys and values)]. A block in several tables counts once.
    """
    filled: dict[int, int] = {}
    for blocks, tokens in tables:
        for place, block in enumerate(blocks):
            here = min(block_size, max(0, tokens - place * block_size))
            filled[block] = max(here, filled.get(block, 0))
    return len(filled), sum(filled.values())


def blocks_needed(running: Iterable[Running], block_size: int) -> tuple[int, int]:
    """(blocks, slots of them that hold a token) that these sequences need: whole blocks of a prompt
    once for all of its sequences. vLLM shares at most all tokens of a prompt but the last, which
    each sequence computes.
    """
    blocks, filled, shared = 0, 0, {}
    for one in running:
        common = (one.prompt_tokens - 1) // block_size
        shared[one.prompt] = common
        blocks += math.ceil(one.tokens / block_size) - common
        filled += one.tokens - common * block_size
    in_common = sum(shared.values())
    return blocks + in_common, filled + in_common * block_size


def waste(sample: Sample, block_size: int, cap: int, others: Iterable[int]) -> Waste:
    """Shares of waste of one sample. `cap`: longest response there may be; `others`: block sizes to
    compute.
    """
    tokens = sum(one.tokens for one in sample.running)
    longest = sum(one.prompt_tokens + cap for one in sample.running)
    final = sum(one.prompt_tokens + one.max_tokens for one in sample.running)
    computed = {}
    for size in others:
        blocks, filled = blocks_needed(sample.running, size)
        computed[size] = 1 - filled / (blocks * size)
    return Waste(
        paged=1 - sample.filled / (sample.allocated * block_size),
        contiguous=1 - tokens / longest,
        oracle=1 - tokens / final,
        empty=(sample.allocated - sample.filled / block_size) / len(sample.running),
        computed=computed,
        off=sample.allocated - blocks_needed(sample.running, block_size)[0],
    )
