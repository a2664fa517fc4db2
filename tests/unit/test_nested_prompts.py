"""Groups whose prompts begin alike, divided by the rollout service: what a trainer computes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megarl.rollout.batch import shares
from megarl.trainer.config import SharePrefix
from megarl.trainer.prefixes import must_save, tree_of
from megarl.types import Group, Prompt, Rollout, Samples, Segment, TokenArrays, Verdict


def rollout(draw: random.Random, number: int, length: int) -> Rollout:
    """A response of tokens 0 and 1."""
    tokens = np.array([draw.randint(0, 1) for _ in range(length)], np.int32)
    arrays = TokenArrays(tokens, np.zeros(length, np.float32))
    segment = Segment("model", length, arrays, [(0, length)], "stop")
    return Rollout(number, 0, [segment], Verdict(0.0, False), 0)


def group(draw: random.Random, ordinal: int, tokens: list[int], lengths: list[int]) -> Group:
    """A group of responses of these `lengths`, the last of which is greedy."""
    *made, greedy = [rollout(draw, number, length) for number, length in enumerate(lengths)]
    return Group(ordinal, Prompt(ordinal, "", tokens, ""), made, greedy)


def computed(samples: Samples, saves: float) -> int:
    """Tokens of a packed sequence of `samples` in training."""
    tree = tree_of(samples, saves=saves)
    return int(samples.offsets[-1]) if tree is None else len(tree.places)


def packed(groups: list[Group], *, budget: int, saves: float, ranks: int = 1) -> list[list[int]]:
    """By rank, the tokens that each packed sequence computes; those of more samples than one are
    within the budget.
    """
    made = shares(
        step=0,
        drawn=groups,
        accepted=groups,
        seconds=1.0,
        num_data_ranks=ranks,
        num_mini_batches=1,
        micro_batch_tokens=budget,
        transcripts=0,
        with_greedy=True,
        prefix_saves=saves,
    )
    found = []
    for rank in range(ranks):
        batch = made.share(rank)
        (samples,), (rows,) = batch.samples, batch.micro_batches
        found.append([computed(samples.select(row), saves) for row in rows])
        for row, tokens in zip(rows, found[-1], strict=True):
            assert tokens <= budget or len(row) == 1
    return found


@pytest.mark.parametrize("share", ["auto", "on"])
def test_greedy_responses_share_what_the_service_counted(share: SharePrefix) -> None:
    """Prompts that have little of their own behind long instructions, in a budget of exactly what
    they need: 100 tokens of instructions, and 2 + 2 x 21 of each group.
    """
    draw = random.Random(0)
    groups = [group(draw, n, [2] * 100 + [n, 4, 5], [20, 20]) for n in range(4)]
    assert packed(groups, budget=276, saves=must_save(share)) == [[276]]


@pytest.mark.parametrize("share", ["auto", "on"])
def test_conversations_with_greedy_responses_stay_within_the_budget(share: SharePrefix) -> None:
    """Each turn is a prompt too; the next turn may begin as the greedy response did."""
    for seed in range(150):
        draw, tokens, groups = random.Random(seed), list[int](), []
        for ordinal in range(12):
            tokens = tokens + [draw.randint(0, 1) for _ in range(draw.choice([2, 20]))]
            lengths = [draw.choice([1, 5, 20, 100]) for _ in range(draw.choice([2, 3, 5]))]
            groups.append(group(draw, ordinal, tokens, lengths))
        rows = packed(groups, budget=300, saves=must_save(share), ranks=draw.choice([1, 2, 4]))
        assert len({len(row) for row in rows}) == 1
