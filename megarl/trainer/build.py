"""From the settings of a model to a network with weights on this rank: build empty, shard, load."""

from __future__ import annotations

import contextlib
import sys

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, free_param
from torch import nn

from megarl.checkpoints.adapter_files import SCORE
from megarl.parallel.mesh import DeepSpeedView, ProcessMesh
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
    """Create the model of `config` as a `RoleModel`, a Hugging Face model with one of megarl's
    heads, with this rank's weights on `device`: its tensor-parallel shard, and under ZeRO 3 a slice
    of that shard. LoRA adapters of `training.lora` are in it. All ranks of `mesh` call it together.

    `seed`: of weights that are drawn at random. `head`: what the model computes: "logprobs",
    "value" (a number for each token), "scalar" (one for each sample) or "states" (last hidden
    states). With `needs_score`, raises `ValueError` for a checkpoint without a score head. Also
    raises `ValueError` for a checkpoint whose tensors are not those of its config.json.

    With `training.tensor_backend: autotp` and more than one tensor-parallel rank, every rank first
    loads the whole model on the CPU, where the returned model then is: AutoTP can only shard loaded
    weights. `needs_score` has no effect then.
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
    if training.zero_stage == 3:
        replicas = mesh.gradient
        part = Part(network.shards, mesh.tensor.rank, replicas.rank, replicas.size)
        make = Partitioner(deepspeed_config(training, replicas.size), mesh, dtype)
        load_weights(network.model, weights, part, dtype=dtype, device=device, make=make)
    else:
        part = Part(network.shards, mesh.tensor.rank)
        load_weights(network.model, weights, part, dtype=dtype, device=device)
    return network


class Partitioner:
    """Makes DeepSpeed ZeRO 3 parameters from this rank's slices, without a whole tensor on any
    rank: `Partitioner(settings, mesh, dtype)(part, shape, requires_grad)` returns an
    `nn.Parameter`. `settings`: the DeepSpeed configuration, as a dict. `part`: the flat slice, of
    ceil(numel / n) elements for n data x sequence ranks. `shape`: that of the whole tensor-parallel
    shard. All ranks of `mesh` create a `Partitioner` together.
    """

    def __init__(self, settings: dict[str, object], mesh: ProcessMesh, dtype: torch.dtype) -> None:
        """`settings`: the DeepSpeed configuration, as a dict, with which `deepspeed.initialize` is
        called later.
        """
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
        self._num_slices = mesh.gradient.size

    def __call__(self, part: torch.Tensor, shape: torch.Size, requires_grad: bool) -> nn.Parameter:
        """A ZeRO 3 parameter made of `part`, this rank's flat slice with its padding, which is kept
        and not copied. `shape`: shape of the whole tensor-parallel shard.
        """
        # A view of one element: DeepSpeed asks for the shape, and nothing whole is allocated.
        unfilled = torch.zeros(1, dtype=part.dtype, device=part.device).expand(shape)
        parameter = nn.Parameter(unfilled, requires_grad=requires_grad)
        self._init._convert_to_deepspeed_param(parameter)
        made: torch.Tensor = part
        made.ds_numel = part.numel()  # type: ignore[attr-defined]
        made.status = PartitionedParamStatus.AVAILABLE  # type: ignore[attr-defined]
        made.final_location = None  # type: ignore[attr-defined]
        parameter.ds_tensor = made  # type: ignore[attr-defined]
        parameter.ds_numel_aligned = part.numel() * self._num_slices  # type: ignore[attr-defined]
        free_param(parameter)
        return parameter
