"""A recipe that asks for what the GPU does not have is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.checks.gpu_checks import check_gpus, check_precision
from megarl.config import RunConfig, read

RECIPE = Path(__file__).resolve().parents[2] / "launch/recipes/quickstart.yaml"
TRAINING = ("--training.precision", "bfloat16", "--training.zero_stage", "2")
ENGINE = ("--rollout.engine.dtype", "bfloat16")


def check(patch: pytest.MonkeyPatch, name: str, capability: int, *overrides: str) -> None:
    """Check the quick start's recipe with `overrides` on a machine with one GPU of that name."""
    patch.setattr(torch.cuda, "get_device_name", lambda index: name)
    patch.setattr(torch.cuda, "get_device_capability", lambda index: (capability, 0))
    config = read(RunConfig, RECIPE, overrides)
    check_precision(config.training)
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
