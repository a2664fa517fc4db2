"""One advantage per turn: closed forms, and the sums over samples and ranks."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from megarl.objectives.advantages import ADVANTAGES
from megarl.objectives.config import COMPARING, AlgorithmConfig
from megarl.objectives.token_advantages import turn_advantages, turn_of_tokens, turn_sums
from megarl.parallel.mesh import Axis
from megarl.trainer.step_advantages import step_advantages
from megarl.types import Samples, StepBatch


def test_turns_are_stretches_of_the_policys_tokens() -> None:
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1], dtype=torch.bool)
    ids = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 7, 7, 7])
    turns = turn_of_tokens(mask, ids)
    assert turns[mask].tolist() == [0, 0, 1, 0, 0, 1, 0, 0]
    values = torch.arange(13.0)
    sums = turn_sums(values, mask, ids, (8, 3))
    assert sums[0].tolist() == [1 + 2, 4, 0] and sums[1].tolist() == [5 + 6, 9, 0]
    assert sums[7].tolist() == [11 + 12, 0, 0] and sums[2:7].abs().sum() == 0
    assert turn_of_tokens(mask[:0], ids[:0]).tolist() == []


def test_dr_grpo_by_hand() -> None:
    """r - mean, of the returns of a turn. Rollout 2 has one turn, and is not compared in turn 1."""
    rewards = torch.tensor([[0.0, 1.0], [0.5, 0.0], [2.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    tokens = torch.tensor([[3, 1], [2, 2], [4, 0], [1, 1]])
    groups = torch.tensor([5, 5, 5, 9])
    found = turn_advantages(ADVANTAGES["dr_grpo"], rewards, tokens, groups)
    mean = (1.0 + 0.5 + 2.0) / 3
    expected = [[1.0 - mean, 0.5], [0.5 - mean, -0.5], [2.0 - mean, 0.0], [0.0, 0.0]]
    assert found.numpy() == pytest.approx(np.array(expected), abs=1e-12)


@pytest.mark.parametrize(
    ("discount", "returns"),
    [(0.0, [1.0, 2.0, 4.0]), (0.5, [3.0, 4.0, 4.0]), (1.0, [7.0, 6.0, 4.0])],
)
def test_later_turns_are_discounted(discount: float, returns: list[float]) -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    tokens, groups = torch.ones(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    function = ADVANTAGES["dr_grpo"]
    found = turn_advantages(function, rewards, tokens, groups, discount=discount)
    assert found[0].tolist() == [value / 2 for value in returns]  # the mean is half of it


@pytest.mark.parametrize("name", COMPARING)
def test_one_turn_is_the_response(name: str) -> None:
    draw = random.Random(name)
    rewards = torch.tensor([draw.choice([0.0, 1.0, 0.3]) for _ in range(12)], dtype=torch.float64)
    groups, tokens = torch.arange(12) // 4, torch.tensor([draw.randint(1, 9) for _ in range(12)])
    whole = ADVANTAGES[name](rewards, groups, tokens)
    turns = turn_advantages(ADVANTAGES[name], rewards[:, None], tokens[:, None], groups)
    assert torch.equal(turns[:, 0], whole)


def samples_of(turns: dict[int, list[tuple[int, float]]]) -> Samples:
    """{sample id: (tokens, reward) of its turns}, each turn after 2 tokens of another."""
    parts = []
    for number, of_sample in turns.items():
        mask, rewards = [], []
        for tokens, reward in of_sample:
            mask += [False] * 2 + [True] * tokens
            rewards += [0.0] * (1 + tokens) + [reward]
        one = Samples.one(number, [1] * len(mask), mask=mask)
        one.rewards[:] = rewards
        parts.append(one)
    return Samples.concatenate(parts)


def test_the_advantages_of_a_step() -> None:
    """Samples in two mini-batches: each token has its turn's advantage, whatever the order."""
    turns = {
        0: [(3, 0.5), (2, 1.0)],
        1: [(1, 0.0), (4, 0.0)],
        2: [(2, 1.0)],
        3: [(2, 0.0), (1, 0.25), (3, 0.0)],
    }
    groups = np.array([0, 0, 1, 1])
    order = [{3: turns[3], 1: turns[1]}, {0: turns[0], 2: turns[2]}]
    batch = StepBatch(
        step=0,
        samples=[samples_of(part) for part in order],
        micro_batches=[],
        rewards=np.array([sum(reward for _, reward in turns[n]) for n in range(4)]),
        groups=groups,
        response_tokens=np.array([sum(tokens for tokens, _ in turns[n]) for n in range(4)]),
        mini_batch_of=np.zeros(4, np.int64),
        metrics={},
    )
    (column_a, column_b) = step_advantages(
        batch,
        {},
        AlgorithmConfig(advantage="dr_grpo", credit="turn"),
        kl_coefficient=0.0,
        data=Axis("data", 1, 0, (0,), None),
        device=torch.device("cpu"),
    )["advantages"]
    found = {}
    for samples, column in zip(batch.samples, (column_a, column_b), strict=True):
        for n, number in enumerate(samples.ids.tolist()):
            part = slice(samples.offsets[n], samples.offsets[n + 1])
            found[number] = column[part][torch.from_numpy(samples.mask[part])].tolist()
    assert found[0] == pytest.approx([0.75] * 3 + [0.5] * 2)
    assert found[1] == pytest.approx([-0.75] * 1 + [-0.5] * 4)
    assert found[2] == pytest.approx([0.375] * 2)
    assert found[3] == pytest.approx([-0.375] * 2 + [0.0] * 1 + [0.0] * 3)


def test_a_discount_needs_credit_by_turn() -> None:
    with pytest.raises(ValueError, match=r"turn_discount is 0.5, but .*credit is 'response'"):
        AlgorithmConfig(turn_discount=0.5)


def test_credit_by_turn_needs_a_comparison() -> None:
    with pytest.raises(
        ValueError, match=r"credit is 'turn', but .*advantage is 'reinforce_plus_plus'.* set"
    ):
        AlgorithmConfig(advantage="reinforce_plus_plus", credit="turn")
