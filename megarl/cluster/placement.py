"""Where engines run: on GPUs of their own, or on those of trainer ranks, with whom they take turns.

disaggregated   one bundle of a Ray placement group for each engine: its ranks share a node, engines
                fill nodes in turn
colocated       engine e on the node and GPUs of trainer ranks [e * tensor, (e + 1) * tensor)
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

SLIVER = 0.001
"""CPUs an engine rank asks Ray for where there are no GPUs: the system shares the cores out, not
Ray.
"""


@dataclass(frozen=True)
class Seat:
    """One engine's place."""

    options: dict[str, Any]
    """Of its Ray actor."""
    environment: dict[str, str] = field(default_factory=dict)
    """What its process must find beside the rest."""


@dataclass(frozen=True)
class RankPlace:
    """Where a trainer rank runs."""

    host: str
    gpu: str
    """Its GPU as the system numbers them, or nothing."""

    @staticmethod
    def mine(*, on_cpu: bool) -> RankPlace:
        """This process's."""
        if on_cpu:
            return RankPlace(socket.gethostname(), "")
        local = int(os.environ.get("LOCAL_RANK", "0"))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return RankPlace(socket.gethostname(), visible.split(",")[local] if visible else str(local))


def own_seats(count: int, *, tensor: int, gpus: bool, timeout_s: float) -> list[Seat]:
    """Disaggregated: seats for `count` engines of `tensor` ranks each; Ray must be up.

    Raises `RuntimeError` where the cluster does not have them within `timeout_s`.
    """
    bundle = {"GPU": float(tensor)} if gpus else {"CPU": SLIVER * tensor}
    group = placement_group([dict(bundle) for _ in range(count)], strategy="PACK")
    if not group.wait(timeout_s):
        have = ray.cluster_resources().get("GPU" if gpus else "CPU", 0.0)
        raise RuntimeError(
            f"Ray has no room for {count} engines of {bundle} on one node each within {timeout_s:g}"
            f" s (the cluster has {have:g} in all); lower rollout.num_engines or"
            " rollout.engine.tensor, or start Ray on more nodes"
        )
    asked = (
        {"num_gpus": tensor, "num_cpus": 0}
        if gpus
        else {"num_gpus": 0, "num_cpus": SLIVER * tensor}
    )
    return [
        Seat(asked | {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, number)})
        for number in range(count)
    ]


def shared_seats(count: int, *, tensor: int, ranks: Sequence[RankPlace]) -> list[Seat]:
    """Colocated: seats on the nodes and GPUs of trainer ranks, given in their order; Ray must be
    up.

    Raises `ValueError` where an engine's ranks would sit on several nodes, `RuntimeError` where Ray
    does not run on one of them.
    """
    nodes = {node["NodeManagerHostname"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    seats = []
    for number in range(count):
        mine = ranks[number * tensor : (number + 1) * tensor]
        hosts = sorted({place.host for place in mine})
        if len(hosts) != 1:
            raise ValueError(
                f"rollout.engine.tensor is {tensor}, and engine {number} would sit on the nodes"
                f" {', '.join(hosts)}; set it to a divisor of the trainer ranks of one node"
            )
        if hosts[0] not in nodes:
            raise RuntimeError(
                f"Ray does not run on {hosts[0]}, where trainer ranks do; start it there too"
                f" (known: {sorted(nodes)})"
            )
        strategy = NodeAffinitySchedulingStrategy(nodes[hosts[0]], soft=False)
        gpus = ",".join(place.gpu for place in mine)
        seats.append(
            Seat(
                {"num_gpus": 0, "num_cpus": 0, "scheduling_strategy": strategy},
                {"CUDA_VISIBLE_DEVICES": gpus} if gpus.strip(",") else {},
            )
        )
    return seats
