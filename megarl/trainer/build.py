"""From a recipe to a network with weights on this rank: build empty, shard, load."""

from __future__ import annotations

import torch

from megarl.checkpoints.adapter_files import SCORE
from megarl.parallel.mesh import ProcessMesh
from megarl.parallel.tensor import whole_shapes
from megarl.trainer.config import ModelConfig, TrainingConfig
from megarl.trainer.heads import SCORING, HeadName
from megarl.trainer.loading import (
    Part,
    empty_model,
    load_model,
    load_weights,
    open_weights,
)
from megarl.trainer.lora import adapter_weights
from megarl.trainer.model import RoleModel
from megarl.trainer.partition import Partitioner
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
    """Create the model of `config` with this rank's weights on `device`: its tensor-parallel shard,
    and under ZeRO 3 a slice of that shard. All ranks of the mesh call it together. With
    `needs_score`, raises `ValueError` for a model without a score head.

    With `tensor_backend: autotp` every rank first loads the whole model on the CPU: AutoTP can only
    shard loaded weights.
    """
    dtype = DTYPES[training.dtype]
    if training.tensor_backend == "autotp" and mesh.tensor.size > 1:
        model = load_model(config, dtype=dtype, seed=seed, head=head)
        return RoleModel(model, mesh, training, head)
    network = RoleModel(empty_model(config), mesh, training, head)
    fill_network(network, config, training, mesh, device, seed=seed, needs_score=needs_score)
    return network


def fill_network(
    network: RoleModel,
    config: ModelConfig,
    training: TrainingConfig,
    mesh: ProcessMesh,
    device: torch.device,
    *,
    seed: int,
    needs_score: bool = False,
) -> None:
    """Load the weights of a model that is already sharded and still on the meta device; see
    `load_weights`.
    """
    dtype = DTYPES[training.dtype]
    weights = open_weights(config, seed=seed, head=network.head, needs_score=needs_score)
    if network.adapters is not None:
        whole = whole_shapes(network.model, network.shards)
        head = [SCORE] if network.head in SCORING else []
        shapes = {name: whole[name] for name in [*network.adapters.parameters, *head]}
        weights = adapter_weights(weights, shapes, training.lora, seed=seed)
    if training.zero_stage == 3:
        replicas = mesh.gradient
        part = Part(network.shards, mesh.tensor.rank, replicas.rank, replicas.size)
        make = Partitioner(deepspeed_config(training, replicas.size), mesh, dtype)
        load_weights(network.model, weights, part, dtype=dtype, device=device, make=make)
    else:
        part = Part(network.shards, mesh.tensor.rank)
        load_weights(network.model, weights, part, dtype=dtype, device=device)
