"""A recipe that asks for what the GPU does not have is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.checks.preflight import check_gpus
from megarl.config import RunConfig, read
from megarl.errors import UserError
from megarl.trainer.precision import automatic, check_precision, refuse_different, slow_line

RECIPE = Path(__file__).resolve().parents[2] / "launch/recipes/quickstart.yaml"
TRAINING = ("--training.precision", "bfloat16", "--training.zero_stage", "2")
ENGINE = ("--rollout.engine.dtype", "bfloat16")


def check(patch: pytest.MonkeyPatch, name: str, capability: int, *overrides: str) -> None:
    """Check the quick start's recipe with `overrides` on a machine with one GPU of that name."""
    patch.setattr(torch.cuda, "get_device_name", lambda index: name)
    patch.setattr(torch.cuda, "get_device_capability", lambda index: (capability, 0))
    config = read(RunConfig, RECIPE, overrides)
    check_precision(config.training, torch.device("cuda"))
    check_gpus(config)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (TRAINING, "training.precision is 'bfloat16', which Tesla V100 does not compute in; set"),
        (ENGINE, "rollout.engine.dtype is 'bfloat16', which Tesla V100 does not compute in; set"),
    ],
)
def test_bfloat16_needs_a_gpu_that_has_it(
    overrides: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, "NVIDIA A100", 8, *overrides)
    check(monkeypatch, "Tesla V100", 7)
    with pytest.raises(ValueError) as refused:
        check(monkeypatch, "Tesla V100", 7, *overrides)
    assert said in str(refused.value)


def test_a_slice_is_for_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
    check(monkeypatch, cut, 8)
    with pytest.raises(ValueError, match=r"rollout\.engine\.tensor 2; start one rank"):
        check(monkeypatch, cut, 8, "--rollout.engine.tensor", "2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="the run has 2 ranks here"):
        check(monkeypatch, cut, 8)


@pytest.mark.parametrize(
    ("capability", "zero_stage", "chosen"),
    [(9, 1, "bfloat16"), (9, 0, "float32"), (7, 1, "float16"), (7, 0, "float32")],
)
def test_automatic_precision_is_one_that_the_gpu_has(
    capability: int, zero_stage: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (capability, 0))
    assert automatic(zero_stage, torch.device("cuda"))[0] == chosen


@pytest.mark.parametrize("has_amx", [True, False])
def test_automatic_precision_of_a_processor(has_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr("megarl.trainer.precision.ONEDNN", print)
    chosen, why = automatic(0, torch.device("cpu"))
    assert chosen == ("bfloat16x2" if has_amx else "float32") and "AMX" in why
    assert bool(slow_line("bfloat16x2")) != has_amx


def test_bfloat16x2_is_for_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'bfloat16' on GPUs"):
        check(monkeypatch, "NVIDIA A100", 8, "--training.precision", "bfloat16x2")


def test_a_plan_counts_what_automatic_precision_is_on_gpus() -> None:
    for precision, stage, dtype in (
        ("auto", 3, "bfloat16"),
        ("auto", 0, "float32"),
        ("bfloat16x2", 3, "float32"),
        ("float16", 1, "float16"),
    ):
        words = ("--training.precision", precision, "--training.zero_stage", str(stage))
        assert read(RunConfig, RECIPE, words).training.dtype == dtype


def test_ranks_on_unlike_machines_do_not_choose_apart() -> None:
    refuse_different(["bfloat16"] * 4)
    with pytest.raises(
        UserError, match=r"auto is bfloat16x2 on rank 2, float32 on rank 0, because"
    ):
        refuse_different(["float32", "float32", "bfloat16x2", "float32"])
