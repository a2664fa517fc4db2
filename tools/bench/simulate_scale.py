"""What a run of hundreds of engines costs the process that exists once, the rollout service.

    python tools/bench/simulate_scale.py [--json] [--engines 512] [--ranks 256] [--samples 8192]

Real: Ray and its calls, the service with dispatch and ledger, its channel, the object store.
Simulated: engines and ranks, which live in a few actors. An engine answers after a random time with
a segment, whose length is log-normal (median 1/16 of the longest). Verdicts are made at once and
cost nothing. A rank takes its share of the step and does not fetch arrays.

cpu              CPU seconds of the process for the second of two steps
memory           most resident memory, without shared memory, above that before the first step
calls            Ray calls of the second step by ranks to the service
loop blocked     longest time for which the service's event loop did not run
"""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from common import Args, run_tool
from peak_memory import Sampled, own_bytes
from scale_actors import STEPS, Fleet, Ranks, build

from megarl.rollout.ray_cluster import Cluster
from megarl.system.process_env import own_cluster_token

FLEETS = 4
"""Actors that the simulated engines are divided over."""

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


def measure(args: Args) -> dict[str, Any]:
    """Simulate one step of the rollout service; its times and memory, with the arguments."""
    if args.samples % args.group_size:
        raise ValueError("--group-size must divide --samples")
    return {"rows": [vars(args) | simulate(args, args.work)]}


COLUMNS = (
    "engines d; ranks d; samples d; CPU s=cpu_s .2f; memory MiB=memory_mib .1f;"
    " loop blocked ms=blocked_ms .0f; CPU of that=busy_ms .0f; step s=step_s .1f;"
    " calls of ranks=calls ,d"
)


if __name__ == "__main__":
    run_tool(__doc__, OPTIONS, measure, COLUMNS)
