"""CPU threads of trainers and engines, where a recipe leaves their `num_threads` at 0.

With `rollout.max_staleness: 0` trainer and engines take turns; otherwise each has half of the
cores.
"""

from __future__ import annotations

import contextlib
import os

from megarl.parallel import launcher
from megarl.settings.config import AnyConfig, RunConfig, ServeRewardConfig
from megarl.system.host_memory import control_groups

GIVEN = os.environ.get("OMP_NUM_THREADS", "")
"""OMP_NUM_THREADS of the user or torchrun; later `megarl.system.process_env` sets it for
libraries."""

QUOTAS = {2: ("cpu.max",), 1: ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
"""{version of control groups: files with the microseconds of computing in a period, and the
period}"""


def cores() -> int:
    """CPU cores that this process may use, by affinity and its container's quota, rounded up."""
    count = len(os.sched_getaffinity(0))
    for version, folder in control_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            words = " ".join((folder / name).read_text() for name in QUOTAS[version])
            quota, period = map(int, words.split())
            if quota > 0:  # -1: no limit
                count = min(count, -(-quota // period))
    return max(1, count)


def shared(processes: int) -> int:
    """Threads for each of `processes` on this machine: OMP_NUM_THREADS, or else its share of the
    cores.
    """
    if GIVEN.isascii() and GIVEN.isdecimal() and int(GIVEN) > 0:
        return int(GIVEN)
    return max(1, cores() // processes)


def trainer_threads(config: AnyConfig) -> int:
    """Threads for each trainer rank."""
    return config.training.num_threads or shared(_overlap(config) * launcher.ranks_per_host())


def engine_threads(config: RunConfig, *, trains: bool = True) -> int:
    """Threads for each rank of an engine, of which hosts have equal numbers. `trains`: a trainer
    computes beside them.
    """
    hosts = launcher.num_ranks() // launcher.ranks_per_host()
    ranks = -(-config.rollout.num_engines * config.rollout.engine.tensor // hosts)
    return config.rollout.engine.num_threads or shared((_overlap(config) if trains else 1) * ranks)


def process_threads(config: AnyConfig | ServeRewardConfig) -> int:
    """Threads for a command; a reward server has all cores."""
    if isinstance(config, ServeRewardConfig):
        return shared(1)
    return trainer_threads(config)


def _overlap(config: AnyConfig) -> int:
    """2 where samples are generated while the trainer computes, else 1."""
    return 2 if isinstance(config, RunConfig) and config.rollout.max_staleness > 0 else 1
