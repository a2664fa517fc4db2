"""What a run of hundreds of engines costs the processes that exist once: the rollout service and
the plan of the weights.

    python tools/bench/simulate_scale.py [--json] [--engines 512] [--ranks 256] [--samples 8192]

Real: Ray and its calls, the service with dispatch and ledger, its channel, the
object store, the plan of a Llama of 70 B parameters. Simulated: engines and ranks, which live
in a few actors. An engine answers after a random time with a segment, whose length is log-normal
(median 1/16 of the longest). Verdicts are made at once and cost nothing. A rank takes its share of
the step and does not fetch arrays.

cpu              CPU seconds of the process for the second of two steps
memory           most resident memory, without shared memory, above that before the first step
calls            Ray calls of the second step by ranks to the service
loop blocked     longest time for which the service's event loop did not run
plan             CPU seconds, and memory, of a trainer rank's and of an engine rank's route
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from common import Args, qwen2, run_tool, table, write_config
from peak_memory import Sampled, own_bytes
from scale_actors import STEPS, Fleet, Ranks, build

from megarl.parallel.layout import Layout
from megarl.rollout.ray_cluster import Cluster
from megarl.settings.training import ModelConfig
from megarl.system.process_env import own_cluster_token
from megarl.trainer.memory import sized_parameters
from megarl.weights.recorded_table import recorded_table
from megarl.weights.route import Route, RouteSpec, table_fingerprint

FLEETS = 4
"""Actors that the simulated engines are divided over."""

MODEL = qwen2(128256, 8192, 28672, 80, 64, 8) | {  # 70.6 billion parameters
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
}
OPTIONS = {
    "--engines": (512, "simulated engines"),
    "--ranks": (256, "simulated data ranks"),
    "--samples": (8192, "samples of a step"),
    "--group-size": (16, "samples of a group"),
    "--tokens": (65536, "longest response"),
    "--seconds": (60.0, "an engine answers within"),
}


def simulate(scale: Args, folder: Path) -> dict[str, Any]:
    """One step of a run of this scale, in a Ray cluster of its own. `folder`: for its ledger."""
    options = {"max_concurrency": 100_000, "num_cpus": 0}
    about = {"namespace": f"scale-{os.getpid()}", "object_store_bytes": 2**31}
    with Cluster(token=own_cluster_token(), **about) as cluster:
        actor = ray.remote(Fleet).options(**options)
        sizes = [len(range(n, scale.engines, FLEETS)) for n in range(min(FLEETS, scale.engines))]
        fleets = [actor.remote(size, scale.seconds) for size in sizes]
        handle = cluster.start_service(partial(build, scale, fleets, folder))
        cluster.wait_for_service(120)
        ranks = ray.remote(Ranks).options(**options).remote()
        beat = folder / "heartbeat.json"
        service = psutil.Process(json.loads(beat.read_text())["pid"])
        time.sleep(1.0)
        found: dict[str, Any] = {}
        with Sampled(lambda: own_bytes(service)) as memory:
            ray.get(handle.start.remote())
            for step in range(STEPS):  # the last counts: requests travel as they do in a long run
                beat.unlink()
                used = cpu_s(service)
                found = ray.get(
                    ranks.step.remote(step, scale.ranks, fleets), timeout=scale.seconds + 500
                )
                assert found.pop("samples") == scale.samples, "a sample is lost"
                time.sleep(1.0)
                found["cpu_s"] = cpu_s(service) - used
                found["calls"] = 2 * scale.ranks + found.pop("asked")
        blocked = json.loads(beat.read_text())
        found |= {
            "memory_mib": (memory.most - memory.begin) / 2**20,
            "blocked_ms": blocked["blocked_ms"],
            "busy_ms": blocked["busy_ms"],
        }
    return found


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process so far."""
    return sum(process.cpu_times()[:2])


def plans(engines: int) -> dict[str, Any]:
    """What the plan of one publication costs a trainer rank and an engine rank: 64 trainer ranks
    (data 8 x tensor 8, ZeRO 3), engines of 8 ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        table = recorded_table(write_config(folder, MODEL), MODEL, 8, on_cpu=True)
        sized = sized_parameters(ModelConfig(path=folder), 8)
    spec = RouteSpec(
        layout=Layout(8, 1, 8),
        zero_stage=3,
        shards={
            parameter.name: parameter.shard for parameter in sized if parameter.shard is not None
        },
        engines=engines,
        engine_tensor=8,
        dtype="bfloat16",
        bucket_bytes=8 * 2**20,
        table=table_fingerprint(table),
    )
    found = {}
    for name, make in (("trainer rank", Route.of_source), ("engine rank", Route.of_destination)):
        started_at = time.process_time()
        route = make(spec, table, 3)
        seconds = time.process_time() - started_at
        copies = sum(map(len, route.copies))
        del route
        tracemalloc.start()
        make(spec, table, 3)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        found[name] = {"cpu_s": seconds, "memory_mib": peak / 2**20, "copies": copies}
    return found


def measure(args: Args) -> dict[str, Any]:
    """Simulate one step of the rollout service, and make the plan of a publication; returns their
    times and memory, with the arguments.
    """
    if args.samples % args.group_size:
        raise ValueError("--group-size must divide --samples")
    return vars(args) | simulate(args, args.work) | {"plan": plans(args.engines)}


def show(result: dict[str, Any]) -> Iterator[str]:
    """Two tables: the simulated step, and the plan's cost by kind of rank."""
    columns = (
        "engines d; ranks d; samples d; CPU s=cpu_s .2f; memory MiB=memory_mib .1f;"
        " loop blocked ms=blocked_ms .0f; CPU of that=busy_ms .0f; step s=step_s .1f;"
        " calls of ranks=calls ,d"
    )
    yield from table([result], columns)
    plan = ({"of": name, **found} for name, found in result["plan"].items())
    yield from table(plan, "plan of=of; CPU s=cpu_s .2f; MiB=memory_mib .1f; copies ,d")


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, show)
