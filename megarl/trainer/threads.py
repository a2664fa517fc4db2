"""CPU threads of trainers and engines, where a recipe leaves their `num_threads` at 0.

The machine's cores are divided among the processes that compute at the same time. Trainer and
engines take turns with `rollout.max_staleness: 0`; otherwise each kind has half of the cores.
"""

from __future__ import annotations

import contextlib
import os

from megarl.parallel import launcher
from megarl.settings.config import AnyConfig, RunConfig, ServeRewardConfig
from megarl.system.host_memory import control_groups

GIVEN = os.environ.get("OMP_NUM_THREADS", "")
"""OMP_NUM_THREADS as it was when this process began: the user's or torchrun's. Later
`megarl.system.process_env` sets the variable for libraries."""

QUOTAS = {2: ("cpu.max",), 1: ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
"""{version of control groups: files with the microseconds of computing that are allowed in a
period, and with the period}"""


def cores() -> int:
    """Number of CPU cores that this process may use, at least 1: those that it is bound to
    (affinity), and no more than the CPU quota of its container (control group), rounded up.
    """
    found = len(os.sched_getaffinity(0))
    for version, folder in control_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            words = " ".join((folder / name).read_text() for name in QUOTAS[version])
            quota, period = map(int, words.split())
            if quota > 0:  # -1: no limit
                found = min(found, -(-quota // period))
    return max(1, found)


def shared(processes: int) -> int:
    """Number of CPU threads for each of `processes` processes that compute at the same time on this
    machine: OMP_NUM_THREADS of the environment where that is set, else the cores divided by
    `processes`, at least 1.
    """
    if GIVEN.isascii() and GIVEN.isdecimal() and int(GIVEN) > 0:
        return int(GIVEN)
    return max(1, cores() // processes)


def trainer_threads(config: AnyConfig) -> int:
    """Number of CPU threads for each trainer rank: `training.num_threads`, or where that is 0
    OMP_NUM_THREADS, or without it this machine's cores divided by its ranks, half of that if
    engines generate meanwhile (`rollout.max_staleness` above 0).
    """
    return config.training.num_threads or shared(_overlap(config) * launcher.ranks_per_host())


def engine_threads(config: RunConfig, *, trains: bool = True) -> int:
    """Number of CPU threads for each rank of an inference engine: `rollout.engine.num_threads`, or
    where that is 0 OMP_NUM_THREADS, or without it this machine's cores divided by its engine ranks,
    with engines taken to be spread evenly over the hosts. `trains`: a trainer computes beside the
    engines, which halves that number if `rollout.max_staleness` is above 0.
    """
    hosts = launcher.num_ranks() // launcher.ranks_per_host()
    here = -(-config.rollout.num_engines * config.rollout.engine.tensor // hosts)
    return config.rollout.engine.num_threads or shared((_overlap(config) if trains else 1) * here)


def process_threads(config: AnyConfig | ServeRewardConfig) -> int:
    """Number of CPU threads for the process that runs a command with `config`. For a reward server
    OMP_NUM_THREADS, or without it all cores of this machine; for other commands as
    `trainer_threads` says.
    """
    if isinstance(config, ServeRewardConfig):
        return shared(1)
    return trainer_threads(config)


def _overlap(config: AnyConfig) -> int:
    """2 where samples are generated while the trainer computes, else 1."""
    return 2 if isinstance(config, RunConfig) and config.rollout.max_staleness > 0 else 1
