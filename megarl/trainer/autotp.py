"""Tensor parallelism by DeepSpeed's AutoTP, on the same `tp_plan` as `sharding`, for
`training.tensor_backend: autotp`.

AutoTP is given the model, not the engine: `tensor_parallel.autotp_size` among DeepSpeed's settings
would discard our mesh, and leave a frozen model whole. Embedding and head stay whole. AutoTP cuts
weights, so every rank loads the whole model on the host first.
"""

from __future__ import annotations

import contextlib
import re
import sys

from torch import nn
from transformers import PreTrainedModel

from megarl.parallel.mesh import ProcessMesh
from megarl.parallel.tensor import Shard
from megarl.trainer.role_placement import kv_heads
from megarl.trainer.sharding import WORD_STYLES


def shard_with_autotp(model: PreTrainedModel, mesh: ProcessMesh) -> dict[str, Shard]:
    """Have AutoTP shard `model`, whose weights are on the CPU, over the tensor-parallel ranks, in
    place. Returns {parameter name: how it is split}. Raises `ValueError` if AutoTP cannot.
    Collective.
    """
    axis = mesh.tensor
    if axis.size == 1:
        return {}
    import deepspeed
    from deepspeed.module_inject import set_autotp_mode
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import AutoTPConfig
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter

    plan = {name: style for name, style in model.tp_plan.items() if style not in WORD_STYLES}
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
        deepspeed.init_distributed(
            dist_init_required=False, auto_mpi_discovery=False, verbose=False
        )
        set_autotp_mode(training=True)  # else its layers freeze their weights
        cutter = AutoTP(
            module=model,
            all_reduce_linears=(),
            prefix="",
            state_dict=None,
            linear_layer_setting=(nn.Linear, nn.Embedding),
            orig_layer_impl=None,
            partition_config=AutoTPConfig(
                tp_size=axis.size, layer_specs=TPPlanConverter.convert(plan) or []
            ),
            model_config=model.config,
            training_mode=True,
        )
        # Not `set_tensor_parallel_config`: in training that takes a global group of DeepSpeed's,
        # whichever it is given.
        cutter.mp_size, cutter.mp_group = axis.size, mesh.group(axis)
        cutter.update_linear_policies()
        cutter._replace_module(model)
        cutter.register_replicated_grad_hooks(model)
    return shards_of(model)


def shards_of(model: nn.Module) -> dict[str, Shard]:
    """How AutoTP has split a model's parameters, read from its layers; without those that are
    whole.
    """
    from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer

    shards = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LinearAllreduce | LinearLayer):
            sizes = layer._partition_sizes
            edges = tuple(sum(sizes[:rank]) for rank in range(len(sizes) + 1))
            by_column = isinstance(layer, LinearLayer)
            shards[f"{name}.weight"] = Shard(0 if by_column else 1, edges)
            if by_column and layer.bias is not None:
                shards[f"{name}.bias"] = Shard(0, edges)
    return shards


def refuse_autotp(model: PreTrainedModel, tensor: int) -> None:
    """Raise `ValueError` if AutoTP cannot shard the model over `tensor` ranks: it has too few key
    heads, or a parameter with an entry per head outside a linear layer, such as sinks.
    """
    heads = kv_heads(model.config)
    if heads % tensor:
        raise ValueError(
            f"training.layout.tensor is {tensor}, but the model's num_key_value_heads is {heads}:"
            " DeepSpeed AutoTP would leave ranks without attention heads; set"
            " training.tensor_backend to plan, which copies key heads, or training.layout.tensor"
            f" to a divisor of {heads}"
        )
    patterns = "|".join(
        re.escape(name).replace(r"\*", r"\d+") for name in (model.tp_plan if tensor > 1 else ())
    )
    for name, _ in model.named_parameters() if patterns else ():
        if re.fullmatch(patterns, name):
            raise ValueError(
                f"training.tensor_backend is autotp, which leaves {name} of model type"
                f" {model.config.model_type} whole, since it is of no linear layer, but its heads"
                " are cut; set training.tensor_backend to plan"
            )
