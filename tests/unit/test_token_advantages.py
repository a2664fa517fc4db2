"""Advantages per token and per turn, GAE and the critic's loss: against sums written out, and
against the functions that give a whole sample one advantage.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.objectives.advantages import ADVANTAGES
from megarl.objectives.token_advantages import (
    TOKEN_ADVANTAGES,
    TokenRewards,
    gae,
    generalised_advantages,
    returns_to_go,
    turn_advantages,
    turn_of_tokens,
    turn_sums,
    value_targets,
)
from megarl.objectives.value import MOMENTS, explained_variance, moments, value_loss
from megarl.parallel.mesh import Axis
from megarl.settings.objectives import COMPARING, AlgorithmConfig, GaeConfig
from megarl.settings.schema import replace
from megarl.trainer.step_advantages import step_advantages
from megarl.types import Samples, StepBatch

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

    def work(rank: int) -> Tensor:
        def add(value: Tensor) -> Tensor:
            given[rank] = value
            barrier.wait()
            total = torch.stack([one for one in given if one is not None]).sum(0)
            barrier.wait()
            return total

        function = TOKEN_ADVANTAGES["reinforce_plus_plus_tokens"]
        return function(step(made[rank], add), AlgorithmConfig())

    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(work, range(len(made))))


def test_returns_to_go_are_the_sums_of_what_follows() -> None:
    made = samples(1, dense=True)
    found = returns_to_go(step(made, lambda x: x).rewards, step(made, lambda x: x).sample_ids)
    expected = [sum(rewards[n:]) for rewards, _ in made for n in range(len(rewards))]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert returns_to_go(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


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


def drawn(seed: int, num_samples: int = 9) -> TokenRewards:
    """Samples with prompts, tokens of an environment inside responses, dense rewards and values;
    one of them has no response.
    """
    draw = random.Random(seed)
    mask, ids = [], []
    for number in range(num_samples):
        middle = [draw.random() < 0.7 for _ in range(draw.randint(0, 12))]
        chosen = [False] * draw.randint(1, 3) + (middle if number else [False, False])
        mask += chosen
        ids += [number] * len(chosen)
    rewards = [draw.gauss(0, 1) * m for m in mask]
    values = [draw.gauss(0, 2) * m for m in mask]
    return TokenRewards(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        mask=torch.tensor(mask),
        sample_ids=torch.tensor(ids),
        sum_over_ranks=lambda tensor: tensor,
        values=torch.tensor(values, dtype=torch.float64),
    )


def by_definition(step: TokenRewards, gamma: float, lam: float) -> list[float]:
    """Eq. 11 of the paper: a sum over all later steps of (gamma lam)^l delta, token by token."""
    assert step.values is not None
    found = [0.0] * len(step.mask)
    for sample in set(step.sample_ids.tolist()):
        places = [
            n for n in range(len(found)) if step.mask[n] and int(step.sample_ids[n]) == sample
        ]
        value = [float(step.values[n]) for n in places] + [0.0]
        delta = [
            float(step.rewards[n]) + gamma * value[t + 1] - value[t] for t, n in enumerate(places)
        ]
        for t, n in enumerate(places):
            found[n] = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(places)))
    return found


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_gae_is_the_sum_of_the_paper(gamma: float, lam: float) -> None:
    step = drawn(1)
    assert step.values is not None
    found = generalised_advantages(
        step.rewards, step.values, step.mask, step.sample_ids, gamma=gamma, lam=lam
    )
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(by_definition(step, gamma, lam), abs=1e-12)


def test_targets_with_lambda_1_do_not_depend_on_the_values() -> None:
    step = drawn(2)
    config = AlgorithmConfig(advantage="gae", gae=GaeConfig(gamma=0.9, lam=0.5, value_lam=1.0))
    assert step.values is not None
    other = replace(step, values=step.values * -3)
    targets = [value_targets(one, one.values, config) for one in (step, other)]
    assert torch.allclose(*targets, atol=1e-12)
    assert not torch.allclose(gae(step, config), gae(other, config), atol=1e-3)
    plain = replace(step, values=torch.zeros_like(step.values))
    expected = by_definition(plain, 0.9, 1.0)
    assert value_targets(step, step.values, config).tolist() == pytest.approx(expected, abs=1e-12)


def test_whitened_advantages_have_mean_0_and_variance_1() -> None:
    step = drawn(3)
    config = AlgorithmConfig(advantage="gae")
    found = gae(step, config)
    assert float(found[step.mask].mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(found[step.mask].var(unbiased=False)) == pytest.approx(1.0, abs=1e-5)
    assert not found[~step.mask].any()
    raw = gae(step, replace(config, gae=GaeConfig(whiten=False)))
    assert raw.tolist() == pytest.approx(by_definition(step, 1.0, 0.95), abs=1e-12)


@pytest.mark.parametrize("where", ["no samples", "no response", "one token", "huge"])
def test_corner_cases_are_finite(where: str) -> None:
    mask = {"no samples": [], "no response": [False, False], "one token": [False, True]}
    chosen = torch.tensor(mask.get(where, [True] * 4), dtype=torch.bool)
    size = 1e18 if where == "huge" else 2.0
    step = TokenRewards(
        rewards=torch.full((len(chosen),), size, dtype=torch.float64) * chosen,
        mask=chosen,
        sample_ids=torch.zeros(len(chosen), dtype=torch.int64),
        sum_over_ranks=lambda tensor: tensor,
        values=torch.zeros(len(chosen), dtype=torch.float64),
    )
    plain = AlgorithmConfig(advantage="gae")
    for config in (plain, replace(plain, gae=GaeConfig(whiten=False))):
        assert bool(torch.isfinite(gae(step, config)).all())
        assert bool(torch.isfinite(value_targets(step, step.values, config)).all())
    if where == "one token":
        assert value_targets(step, step.values, AlgorithmConfig()).tolist() == [0.0, 2.0]


def test_the_value_loss_is_the_larger_error() -> None:
    values = torch.tensor([0.0, 1.0, 3.0, -2.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.0, 0.9, 1.0, 0.0], dtype=torch.float64)
    returns = torch.tensor([1.0, 1.0, 0.0, -2.0], dtype=torch.float64)
    terms = value_loss(values, old, returns, 0.2)
    # Within the clip; hit exactly; far off and counted in full; right, but too far from the old.
    assert terms.per_token.tolist() == pytest.approx([0.5, 0.0, 4.5, 0.5 * 1.8**2], abs=1e-12)
    assert terms.clipped.tolist() == [False, False, False, True]
    terms.per_token.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-1.0, 0.0, 3.0, 0.0], abs=1e-12)
    plain = value_loss(values, old, returns, None)
    assert plain.per_token.tolist() == pytest.approx([0.5, 0.0, 4.5, 0.0], abs=1e-12)
    assert not plain.clipped.any()


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 1.0, 4.0])

    def of(values: Tensor) -> float:
        halves = [moments(values[part], returns[part]) for part in (slice(1), slice(1, None))]
        return explained_variance({name: sum(float(h[name]) for h in halves) for name in MOMENTS})

    assert of(returns) == pytest.approx(1.0)
    assert of(returns + 7) == pytest.approx(1.0)  # a constant error has no variance
    assert of(torch.full((4,), 0.3)) == pytest.approx(0.0)
    assert of(-returns) == pytest.approx(1 - 4.0)
    for values, others, wanted in (
        ([0.0, 1e-6], [0.0, 2e-6], 0.75), ([], [], 0.0), ([0.1, 0.2], [0.7, 0.7], 0.0),
    ):  # fmt: skip
        sums = moments(torch.tensor(values), torch.tensor(others))
        found = explained_variance({name: float(value) for name, value in sums.items()})
        assert found == pytest.approx(wanted)


def test_turns_are_stretches_of_the_policys_tokens() -> None:
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1], dtype=torch.bool)
    ids = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 7, 7, 7])
    turns = turn_of_tokens(mask, ids)
    assert turns[mask].tolist() == [0, 0, 1, 0, 0, 1, 0, 0]
    values = torch.arange(13.0)
    sums = turn_sums(values, mask, ids, turns, (8, 3))
    assert sums[0].tolist() == [1 + 2, 4, 0] and sums[1].tolist() == [5 + 6, 9, 0]
    assert sums[7].tolist() == [11 + 12, 0, 0] and sums[2:7].abs().sum() == 0
    assert turn_of_tokens(mask[:0], ids[:0]).tolist() == []
    # Answers made one after the other are turns of their own where a branch begins between them.
    branches = torch.tensor([2, 7, 12])
    assert turn_of_tokens(mask, ids, branches)[mask].tolist() == [0, 1, 2, 0, 0, 1, 0, 1]


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


def test_what_critics_learn_does_not_depend_on_the_advantage(tmp_path: Path) -> None:
    """The user's function may change its arguments in place."""
    (tmp_path / "own.py").write_text(
        "def f(step, config):\n"
        "    [one.fill_(7.0) for one in (step.rewards, *step.critics.values())]\n"
        "    return step.rewards\n"
    )
    samples = samples_of({0: [(3, 1.0)]})
    one = np.ones(1, np.int64)
    batch = StepBatch(0, [samples], [], one * 1.0, one * 0, one * 3, one * 0, metrics={})
    values = torch.tensor([[0.0, 0.0, 0.5, 0.25, 2.0], [0.0, 0.0, -1.0, 0.0, 1.0]])
    found = step_advantages(
        batch,
        {"values.a": [values[0]], "values.b": [values[1]]},
        AlgorithmConfig(advantage=f"{tmp_path}/own.py:f", gae=GaeConfig(value_lam=0.0)),
        kl_coefficient=0.0,
        data=Axis("data", 1, 0, (0,), None),
        device=torch.device("cpu"),
    )
    # With lambda 0 a target is the reward and the next value of the same critic.
    assert found["returns.a"][0].tolist() == [0.0, 0.0, 0.25, 2.0, 1.0]
    assert found["returns.b"][0].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert found["advantages"][0].tolist() == [7.0] * 5
