"""What a trained role hands over to colocated engines, counted on real DeepSpeed engines: nothing but
the weights stays, and a run with hand-overs learns exactly what a run without learns.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.policy import make_role, on_mesh, save_state, whole_weights
from support.ranks import run_ranks
from support.tiny import write_model

from megarl.run.loop import lend_memory
from megarl.run.rollouts import Generation
from megarl.settings.training import LoraConfig
from megarl.trainer.gradient_sums import sums_of
from megarl.types import Samples
from megarl.weights.engine_client import EngineClient

CASES: list[dict[str, Any]] = [
    {"zero_stage": 0},
    {"zero_stage": 2, "precision": "bfloat16"},
    {"zero_stage": 3, "precision": "bfloat16", "lora": LoraConfig(rank=4)},
    {"zero_stage": 3, "precision": "bfloat16", "offload_optimizer": True},
    {"zero_stage": 1, "precision": "float16"},
]
"""Settings of `training` on two data-parallel ranks."""
OTHERS: list[dict[str, Any]] = [
    {"zero_stage": 2},
    {"zero_stage": 1, "precision": "bfloat16"},
    {"zero_stage": 3, "precision": "bfloat16"},
    {"zero_stage": 2, "precision": "bfloat16", "offload_optimizer": True},
]
STEPS = 3


def measure(model: str, folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each of `cases`: the weights after `STEPS` steps without and with hand-overs, and after
    a checkpoint that was written while the optimizer was away; the bytes that stay.
    """
    found = []
    with on_mesh(2) as (mesh, device):
        for number, settings in enumerate(cases):
            common = (model, settings, mesh, device)
            plain = trained(*common, hands_over=False)
            lent = trained(*common, hands_over=True, save=f"{folder}/{number}")
            resumed = trained(*common, hands_over=True, load=f"{folder}/{number}")
            same, resumes = equal(plain, lent), equal(lent, resumed)
            found.append(lent | {"weights": lent["bytes"], "same": same, "resumed": resumes})
    return found


def trained(
    model: str,
    settings: dict[str, Any],
    mesh: Any,
    device: Any,
    *,
    hands_over: bool,
    save: str = "",
    load: str = "",
) -> dict[str, Any]:
    """Train a role; a checkpoint is written before, or read in place of, the last step but one."""
    before = sum(alive().values()) if save else 0
    role = make_role(model, mesh, device, steps=STEPS, **settings)
    found: dict[str, Any] = {"stays": []}
    if scale := role.engine.loss_scale:
        scale.value = 1.0  # a sum overflows at a larger one
    if load:
        role.engine.load(Path(load))
    for step in range(STEPS - 1 if load else 0, STEPS):
        if hands_over:
            role.engine.offload()
            role.engine.offload()  # a second one changes nothing
            moved = role.engine._lending
            on_host = len(moved._host.bytes) if moved._host else 0
            if save and step in (0, STEPS - 1):  # without moments, and with them
                found["stays"].append(sum(alive().values()) - before - on_host)
            found["moved"] = on_host
            sums = sums_of(role.engine._engine.optimizer)
            buffer = "temp_grad_buffer_for_gpu_offload"
            if (made := getattr(role.engine._engine.optimizer, buffer, None)) is not None:
                sums.append(made)
            found["sums"] = sum(one.untyped_storage().nbytes() for one in sums)
            if save and step == STEPS - 1:
                save_state(role.engine, save)
            role.engine.reload()
        for last in (False, True):
            ids = np.arange(1, 10) + step + mesh.data.rank
            sample = Samples.one(0, ids, mask=np.arange(9) > 1)
            (micro,) = role.pack(sample, [[0]])
            role.engine.backward(-role.engine(micro, 1.0)[0].sum(), last=last)
        assert np.isfinite(role.engine.step()[0])
    weights = role.engine.module.model.parameters()
    found["bytes"] = sum(getattr(one, "ds_tensor", one.data).nbytes for one in weights)
    found["weights"] = whole_weights(role.engine)
    role.destroy()
    del role
    gc.collect()
    return found


def alive() -> dict[int, int]:
    """{address: bytes} of all memory of tensors in this process."""
    gc.collect()
    sizes: dict[int, int] = {}
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor) and one.device.type != "meta":
            storages = [one.untyped_storage()]
            storages += [one.grad.untyped_storage()] if one.is_leaf and one.grad is not None else []
            sizes |= {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sizes


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether all weights are the same, bit for bit."""
    return all(torch.equal(one["weights"][n], weight) for n, weight in other["weights"].items())


@pytest.mark.parametrize("cases", [CASES, pytest.param(OTHERS, marks=pytest.mark.nightly)])
def test_only_the_weights_stay_and_nothing_changes(
    cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", hidden_size=128, intermediate_size=256)
    places = (str(model), str(tmp_path))
    for rank in run_ranks(2, __file__, "measure", *places, cases, timeout_s=600):
        for settings, found in zip(cases, rank, strict=True):
            assert found["same"], f"{settings}: a hand-over changes what is learned"
            assert found["resumed"], f"{settings}: the checkpoint of a hand-over is another"
            assert found["sums"] == 0, f"{settings}: memory of gradients stays"
            if not settings.get("offload_optimizer"):
                # Norms, step counters, positions of the rotary embedding.
                assert max(found["stays"]) == pytest.approx(found["weights"], rel=0.05), settings
                assert found["moved"] > 0, settings


def lend(folder: str) -> bool:
    """Lend this rank's memory, of which rank 1 is late to let go; on rank 0 whether rank 1 had let
    go of it when the engines were woken. Runs on every rank.
    """
    done, found = Path(folder, "done"), list[bool]()
    with on_mesh(2, timeout_s=60) as (mesh, _):

        def offload() -> None:
            if mesh.world.rank == 1:
                time.sleep(1.0)
                done.touch()

        wakes: Any = lambda engines, timeout_s: found.append(done.exists())  # noqa: E731
        EngineClient.wake = wakes
        config: Any = SimpleNamespace(weight_sync=SimpleNamespace(timeout_s=30.0))
        parts: Any = SimpleNamespace(
            context=SimpleNamespace(mesh=mesh),
            trained=[SimpleNamespace(engine=SimpleNamespace(offload=offload))],
            generation=Generation(config, mesh, None, None),
        )
        lend_memory(parts)
    return all(found) and bool(found) == (mesh.world.rank == 0)


def test_engines_wake_after_every_rank_has_let_go(tmp_path: Path) -> None:
    assert run_ranks(2, __file__, "lend", str(tmp_path)) == [True, True]
