"""The loss scale of float16: a step whose gradients overflow is computed again, the scale grows
without changing a step, and a checkpoint keeps it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support.policy import Policy, joined, save_state, whole_weights
from support.ranks import run_ranks
from support.rollouts import dealt
from support.tiny import groups, write_model

from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.settings.objectives import AlgorithmConfig
from megarl.settings.training import (
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainingConfig,
)

CASES: list[dict[str, Any]] = [
    {"zero_stage": 1},
    {"zero_stage": 2, "offload_optimizer": True},
    {"zero_stage": 3},
    {"zero_stage": 2, "layout": (1, 1, 2)},
    {"zero_stage": 3, "layout": (1, 2, 1), "lora": LoraConfig(rank=2)},
]
"""Settings of `training` beside float16, and the layout (data, sequence, tensor) of two ranks."""
STEPS = 2


def trained(model: str, folder: str) -> list[dict[str, Any]]:
    """For each of `CASES`, metrics of `STEPS` steps and the weights after them: `plain`, with a
    scale that is too large (`high`), with one that is doubled after every step (`growing`), and
    continued from a checkpoint of step 1 of `high` (`resumed`). Runs on every rank.
    """
    found = []
    with joined() as device:
        for number, case in enumerate(CASES):
            settings, place = dict(case), f"{folder}/{number}"
            layout = Layout(*settings.pop("layout", (2, 1, 1)))
            with ProcessMesh(layout, timeout_s=60) as mesh:
                common = (model, settings, mesh, device)
                found.append(
                    {
                        "plain": run(*common),
                        "high": run(*common, scale=2.0**20, save=place),
                        "growing": run(*common, scale=4.0, window=1),
                        "resumed": run(*common, load=place),
                    }
                )
    return found


def run(
    model: str,
    settings: dict[str, Any],
    mesh: Any,
    device: Any,
    *,
    scale: float = 0.0,
    window: int = 0,
    save: str = "",
    load: str = "",
) -> tuple[list[dict[str, float]], dict[str, Any], float]:
    """(metrics of each step, weights, sum of the learning rates)."""
    optimizer = OptimizerConfig(learning_rate=1e-3, clip_norm=0.05, eps=1e-6)
    policy = Policy(
        model=ModelConfig(path=model),
        training=TrainingConfig(
            precision="float16",
            optimizer=optimizer,
            schedule=ScheduleConfig(warmup_steps=STEPS),
            **settings,
        ),
        algorithm=AlgorithmConfig(),
        temperature=1.0,
        mesh=mesh,
        device=device,
        total_steps=STEPS,
        seed=1,
    )
    found = policy.engine.loss_scale
    assert found is not None
    if scale:
        found.value = scale
    if window:
        found._optimizer.loss_scaler.scale_window = window
    if load:
        policy.engine.load(Path(load))
    reports = []
    for step in range(1 if load else 0, STEPS):
        if save and step == 1:
            save_state(policy.engine, save)
        made, settings = groups(3, 3, seed=step), {"num_data_ranks": mesh.data.size}
        plan = dealt(made, step=step, micro_batch_tokens=70, **settings)
        reports.append(policy.train(plan.share(mesh.data.rank)).metrics)
    assert policy.engine.steps_done == STEPS
    weights = whole_weights(policy.engine)
    policy.engine.destroy()
    return reports, weights, sum(one["learning_rate"] for one in reports)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """[rank][case]."""
    place = tmp_path_factory.mktemp("scale")
    model = write_model(place / "model", num_key_value_heads=2)
    return run_ranks(2, __file__, "trained", str(model), str(place), timeout_s=300)


def assert_near(one: Any, other: Any, case: object) -> None:
    """The same steps, up to what float16 rounds differently below its smallest normal number."""
    assert len(one[0]) == len(other[0])
    for mine, theirs in zip(one[0], other[0], strict=True):
        for name, near in (("grad_norm", 2e-3), ("loss", 2e-3), ("entropy", 1e-3)):
            # A loss is a sum of terms of about 1 that cancel.
            size = 1.0 if name == "loss" else theirs[name]
            assert abs(mine[name] - theirs[name]) < near * size, (case, name, mine, theirs)
        for name in ("learning_rate", "tokens/trained", "skipped_steps"):
            assert mine[name] == theirs[name], (case, name)
    for name, tensor in one[1].items():
        assert abs(tensor - other[1][name]).max() < 3e-3, (case, name)


def test_an_overflow_is_computed_again(found: list[list[dict[str, Any]]]) -> None:
    """Nothing of it remains: metrics and weights are those of steps without, on every rank, and it
    counts as no skipped step.
    """
    for rank in found:
        for case, runs in zip(CASES, rank, strict=True):
            (first, *later), (usual, *_) = runs["high"][0], runs["plain"][0]
            assert usual["loss_scale"] == 2.0**12 and usual["overflows"] == 0, case
            assert first["overflows"] > 0 and first["skipped_steps"] == 0, case
            assert first["loss_scale"] == 2.0 ** (20 - first["overflows"]), case
            assert sum(one["overflows"] for one in later) <= 2, case
            assert_near(runs["high"], runs["plain"], case)
            assert runs["high"][0] == found[0][CASES.index(case)]["high"][0]


def test_the_step_in_which_the_scale_grows_is_the_same(found: list[list[dict[str, Any]]]) -> None:
    for case, runs in zip(CASES, found[0], strict=True):
        scales = [math.log2(one["loss_scale"]) for one in runs["growing"][0]]
        assert scales[-1] > scales[0] == 2, (case, scales)
        assert_near(runs["growing"], runs["plain"], case)


def test_a_checkpoint_keeps_the_scale(found: list[list[dict[str, Any]]]) -> None:
    """The steps after it are the same, bit for bit."""
    timed = ("time/", "tokens/trained_per_s")
    for case, runs in zip(CASES, found[0], strict=True):
        for mine, theirs in zip(runs["resumed"][0], runs["high"][0][1:], strict=True):
            for name, value in theirs.items():
                assert name.startswith(timed) or mine[name] == value, (case, name)
        for name, tensor in runs["high"][1].items():
            assert (tensor == runs["resumed"][1][name]).all(), (case, name)


def test_layouts_and_stages_agree(found: list[list[dict[str, Any]]]) -> None:
    for case, runs in zip(CASES, found[0], strict=True):
        if "lora" not in case:
            assert_near(runs["plain"], found[0][0]["plain"], case)
