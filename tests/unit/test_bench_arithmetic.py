"""The arithmetic of benchmarks: key-value memory of blocks, and a line through the values of a
metric.
"""

from __future__ import annotations

import importlib
import math
import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("kv_waste")


def allocation(running: list[Any], block_size: int) -> list[tuple[list[int], int]]:
    """Block tables as vLLM makes them, block by block: whole blocks of a prompt, without its last
    token, have the same numbers for all sequences of the prompt.
    """
    shared: dict[tuple[int, int], int] = {}
    fresh = iter(range(1, 10**6))
    tables = []
    for one in running:
        blocks = []
        for place in range(math.ceil(one.tokens / block_size)):
            if (place + 1) * block_size < one.prompt_tokens:
                key = (one.prompt, place)
                shared[key] = shared.get(key) or next(fresh)
                blocks.append(shared[key])
            else:
                blocks.append(next(fresh))
        tables.append((blocks, one.tokens))
    return tables


def sequences(slots: Any, seed: int) -> list[Any]:
    """Groups of one to four sequences of one prompt, of which each has all tokens of the prompt."""
    draw, found = random.Random(seed), []
    for prompt in range(5):
        prompt_tokens = draw.choice([1, 16, 31, 32, 33, 64, 100])
        for _ in range(draw.randint(1, 4)):
            made, most = draw.randint(0, 90), 90
            found.append(slots.Running(prompt, prompt_tokens, prompt_tokens + made, most))
    return found


@pytest.mark.parametrize("block_size", [1, 16, 32, 128])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_are_counted_as_a_table_of_blocks_has_them(
    slots: Any, seed: int, block_size: int
) -> None:
    running = sequences(slots, seed)
    tables = allocation(running, block_size)
    places = {  # (block, place in the block) of every token, each once
        (blocks[token // block_size], token % block_size)
        for blocks, tokens in tables
        for token in range(tokens)
    }
    blocks = {block for table, _ in tables for block in table}
    assert slots.blocks_needed(running, block_size) == (len(blocks), len(places))


def test_shares_of_waste(slots: Any) -> None:
    """Two sequences of one prompt of 100 tokens, with 10 and 50 of 60 tokens generated; the longest
    response has 140. Of blocks of 64 tokens, one is shared, and three are of one sequence.
    """
    running = [slots.Running(7, 100, 110, 60), slots.Running(7, 100, 150, 60)]
    found = slots.waste(running, 64, 140)
    assert math.isclose(found["paged"], 1 - 196 / 256)
    assert math.isclose(found["empty"], (18 + 42) / 64 / 2)
    assert math.isclose(found["contiguous"], 1 - 260 / 480)
    assert math.isclose(found["oracle"], 1 - 260 / 320)
    # Six blocks of 16 are of the prompt; 14 and 54 tokens need one and four more.
    assert math.isclose(found["computed"], 1 - (96 + 14 + 54) / (6 + 1 + 4) / 16)


def test_the_next_sequence_begins_when_one_has_ended(slots: Any) -> None:
    tokens = [[one.tokens - 100 for one in running] for running in slots.steps([2, 1, 3], 2)]
    assert tokens == [[0, 0], [1, 0], [1], [2]]


@pytest.mark.parametrize("mean", [256, 16384])
def test_lengths_are_log_normal_up_to_their_cap(slots: Any, mean: int) -> None:
    lengths = slots.response_lengths(mean, 2 * mean, 400, 0)
    assert math.isclose(statistics.mean(lengths), mean, rel_tol=0.005)
    assert max(lengths) == 2 * mean
    low, middle, high = sorted(slots.response_lengths(mean, 9 * mean, 3, 0))  # of thirds
    step = math.exp(slots.SIGMA * statistics.NormalDist().inv_cdf(5 / 6))
    assert math.isclose(high / middle, step, rel_tol=0.01)
    assert math.isclose(middle / low, step, rel_tol=0.01)
    assert slots.response_lengths(mean, 2 * mean, 400, 1) != lengths
    with pytest.raises(ValueError, match="larger cap"):
        slots.response_lengths(mean, mean, 400, 0)


def test_a_trend_is_the_least_squares_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    trend = importlib.import_module("mismatch_drift").trend
    values = 3.0 + 0.2 * np.arange(50) + np.random.default_rng(0).normal(size=50)
    slope, begin = statistics.linear_regression(range(50), values)
    places, found = np.arange(50), trend(values.tolist())
    error = math.sqrt(((values - begin - slope * places) ** 2).sum() / 48 / places.var() / 50)
    assert math.isclose(found["slope"], slope) and math.isclose(found["slope_error"], error)
    assert math.isclose(found["first_quarter"], values[:12].mean())
    assert math.isclose(found["last_quarter"], values[-12:].mean())
