"""An optimizer on the host, when gradients are not finite: DeepSpeed skips the step by itself, and
what the next one trains on.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.policy import make_role, on_mesh
from support.ranks import run_ranks
from support.tiny import write_model

from megarl.parallel.mesh import Axis
from megarl.settings.training import TrainingConfig
from megarl.trainer import zero
from megarl.trainer.gradient_sums import PARTS
from megarl.trainer.zero import TrainEngine
from megarl.types import Samples

CASES: list[dict[str, Any]] = [
    {"zero_stage": 1, "precision": "bfloat16"},
    {"zero_stage": 2, "precision": "bfloat16"},
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
]
"""Settings of `training` beside the optimizer on the host."""


def norms(model: str, scales: list[float]) -> list[list[float]]:
    """For each of `CASES`, the gradient norm of steps whose losses are multiplied by `scales`. Runs
    on a rank.
    """
    found = []
    with on_mesh() as (mesh, device):
        for settings in CASES:
            role = make_role(
                model, mesh, device, steps=len(scales), offload_optimizer=True, **settings
            )
            ids = np.arange(1, 20)
            (micro,) = role.pack(Samples.one(0, ids, mask=ids > 1), [[0]])
            found.append([])
            for scale in scales:
                role.engine.backward(role.engine(micro, 1.0)[0].sum() * scale, last=True)
                found[-1].append(role.engine.step()[0])
            role.destroy()
    return found


def test_a_step_that_deepspeed_skips_leaves_no_gradients(tmp_path: Path) -> None:
    """Gradients of every parameter may be finite while the norm of all is not. The weights stay, so
    the next step has the first one's gradients, and no others.
    """
    model = write_model(tmp_path / "model")
    (clean,) = run_ranks(1, __file__, "norms", str(model), [1.0], timeout_s=200)
    (found,) = run_ranks(1, __file__, "norms", str(model), [math.nan, 1.0], timeout_s=200)
    for settings, (broken, after), (wanted,) in zip(CASES, found, clean, strict=True):
        assert not math.isfinite(broken), settings
        assert after == wanted > 0, settings


def test_gradients_on_the_host_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the copies may be under way after the last backward pass. With a stand-in for a
    parameter under ZeRO 1, whose gradient arrives once it is waited for.
    """
    arrived = torch.zeros(3)
    monkeypatch.setattr(zero, "synchronize", lambda device: arrived.fill_(math.nan))
    parameter = SimpleNamespace(
        requires_grad=True,
        _hp_mapping=SimpleNamespace(get_lp_grad_fragment=lambda index: arrived),
        _index_in_param_group=0,
    )
    engine: Any = object.__new__(TrainEngine)
    engine.config = TrainingConfig(zero_stage=1, offload_optimizer=True)
    engine.device = torch.device("cpu")
    engine.mesh = SimpleNamespace(world=Axis("world", 1, 0, (0,), None))
    engine.module = SimpleNamespace(named_parameters=lambda: [("model.weight", parameter)])
    assert engine.broken_gradient() == "weight"


def test_gradients_on_the_device_are_not_copied_back_from_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under ZeRO 3 with the optimizer on the host, sums are looked at where they were added up.
    With a stand-in for a parameter and its optimizer.
    """
    copied: list[Any] = []
    monkeypatch.setattr(zero, "safe_get_local_grad", lambda it: copied.append(it) or torch.ones(2))
    sums = torch.tensor([1.0, math.nan])
    optimizer = SimpleNamespace(offload_optimizer=True, **{PARTS: {7: sums}})
    parameter = SimpleNamespace(
        requires_grad=True, ds_id=7, device=sums.device, _z3_optimizer=optimizer
    )
    assert zero._gradient(parameter) is sums and not copied
    optimizer.offload_optimizer = False
    assert zero._gradient(parameter) is not sums and copied == [parameter]
