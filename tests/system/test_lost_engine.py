"""Whole runs whose engines die or hang, in every phase: they go on with new engines, and no prompt is
lost.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from support.commands import finish, megarl, records, start, tiny_run, write_recipe
from support.faults import KILLER
from support.fork_server import UNFORKED
from support.tiny import write_model

PHASES = """
import os, signal, sys
import psutil
from support.fork_server import below
from megarl.cluster.rollout_client import RolloutClient
from megarl.console import say
from megarl.weight_sync.publication import Publication
from megarl.weight_sync.transports import shared_memory

def called(title):
    return next(
        process for process in below(psutil.Process())
        if process.cmdline() and process.cmdline()[0].startswith(title)
    )

def hit(kind, number):
    # Ray's processes are below this one. The engine's core has no title of its own; it is the
    # largest process below the actor.
    victim = called("ray::Engine")
    if kind == "core":
        below = victim.children(recursive=True)
        victim = max(below, key=lambda process: process.memory_info().rss)
    victim.send_signal(number)
    say(f"hit {kind} {number}")

def before(owner, name, *faults):
    plain, calls = getattr(owner, name), []
    def method(self, *arguments):
        calls.append(arguments)
        for count, kind, number in faults:
            if len(calls) == count:
                hit(kind, number)
        return plain(self, *arguments)
    setattr(owner, name, method)

# The first call of each is the start of the run. After `release`, the trainer waits for rollouts.
before(
    RolloutClient, "release",
    (1, "core", signal.SIGKILL), (3, "core", signal.SIGSTOP),
)
before(RolloutClient, "evaluate", (2, "actor", signal.SIGKILL), (3, "actor", signal.SIGSTOP))
before(Publication, "_check_probe", (3, "core", signal.SIGKILL))
before(shared_memory.Sender, "begin", (7, "core", signal.SIGKILL))
from megarl.cli import main
sys.exit(main())
"""


@pytest.mark.nightly
def test_one_engine_dies_and_hangs_in_every_phase(tmp_path: Path) -> None:
    """One engine alone, so that everything waits for its replacement: while the trainer waits for
    rollouts or an evaluation, in the probe, and before the first byte of a version.
    """
    model = write_model(tmp_path / "model")
    tree = tiny_run(tmp_path, model, steps=5)
    tree["rollout"] |= {"engine": {"stall_timeout_s": 8}}
    tree["environment"] |= {"time_limit_s": 2}
    tree["evaluation"] |= {"every": 2}
    command = [sys.executable, "-c", PHASES, "train", write_recipe(tmp_path / "recipe.yaml", tree)]
    process, mark = start(command)
    done = finish(process, mark, 400)
    assert done.code == 0, done.err[-3000:]
    assert done.survivors == []
    assert done.err.count("hit ") == 6
    steps = [
        row for row in records(tmp_path / "run" / "metrics.jsonl") if "publish/replaced" in row
    ]
    assert len(steps) == 5
    assert steps[-1]["engines/replaced"] == 6
    assert "has lost one of vLLM's processes; it is replaced" in done.err
    assert re.search(r"has made no step for \d+ s, with \d+ requests open", done.err)
    assert re.search(r"has not said for \d+ s that it lives", done.err)
    assert [row["groups/drawn"] - row["groups/rejected"] for row in steps] == [4] * 5
    audit = megarl("ledger", str(tmp_path / "run"))
    assert audit.code == 0, audit.out + audit.err


RAY = """
import time
import psutil, ray
from megarl.cluster.ray_cluster import shut_down, started_processes

ray.init(address="local", include_dashboard=False, num_cpus=1, log_to_driver=False)
named = {one[1]: " ".join(psutil.Process(one[1]).cmdline()) for one in started_processes()}
(raylet,) = [number for number, line in named.items() if "raylet --raylet" in line]
psutil.Process(raylet).suspend()
began = time.monotonic()
shut_down(2.0)
assert time.monotonic() - began < 60
print(len(named), "processes")
"""


def test_a_raylet_that_hangs_does_not_keep_the_run_from_ending() -> None:
    process, mark = start([sys.executable, "-c", RAY])
    done = finish(process, mark, 120)
    assert done.code == 0 and int(done.out.split()[0]) >= 3, done.out + done.err[-3000:]
    assert "megarl: Ray has not shut down within 2 s; its processes are killed" in done.err
    assert done.survivors == []


SERVICE_DIES = """
import asyncio, contextlib, os, signal, time
import psutil, ray
from megarl.cluster.engines import EngineGroup
from megarl.cluster.process_env import own_cluster_token
from megarl.cluster.ray_cluster import Cluster
from megarl.cluster.ray_cluster import started_processes
from megarl.cluster.remote import own_process
from megarl.cluster.service_process import ServiceActor
from megarl.cluster.supervisor import EngineSupervisor
from megarl.rollout.config import RolloutConfig
from megarl.rollout.inference_engine import Pulse

class Environment:
    async def start(self): pass

def arguments():
    "Of a service that makes nothing."
    config = RolloutConfig(groups_per_step=1, max_new_tokens=1)
    return dict(config=config, seed=0, prompts=None, engines=[], environment=Environment(),
                num_data_ranks=1, deal=None, last_step=1)

