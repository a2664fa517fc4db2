"""Under ZeRO 3 no rank ever has a whole model on its device: neither the policy nor the reference,
counted while megarl and DeepSpeed build them.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from support.policy import make_role, on_mesh
from support.ranks import run_ranks
from support.tiny import write_model
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.trainer import working_memory, zero
from megarl.trainer.finite import StepGuard
from megarl.trainer.step import StepMetrics, optimizer_step
from megarl.types import Samples

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 12,
    "vocab_size": 64,
}
RANKS = 2
LAYER = 37_120
"""Elements of a layer of this model, which has 453,696 in all."""
LIMIT = 80_000


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that operations make on the device, which stands for a GPU: what
    is read from a file in place is not among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak, self._known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(one, torch.Tensor) and one.device.type != "meta":
                self._count(one.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        name, size = storage._cdata, storage.nbytes()
        if name in self._known:
            return
        self._known.add(name)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, name, size)

    def _free(self, name: int, size: int) -> None:
        self._known.discard(name)
        self.now -= size


def build(model: str) -> dict[str, int]:
    """Peak bytes on this rank while a frozen and a trained role are built under ZeRO 3, and a frozen
    one without; bytes in bfloat16 of the whole model and of its largest tensor.
    """
    found = {}
    sharded = {"zero_stage": 3, "precision": "bfloat16"}
    with on_mesh(RANKS) as (mesh, device):
        for name, steps, settings in (
            ("reference", None, sharded),
            ("policy", 2, sharded),
            ("whole", None, {}),
        ):
            with Allocations() as counted:
                role = make_role(model, mesh, device, name=name, steps=steps, **settings)
            sizes = [one.numel() for one in role.engine.module.parameters()]
            found |= {name: counted.peak, "sum": 2 * sum(sizes), "largest": 2 * max(sizes)}
            role.destroy()
    return found


def test_no_rank_has_a_whole_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", **SHAPE)
    for found in run_ranks(RANKS, __file__, "build", str(model)):
        part, largest = found["sum"] / RANKS, found["largest"]
        # Its own part, and a few tensors on the way to it.
        assert part <= found["reference"] <= part + 4 * largest < found["sum"]
        # Beside it master weights and gradients, of 4 bytes, and the buffer in which gradients are
        # reduced, of the whole model's; the moments come with the first step.
        assert found["policy"] <= part / 2 * (2 + 4 + 4) + found["sum"] + 4 * largest
        # The count sees a whole model, of float32, where there is one.
        assert found["whole"] >= 2 * found["sum"]


def gather(model: str) -> dict[str, list[int]]:
    """The most elements of parameters that a frozen role and one trained under recomputation have
    gathered before a module computes, in each of three steps, where `LIMIT` are allowed.
    """
    working_memory.LIVE_ELEMENTS = LIMIT
    plain = zero.deepspeed_config

    def without_small(*arguments: Any, **settings: Any) -> dict[str, Any]:
        made: dict[str, Any] = plain(*arguments, **settings)
        # DeepSpeed never releases parameters of fewer elements, of which this model has no others.
        made["zero_optimization"]["stage3_param_persistence_threshold"] = 100
        return made

    zero.deepspeed_config = without_small
    peaks: dict[str, list[int]] = {"reference": [], "policy": []}
    samples = [Samples.one(i, np.arange(1, 12), mask=np.arange(11) > 1) for i in range(RANKS)]
    with on_mesh(RANKS) as (mesh, device):
        roles = {
            name: make_role(
                *(model, mesh, device),
                name=name,
                steps=3 if name == "policy" else None,
                zero_stage=3,
                gradient_checkpointing=True,
            )
            for name in peaks
        }

        def count(name: str) -> None:
            parameters: list[Any] = list(roles[name].engine.module.parameters())
            gathered = [p for p in parameters if p.ds_status != ZeroParamStatus.NOT_AVAILABLE]
            peaks[name][-1] = max(peaks[name][-1], sum(p.ds_numel for p in gathered))

        for name, role in roles.items():
            for module in role.engine.module.modules():
                module.register_forward_pre_hook(lambda *_, name=name: count(name))
        engine, guard = roles["policy"].engine, StepGuard(roles["policy"], allowed=0)
        for step in range(3):
            for peak in peaks.values():
                peak.append(0)
            roles["reference"].logprobs(Samples.concatenate(samples))
            micro = roles["policy"].pack(samples[mesh.data.rank], [[0]])
            guard.begin(f"step {step}")
            work: Any = (micro, lambda one: -engine(one, 1.0)[0].sum())
            optimizer_step(roles["policy"], *work, guard, StepMetrics(device, ()))
    return peaks


def test_gathered_weights_stay_below_the_limit(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", **SHAPE)
    for peaks in run_ranks(RANKS, __file__, "gather", str(model)):
        for name, peak in peaks.items():
            assert LAYER < max(peak) <= LIMIT + LAYER, (name, peak)
