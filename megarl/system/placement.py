"""Where engines run: on GPUs of their own, or on those of trainer ranks, with whom they take turns.

disaggregated   one bundle of a Ray placement group for each engine: its ranks are on one node, and
                engines fill nodes in turn
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

from megarl.system.process_env import ENGINE_RANKS, KEPT_ENGINES
from megarl.system.spans import Recording

SLIVER = 0.001
"""CPUs that an engine rank reserves in Ray without GPUs: close to 0, so that Ray sets no limit."""


@dataclass(frozen=True)
class Seat:
    """Where one engine runs."""

    options: dict[str, Any]
    """Ray's, of the engine's actor."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further variables of its process."""


@dataclass(frozen=True)
class RankPlace:
    """Host and GPU of a trainer rank."""

    host: str
    gpu: str
    """As CUDA_VISIBLE_DEVICES writes it; empty on the CPU."""

    @staticmethod
    def mine(*, on_cpu: bool) -> RankPlace:
        """Host and GPU of the calling rank, from LOCAL_RANK and CUDA_VISIBLE_DEVICES."""
        if on_cpu:
            return RankPlace(socket.gethostname(), gpu="")
        local = int(os.environ.get("LOCAL_RANK", "0"))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return RankPlace(socket.gethostname(), visible.split(",")[local] if visible else str(local))


def engine_bundle(
    tensor: int, *, gpus: bool, limited: bool = False
) -> tuple[dict[str, float], dict[str, float]]:
    """(resources that Ray reserves for an engine, options by which its actor asks for them).
    `limited`: a unit of `ENGINE_RANKS` for each rank.
    """
    if gpus:
        return {"GPU": float(tensor)}, {"num_gpus": tensor, "num_cpus": 0}
    bundle = {"CPU": SLIVER * tensor} | ({ENGINE_RANKS: float(tensor)} if limited else {})
    return bundle, {"num_gpus": 0, "num_cpus": SLIVER * tensor}


def own_seats(count: int, *, tensor: int, gpus: bool, timeout_s: float) -> list[Seat]:
    """Reserve resources for `count` disaggregated engines, each on one node; none for engines that
    stay. Raises `RuntimeError` after `timeout_s`.
    """
    if KEPT_ENGINES in os.environ:  # one machine, and a reservation would end with this run
        return [Seat(engine_bundle(tensor, gpus=gpus)[1]) for _ in range(count)]
    limited = not gpus and ENGINE_RANKS in ray.cluster_resources()
    bundle, asked = engine_bundle(tensor, gpus=gpus, limited=limited)
    group = placement_group([dict(bundle) for _ in range(count)], strategy="PACK")
    if not group.wait(timeout_s):
        have = ray.cluster_resources().get("GPU" if gpus else "CPU", 0.0)
        raise RuntimeError(
            f"Ray has no room for {count} engines of {bundle} on one node each within {timeout_s:g}"
            f" s (the cluster has {have:g} in all); lower rollout.num_engines or"
            " rollout.engine.tensor, or start Ray on more nodes"
        )
    return [
        Seat(asked | {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, number)})
        for number in range(count)
    ]


def shared_seats(count: int, *, tensor: int, ranks: Sequence[RankPlace]) -> list[Seat]:
    """Seats of colocated engines. Raises `ValueError` if one engine's ranks are on several nodes,
    `RuntimeError` if Ray does not run on one.
    """
    nodes = {node["NodeManagerHostname"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    seats = []
    for number in range(count):
        own_ranks = ranks[number * tensor : (number + 1) * tensor]
        hosts = sorted({rank.host for rank in own_ranks})
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
        gpus = ",".join(rank.gpu for rank in own_ranks)
        seats.append(
            Seat(
                {"num_gpus": 0, "num_cpus": 0, "scheduling_strategy": strategy},
                {"CUDA_VISIBLE_DEVICES": gpus} if gpus.strip(",") else {},
            )
        )
    return seats


def kept_engines(recording: Recording | None) -> dict[int, Any]:
    """{number: Ray actor} of engines that earlier runs left, which now record in `recording`."""
    namespace, engines = os.environ.get(KEPT_ENGINES), dict[int, Any]()
    named: Any = ray.util.list_named_actors(all_namespaces=True) if namespace else ()
    for actor in named:
        if actor["namespace"] == namespace:
            number = int(actor["name"].partition("-")[0])
            engines[number] = ray.get_actor(actor["name"], namespace)
            engines[number].record.remote(recording)
    return engines
