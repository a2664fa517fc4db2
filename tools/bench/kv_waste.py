"""The share of an engine's key-value memory that is allocated but holds no token, by arithmetic.

    python tools/bench/kv_waste.py [--lengths 256,1024,4096,16384] [--block-sizes 128,32] [--json]

`--requests` responses of each length are generated, `--sequences` at a time, in groups of four of
one prompt of 100 tokens, whose whole blocks the group shares. Lengths are quantiles of a log-normal
distribution, cut off at twice the mean. Every 13th engine step counts, and the first steps, where
sequences are short, count like others. A slot is a block's memory for the keys and values of one
token.

    paged       blocks of the given size. Only the last block of a sequence is not full: half a
                block a sequence is expected, and `empty` is what was found, in blocks a sequence.
    16          blocks of 16 tokens, vLLM's default on NVIDIA GPUs
    contiguous  each sequence has memory for its prompt and the longest response from the start
    oracle      each sequence has memory for exactly its final length from the start

On the CPU megarl's engines have blocks of 32 tokens; vLLM's default is 128.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from common import Args, run_tool

PROMPT_TOKENS = 100
GROUP = 4
CAP = 2
"""Longest response over the mean response."""
GPU_BLOCK = 16
EVERY = 13
"""Engine steps from one sample to the next: a prime, so that samples of sequences that grow in step
meet every state of their last block."""
SIGMA = 0.8
"""Standard deviation of the logarithm of response lengths."""
OPTIONS = {
    "--lengths": ([256, 1024, 4096, 16384], "mean response lengths, tokens"),
    "--block-sizes": ([128, 32], "tokens of a block"),
    "--requests": (16, "responses of each length"),
    "--sequences": (8, "responses at a time"),
    "--seed": (0, "of the order of lengths"),
}


class Running(NamedTuple):
    """A sequence while it is generated."""

    prompt: int
    """The same number for sequences of the same prompt."""
    prompt_tokens: int
    tokens: int
    """Tokens so far that have keys and values, those of the prompt included."""
    max_tokens: int
    """Tokens that the response will have in the end."""


COLUMNS = (
    "length d; cap d; block=block_size d; samples d; paged .2%; largest .2%; empty .3f;"
    " 16=computed .2%; contiguous .2%; oracle .2%"
)


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


def blocks_needed(running: Iterable[Running], block_size: int) -> tuple[int, int]:
    """(blocks, slots of them that hold a token) that these sequences need: whole blocks of a prompt
    once for all of its sequences. vLLM shares at most all tokens of a prompt but the last, which
    each sequence computes.
    """
    ones = list(running)
    shared = [(one.prompt_tokens - 1) // block_size for one in ones]
    prompts = dict(zip((one.prompt for one in ones), shared, strict=True))
    repeated = sum(shared) - sum(prompts.values())
    blocks = sum(math.ceil(one.tokens / block_size) for one in ones)
    return blocks - repeated, sum(one.tokens for one in ones) - repeated * block_size


def waste(running: list[Running], block_size: int, cap: int) -> dict[str, float]:
    """Shares of allocated slots that hold no token, at one engine step. `cap`: longest response."""

    def share(size: int) -> tuple[int, float]:
        blocks, filled = blocks_needed(running, size)
        return blocks, 1 - filled / (blocks * size)

    blocks, paged = share(block_size)
    tokens = sum(one.tokens for one in running)
    return {
        "paged": paged,
        "empty": paged * blocks / len(running),
        "computed": share(GPU_BLOCK)[1],
        "contiguous": 1 - tokens / sum(one.prompt_tokens + cap for one in running),
        "oracle": 1 - tokens / sum(one.prompt_tokens + one.max_tokens for one in running),
    }


def steps(lengths: list[int], at_once: int) -> Iterator[list[Running]]:
    """The sequences of every engine step: each grows by a token a step, and the next one begins
    when one has ended.
    """
    waiting, left = list(enumerate(lengths)), dict[int, int]()
    while waiting or left:
        while waiting and len(left) < at_once:
            number, length = waiting.pop(0)
            left[number] = length
        yield [
            Running(n // GROUP, PROMPT_TOKENS, PROMPT_TOKENS + lengths[n] - rest, lengths[n])
            for n, rest in left.items()
        ]
        left = {number: rest - 1 for number, rest in left.items() if rest > 1}


def measure(args: Args) -> dict[str, Any]:
    """A row for each block size and length."""
    rows = []
    for size in args.block_sizes:
        for mean in args.lengths:
            lengths = response_lengths(mean, CAP * mean, args.requests, args.seed)
            samples = list(steps(lengths, args.sequences))[EVERY - 1 :: EVERY]
            found = [waste(running, size, CAP * mean) for running in samples]
            about = {"length": mean, "cap": CAP * mean, "block_size": size, "samples": len(found)}
            means = {name: statistics.fmean(one[name] for one in found) for name in found[0]}
            rows.append(about | means | {"largest": max(one["paged"] for one in found)})
    return {"rows": rows}


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, COLUMNS)
