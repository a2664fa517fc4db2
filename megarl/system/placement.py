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
"""CPUs that an engine rank reserves in Ray where there are no GPUs. The value is close to 0, so
that Ray does not limit the number of engines; the operating system shares out the cores."""


@dataclass(frozen=True)
class Seat:
    """Where one inference engine is to run: the Ray options of its actor, which name a Ray
    placement group or the node of the trainer ranks whose GPUs the engine shares, and environment
    variables for its process.
    """

    options: dict[str, Any]
    """Ray options (`num_gpus`, `scheduling_strategy`, ...) of the engine's actor."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables to add to those of the engine's process."""


@dataclass(frozen=True)
class RankPlace:
    """Host and GPU of a trainer rank. Colocated engines run on the GPUs of trainer ranks."""

    host: str
    gpu: str
    """Number of the rank's GPU, as CUDA_VISIBLE_DEVICES writes it; empty on the CPU."""

    @staticmethod
    def mine(*, on_cpu: bool) -> RankPlace:
        """The host name and the GPU of the calling rank, from LOCAL_RANK and CUDA_VISIBLE_DEVICES.
        The GPU is text as in CUDA_VISIBLE_DEVICES, such as "3". `on_cpu`: the rank uses no GPU, and
        the text is empty.
        """
        if on_cpu:
            return RankPlace(socket.gethostname(), "")
        local = int(os.environ.get("LOCAL_RANK", "0"))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return RankPlace(socket.gethostname(), visible.split(",")[local] if visible else str(local))


def engine_bundle(
    tensor: int, *, gpus: bool, limited: bool = False
) -> tuple[dict[str, float], dict[str, float]]:
    """(resources {name: amount} that Ray reserves for one disaggregated engine of `tensor` ranks,
    keyword arguments by which the engine's Ray actor asks for them). `gpus`: each rank gets a GPU.
    `limited` (only without GPUs): also reserve one unit of a custom Ray resource for each rank, by
    which `megarl run` sets how many engine ranks a node takes.
    """
    if gpus:
        return {"GPU": float(tensor)}, {"num_gpus": tensor, "num_cpus": 0}
    bundle = {"CPU": SLIVER * tensor} | ({ENGINE_RANKS: float(tensor)} if limited else {})
    return bundle, {"num_gpus": 0, "num_cpus": SLIVER * tensor}


def own_seats(count: int, *, tensor: int, gpus: bool, timeout_s: float) -> list[Seat]:
    """Reserve resources in Ray, which must be running, for `count` disaggregated engines (on GPUs
    that no trainer rank uses), each with `tensor` ranks on one node. Returns a `Seat` for each:
    where its Ray actor is to run. Blocks until they are reserved.

    Nothing is reserved for engines that stay after the run. Raises `RuntimeError` if the cluster
    cannot reserve the resources within `timeout_s` seconds.
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
    """Where the Ray actors of `count` colocated engines are to run: a `Seat` for each, by which
    engine e shares host and GPUs of the trainer ranks `ranks[e * tensor : (e + 1) * tensor]`. Ray
    must be running.

    Raises `ValueError` if the trainer ranks of one engine are on several nodes. Raises
    `RuntimeError` if Ray does not run on the node of a rank.
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


def kept_engines(recording: Recording | None) -> dict[int, Any]:
    """{engine number: Ray actor} of the engines that earlier runs have left for this one (see
    `megarl.KeptEngines`), which from now on record what they do in `recording`.
    """
    namespace, found = os.environ.get(KEPT_ENGINES), dict[int, Any]()
    named: Any = ray.util.list_named_actors(all_namespaces=True) if namespace else ()
    for one in named:
        if one["namespace"] == namespace:
            number = int(one["name"].partition("-")[0])
            found[number] = ray.get_actor(one["name"], namespace)
            found[number].record.remote(recording)
    return found
