"""The quick start's recipe is accepted on a machine with one GPU, or refused before its first stage."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import quickstart_settings
import torch

from megarl.engines.plan import check_placement
from megarl.errors import UserError
from megarl.settings.config import RunConfig, read

GIB = 2**30
LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SCRIPT, RECIPE = LAUNCH / "quickstart.sh", LAUNCH / "recipes/quickstart.yaml"


def use_gpu(patch: pytest.MonkeyPatch, *, free: float, total: float, capability: int = 9) -> None:
    """Make torch report one GPU."""
    cuda: dict[str, Any] = {
        "mem_get_info": lambda index: (int(free * GIB), int(total * GIB)),
        "get_device_name": lambda index: "NVIDIA H100",
        "get_device_capability": lambda index: (capability, 0),
    }
    for name, value in cuda.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(quickstart_settings, "local_device", lambda: torch.device("cuda", 0))


def settings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the tool prints."""
    assert quickstart_settings.main([str(RECIPE)]) == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("free", "total", "capability", "dtype", "share"),
    [(79, 80, 9, "bfloat16", 0.3), (15, 16, 7, "float16", 0.3), (10, 80, 8, "bfloat16", 0.087)],
)
def test_one_gpu_is_shared(
    free: float, total: float, capability: int, dtype: str, share: float,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    use_gpu(monkeypatch, free=free, total=total, capability=capability)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    plain = read(RunConfig, RECIPE)
    with pytest.raises(ValueError, match="engines need GPUs that the trainer ranks do not see"):
        check_placement(plain, 1, 1, shares_gpus=True)
    words = settings(capsys)
    config = read(RunConfig, RECIPE, words)
    check_placement(config, 1, 1, shares_gpus=True)
    engine = config.rollout.engine
    assert (config.rollout.placement, config.training.zero_stage) == ("colocated", 2)
    assert (engine.dtype, engine.gpu_memory_utilization) == (dtype, share)
    assert engine.gpu_memory_utilization * total <= free - 3 + 0.1


def test_a_busy_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A published model needs more of it."""
    use_gpu(monkeypatch, free=10, total=80)
    assert quickstart_settings.main([str(LAUNCH / "recipes/smollm2_arithmetic.yaml")]) == 2
    said = capsys.readouterr().err
    assert "needs 14 GiB of GPU memory" in said and "launch/quickstart.sh --model smollm2" in said
    assert "has 10.0 of 80.0 GiB free; choose another GPU" in said


def test_a_gpu_that_torch_does_not_see_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> torch.device:
        raise UserError("the driver is too old; update it")

    monkeypatch.setattr(quickstart_settings, "local_device", refuse)
    assert quickstart_settings.main([str(RECIPE)]) == 2
    assert "the driver is too old; update it" in capsys.readouterr().err


def test_nothing_changes_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert settings(capsys) == []


def test_the_script_asks_first() -> None:
    script = SCRIPT.read_text()
    assert "|| exit 2" in script[script.index("quickstart_settings.py") :].splitlines()[0]
    assert script.index("quickstart_settings.py") < script.index("make_addition.py")
    assert script.count("$settings") == 4


@pytest.mark.parametrize(("arguments", "says"), [
    ("--model qwen", "--model is 'qwen'; set it to smollm2"), ("--model", "--model is ''"),
    ("one", "found 'one'"), ("1 2", "found '1 2'"),
    ("--models smollm2", "found '--models smollm2'"),
])  # fmt: skip
def test_other_arguments_are_refused_at_once(arguments: str, says: str) -> None:
    done = subprocess.run(
        ["bash", SCRIPT, *arguments.split()], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1