class Engine:
    '''Makes a step a second; `starts`: whether its start ends.'''
    def __init__(self, starts): self.starts, self.steps = starts, 0
    async def process(self): return own_process()
    async def pulse(self):
        self.steps += 1
        return Pulse(self.steps, 0, 0, 0, requests=1, is_paused=False, is_dead=False)
    async def start(self):
        await asyncio.sleep(0 if self.starts else 3600)
        return {"processes": [own_process()], "seconds": 0.0}

def processes(title):
    lines = {one[1]: psutil.Process(one[1]).cmdline() for one in started_processes()}
    return [number for number, line in lines.items() if title in " ".join(line)]

if __name__ == "__main__":
    with Cluster(namespace="test", token=own_cluster_token()) as cluster:
        made = []
        def engine(number):
            made.append(number)
            return ray.remote(Engine).options(num_cpus=0, max_concurrency=100).remote(
                len(made) <= 2)
        group = EngineGroup(2, engine, 600.0)
        group.wait()
        group.service = cluster.start_service(arguments)
        cluster.wait_for_service(60)
        (service,) = processes("ray::ServiceActor")
        supervisor = EngineSupervisor(group, stall_s=600.0, loads=False)
        time.sleep(3.0)
        group.is_held = True  # as in a publication, which replaces an engine itself
        group.restart([1])
        os.kill(service, signal.SIGKILL)
        began = time.monotonic()
        try:
            group.wait()
        except RuntimeError as error:
            print("test:", error)
        assert time.monotonic() - began < 60

        other = ray.remote(ServiceActor).remote(arguments)
        ray.get(other.build.remote())
        service = psutil.Process(processes("ray::ServiceActor")[0])
        raylet = psutil.Process(processes("raylet --raylet")[0])
        raylet.kill()
        raylet.wait()
        # Ray's processes notice it within seconds; one that is stopped before never does.
        with contextlib.suppress(psutil.NoSuchProcess):
            service.suspend()
        _, left = psutil.wait_procs([service], timeout=20)
        print("test:", "left behind" if left else "gone")
"""


def test_a_service_that_dies_ends_a_wait_for_an_engine(tmp_path: Path) -> None:
    """And one that is stopped just after its raylet's death is not left behind."""
    (tmp_path / "script.py").write_text(SERVICE_DIES)
    process, mark = start([sys.executable, str(tmp_path / "script.py")], **UNFORKED)
    done = finish(process, mark, 180)
    said = re.findall("test: (.*)", done.out)
    assert done.code == 0 and len(said) == 2, done.out + done.err[-3000:]
    assert said[0].startswith("engine 1 cannot start: the rollout service died (")
    assert said[1] == "gone"
    assert done.survivors == []


@pytest.mark.parametrize(("victim", "engines", "tensor"), [("engine", 2, 1), ("rank", 1, 2)])
def test_the_run_goes_on_with_a_fresh_engine(
    victim: str, engines: int, tensor: int, tmp_path: Path
) -> None:
    """One of two engines loses its actor, or the only one loses one rank of two; requests are
    under way.
    """
    model = write_model(tmp_path / "model")
    tree = tiny_run(tmp_path, model, steps=4)
    tree["rollout"] |= {"num_engines": engines, "max_staleness": 1}
    tree["rollout"] |= {"engine": {"tensor": tensor}}
    tree["algorithm"] = {"correction": {"kind": "tis"}}
    tree["observe"] = {"batches": True}
    command = [sys.executable, "-c", KILLER, "train", write_recipe(tmp_path / "recipe.yaml", tree)]
    process, mark = start(command, VICTIM=victim)
    done = finish(process, mark, 300)
    assert done.code == 0, done.err[-3000:]
    assert done.survivors == []
    assert re.search(
        r"engine \d was lost while it received version 2, in bucket \d+ of \d+, which begins with"
        r" model\.",
        done.err,
    )
    rows = records(tmp_path / "run" / "metrics.jsonl")
    steps = [row for row in rows if "publish/replaced" in row]
    assert [row["publish/replaced"] for row in steps] == [
        0,
        1,
        0,
        0,
    ], "version 2 is what step 1 leaves"
    assert all(row["probe/max_abs"] < 1e-4 for row in steps)
    # Groups are trained in order: a rollout that was lost with the engine would have stopped the
    # run.
    assert [row["groups/drawn"] - row["groups/rejected"] for row in steps] == [4, 4, 4, 4]
    if tensor == 1:
        replays_bit_by_bit(tmp_path / "run", steps=4)


def replays_bit_by_bit(run: Path, steps: int) -> None:
    """Training again on the batches of `run` gives its metrics and weights."""
    replayed = megarl("replay", str(run))
    assert replayed.code == 0, replayed.out + replayed.err[-3000:]
    found = json.loads(replayed.out)
    assert found["steps"] == steps
    assert found["steps_that_differ"] == {} and found["checkpoints_that_differ"] == []
    assert f"step_{steps:06d}" in found["checkpoints_compared"]
    path = run / "batches" / "step_000002.rank_000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0\0")
    torn = megarl("replay", str(run), "--folder", f"{run}_again")
    assert torn.code == 2 and "step_000002.rank_000.safetensors cannot be read" in torn.err
    path.unlink()
    missing = megarl("replay", str(run), "--folder", f"{run}_again")
    assert missing.code == 2 and "set replay.steps to 1" in missing.err
