"""Experts under DeepSpeed: which ranks share the gradients and the optimizer state of a layer's
experts.

DeepSpeed averages expert gradients over their replicas and divides by all data-parallel ranks, so
that their scale is that of the other gradients.
"""

from __future__ import annotations

from typing import Any

from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

from megarl.parallel.mesh import ProcessMesh


class _ExpertMark(MoE):
    """Tells DeepSpeed below ZeRO 3 that the model has experts, by its class."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_experts = 0

    def set_deepspeed_parallelism(self, *_: object) -> None:
        """The groups exist already."""


def expert_groups(
    model: Any, mesh: ProcessMesh, trained: list[nn.Parameter], stage: int
) -> list[dict[str, Any]]:
    """The optimizer's parameter groups: experts that are divided over data x sequence ranks apart,
    and known to DeepSpeed. Call it before `deepspeed.initialize`.
    """
    names = [name for name, shard in model.shards.items() if shard.axis == "experts"]
    experts: list[Any] = [model.model.get_parameter(name) for name in names]
    for parameter in experts:
        if not parameter.requires_grad:
            parameter.ds_optim_param = True  # DeepSpeed does not broadcast it over all replicas
    experts = [parameter for parameter in experts if parameter.requires_grad]
    if mesh.expert.size == 1 or not experts:
        return [{"params": trained}]
    name = f"experts of ranks {mesh.expert_gradient.ranks}"
    groups._EXPERT_DATA_PARALLEL_GROUP[name] = mesh.group(mesh.expert_gradient)
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = list(mesh.expert_gradient.ranks)
    groups._EXPERT_PARALLEL_GROUP[name] = mesh.group(mesh.experts)  # norms add up over it
    groups._EXPERT_PARALLEL_GROUP_RANKS[name] = list(mesh.experts.ranks)
    for parameter in experts:
        if stage == 3:
            parameter.ds_zero_placement_family = "autoep_expert"
            parameter.ds_zero_partition_group_name = name
        else:
            parameter.allreduce, parameter.group_name = False, name
    if stage < 3:
        model.expert_mark = _ExpertMark()
    expert_ids = {id(parameter) for parameter in experts}
    dense = [parameter for parameter in trained if id(parameter) not in expert_ids]
    return [{"params": dense}, {"params": experts, "moe": True, "name": name}]
