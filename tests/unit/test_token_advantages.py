"""Advantages per token against sums written out, and against the functions that give a whole sample
one advantage.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megarl.objectives.advantages import ADVANTAGES, EPSILON
from megarl.objectives.config import AlgorithmConfig
from megarl.objectives.token_advantages import (
    TOKEN_ADVANTAGES,
    TokenRewards,
    normalise,
    returns_to_go,
)

Sample = tuple[list[float], list[bool]]


def samples(seed: int, *, dense: bool) -> list[Sample]:
    """(rewards, mask) of samples with prompts; with `dense` every chosen token has a reward, else
    only the last.
    """
    draw, found = random.Random(seed), []
    for _ in range(7):
        prompt, response = draw.randint(0, 3), draw.randint(1, 6)
        rewards = [draw.choice([-1.0, 0.1, 2.0]) if dense else 0.0 for _ in range(response)]
        rewards[-1] = draw.choice([-1.0, 0.1, 2.0])
        found.append(([0.0] * prompt + rewards, [False] * prompt + [True] * response))
    return found


def step(made: list[Sample], sum_over_ranks: Callable[[Tensor], Tensor]) -> TokenRewards:
    ids = [torch.full((len(mask),), number) for number, (_, mask) in enumerate(made)]
    return TokenRewards(
        rewards=torch.tensor([r for rewards, _ in made for r in rewards], dtype=torch.float64),
        mask=torch.tensor([m for _, mask in made for m in mask], dtype=torch.bool),
        sample_ids=torch.cat([torch.zeros(0, dtype=torch.int64), *ids]),
        sum_over_ranks=sum_over_ranks,
    )


def over_ranks(made: list[list[Sample]]) -> list[Tensor]:
    """Each rank's advantages, the ranks being threads that add up what they are given."""
    barrier = threading.Barrier(len(made), timeout=20)
    given: list[Tensor | None] = [None] * len(made)
    found: list[Tensor | None] = [None] * len(made)

    def work(rank: int) -> None:
        def add(value: Tensor) -> Tensor:
            given[rank] = value
            barrier.wait()
            total = torch.stack([one for one in given if one is not None]).sum(0)
            barrier.wait()
            return total

        function = TOKEN_ADVANTAGES["reinforce_plus_plus_tokens"]
        found[rank] = function(step(made[rank], add), AlgorithmConfig())

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [one for one in found if one is not None]


def test_returns_to_go_are_the_sums_of_what_follows() -> None:
    made = samples(1, dense=True)
    found = returns_to_go(step(made, lambda x: x).rewards, step(made, lambda x: x).sample_ids)
    expected = [sum(rewards[n:]) for rewards, _ in made for n in range(len(rewards))]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert returns_to_go(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_normalised_over_all_chosen_tokens() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    mean, std = 7 / 3, (((1 - 7 / 3) ** 2 + (2 - 7 / 3) ** 2 + (4 - 7 / 3) ** 2) / 3) ** 0.5
    expected = [(x - mean) / (std + EPSILON) for x in (1, 2, 4)] + [0.0]
    assert normalise(values, mask, lambda x: x).tolist() == pytest.approx(expected, abs=1e-12)
    equal = torch.full((3,), 0.1, dtype=torch.float64)
    assert normalise(equal, mask[:3], lambda x: x).abs().max() < 1e-6


def test_an_outcome_reward_gives_what_the_sample_function_gives() -> None:
    """With a reward on the last token only, every token's return is the sample's reward."""
    made = samples(2, dense=False)
    found = TOKEN_ADVANTAGES["reinforce_plus_plus_tokens"](
        step(made, lambda x: x), AlgorithmConfig()
    )
    totals = torch.tensor([sum(rewards) for rewards, _ in made], dtype=torch.float64)
    tokens = torch.tensor([sum(mask) for _, mask in made])
    wanted = ADVANTAGES["reinforce_plus_plus"](totals, torch.zeros(7, dtype=torch.int64), tokens)
    expected = [float(wanted[n]) * m for n, (_, mask) in enumerate(made) for m in mask]
    assert found.tolist() == pytest.approx(expected, abs=1e-9)


def test_ranks_change_nothing() -> None:
    made = samples(3, dense=True)
    (alone,) = over_ranks([made])
    shared = torch.cat(over_ranks([made[:3], [], made[3:]]))
    assert shared.tolist() == pytest.approx(alone.tolist(), abs=1e-12)
