"""Gradients of an optimizer on the host move there once a step: what is copied, and that DeepSpeed
without this change learns the same.

On the CPU "device" and "host" are the same memory. Counted are therefore the operations that write
to what is in the host's memory on a GPU machine: buffers that DeepSpeed has made on `cpu` for
the optimizer.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from support.policy import make_role, on_mesh, save_state, whole_weights
from support.ranks import run_ranks
from support.tiny import write_model
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.errors import UserError
from megarl.settings.training import OptimizerConfig
from megarl.trainer import zero
from megarl.trainer.gradient_sums import PARTS, keep_on_device, sums_of
from megarl.types import Samples

STEPS = 3
CASES: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"zero_stage": 3, "precision": "bfloat16"}, (1, 2, 4)),
    ({"zero_stage": 2}, (1, 2, 4)),
    ({"zero_stage": 3}, (2,)),
    ({"zero_stage": 2, "precision": "bfloat16"}, (2,)),
    ({"zero_stage": 1, "precision": "bfloat16"}, (2,)),
]
"""(settings of `training` beside the optimizer on the host, micro-batches of a step)."""


def measure(model: str, folder: str, num_ranks: int) -> dict[str, Any]:
    """{case: what `trained` found} on this of `num_ranks` ranks. Keys are (stage, precision, micro-batches, whose):
    "ours", "deepspeed" without `keep_on_device`, "micro_batch" by the setting, or "resumed".
    """
    found = {}
    with on_mesh(num_ranks) as (mesh, device):
        for settings, numbers in CASES:
            where = settings["zero_stage"], settings.get("precision", "float32")
            for number in numbers:
                common: Any = (model, settings, mesh, device, number)
                path = f"{folder}/{len(found)}" if number == 2 else ""
                found[*where, number, "ours"] = trained(*common, save=path)
                found[*where, number, "deepspeed"] = trained(*common, is_ours=False)
                if path:
                    found[*where, number, "resumed"] = trained(*common, load=path)
        common = (model, CASES[0][0] | {"offload_gradients": "micro_batch"}, mesh, device, 2)
        found[3, "bfloat16", 2, "micro_batch"] = trained(*common)
    return found


def trained(
    model: str,
    settings: dict[str, Any],
    mesh: Any,
    device: Any,
    micro_batches: int,
    *,
    is_ours: bool = True,
    save: str = "",
    load: str = "",
) -> dict[str, Any]:
    """Train `STEPS` steps. A checkpoint is written after the first, or read in its place."""
    clipped = OptimizerConfig(learning_rate=1e-3, clip_norm=0.5)
    settings = settings | {"offload_optimizer": True, "optimizer": clipped}
    with host_memory_of_deepspeed(is_ours=is_ours) as host:
        role = make_role(model, mesh, device, steps=STEPS, **settings)
    if load:
        role.engine.load(Path(load))
    counts, norms = [], []
    for step in range(1 if load else 0, STEPS):
        with host.counted(role.engine._engine.optimizer):
            for number in range(micro_batches):
                ids = np.arange(1, 10 + number) + step + mesh.data.rank
                sample = Samples.one(0, ids, mask=np.arange(len(ids)) > 1)
                (micro,) = role.pack(sample, [[0]])
                loss = -role.engine(micro, 1.0)[0].sum() / 100
                role.engine.backward(loss, last=number == micro_batches - 1)
        counts.append(host.num_bytes)
        norms.append(role.engine.step()[0])
        if save and step == 0:
            save_state(role.engine, save)
    weights = whole_weights(role.engine)
    sums = [(one.device.type, one.nbytes) for one in sums_of(role.engine._engine.optimizer)]
    role.destroy()
    return {"sums": sums, "weights": weights, "norms": norms, "written": counts}


class HostMemory:
    """The buffers that DeepSpeed makes on the host, and the bytes that are written to them."""

    def __init__(self) -> None:
        self.buffers: list[Any] = []
        """Kept alive, so that their memory is not given to other tensors."""
        self.num_bytes = 0
        """Bytes written in the last `counted`."""

    @contextmanager
    def counted(self, optimizer: Any) -> Any:
        """Count the bytes that are written to the host within."""
        masters = getattr(optimizer, "fp32_partitioned_groups_flat", None)
        masters = masters or optimizer.single_partition_of_fp32_groups
        lasting = {address(one) for one in [*self.buffers, *(m.grad for m in masters)]}
        memory, self.num_bytes = self, 0

        class Counter(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                # ZeRO 2 in float32 makes these buffers as it goes.
                made = getattr(optimizer, "accumulated_grads_in_cpu", {}).values()
                host = lasting | {address(one) for one in made}
                memory.num_bytes += sum(
                    one.nbytes for one in written(func, args, kwargs) if address(one) in host
                )
                return func(*args, **(kwargs or {}))

        with Counter():
            yield


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors that a call of torch's operator `func` writes to."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else (kwargs or {}).get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return [one for one in found if isinstance(one, torch.Tensor)]


def address(tensor: Any) -> int:
    """Where the memory of a tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


