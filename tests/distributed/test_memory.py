"""What `megarl run --dry-run` says of memory is what a trained role's tensors take up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.policy import joined, make_role
from support.ranks import run_ranks
from support.tiny import write_model

from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.settings.training import LoraConfig, ModelConfig, TrainingConfig
from megarl.trainer.memory import role_memory, sized_parameters
from megarl.types import Samples

PLACES: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((2, 1, 1), {"zero_stage": 0}),
    ((1, 2, 1), {"zero_stage": 1}),
    ((1, 1, 2), {"zero_stage": 1, "precision": "bfloat16"}),
    ((2, 1, 1), {"zero_stage": 1, "precision": "bfloat16"}),
    ((2, 1, 1), {"zero_stage": 2, "precision": "bfloat16"}),
    ((2, 1, 1), {"zero_stage": 1, "precision": "float16"}),
    ((2, 1, 1), {"zero_stage": 3, "precision": "bfloat16"}),
    ((2, 1, 1), {"zero_stage": 3, "precision": "bfloat16", "lora": LoraConfig(rank=4)}),
    ((1, 1, 2), {"zero_stage": 2, "precision": "bfloat16", "lora": LoraConfig(rank=4)}),
]
"""(layout, settings of `training`) on two ranks."""


def measure(model: str) -> list[dict[str, int]]:
    """For each of `PLACES`, bytes of this rank's weights and, after an optimizer step, of its
    master weights and moments.
    """
    found = []
    with joined() as device:
        for degrees, settings in PLACES:
            with ProcessMesh(Layout(*degrees), timeout_s=60) as mesh:
                role = make_role(model, mesh, device, steps=2, **settings)
                sample = Samples.one(0, np.arange(1, 10), mask=np.arange(9) > 1)
                (micro,) = role.pack(sample, [[0]])
                if scale := role.engine.loss_scale:
                    scale.value = 1.0  # a sum overflows at a larger one
                role.engine.backward(-role.engine(micro, 1.0)[0].sum(), last=True)
                role.engine.step()
                weights = list(role.engine.module.model.parameters())
                parts = [getattr(one, "ds_tensor", one.data) for one in weights]
                state: Any = adam(role.engine._engine.optimizer).state
                kept = [one for one in state if role.zero_stage > 0]
                kept += [
                    tensor
                    for of_one in state.values()
                    for tensor in of_one.values()
                    if isinstance(tensor, torch.Tensor) and tensor.numel() > 1
                ]
                sizes = (sum(one.nbytes for one in some) for some in (parts, kept))
                found.append(dict(zip(("weights", "optimizer"), sizes, strict=True)))
                role.destroy()
    return found


def adam(optimizer: Any) -> Any:
    """The torch optimizer inside DeepSpeed's."""
    inner = getattr(optimizer, "optimizer", None)
    return optimizer if inner is None else adam(inner)


def test_estimates_are_what_tensors_take_up(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", hidden_size=128, intermediate_size=256)
    ranks = run_ranks(2, __file__, "measure", str(folder))
    for number, (degrees, settings) in enumerate(PLACES):
        training = TrainingConfig(**settings)
        layout = Layout(*degrees)
        parameters = sized_parameters(ModelConfig(path=str(folder)), layout.tensor)
        wanted = role_memory(parameters, layout, training, trains=True)
        for name in ("weights", "optimizer"):
            most = max(found[number][name] for found in ranks)
            # DeepSpeed pads partitions to equal lengths.
            assert most == pytest.approx(getattr(wanted, name), rel=0.01), (degrees, settings, name)
