"""A model under DeepSpeed: backward on a micro-batch, an optimizer step, whole weights by name; and
the same model without an optimizer.

The loss handed to `backward` is this rank's share of one global sum; DeepSpeed's mean over ranks is
undone here.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_local_grad

from megarl.checkpoints.adapter_files import SCORE
from megarl.checkpoints.rank_files import RankFiles
from megarl.parallel.collectives import all_reduce, all_reduce_max
from megarl.parallel.mesh import Axis, DeepSpeedView, ProcessMesh
from megarl.parallel.reshard.owned import tensor_spans
from megarl.parallel.tensor import replicas
from megarl.settings.training import TrainingConfig
from megarl.trainer import working_memory
from megarl.trainer.expert_zero import expert_groups
from megarl.trainer.gradient_sums import keep_on_device, sum_of
from megarl.trainer.heads import SCORING
from megarl.trainer.loading import Part
from megarl.trainer.lora import MergedWeights, is_adapter
from megarl.trainer.loss_scale import LossScale, fp16_settings
from megarl.trainer.memory_lending import MemoryLending, free_cache, synchronize
from megarl.trainer.model import RoleModel
from megarl.trainer.optimizers import OPTIMIZERS, learning_rate
from megarl.trainer.zero_state import TrainState
from megarl.weights.published import kept_buffers

logging.getLogger("DeepSpeed").setLevel(logging.WARNING)

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""DeepSpeed's name of each dtype."""


def deepspeed_config(
    config: TrainingConfig,
    num_data_ranks: int,
    *,
    trains: bool = True,
    trained: int = working_memory.BUCKET_ELEMENTS,
) -> dict[str, object]:
    """Settings for `deepspeed.initialize`. Gradient accumulation is 1, since megarl tells DeepSpeed
    which micro-batch ends an optimizer step. `trained`: trainable elements on one tensor-parallel
    rank, which limit the buffer for reducing gradients.
    """
    zero: dict[str, object] = {
        "stage": config.zero_stage,
        "contiguous_gradients": True,
        "reduce_bucket_size": min(trained, working_memory.BUCKET_ELEMENTS),
    }
    if config.zero_stage == 3:
        # What is gathered stays where it is needed again within so many elements, as in the
        # backward pass and under recomputation, up to so many elements.
        zero["stage3_max_live_parameters"] = working_memory.LIVE_ELEMENTS
        zero["stage3_max_reuse_distance"] = working_memory.LIVE_ELEMENTS
    if config.offload_optimizer and trains:
        zero["offload_optimizer"] = {"device": "cpu"}
    settings: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": num_data_ranks,
        # Without ZeRO `TrainEngine.step` clips: DeepSpeed would average the norms of experts.
        "gradient_clipping": config.optimizer.clip_norm if config.zero_stage else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if config.dtype == "bfloat16":
        settings["bf16"] = {"enabled": True}
    if config.dtype == "float16":
        settings["fp16"] = fp16_settings()
    if config.dtype != "float32":
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    settings["communication_data_type"] = SHORT[config.reduced_dtype]
    return settings


def _bare(name: str) -> str:
    return name.removeprefix("model.")


def _gradient(parameter: Any) -> torch.Tensor | None:
    """This rank's part of a gradient that is summed over ranks; None for a frozen parameter. Valid
    between a step's last backward pass and its optimizer step.
    """
    if not parameter.requires_grad:
        return None
    if hasattr(parameter, "ds_id"):  # ZeRO 3
        gradient = sum_of(parameter)
        return safe_get_local_grad(parameter) if gradient is None else gradient
    mapping = getattr(parameter, "_hp_mapping", None)  # ZeRO 1 and 2
    if mapping is not None:
        return mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    return parameter.grad


def _own_values(parameter: Any, rank: int) -> torch.Tensor:
    """This rank's part of a parameter; under ZeRO 3 its slice without padding. `rank`: index among
    the ranks that share the parameter.
    """
    partition = getattr(parameter, "ds_tensor", None)
    if partition is None:
        return parameter.data
    size = partition.ds_numel
    return partition.data.view(-1)[: max(0, min(size, parameter.ds_numel - rank * size))]


