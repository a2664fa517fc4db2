"""Values that are not finite are blamed on what they come from, and a run that trains on nothing
does not end as if it had learnt.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.errors import UserError
from megarl.parallel.mesh import Axis
from megarl.run.evaluate import refuse_nonfinite
from megarl.run.plan import algorithm_warning
from megarl.settings.environments import EnvironmentConfig, OverlongConfig
from megarl.settings.objectives import AlgorithmConfig
from megarl.settings.training import OptimizerConfig
from megarl.trainer.step import EmptySteps
from megarl.trainer.zero import first_broken
from megarl.weights.probe import Probe

ALONE = Axis("world", 1, 0, (0,), None)
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(("second", "third", "norm", "name"), [
    (1.0, 1.0, 0, ""), (1.0, NAN, 0, "third"), (-INF, NAN, 0, "second"), (1e30, 1.0, 0, ""),
    (1e30, 1.0, 2, "second"), (None, INF, 2, "third"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_broken_tensor_is_named(
    second: float | None, third: float, norm: int, name: str, dtype: torch.dtype
) -> None:
    """Values are looked at, or their Euclidean norm in float32; a rank may have no part."""

    def tensor(value: float) -> torch.Tensor:
        return torch.tensor([0.5, value, -0.5], dtype=dtype)

    parts = [
        ("first", tensor(3.0)),
        ("second", None if second is None else tensor(second)),
        ("third", tensor(third)),
        ("empty", torch.zeros(0)),
    ]
    assert first_broken(parts, ALONE, torch.device("cpu"), norm=norm) == name


@pytest.mark.parametrize(("trainer", "engine", "said"), [
    ([-1.0, NAN], [-1.0, NAN], "the trainer's log-probs of the probe text are not finite"),
    ([-1.0, -2.0], [-1.0, INF], "engine 0's log-probs of the probe text are not finite"),
    ([-1.0, -2.0], [-1.0, -2.5], "are not those published"),
])  # fmt: skip
def test_the_probe_blames_who_computes_nan(
    trainer: list[float], engine: list[float], said: str
) -> None:
    probe = Probe.random(dtypes=("float32",), vocab_size=9, max_tokens=4, seed=0, tolerance=0.0)
    with pytest.raises(RuntimeError, match=said):
        probe.compare(trainer, [engine], version=3, layouts="")


def test_a_model_that_computes_nan_is_not_evaluated() -> None:
    refuse_nonfinite([[-1.0, -2.0]], "m")
    with pytest.raises(UserError, match=r"model.path 'm' gives log-probs that are not finite"):
        refuse_nonfinite([[-1.0], [NAN]], "m")


def test_gspo_with_the_clip_of_a_token_is_warned_about() -> None:
    assert "hardly ever clip" in algorithm_warning(AlgorithmConfig(loss="gspo"), 1)
    assert not algorithm_warning(AlgorithmConfig(loss="gspo", clip_low=3e-4, clip_high=4e-4), 1)
    assert not algorithm_warning(AlgorithmConfig(), 4)


def test_reinforce_with_several_updates_is_warned_about() -> None:
    assert "older policy" in algorithm_warning(AlgorithmConfig(loss="reinforce"), 2)
    assert not algorithm_warning(AlgorithmConfig(loss="reinforce"), 1)


@pytest.mark.parametrize(
    ("has_updated", "accuracy", "ends"),
    [(False, 1.0, True), (False, 0.0, True), (True, 0.0, True), (True, 1.0, False)],
)
def test_empty_steps_in_a_row_end_a_run(has_updated: bool, accuracy: float, ends: bool) -> None:
    """Unless the policy was updated and is mostly right: then it has nothing left to learn."""
    guard: Any = SimpleNamespace(has_updated=has_updated)
    steps, metrics = EmptySteps(guard, 3), {"groups/drawn": 4, "accuracy": accuracy}
    for step, samples in enumerate((0, 0, 8, 0, 0)):
        steps.count(step, samples, metrics)
    if not ends:
        steps.count(5, 0, metrics)
        return
    with pytest.raises(UserError, match=rf"^step 6: 3 steps .*accuracy {accuracy:g}, .*; set "):
        steps.count(5, 0, metrics)


@pytest.mark.parametrize(("samples", "says"), [(0, "no step trained"), (8, "was skipped")])
def test_a_run_without_an_update_fails_at_its_end(samples: int, says: str) -> None:
    guard: Any = SimpleNamespace(has_updated=False)
    steps, metrics = EmptySteps(guard, 5), {"groups/drawn": 4, "accuracy": 1.0}
    with pytest.raises(UserError, match=f"^step 2: the run ends with the weights .*{says}"):
        steps.end(1, samples, metrics)
    guard.has_updated = True
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