@contextmanager
def host_memory_of_deepspeed(*, is_ours: bool) -> Any:
    """What DeepSpeed has on the host before `keep_on_device`, which is left out if not `is_ours`."""
    host = HostMemory()

    def keep(optimizer: Any) -> None:
        host.buffers += sums_of(optimizer)
        if is_ours:
            keep_on_device(optimizer)

    def initialise(*args: Any, **more: Any) -> Any:
        made = plain(*args, **more)
        host.buffers += sums_of(made[1])
        return made

    plain = zero.deepspeed.initialize
    zero.keep_on_device, zero.deepspeed.initialize = keep, initialise
    yield host
    zero.keep_on_device, zero.deepspeed.initialize = keep_on_device, plain


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """By rank, what one launch of two ranks found."""
    folder = tmp_path_factory.mktemp("sums")
    model = write_model(folder / "model", hidden_size=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return run_ranks(2, __file__, "measure", str(model), str(folder), 2, timeout_s=400)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether weights and gradient norms are equal bit for bit; of a resumed run those of its
    steps.
    """
    names = one["weights"].keys()
    common = min(len(one["norms"]), len(other["norms"]))
    return one["norms"][-common:] == other["norms"][-common:] and all(
        torch.equal(one["weights"][name], other["weights"][name]) for name in names
    )


def test_the_sums_of_deepspeed_alone_are_the_same_bits(found: list[dict[Any, Any]]) -> None:
    for rank in found:
        for (*where, whose), ours in rank.items():
            assert len(ours["weights"]) > 10 and len(set(ours["norms"])) == len(ours["norms"])
            if whose in ("ours", "micro_batch"):
                assert same(ours, rank[*where, "deepspeed"]), where


def check_what_is_written(found: list[dict[Any, Any]], device: str) -> None:
    """Once a step whatever the number of micro-batches, and DeepSpeed alone more often."""
    for rank in found:
        (ours,) = rank[3, "bfloat16", 2, "ours"]["sums"]
        # Parts of equal length, of which some of the last rank's end in padding.
        written = rank[3, "bfloat16", 2, "ours"]["written"][0]
        assert ours[0] == device and written <= ours[1] <= 1.01 * written
        assert rank[3, "bfloat16", 2, "micro_batch"]["sums"] == [("cpu", ours[1])]
        for stage, precision in ((3, "bfloat16"), (2, "float32")):
            once = rank[stage, precision, 1, "ours"]["written"]
            assert once[0] > 0
            for number in (1, 2, 4):
                ours, theirs = (
                    rank[stage, precision, number, whose]["written"]
                    for whose in ("ours", "deepspeed")
                )
                print(stage, precision, number, ours, theirs)
                assert ours == once
                if stage == 3:  # once in each micro-batch, and once for the optimizer
                    assert theirs == [(number + 1) * size for size in once]
                elif number > 1:  # whole parameters, of which a rank has parts
                    assert min(theirs) >= (number + 1) * once[0]
        by_setting = rank[3, "bfloat16", 2, "micro_batch"]["written"]
        assert by_setting == rank[3, "bfloat16", 2, "deepspeed"]["written"]
        for stage in (1, 2):  # DeepSpeed's own way, as the table in the module says
            ours, theirs = (rank[stage, "bfloat16", 2, w] for w in ("ours", "deepspeed"))
            assert ours["written"] == theirs["written"]


def test_gradients_go_to_the_host_once_a_step(found: list[dict[Any, Any]]) -> None:
    check_what_is_written(found, "cpu")


@pytest.mark.gpu
def test_gradients_go_to_the_host_once_a_step_on_a_gpu(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", hidden_size=64)
    found = run_ranks(1, __file__, "measure", str(model), str(tmp_path), 1, timeout_s=400)
    check_what_is_written(found, "cuda")


def test_a_checkpoint_between_two_steps(found: list[dict[Any, Any]]) -> None:
    for rank in found:
        resumed = [key for key in rank if key[-1] == "resumed"]
        assert len(resumed) == len(CASES)
        for *where, _ in resumed:
            assert same(rank[*where, "resumed"], rank[*where, "ours"]), where


def test_another_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the optimizer; the real one is accepted by the tests above."""
    flat = torch.ones(6)
    optimizer = DeepSpeedZeroOptimizer_Stage3.__new__(DeepSpeedZeroOptimizer_Stage3)
    optimizer.offload_optimizer, optimizer.grad_partitions_flat_buffer = True, flat
    optimizer.inf_or_nan_tracker = torch.zeros(1, dtype=torch.bool)
    setattr(optimizer, PARTS, {4: flat[:2], 7: flat[2:]})
    keep_on_device(optimizer)
    parts = getattr(optimizer, PARTS)
    (sums,) = sums_of(optimizer)
    parts[7] += 1.0
    assert sums.tolist() == [0, 0, 1, 1, 1, 1] and flat.tolist() == [1] * 6
    monkeypatch.setattr("deepspeed.__version__", "0.20.0")
    with pytest.raises(UserError, match=r"0\.20\.0 may add up gradients in another way"):
        keep_on_device(optimizer)
    monkeypatch.undo()
    delattr(optimizer, PARTS)
    other: Any = SimpleNamespace(partition_gradients=True)  # of ZeRO 2, and built otherwise too
    for one in (optimizer, other):
        with pytest.raises(UserError, match="may add up gradients in another way"):
            keep_on_device(one)
