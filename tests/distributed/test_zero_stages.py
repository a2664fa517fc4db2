"""Thirty steps under every ZeRO stage in bfloat16, on whatever device there is; and on a GPU what
the CPU trains.

The layouts of test_layouts.py need several ranks. One GPU is one rank, on which the stages still
take different ways through DeepSpeed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import training_cases
from support.policy import make_role, on_mesh
from support.ranks import run_ranks
from support.tiny import write_model
from support.training_cases import differences, write

from megarl.kernels import packed_attention
from megarl.settings.training import OptimizerConfig
from megarl.types import Samples

STEPS = 30
STAGES: list[dict[str, Any]] = [
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 3, "offload_optimizer": True},
]
"""Settings of `training`, beside bfloat16."""


def train(model: str, stages: list[dict[str, Any]]) -> list[list[float]]:
    """For each of `stages` the loss of every step: the negative mean log-prob of three texts, which
    are learned by heart. Runs on a rank.
    """
    with on_mesh() as (mesh, device):
        return [losses(model, settings, mesh, device) for settings in stages]


def losses(model: str, settings: dict[str, Any], mesh: Any, device: Any) -> list[float]:
    optimizer = OptimizerConfig(learning_rate=3e-3, clip_norm=1.0)
    settings = settings | {"precision": "bfloat16", "optimizer": optimizer}
    role = make_role(model, mesh, device, steps=STEPS, **settings)
    draw, found = np.random.default_rng(0), []
    texts = [draw.integers(3, 40, length) for length in (30, 41, 17)]
    samples = Samples.concatenate(
        [Samples.one(n, text, mask=np.arange(len(text)) > 0) for n, text in enumerate(texts)]
    )
    (micro,) = role.pack(samples, [[0, 1, 2]])
    for _ in range(STEPS):
        logprobs = role.engine(micro, 1.0)[0]
        loss = -logprobs.sum() / sum(map(len, texts))
        role.engine.backward(loss, last=True)
        role.engine.step()
        found.append(float(loss))
    role.destroy()
    return found


def train_with_a_kernel(model: str, settings: dict[str, Any]) -> list[float]:
    """As `losses` on one rank, with a kernel of variable length in the place of a GPU's."""

    def kernel(q: Any, k: Any, v: Any, starts: Any, longest: int, scale: float) -> Any:
        return packed_attention.packed_reference(q, k, v, starts, scale)

    packed_attention.varlen_function = lambda capability: kernel
    with on_mesh() as (mesh, device):
        return losses(model, settings | {"attention": "flash_attn"}, mesh, device)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_kernel_is_proven_before_the_first_backward(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No forward pass without gradients comes before, as in supervised training: the comparison
    with float64 inside a layer that is checkpointed would end the run.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = write_model(tmp_path / "model", hidden_size=64)
    settings = {"zero_stage": stage, "gradient_checkpointing": True}
    (found,) = run_ranks(1, __file__, "train_with_a_kernel", str(model), settings)
    assert found[-1] < 0.5 * found[0], found


def check_stages(folder: Path) -> None:
    """Every stage learns, and all learn the same."""
    model = write_model(folder / "model", hidden_size=64)
    (found,) = run_ranks(1, __file__, "train", str(model), STAGES)
    print(json.dumps(found))
    first = np.array(found[0])
    assert first[0] > 3 and first[-1] < 0.5 * first[0], first
    for settings, curve in zip(STAGES, found, strict=True):
        assert len(curve) == STEPS
        # Each rounds its weights to bfloat16 after every step; on the CPU the gap is up to 0.001.
        gap = np.abs(np.array(curve) - first) / first[0]
        assert gap.max() < 0.005, (settings, gap.max())


def test_thirty_steps_under_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_stages(tmp_path)


@pytest.mark.gpu
def test_thirty_steps_under_every_stage_on_a_gpu(tmp_path: Path) -> None:
    check_stages(tmp_path)


@pytest.mark.gpu
def test_a_gpu_trains_what_the_cpu_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reinforcement learning on packed documents in float32: log-probs, gradient norms, weights."""
    model = write(tmp_path / "model")
    cases = [{"layout": (1, 1, 1), "stage": stage, "model": model} for stage in range(4)]
    (found,) = run_ranks(1, training_cases.__file__, "run_cases", cases, timeout_s=400)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (wanted,) = run_ranks(1, training_cases.__file__, "run_cases", cases[:1])
    for case, result in zip(cases, found, strict=True):
        numbers = differences(wanted[0], result)
        print(case["stage"], numbers)
        assert max(numbers.values()) < 1e-4, (case, numbers)
