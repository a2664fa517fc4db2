"""Why a Ray actor died, in one line.

Ray ends actors where 95 % of the host's memory are used, whoever uses it
(`RAY_memory_usage_threshold`). Calls then raise `OutOfMemoryError`, which is no `RayActorError`.
"""

from __future__ import annotations

import contextlib
import os
import re

import psutil
import ray
from ray.exceptions import OutOfMemoryError, RayActorError

from megarl.system.private_folder import MARK

DEATHS = (RayActorError, OutOfMemoryError)
"""What a Ray call raises if its actor is dead or out of reach."""
ENGINE_DEAD = "EngineDeadError"
"""vLLM's exception for a dead process, by name: vLLM is not imported where Ray is called."""

COLOUR = re.compile(r"\x1b\[[\d;]*m")
NODE = re.compile(r"\(IP: ([^,]+),.*?was ([\d.]+)GB used / ([\d.]+)GB limit")
THRESHOLD = re.compile(r"exceeded threshold of (\d+)B")
PROCESS = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)
NAMED = 3
"""Processes that the line names."""
LONGEST_NAME = 40
"""Characters of a process's command line."""
OWN = "of this run"


def why_dead(error: BaseException) -> str:
    """Of one of `DEATHS`. If memory was full: the largest processes, this run's part, and what to
    change.
    """
    node = NODE.search(str(error))
    if node is None or not isinstance(error, OutOfMemoryError):
        lines = COLOUR.sub("", str(error)).splitlines() or [repr(error)]
        # Of an actor that could not be made, the last line is what its `__init__` raised.
        return lines[-1] if "in its creation task" in lines[0] else lines[0]
    address, used, total = node[1], float(node[2]), node[3]
    is_here = address == ray.util.get_node_ip_address()
    users, run_gib = list[str](), 0.0
    for pid, gib, command in PROCESS.findall(str(error)):  # the largest first
        whose = _whose(int(pid)) if is_here else "not visible from here"
        run_gib += float(gib) if whose == OWN else 0.0
        users.append(f"{command[:LONGEST_NAME]} (process {pid}, {float(gib):.1f} GiB, {whose})")
    limit = THRESHOLD.search(str(error))
    at = f", limit {int(limit[1]) / 2**30:.1f}" if limit else ""
    fix = "lower rollout.engine.kv_cache_gib or rollout.num_engines"
    if run_gib < used / 2:
        fix = f"end other programs there, or {fix}"
    return (
        f"Ray ended it as the memory of {address} was full: {used:.1f} of {total} GiB used{at}; the"
        f" largest: {', '.join(users[:NAMED])}; this run's part is {run_gib:.1f} GiB: {fix}"
    )


def _whose(pid: int) -> str:
    """A process that has ended counts as this run's: Ray has ended it, or its parent."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if not _is_of_this_run(process):
            return f"of {process.username()}, not of this run"
    return OWN


def _is_of_this_run(process: psutil.Process) -> bool:
    """Whether `process` has the temporary folder of this process's run, or the same torchrun has
    started it. False for a process whose environment cannot be read.
    """
    # The process that made the run's folder, of which the mark has the id, is not marked itself.
    if process.pid == os.getpid() or f"/megarl-{process.pid}-" in os.environ.get(MARK, ""):
        return True
    with contextlib.suppress(psutil.Error, OSError):
        shared = dict(os.environ.items() & process.environ().items())
        return MARK in shared or {"TORCHELASTIC_RUN_ID", "MASTER_PORT"} <= shared.keys()
    return False