def first_broken(
    parts: Iterable[tuple[str, torch.Tensor | None]], axis: Axis, device: torch.device, *, norm: int
) -> str:
    """Name of the first tensor that is not finite on any rank of `axis`, or "". Collective.

    `parts`: (name, this rank's part or None), with the same names on every rank. `norm`: 0 for the
    values; 2 for the norm in float32, as DeepSpeed computes it, which overflows for values above
    1.8e19.
    """
    names, sizes, numbers = [], [], []
    for number, (name, values) in enumerate(parts):
        names.append(name)
        if values is not None and values.numel():
            if norm == 2:
                size = torch.linalg.vector_norm(values, dtype=torch.float32)
            else:
                size = torch.stack(torch.aminmax(values)).float().abs().max()  # NaN stays NaN
            sizes.append(size.to(device))
            numbers.append(number)
    first = len(names)
    if sizes:
        nonfinite = (~torch.isfinite(torch.stack(sizes))).nonzero()
        first = numbers[int(nonfinite[0])] if len(nonfinite) else first
    first = -int(all_reduce_max(torch.tensor([-first], device=device), axis))
    return names[first] if first < len(names) else ""


class TrainEngine:
    """This rank's part of a model, trained under DeepSpeed, or frozen (`trains=False`). An
    optimizer step is a call and `backward` for each micro-batch, then `step`. Its methods are
    collective over `mesh`.

    A frozen model uses DeepSpeed only under ZeRO 3, which partitions the parameters.
    """

    def __init__(
        self,
        model: RoleModel,
        config: TrainingConfig,
        mesh: ProcessMesh,
        device: torch.device,
        *,
        total_steps: int = 0,
        trains: bool = True,
    ) -> None:
        """`total_steps`: optimizer steps of the whole run, for the learning-rate schedule."""
        self.config, self.mesh, self.device, self.total_steps = config, mesh, device, total_steps
        self.trains = trains
        self.module = model
        """The model without DeepSpeed. Under ZeRO 3 its parameters are empty outside of a pass."""
        self._view, self._lending = DeepSpeedView(mesh), MemoryLending(device)
        self._engine: Any = None
        self.loss_scale: LossScale | None = None
        """Set for a model trained in float16."""
        model.train(trains)
        if trains and config.gradient_checkpointing:
            model.model.gradient_checkpointing_enable({"use_reentrant": False})
        if not trains:
            model.requires_grad_(False)
        model.to(device)
        if trains or config.zero_stage == 3:
            self._engine = self._initialise(model)
        self.steps_done = 0

    def _initialise(self, model: RoleModel) -> Any:
        config, optimizer = self.config, None
        trained: list[Any] = [p for p in model.parameters() if p.requires_grad]
        if self.trains:
            groups = expert_groups(model, self.mesh, trained, config.zero_stage)
            optimizer = OPTIMIZERS[config.optimizer.kind](groups, config.optimizer)
        num_trained = sum(getattr(p, "ds_numel", p.numel()) for p in trained)
        settings = deepspeed_config(
            *(config, self.mesh.gradient.size), trains=self.trains, trained=max(1, num_trained)
        )
        engine: Any
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,  # pyright: ignore[reportArgumentType]
                config=settings,
                mpu=self._view,
                dist_init_required=False,
            )
        if self.trains and config.offload_optimizer and config.offload_gradients == "step":
            keep_on_device(engine.optimizer)
        if self.trains and config.dtype == "float16":
            self.loss_scale = LossScale(engine.optimizer)
        return engine

    def __call__(self, *args: object) -> Any:
        """The head's output for a micro-batch; a frozen model computes no gradients. Arguments:
        those of `RoleModel.forward`.
        """
        if self.trains:
            return self._engine(*args)
        with torch.no_grad():
            return (self._engine or self.module)(*args)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Run a backward pass, which adds to the gradients. `loss`: a scalar, this rank's part of a
        sum over micro-batches and ranks. `last`: the optimizer step's last micro-batch.
        """
        self._view.use()
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed takes the mean over ranks where the loss is a sum over them.
        self._engine.backward(loss * self.mesh.gradient.size, scale_wrt_gas=False)
        if not last:
            self._engine.step()

    def next_rate(self) -> float:
        return learning_rate(
            self.config.schedule,
            self.config.optimizer.learning_rate,
            self.steps_done,
            self.total_steps,
        )

    def step(self) -> tuple[float, float]:
        """Take an optimizer step; returns (gradient norm before clipping, learning rate). If the
        norm is not finite, DeepSpeed skips the step, but under ZeRO 0 takes it: look for a
        `broken_gradient` before. Collective.
        """
        self._view.use()
        rate = self.next_rate()
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        # Without ZeRO, which is in float32 only, DeepSpeed tells none.
        norm = self._clip() if self.config.zero_stage == 0 else None
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.step()
        if norm is None:
            norm = self._engine.get_global_grad_norm()
        norm = float(norm) if norm is not None else float("nan")
        if math.isfinite(norm):
            self.steps_done += 1
            if self.loss_scale is not None:
                self.loss_scale.count_step()
        else:
            self._drop_sums()
        return norm, rate

    def discard(self) -> None:
        """Drop accumulated gradients that are not finite, in place of `step`; weights and optimizer
        state stay. Collective.
        """
        if self.config.zero_stage == 0:
            self._engine.zero_grad()
            return
        self._view.use()
        # With such gradients DeepSpeed's ZeRO optimizers skip the update and drop the gradients.
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.step()
        optimizer = self._engine.optimizer
        assert optimizer.overflow, "DeepSpeed has taken a step that it should have skipped"
        self._drop_sums()

    def _drop_sums(self) -> None:
        """Delete the gradients of a skipped optimizer step, which DeepSpeed 0.19 would add the next
        step's to under ZeRO 1 and 2 with the optimizer state on the host.
        """
        if self.config.offload_optimizer and 0 < self.config.zero_stage < 3:
            optimizer = self._engine.optimizer
            optimizer.averaged_gradients = dict.fromkeys(optimizer.averaged_gradients)

    def broken_gradient(self) -> str:
        """Name of the first parameter whose gradient, or its norm in float32, is not finite on some
        rank, or "". Collective, after the `backward` with `last`.
        """
        if self.config.offload_optimizer:
            # ZeRO 1 and 2 only start the copies to the host, which until then has older gradients.
            synchronize(self.device)
        named = ((_bare(n), _gradient(p)) for n, p in self.module.named_parameters())
        return first_broken(named, self.mesh.world, self.device, norm=2)

    def broken_weight(self) -> str:
        """Name of the first parameter that is not finite on some rank, or "". Collective."""
        named = (
            (_bare(n), _own_values(p, replicas(self.module.shards.get(_bare(n)), self.mesh).rank))
            for n, p in self.module.named_parameters()
        )
        return first_broken(named, self.mesh.world, self.device, norm=0)

    def _clip(self) -> float:
        """Clip the gradients without ZeRO; returns their norm before. Collective."""
        squares = torch.zeros(3, dtype=torch.float64, device=self.device)
        gradients = []
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                shard = self.module.shards.get(_bare(name))
                axis = 0 if shard is None else 1 + (shard.axis == "experts")
                squares[axis] += parameter.grad.norm(dtype=torch.float64) ** 2
                gradients.append(parameter.grad)
        # Parts add up over their axis; what every rank holds whole counts once.
        all_reduce(squares[1:2], self.mesh.tensor)
        all_reduce(squares[2:], self.mesh.experts)
        norm, largest = float(squares.sum().sqrt()), self.config.optimizer.clip_norm
        if 0 < largest < norm < math.inf:
            for gradient in gradients:
                gradient.mul_(largest / (norm + 1e-6))
        return norm

    def full_score_weight(self) -> torch.Tensor:
        """A copy, on every rank, of the score head's whole weight [1, H]. Raises `AttributeError`
        for a model with another head. Collective.
        """
        weight: Any = self.module.model.get_parameter(SCORE)
        with deepspeed.zero.GatheredParameters([weight], enabled=hasattr(weight, "ds_status")):
            return weight.detach().clone()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over (Hugging Face name, whole tensor) of every weight, gathered on every rank;
        collective, to the end. A tensor is valid until the next one. Tied weights appear once, LoRA
        adapters as separate entries.
        """
        named: Any = self.module.model.named_parameters()
        for name, parameter in named:
            is_split = hasattr(parameter, "ds_status")
            with deepspeed.zero.GatheredParameters([parameter], enabled=is_split):
                assert not is_split or parameter.ds_status == ZeroParamStatus.AVAILABLE
                shard = self.module.shards.get(name)
                yield (name, shard.gather(parameter.data, self.mesh) if shard else parameter.data)

    def owned(self) -> Mapping[str, torch.Tensor]:
        """{published name: flat tensor} of this rank's part of every weight: its shard or, under
        ZeRO 3, its slice of that shard, of which the last may end in padding. Tensors that a rank
        has nothing of may be missing. Collective.

        The tensors are the model's own memory. With LoRA an adapted weight is merged each time it
        is asked for (`MergedWeights`); under ZeRO 3 this call gathers all A and B.
        """
        owned = {
            name: getattr(parameter, "ds_tensor", parameter).data.view(-1)
            for name, parameter in self.module.model.named_parameters()
            if not is_adapter(name)
        }
        for tensor, (name, start, end) in self._fused_spans.items():
            owned[tensor] = owned[name][start:end]
        owned = {name: shard for name, shard in owned.items() if name not in self.module.fused}
        for name, buffer in kept_buffers(self.module.model).items():
            axis, size = self.mesh.gradient, buffer.numel()
            length = -(-size // axis.size) if self.config.zero_stage == 3 else size
            first = axis.rank * length if length < size else 0
            owned[name] = buffer.view(-1)[first : first + length]
        if self.module.adapters is None:
            return owned
        number = self.mesh.gradient.rank if self.config.zero_stage == 3 else None
        local = self.local_adapters()
        return MergedWeights(owned, local, self.module.adapters, slice_number=number)

    @cached_property
    def _fused_spans(self) -> dict[str, tuple[str, int, int]]:
        """See `tensor_spans`."""
        module = self.module
        part = Part(module.shards, module.fused, self.mesh, self.config.zero_stage == 3)
        spans = dict[str, tuple[str, int, int]]()
        for name in module.fused:
            spans |= tensor_spans(part.owned(name, ()), module.fused)
        return spans

    def local_adapters(self) -> dict[str, torch.Tensor]:
        """{name: copy of this rank's tensor-parallel shard} of the LoRA adapters. Collective."""
        named = self._adapter_parameters()
        is_split = any(hasattr(parameter, "ds_status") for parameter in named.values())
        with deepspeed.zero.GatheredParameters(list(named.values()), enabled=is_split):
            return {name: parameter.detach().clone() for name, parameter in named.items()}

    def _adapter_parameters(self) -> dict[str, Any]:
        assert self.module.adapters is not None
        names = self.module.adapters.parameters
        return {name: self.module.model.get_parameter(name) for name in names}

    def keep_adapters(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Copy the LoRA adapters as they are now. Returns a factory of context managers in which
        the model computes with this copy. Collective, also the blocks.
        """
        kept = [view.clone() for view in self._own_adapters()]

        def put(values: list[torch.Tensor]) -> None:
            for view, value in zip(self._own_adapters(), values, strict=True):
                view.copy_(value)

        @contextlib.contextmanager
        def restored() -> Iterator[None]:
            trained = [view.clone() for view in self._own_adapters()]
            put(kept)
            try:
                yield
            finally:
                put(trained)

        return restored

    def _own_adapters(self) -> list[torch.Tensor]:
        """Views of this rank's part of each LoRA parameter; under ZeRO 3 its slice."""
        parameters = self._adapter_parameters().values()
        for parameter in parameters:
            if getattr(parameter, "ds_status", None) == ZeroParamStatus.AVAILABLE:
                parameter.partition()  # DeepSpeed keeps small ones gathered, which would be stale
        return [_own_values(parameter, self.mesh.gradient.rank) for parameter in parameters]

    def whole_adapters(self) -> dict[str, torch.Tensor]:
        """{parameter name: whole tensor} of all LoRA adapters and, in a model that scores, of its
        score head; the same on every rank, {} without adapters. Collective.
        """
        if self.module.adapters is None:
            return {}
        shards, mesh = self.module.shards, self.mesh
        adapters = {
            name: shards[name].gather(local, mesh) if name in shards else local
            for name, local in self.local_adapters().items()
        }
        has_score = self.module.head in SCORING
        return adapters | ({SCORE: self.full_score_weight()} if has_score else {})

    def offload(self) -> None:
        """Move master weights and optimizer state to the host, and free gradients and reduction
        buffers, for colocated inference engines; see `MemoryLending`. Of a frozen model only unused
        memory is freed.
        """
        if self.trains:
            on_host = self.config.offload_optimizer
            self._lending.offload(self._engine.optimizer, self.module, on_host=on_host)
        free_cache(self.device)

    def reload(self) -> None:
        """Undo `offload`; blocks until the copies are done."""
        self._lending.reload()

    def save(self, folder: Path, files: RankFiles) -> None:
        """Add this rank's optimizer state and master weights to `files`, as rank_NNNNN.safetensors
        of `folder`. Collective.
        """
        header: dict[str, Any] = {"steps_done": self.steps_done}
        if self.loss_scale is not None:
            header["loss_scale"] = self.loss_scale.state()
        self._state.write(folder, files, header)

    def load(self, folder: Path) -> None:
        """Restore weights, optimizer state and `steps_done` from `folder`, written under any layout
        and ZeRO stage. Digests are not checked. Raises `UserError` for another model's state.
        Collective.
        """
        self._view.use()
        header = self._state.read(folder)
        self.steps_done = header["steps_done"]
        if self.loss_scale is not None:
            self.loss_scale.restore(header["loss_scale"])

    @property
    def _state(self) -> TrainState:
        return TrainState(self._engine.optimizer, self.module, self.mesh, self.config.zero_stage)

    def destroy(self) -> None:
        """Release DeepSpeed's hooks and memory; the model cannot be used afterwards."""
        self._lending.release()
        if self._engine is not None:
            self._engine.destroy()
