"""Whole runs whose engines die or hang, in every phase: they go on with the others and new ones, and
no prompt is lost. Where the last engine dies, they end, and a resume goes on.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import (
    Done,
    finish,
    megarl,
    records,
    replayed,
    start,
    tiny_run,
    write_recipe,
)
from support.faults import KILLER
from support.fork_server import UNFORKED
from support.tiny import write_model

PHASES = """
import os, signal, sys, time
import psutil
from support.fork_server import below
from megarl.rollout.client import RolloutClient
from megarl.system.console import say
from megarl.weights.publication import Publication

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

plain = Publication.publish

def publish(self, version):
    # With all engines, so that each fault leaves one that serves.
    time.sleep(3.0)  # a dead engine is noticed
    while len(self.engines.hold()[0]) < 2:
        time.sleep(0.2)
    return plain(self, version)

Publication.publish = publish

# The first evaluation is at the start of the run. After `release`, the trainer waits for rollouts.
before(
    RolloutClient, "release",
    (1, "core", signal.SIGKILL), (3, "core", signal.SIGSTOP),
)
before(RolloutClient, "evaluate", (2, "actor", signal.SIGKILL), (3, "actor", signal.SIGSTOP))
before(Publication, "_check_probe", (6, "core", signal.SIGKILL))
from megarl.cli import main
sys.exit(main())
"""


@pytest.mark.nightly
def test_engines_die_and_hang_in_every_phase(tmp_path: Path) -> None:
    """One of two, while the trainer waits for rollouts or an evaluation, and in the probe."""
    model = write_model(tmp_path / "model")
    tree = tiny_run(tmp_path, model, steps=5)
    tree["rollout"] |= {"num_engines": 2, "engine": {"stall_timeout_s": 8}}
    tree["environment"] |= {"time_limit_s": 2}
    tree["evaluation"] |= {"every": 2}
    command = [sys.executable, "-c", PHASES, "run", write_recipe(tmp_path / "recipe.yaml", tree)]
    process, mark = start(command)
    done = finish(process, mark, 400)
    assert done.code == 0, done.err[-3000:]
    assert done.survivors == []
    assert done.err.count("hit ") == 5
    steps = [
        row for row in records(tmp_path / "run" / "metrics.jsonl") if "publish/replaced" in row
    ]
    assert len(steps) == 5
    assert [row["engines/replaced"] for row in steps[:4]] == [0, 1, 2, 3]
    # The service counts this one when its engine is called again, which may be after the last row.
    assert steps[4]["publish/replaced"] == 1
    assert "has lost one of vLLM's processes; it is replaced" in done.err
    assert re.search(r"has made no step for \d+ s, with \d+ requests open", done.err)
    assert re.search(r"has not said for \d+ s that it lives", done.err)
    assert [row["groups/drawn"] - row["groups/rejected"] for row in steps] == [4] * 5
    audit = megarl("ledger", str(tmp_path / "run"))
    assert audit.code == 0, audit.out + audit.err


RAY = """
import time
import psutil, ray
from megarl.rollout.ray_cluster import shut_down, started_processes

ray.init(address="local", include_dashboard=False, num_cpus=1, log_to_driver=False)
named = {one[1]: " ".join(psutil.Process(one[1]).cmdline()) for one in started_processes()}
(raylet,) = [number for number, line in named.items() if "raylet --raylet" in line]
psutil.Process(raylet).suspend()
began = time.monotonic()
shut_down(2.0)
assert time.monotonic() - began < 60
print(len(named), "processes")
"""


@pytest.mark.nightly
def test_a_raylet_that_hangs_does_not_keep_the_run_from_ending() -> None:
    process, mark = start([sys.executable, "-c", RAY])
    done = finish(process, mark, 120)
    assert done.code == 0 and int(done.out.split()[0]) >= 3, done.out + done.err[-3000:]
    assert "megarl: Ray has not shut down within 2 s; its processes are killed" in done.err
    assert done.survivors == []


SERVICE_DIES = """
import asyncio, contextlib, os, signal, time
from types import SimpleNamespace
import psutil, ray
from megarl.engines.pool import EngineStarts
from megarl.system.process_env import own_cluster_token
from megarl.rollout.ray_cluster import Cluster, started_processes
from megarl.rollout.service_process import ServiceActor
from megarl.settings.rollout import RolloutConfig
from megarl.weights import engine_client
from megarl.weights.engine_client import EngineClient

engine_client.SERVICE_TIMEOUT_S = 3.0
CONFIG = SimpleNamespace(
    rollout=RolloutConfig(groups_per_step=1, max_new_tokens=1), seed=0, steps=2,
    group_filter="all", greedy_baseline=False, algorithm=SimpleNamespace(truncated="train"),
    environment=SimpleNamespace(max_turns=0, max_failure_share=1.0),
)

class Environment:
    async def start(self): pass

class Engine:
    '''Its start does not end.'''
    async def process(self): return ("elsewhere", 1, 1.0)
    async def start(self): await asyncio.sleep(3600)

