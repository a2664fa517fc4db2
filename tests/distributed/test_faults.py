"""Faults injected into training on two gloo ranks: named on every rank within the step, and a step
that is skipped leaves no trace.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from support.ranks import run_ranks
from support.tiny import groups, write_model

from megarl.checkpoints.manifest import damage

UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
Cases = list[dict[str, Any]]
CASES: Cases = [
    {"zero_stage": 1},
    {"zero_stage": 3},
    {"zero_stage": 2, "precision": "bfloat16", "offload_optimizer": True},
    {"zero_stage": 3, "precision": "float16", "offload_optimizer": True},
    {"zero_stage": 1, "layout": (1, 1, 2)},
]
OTHERS: Cases = [
    {"zero_stage": 0},
    {"zero_stage": 2},
    {"zero_stage": 1, "precision": "bfloat16"},
    {"zero_stage": 2, "offload_optimizer": True},
    {"zero_stage": 3, "precision": "bfloat16"},
    {"zero_stage": 1, "precision": "float16"},
    {"zero_stage": 3, "offload_optimizer": True},
]
"""Settings of `TrainingConfig`, and the layout (data, sequence, tensor)."""


def faults(model: str, folder: str, cases: Cases) -> list[dict[str, Any]]:
    """For each case, what was said at each fault. Runs on every rank. The first case writes
    checkpoints to `folder`.
    """
    import torch

    from megarl.parallel import mesh as mesh_module
    from megarl.parallel.layout import Layout
    from megarl.parallel.mesh import ProcessMesh

    torch.set_num_threads(1)
    device, found = mesh_module.initialise(timeout_s=60), []
    for case in cases:
        settings = dict(case)
        layout = Layout(*settings.pop("layout", (2, 1, 1)))
        with ProcessMesh(layout, timeout_s=60) as mesh:
            found.append(one_case(model, settings, mesh, device, "" if found else folder))
    mesh_module.finalise()
    return found


def one_case(
    model: str, settings: dict[str, Any], mesh: Any, device: Any, folder: str = ""
) -> dict[str, Any]:
    """What was said at each fault. With `folder` checkpoints are written there."""
    import torch
    from support.policy import Policy

    from megarl.checkpoints.checkpoint import Checkpoints
    from megarl.data.tokenizer import load_tokenizer
    from megarl.errors import UserError
    from megarl.rollout.batch import shares
    from megarl.settings.objectives import AlgorithmConfig
    from megarl.settings.observe import STEP_METRICS
    from megarl.settings.training import ModelConfig, OptimizerConfig, TrainingConfig

    def batch(step: int, *, rejected: bool = False) -> Any:
        made = groups(3, 3, seed=step)
        dealt = shares(
            step=step,
            drawn=made,
            accepted=[] if rejected else made,
            seconds=1.0,
            num_data_ranks=mesh.data.size,
            num_mini_batches=1,
            micro_batch_tokens=70,
            transcripts=0,
        )
        return dealt.share(mesh.data.rank)

    def policy(allowed: int) -> Any:
        return Policy(
            model=ModelConfig(path=model),
            training=TrainingConfig(
                max_skipped_steps=allowed,
                max_empty_steps=3,
                optimizer=OptimizerConfig(learning_rate=1e-3, clip_norm=0.5),
                **settings,
            ),
            algorithm=AlgorithmConfig(),
            temperature=1.0,
            mesh=mesh,
            device=device,
            total_steps=4,
            seed=1,
        )

    def weights(trained: Any) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in trained.engine.weights()}

    def message(work: Any) -> str:
        try:
            work()
        except UserError as error:
            return str(error)
        return ""

    @contextmanager
    def broken_gradient(trained: Any) -> Any:
        """Rank 1's gradient of one parameter is NaN."""
        parameter = dict(trained.engine.module.named_parameters())[f"model.{UP}"]
        hook = parameter.register_hook(lambda g: g * (float("nan") if mesh.rank == 1 else 1.0))
        yield
        hook.remove()

    plain = policy(0)
    for step in (0, 2):
        plain.train(batch(step))
    expected = weights(plain)
    plain.engine.destroy()

    trained, said = policy(2), {}
    trained.train(batch(0))
    with broken_gradient(trained):
        report = trained.train(batch(1)).metrics
    said["skipped"] = report["skipped_steps"]
    known = set(STEP_METRICS).issuperset(report)
    said["metrics"] = known and all(map(np.isfinite, report.values()))
    bad = batch(1)
    if mesh.rank == 1:
        bad.samples[0].engine_logprobs[-1] = float("nan")
    said["skipped"] += trained.train(bad).metrics["skipped_steps"]
    report = trained.train(batch(2)).metrics
    said["skipped"] += report["skipped_steps"]
    made, checkpoints = weights(trained), None
    if folder:
        checkpoints = Checkpoints(
            Path(folder),
            keep=1,
            engine=trained.engine,
            tokenizer=load_tokenizer(model),
            mesh=mesh,
            seed=0,
            data="",
        )
        checkpoints.save(step=3, next_ordinal=3)
    said["same"] = all(torch.equal(value, expected[name]) for name, value in made.items())
    empty = [message(lambda: trained.train(batch(3, rejected=True))) for _ in range(3)]
    said["empty"] = empty[2] if not any(empty[:2]) else f"too early: {empty}"
    said["engine"] = message(lambda: trained.train(bad))
    with broken_gradient(trained):
        said["gradient"] = message(lambda: trained.train(batch(3)))
    if mesh.rank == 1:
        trained.engine.owned()[NORM].fill_(float("inf"))
    said["weight"] = message(lambda: trained.train(replace(batch(3), step=3)))
    said["save"] = message(lambda: checkpoints.save(step=4, next_ordinal=4)) if checkpoints else ""
    trained.engine.destroy()
    return said


