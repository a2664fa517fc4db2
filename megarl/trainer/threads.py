"""CPU threads of trainers and engines, where a recipe leaves their `num_threads` at 0.

The machine's cores are shared out among the processes that compute at the same time. Trainer and
engines take turns with `rollout.max_staleness: 0`; otherwise each kind has half of the cores.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from megarl.config import AnyConfig, RunConfig, ServeRewardConfig
from megarl.parallel import launcher

GIVEN = os.environ.get("OMP_NUM_THREADS", "")
"""What the user or torchrun has set, before `megarl.cluster.process_env` sets it for libraries."""

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of computing in a period that a container may use, or "max", and the period."""


def cores() -> int:
    """Number of cores that this process may use, at least 1."""
    found = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        quota, period = map(int, QUOTA.read_text().split())
        found = min(found, -(-quota // period))
    return max(1, found)


def shared(processes: int) -> int:
    """Threads of each of `processes` processes that compute at the same time on this machine;
    OMP_NUM_THREADS where that is set.
    """
    if GIVEN.isascii() and GIVEN.isdecimal() and int(GIVEN) > 0:
        return int(GIVEN)
    return max(1, cores() // processes)


def trainer_threads(config: AnyConfig) -> int:
    """Threads of each trainer rank."""
    return config.training.num_threads or shared(_overlap(config) * launcher.ranks_per_host())


def engine_threads(config: RunConfig) -> int:
    """Threads of each rank of an engine. Engines are taken to be spread evenly over the hosts."""
    hosts = launcher.num_ranks() // launcher.ranks_per_host()
    here = -(-config.rollout.num_engines * config.rollout.engine.tensor // hosts)
    return config.rollout.engine.num_threads or shared(_overlap(config) * here)


def process_threads(config: AnyConfig | ServeRewardConfig) -> int:
    """Threads of the process that runs a command with `config`."""
    if isinstance(config, ServeRewardConfig):
        return config.num_threads or shared(1)
    return trainer_threads(config)


def _overlap(config: AnyConfig) -> int:
    """2 where samples are generated while the trainer computes, else 1."""
    return 2 if isinstance(config, RunConfig) and config.rollout.max_staleness > 0 else 1