def arguments(starts=None):
    "Of a service that makes nothing."
    return dict(config=CONFIG, prompts=None, engines=[], environment=Environment(),
                num_data_ranks=1, deal=None, starts=starts)

def processes(title):
    lines = {one[1]: psutil.Process(one[1]).cmdline() for one in started_processes()}
    return [number for number, line in lines.items() if title in " ".join(line)]

if __name__ == "__main__":
    with Cluster(namespace="test", token=own_cluster_token()) as cluster:
        engine = ray.remote(Engine).options(num_cpus=0, max_concurrency=100).remote()
        starts = EngineStarts((), {"load": False}, 600.0, 600.0, actors=[engine])
        service = cluster.start_service(lambda: arguments(starts))
        cluster.wait_for_service(60)
        engines = EngineClient(service, starts.timeout_s)
        waits = service.engine_call.remote("ready")
        assert not ray.wait([waits], timeout=1.0)[0]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            os.kill(processes("ray::ServiceActor")[0], number)
            began = time.monotonic()
            try:
                engines.wait()
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


@pytest.mark.nightly
def test_a_service_that_hangs_or_dies_ends_a_wait_for_an_engine(tmp_path: Path) -> None:
    """Long before the engine's time is up. And one that is stopped just after its raylet's death is
    not left behind.
    """
    (tmp_path / "script.py").write_text(SERVICE_DIES)
    process, mark = start([sys.executable, str(tmp_path / "script.py")], **UNFORKED)
    done = finish(process, mark, 180)
    said = re.findall("test: (.*)", done.out)
    assert done.code == 0 and len(said) == 3, done.out + done.err[-3000:]
    assert said[0] == "the rollout service did not answer within 3 s (calling the engines)"
    assert said[1].startswith("the rollout service died (calling the engines)")
    assert said[2] == "gone"
    assert done.survivors == []


def killing_run(folder: Path, victim: str, **rollout: Any) -> tuple[Done, dict[str, Any]]:
    """A run of four steps, one of whose engines is hit while version 2 is on its way, and its
    recipe.
    """
    tree = tiny_run(folder, write_model(folder / "model"), steps=4)
    tree["rollout"] |= rollout
    tree["observe"] = {"batches": True}
    if rollout.get("max_staleness"):
        tree["algorithm"] = {"correction": {"kind": "tis"}}
    command = [sys.executable, "-c", KILLER, "run", write_recipe(folder / "recipe.yaml", tree)]
    process, mark = start(command, VICTIM=victim)
    done = finish(process, mark, 300)
    assert done.survivors == []
    assert re.search(
        r"engine \d was lost while it received version 2, in bucket \d+ of \d+, which begins with"
        r" model\.",
        done.err,
    ), done.err[-3000:]
    return done, tree


def test_the_run_goes_on_with_a_fresh_engine(tmp_path: Path) -> None:
    """One of two engines loses its actor; requests are under way."""
    done, _ = killing_run(tmp_path, "engine", num_engines=2, max_staleness=1)
    assert done.code == 0, done.err[-3000:]
    rows = records(tmp_path / "run" / "metrics.jsonl")
    steps = [row for row in rows if "publish/replaced" in row]
    assert [row["publish/replaced"] for row in steps] == [0, 1, 0, 0], "version 2 is of step 1"
    assert all(row["probe/max_abs"] < 1e-4 for row in steps)
    # Groups are trained in order: a rollout that was lost with the engine would have stopped the
    # run.
    assert [row["groups/drawn"] - row["groups/rejected"] for row in steps] == [4, 4, 4, 4]
    replayed(tmp_path / "run", steps=4)
    refuses_torn_batches(tmp_path / "run")


@pytest.mark.nightly
def test_a_run_whose_last_engine_dies_ends_and_resumes(tmp_path: Path) -> None:
    """It loses one rank of two. No checkpoint has step 1 or 2: they are done again."""
    done, tree = killing_run(tmp_path, "rank", num_engines=1, engine={"tensor": 2})
    assert done.code == 1
    assert "no engine is left" in done.err
    assert "`--resume auto` goes on from the newest checkpoint" in done.err
    resumed = megarl("run", write_recipe(tmp_path / "recipe.yaml", tree), "--resume", "auto")
    assert resumed.code == 0, resumed.err[-3000:]
    rows = records(tmp_path / "run" / "metrics.jsonl")
    steps = [row for row in rows if "publish/replaced" in row]
    assert [row["groups/drawn"] - row["groups/rejected"] for row in steps] == [4, 4, 4, 4]
    audit = megarl("ledger", str(tmp_path / "run"))
    assert audit.code == 0, audit.out + audit.err


def refuses_torn_batches(run: Path) -> None:
    """A replay names a batch that is damaged or missing."""
    path = run / "batches" / "step_000002.rank_000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0\0")
    torn = megarl("replay", str(run), "--folder", f"{run}_again")
    assert torn.code == 2 and "step_000002.rank_000.safetensors cannot be read" in torn.err
    path.unlink()
    missing = megarl("replay", str(run), "--folder", f"{run}_once_more")
    assert missing.code == 2 and "set replay.steps to 1" in missing.err
