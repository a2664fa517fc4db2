"""A run that trains on nothing does not end as if it had learnt."""

from __future__ import annotations

import pytest

from megarl.environments.config import EnvironmentConfig, OverlongConfig
from megarl.errors import UserError
from megarl.trainer.config import OptimizerConfig
from megarl.trainer.step import EmptySteps


@pytest.mark.parametrize(
    ("has_updated", "accuracy", "ends"),
    [(False, 1.0, True), (False, 0.0, True), (True, 0.0, True), (True, 1.0, False)],
)
def test_empty_steps_in_a_row_end_a_run(has_updated: bool, accuracy: float, ends: bool) -> None:
    """Unless the policy was updated and is mostly right: then it has nothing left to learn."""
    steps, metrics = EmptySteps(3), {"groups/drawn": 4, "accuracy": accuracy}
    steps.has_updated = has_updated
    for step, samples in enumerate((0, 0, 8, 0, 0)):
        steps.count(step, samples, metrics)
    if not ends:
        steps.count(5, 0, metrics)
        return
    with pytest.raises(UserError, match=rf"^step 6: 3 steps .*accuracy {accuracy:g}, .*; set "):
        steps.count(5, 0, metrics)


@pytest.mark.parametrize(("samples", "says"), [(0, "no step trained"), (8, "was skipped")])
def test_a_run_without_an_update_fails_at_its_end(samples: int, says: str) -> None:
    steps, metrics = EmptySteps(5), {"groups/drawn": 4, "accuracy": 1.0}
    with pytest.raises(UserError, match=f"^step 2: the run ends with the weights .*{says}"):
        steps.end(1, samples, metrics)
    steps.has_updated = True
    steps.end(1, samples, metrics)


def test_what_cannot_change_the_weights_is_refused() -> None:
    with pytest.raises(ValueError, match=r"OptimizerConfig\.learning_rate is 0.0; set"):
        OptimizerConfig(learning_rate=0.0)
    weights = {"math": 0.0, "style.py:brevity": 0.0}
    with pytest.raises(ValueError, match=r"environment\.rewards weighs math, style\.py:brevity"):
        EnvironmentConfig(rewards=weights)
    penalty = OverlongConfig(limit_tokens=8, buffer_tokens=4)
    EnvironmentConfig(rewards=weights, overlong=penalty)
    EnvironmentConfig(rewards=weights | {"math": -1.0})
