"""Scores of reward models become rewards of the right samples and tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import groups

from megarl.errors import UserError
from megarl.objectives.advantages import ADVANTAGES
from megarl.parallel.mesh import Axis
from megarl.rollout.batch import shares
from megarl.trainer.model_rewards import RewardModels
from megarl.types import StepBatch

CPU = torch.device("cpu")
ALONE = Axis("data", 1, 0, (0,), None)


class Given:
    """A scorer with known scores: sample n gets `scale` x n."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def score(self, batch: StepBatch, packed: Any, *, temperature: float) -> list[torch.Tensor]:
        assert temperature == 1.0
        found = []
        for samples in batch.samples:
            column = torch.zeros(len(samples.token_ids))
            column[samples.offsets[1:] - 1] = self.scale * torch.from_numpy(samples.ids).float()
            found.append(column)
        return found


@pytest.fixture
def batch() -> StepBatch:
    made = groups(3, 2, seed=1)
    return shares(
        step=4,
        drawn=made,
        accepted=made,
        seconds=1.0,
        num_data_ranks=1,
        num_mini_batches=2,
        micro_batch_tokens=64,
        transcripts=0,
    ).share(0)


def rewarded(batch: StepBatch, scales: dict[str, float]) -> StepBatch:
    models: Any = {name: Given(scale) for name, scale in scales.items()}
    made = RewardModels(models, {"a": 0.5, "b": -2.0})
    return made.rewarded(batch, made.scores(batch, ()), data=ALONE, device=CPU)


def test_weighted_scores_are_added_at_the_last_generated_token(batch: StepBatch) -> None:
    found = rewarded(batch, {"a": 1.0, "b": 3.0})
    added = (0.5 * 1.0 - 2.0 * 3.0) * np.arange(6)
    assert found.rewards == pytest.approx(batch.rewards + added)
    for before, after in zip(batch.samples, found.samples, strict=True):
        gained = after.rewards - before.rewards
        for n, name in enumerate(after.ids):
            part = gained[after.offsets[n] : after.offsets[n + 1]]
            last = np.flatnonzero(after.mask[after.offsets[n] : after.offsets[n + 1]])[-1]
            assert part[last] == pytest.approx(added[name])
            assert (np.delete(part, last) == 0).all()
    assert found.metrics["reward_model/b/mean"] == pytest.approx(7.5)
    assert found.metrics["reward_model/a/std"] == pytest.approx(np.arange(6).std())
    assert found.metrics["reward/mean"] == pytest.approx(found.rewards.mean())
    assert found.metrics["accuracy"] == batch.metrics["accuracy"]


def test_a_greedy_response_is_scored_and_left_out_of_the_statistics() -> None:
    """ReMax under a reward model: the score of a group's last sample is what others are compared
    with, and no token of it gets a reward.
    """
    made = [replace(group, greedy=group.rollouts[0]) for group in groups(2, 2, seed=1)]
    made = [replace(group, rollouts=group.rollouts[1:]) for group in made]
    dealt = shares(
        step=4,
        drawn=made,
        accepted=made,
        seconds=1.0,
        num_data_ranks=1,
        num_mini_batches=1,
        micro_batch_tokens=64,
        transcripts=0,
        with_greedy=True,
    ).share(0)
    found = rewarded(dealt, {"a": 1.0})
    assert found.response_tokens.astype(bool).tolist() == [True, False, True, False]
    assert found.rewards == pytest.approx(dealt.rewards + 0.5 * np.arange(4))
    assert found.metrics["reward_model/a/mean"] == pytest.approx((0 + 2) / 2)
    assert found.metrics["reward/mean"] == pytest.approx(found.rewards[[0, 2]].mean())
    assert found.metrics["reward/greedy_mean"] == pytest.approx(found.rewards[[1, 3]].mean())
    (samples,) = found.samples
    for position, number in enumerate(samples.ids.tolist()):
        total = samples.select([position]).rewards.sum()
        assert total == pytest.approx(found.rewards[number] if number in (0, 2) else 0.0)
    arrays = (found.rewards, found.groups, found.response_tokens)
    advantages = ADVANTAGES["remax"](*map(torch.from_numpy, arrays))
    expected = found.rewards - found.rewards[[1, 1, 3, 3]]
    assert advantages.numpy() == pytest.approx(expected)


def test_without_models_nothing_changes(batch: StepBatch) -> None:
    assert rewarded(batch, {}) is batch


def test_a_score_that_is_not_finite_ends_the_run(batch: StepBatch) -> None:
    with pytest.raises(UserError, match=r"reward model b scores a response of step 5 .* not finit"):
        rewarded(batch, {"a": 1.0, "b": float("inf")})


def test_a_step_without_samples(batch: StepBatch) -> None:
    none = np.zeros(0)
    empty = replace(batch, samples=[], micro_batches=[], rewards=none, response_tokens=none)
    assert len(rewarded(empty, {"a": 1.0}).rewards) == 0