@pytest.fixture(scope="module", params=[CASES, pytest.param(OTHERS, marks=pytest.mark.nightly)])
def cases(request: pytest.FixtureRequest) -> Cases:
    return request.param


@pytest.fixture(scope="module")
def place(cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def said(place: Path, cases: Cases) -> list[list[dict[str, Any]]]:
    """[rank][case]: what one launch of two ranks found."""
    model = write_model(place / "model", num_key_value_heads=2)
    return run_ranks(2, __file__, "faults", str(model), str(place / "checkpoints"), cases)


def test_skipped_steps_leave_no_trace(said: list[list[dict[str, Any]]], cases: Cases) -> None:
    """A NaN in one rank's gradient, then one in an engine's log-probs: after both are skipped, the
    weights are those of a run that never had them.
    """
    for rank in said:
        for case, found in zip(cases, rank, strict=True):
            assert found["skipped"] == 2 and found["metrics"] and found["same"], (case, found)


@pytest.mark.parametrize(("fault", "text"), [
    ("gradient", f"step 4: the gradient of {UP} is not finite"),
    ("engine", "step 2: the engines' log-probs are not finite"),
    ("empty", "step 4: 3 steps in a row trained on no token, since the rewards of every group"),
    ("weight", f"step 4: the weight {NORM} of the policy is not finite"),
])  # fmt: skip
def test_faults_are_named_on_every_rank(
    said: list[list[dict[str, Any]]], cases: Cases, fault: str, text: str
) -> None:
    for rank in said:
        for case, found in zip(cases, rank, strict=True):
            assert found[fault].startswith(text), (case, found[fault])
            at_least = fault == "gradient" and case.get("precision") == "float16"
            assert ("at the smallest loss scale" in found[fault]) == at_least, found[fault]


def test_the_last_checkpoint_stays_whole_and_finite(
    said: list[list[dict[str, Any]]], place: Path
) -> None:
    assert all(
        rank[0]["save"].startswith(f"no checkpoint of step 4 is written: the weight {NORM}")
        for rank in said
    )
    (kept,) = (place / "checkpoints").iterdir()
    assert kept.name == "step_000003" and damage(kept) == ""
    for file in (kept / "model").glob("*.safetensors"):
        assert all(np.isfinite(tensor.numpy()).all() for tensor in load_file(file).values())
