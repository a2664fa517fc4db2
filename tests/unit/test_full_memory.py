"""An actor that Ray ends as the machine's memory is full: one line; and the process in which vLLM
computes ends with its owner, even one that is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray
from ray.exceptions import OutOfMemoryError, RayActorError
from support.commands import python

from megarl.system.deaths import why_dead

FULL = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: {ip}, \
ID: 138a) was 22.50GB used / 23.54GB limit (0.955)
OOM kill reason: Memory usage 24159191040B exceeded threshold of 24012677120B (95.0% of 25276502016B limit)
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
{pid}\t{gib:.2f}\tpython3 fill.py /and/a/very/long/command/line/of/more/than/forty/characters
1\t1.00\t/sbin/init
{gone}\t0.90\tVLLM::EngineCore
2\t0.10\tkthreadd
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io"""


def full(pid: int, gib: float, ip: str = "") -> OutOfMemoryError:
    """Ray's error: process `pid` used `gib` GiB, and one that has ended since 0.9."""
    ip = ip or ray.util.get_node_ip_address()
    return OutOfMemoryError(FULL.format(ip=ip, pid=pid, gib=gib, gone=2**22 + 1))


def test_a_full_memory_is_one_line() -> None:
    user = psutil.Process().username()
    said = why_dead(full(os.getpid(), 15.0))
    assert "was full: 22.5 of 23.54 GiB used, limit 22.4; the largest: python3 fill.py" in said
    assert f"(process {os.getpid()}, 15.0 GiB, of this run)" in said
    assert "VLLM::EngineCore (process 4194305, 0.9 GiB, of this run)" in said
    assert "this run's part is 15.9 GiB: lower rollout.engine.kv_cache_gib or rollout.num" in said
    assert "kthreadd" not in said and len(said) < 600
    with subprocess.Popen(["sleep", "60"], env={}) as other:
        said = why_dead(full(other.pid, 15.0))
        other.kill()
    assert f"(process {other.pid}, 15.0 GiB, of {user}, not of this run)" in said
    assert "end other programs there, or lower rollout.engine.kv_cache_gib" in said
    assert "not visible from here" in why_dead(full(7, 15.0, "203.0.113.9"))
    assert why_dead(OutOfMemoryError("other words\nof Ray")) == "other words"


def test_an_actor_that_could_not_be_made_says_why() -> None:
    text = (
        "The actor died because of an error raised in its creation task, \x1b[36mray::Engine()"
        "\x1b[39m\n  File engine.py\nTypeError: unexpected keyword"
    )
    assert why_dead(RayActorError(error_msg=text)) == "TypeError: unexpected keyword"


KILLED = """
import os
os.environ |= {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"}
import ray
from megarl.system.ray_calls import ask
from megarl.system.private_folder import run_folder

class Holds:
    def pulse(self):
        import time
        time.sleep(60)

with run_folder():
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    actor = ray.remote(Holds).options(max_concurrency=4).remote()
    try:
        ask("engine 0", actor.pulse.remote(), 50, "x")
    except Exception as error:
        print(type(error).__name__, str(error).replace("\\n", "|"))
    ray.shutdown()
"""


@pytest.mark.engine
def test_rays_memory_monitor_ends_an_actor() -> None:
    """The real error, which is no `RayActorError`."""
    done = python("-c", KILLED, timeout=200)
    (said,) = done.stdout.splitlines()
    assert said.startswith("ProcessLost engine 0 died (x): Ray ended it as the memory of "), said
    assert "GiB used, limit" in said and "|" not in said and "rollout.num_engines" in said
    assert len(said) < 700


OWNER = """
import sys, time
sys.path.insert(0, {folder!r})
import core_target
from megarl.engines.vllm_core import CoreContext, SpawnedCoreContext

if __name__ == "__main__":
    for context in (CoreContext(), SpawnedCoreContext()):
        told = type(context).__name__
        context.Process(target=core_target.wait, name="EngineCore", kwargs={{"told": told}}).start()
    time.sleep(600)
"""
TARGET = """
import os, time

def wait(told):
    print(os.getpid(), told, flush=True)
    time.sleep(600)
"""


def test_a_core_ends_with_its_killed_owner(tmp_path: Path) -> None:
    """A forked one and a spawned one."""
    (tmp_path / "core_target.py").write_text(TARGET)
    script = tmp_path / "owner.py"
    script.write_text(OWNER.format(folder=str(tmp_path)))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = dict(reversed(owner.stdout.readline().split()) for _ in range(2))
        assert set(pids) == {"CoreContext", "SpawnedCoreContext"}
        cores = [psutil.Process(int(pid)) for pid in pids.values()]
        assert all(core.is_running() for core in cores)
        owner.kill()
        _, left = psutil.wait_procs(cores, timeout=20)
        for one in left:
            one.kill()
        assert left == []
