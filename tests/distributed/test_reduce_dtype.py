"""Gradients summed over two ranks in the dtype that `training.reduce_dtype` names, when training in
bfloat16: what rounding the sum costs, beside what bfloat16 costs anyway.

One rank adds its micro-batches up in float32. With the same micro-batches, two ranks that sum in
float32 compute the same gradient; two that sum in bfloat16 compute it rounded. Both are compared
with one rank in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from support.policy import make_role, on_mesh
from support.ranks import run_ranks
from support.tiny import write_model

from megarl.settings.training import OptimizerConfig
from megarl.types import Samples

STEPS = 3
"""DeepSpeed's Adam on CPUs rounds the end of each rank's share otherwise than its middle, by one unit
of float32. After about five steps such a difference moves a weight across a border of bfloat16, and
the runs part.
"""
DTYPES = ("float32", "auto")
DTYPES_SAID = ("float32", "bfloat16")
"""Values of `reduce_dtype`, and what they mean where training is in bfloat16."""
STAGES: list[dict[str, Any]] = [
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 2, "offload_optimizer": True},
    {"zero_stage": 3, "offload_optimizer": True},
]
"""Settings of `training`, beside the dtypes."""


def trained(model: str, cases: list[dict[str, Any]], num_ranks: int) -> list[Any]:
    """For each of `cases`, settings of `training`: (gradient of the first step, change of the
    float32 weights after `STEPS`), as one vector each. Runs on each of `num_ranks` ranks.
    """
    with on_mesh(num_ranks) as (mesh, device):
        return [vectors(model, settings, mesh, device) for settings in cases]


def vectors(model: str, settings: dict[str, Any], mesh: Any, device: Any) -> Any:
    optimizer = OptimizerConfig(learning_rate=1e-3, clip_norm=1.0)
    role = make_role(model, mesh, device, steps=STEPS, optimizer=optimizer, **settings)
    parameters: list[Any] = [one for _, one in role.engine.module.named_parameters()]
    draw = np.random.default_rng(0)
    texts = [draw.integers(3, 40, length) for length in (30, 41, 17, 38)]
    mine = range(mesh.data.rank, len(texts), mesh.data.size)
    packs = []
    for number in mine:
        text = texts[number]
        one = Samples.one(number, text, mask=np.arange(len(text)) > 0)
        packs += role.pack(one, [[0]])
    before, gradient = masters(parameters), torch.zeros(0)
    for step in range(STEPS):
        for micro in packs:
            loss = -role.engine(micro, 1.0)[0].sum() / sum(map(len, texts))
            role.engine.backward(loss, last=micro is packs[-1])
        if step == 0:
            found: list[Any] = [safe_get_full_grad(one) for one in parameters]
            gradient = torch.cat([one.detach().double().flatten() for one in found])
        role.engine.step()
    change = masters(parameters) - before
    role.destroy()
    return gradient, change


def masters(parameters: list[Any]) -> torch.Tensor:
    """The float32 weights of the optimizer, all in one vector."""
    found: list[Any] = [safe_get_full_fp32_param(one) for one in parameters]
    return torch.cat([one.detach().double().flatten() for one in found])


def away(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference, as a share of the norm of `wanted`."""
    return float((found - wanted).norm() / wanted.norm())


def test_the_dtype_of_sums_over_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = str(write_model(tmp_path / "model"))
    short = [stage | {"precision": "bfloat16"} for stage in STAGES]
    in_float32, as_trained = ([one | {"reduce_dtype": d} for one in short] for d in DTYPES)
    (exact, *alone), *_ = run_ranks(1, __file__, "trained", model, [STAGES[0], *in_float32], 1)
    found, *_ = run_ranks(2, __file__, "trained", model, in_float32 + as_trained, 2)
    for number, (case, single) in enumerate(zip(short, alone, strict=True)):
        whole, rounded = found[number], found[len(short) + number]
        numbers = {
            f"{what}, summed in {dtype}, to {against}": away(result[place], wanted[place])
            for place, what in enumerate(("gradient", "change"))
            for dtype, result in (("float32", whole), ("bfloat16", rounded))
            for against, wanted in (("one rank", single), ("float32", exact))
        }
        print(json.dumps({"case": case, **numbers}))
        assert numbers["gradient, summed in float32, to one rank"] < 1e-6, numbers
        assert numbers["change, summed in float32, to one rank"] < 1e-4, numbers
        assert 1e-4 < numbers["gradient, summed in bfloat16, to one rank"] < 4e-3, numbers
        for what in ("gradient", "change"):  # all of it is dwarfed by what bfloat16 costs anyway
            with_both = [numbers[f"{what}, summed in {dtype}, to float32"] for dtype in DTYPES_SAID]
            assert min(with_both) > 0.01 and max(with_both) < 1.1 * min(with_both), numbers
