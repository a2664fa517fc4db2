"""Where engines sit: on one node each of a real Ray cluster of two (whose GPUs only Ray believes
in), or beside trainer ranks.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster as Nodes

from megarl.system.placement import RankPlace, own_seats, shared_seats
from megarl.system.process_env import own_cluster_token, prepare_environment

GPUS = 2
HERE = socket.gethostname()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[None]:
    prepare_environment(1)
    own_cluster_token()
    nodes = Nodes(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "num_gpus": GPUS, "include_dashboard": False},
    )
    try:
        nodes.add_node(num_cpus=1, num_gpus=GPUS)
        ray.init(address=nodes.address, logging_level="ERROR")
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()


ANOTHER_RAY = """
import os, psutil, ray
from megarl.rollout.ray_cluster import start_ray
from megarl.system.private_folder import run_folder
running = run_folder()
folder = running.__enter__()
start_ray(folder, num_cpus=1, include_dashboard=False, logging_level="ERROR")
started = psutil.Process().children(recursive=True)
outside = {os.getpgid(one.pid) for one in started}.isdisjoint({os.getpgid(0)})
print(len(ray.nodes()), "node", (folder / "ray/session_latest").exists(), outside)
print(oct(folder.stat().st_mode & 0o777))
ray.shutdown()
running.__exit__(None, None, None)
print(folder.exists())
"""


def where() -> str:
    return ray.get_runtime_context().get_node_id()


def test_a_run_does_not_join_another_ray_of_this_machine(two_nodes: None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER_RAY], capture_output=True, text=True, timeout=180
    )
    assert done.stdout.split() == ["1", "node", "True", "True", "0o700", "False"], done.stderr


def test_each_engine_has_its_gpus_on_one_node(two_nodes: None) -> None:
    seats = own_seats(2, tensor=GPUS, gpus=True, timeout_s=30)
    places = ray.get(
        [ray.remote(where).options(**seat.options).remote() for seat in seats], timeout=60
    )
    assert len(set(places)) == 2, "two engines of two GPUs each fill a node each"
    for seat in seats:
        ray.util.remove_placement_group(seat.options["scheduling_strategy"].placement_group)


def test_an_engine_never_spans_nodes(two_nodes: None) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"no room for 1 engines of .*GPU.*lower rollout.num_engines or rollout.engine.tensor",
    ):
        own_seats(1, tensor=GPUS + 1, gpus=True, timeout_s=2)


def test_colocated_engines_sit_with_their_ranks(two_nodes: None) -> None:
    ranks = [RankPlace(HERE, str(gpu)) for gpu in (4, 5, 6, 7)]
    seats = shared_seats(2, tensor=2, ranks=ranks)
    assert [seat.environment for seat in seats] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    # Both nodes of this cluster have one host's name; Ray keeps to the one that was chosen.
    chosen = [seat.options["scheduling_strategy"].node_id for seat in seats]
    assert (
        ray.get([ray.remote(where).options(**seat.options).remote() for seat in seats], timeout=60)
        == chosen
    )
    assert shared_seats(1, tensor=1, ranks=[RankPlace(HERE, "")])[0].environment == {}


def test_colocated_engines_that_cannot_sit_there_are_refused(two_nodes: None) -> None:
    with pytest.raises(
        ValueError, match=r"rollout.engine.tensor is 2, and engine 0 would sit on the nodes a, b"
    ):
        shared_seats(1, tensor=2, ranks=[RankPlace("a", "0"), RankPlace("b", "0")])
    with pytest.raises(RuntimeError, match="Ray does not run on elsewhere"):
        shared_seats(1, tensor=1, ranks=[RankPlace("elsewhere", "0")])
