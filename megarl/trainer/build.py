"""From the settings of a model to a network with weights on this rank: build empty, shard, load."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, free_param
from torch import nn

from megarl.checkpoints.adapter_files import SCORE
from megarl.parallel.mesh import Axis, DeepSpeedView, ProcessMesh
from megarl.parallel.tensor import whole_shapes
from megarl.settings.training import ModelConfig, TrainingConfig
from megarl.trainer.heads import SCORING, HeadName
from megarl.trainer.loading import Part, empty_model, load_model, load_weights, open_weights
from megarl.trainer.lora import adapter_weights
from megarl.trainer.model import RoleModel
from megarl.trainer.zero import deepspeed_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_network(
    config: ModelConfig,
    training: TrainingConfig,
    mesh: ProcessMesh,
    device: torch.device,
    *,
    seed: int,
    head: HeadName = "logprobs",
    needs_score: bool = False,
) -> RoleModel:
    """The model of `config` with its head, LoRA adapters, and this rank's weights on `device`: its
    tensor-parallel shard, and under ZeRO 3 a slice of that. `seed`: of random weights. Raises
    `ValueError` as `open_weights`. Collective.

    For AutoTP over several ranks every rank loads the whole model on the CPU, where the returned
    one then is; `needs_score` has no effect.
    """
    dtype = DTYPES[training.dtype]
    if training.tensor_backend == "autotp" and mesh.tensor.size > 1:
        model = load_model(config, dtype=dtype, seed=seed, head=head)
        return RoleModel(model, mesh, training, head)
    network = RoleModel(empty_model(config), mesh, training, head)
    weights = open_weights(config, seed=seed, head=head, needs_score=needs_score)
    if network.adapters is not None:
        whole = whole_shapes(network.model, network.shards)
        score = [SCORE] if head in SCORING else []
        shapes = {name: whole[name] for name in [*network.adapters.parameters, *score]}
        weights = adapter_weights(weights, shapes, training.lora, seed=seed)
    make = None
    if training.zero_stage == 3:
        make = Partitioner(deepspeed_config(training, mesh.gradient.size), mesh, dtype)
    part = Part(network.shards, network.fused, mesh, is_sliced=make is not None)
    load_weights(network.model, weights, part, dtype=dtype, device=device, make=make)
    return network


class Partitioner:
    """Makes ZeRO 3 parameters from this rank's slices, without a whole tensor on any rank.
    Collective.
    """

    def __init__(self, settings: dict[str, object], mesh: ProcessMesh, dtype: torch.dtype) -> None:
        """`settings`: those for `deepspeed.initialize`."""
        view = DeepSpeedView(mesh)
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
            deepspeed.init_distributed(
                dist_init_required=False, auto_mpi_discovery=False, verbose=False
            )
            # With a module, if an empty one, DeepSpeed also puts in place its linear function that
            # does not keep gathered weights alive.
            self._init = deepspeed.zero.Init(
                module=nn.Module(),
                data_parallel_group=view.get_data_parallel_group(),
                config_dict_or_path=settings,
                dtype=dtype,
                mpu=view,
            )
        self._mesh = mesh

    def __call__(self, part: torch.Tensor, empty: nn.Parameter, axis: Axis) -> nn.Parameter:
        """A parameter made of `part`, this rank's flat slice of ceil(numel / n) elements, padding
        included, which is not copied. `empty`: the whole shard, of which the ranks of `axis` have
        slices.
        """
        # A view of one element: DeepSpeed asks for the shape, and nothing whole is allocated.
        unfilled = torch.zeros(1, dtype=part.dtype, device=part.device).expand(empty.shape)
        parameter: Any = nn.Parameter(unfilled, requires_grad=empty.requires_grad)
        if axis is not self._mesh.gradient:
            parameter.ds_zero_partition_process_group = self._mesh.group(axis)
        self._init._convert_to_deepspeed_param(parameter)
        partition: Any = part
        partition.ds_numel = part.numel()
        partition.status = PartitionedParamStatus.AVAILABLE
        partition.final_location = None
        parameter.ds_tensor = partition
        parameter.ds_numel_aligned = part.numel() * axis.size
        free_param(parameter)
        return parameter
