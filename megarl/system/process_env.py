"""Environment variables that Ray, vLLM, torch, DeepSpeed and tokenizers read when they are
imported, which this file does not do.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

from megarl.system.host_memory import KEEPS_FREED_MEMORY

RAY_SETTINGS = {
    # Every rank must agree, and Ray's own default differs by role.
    "RAY_AUTH_MODE": "token",
    "RAY_DEDUP_LOGS": "0",
    # Ray's 15 would starve engines beside trainer ranks.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray leaves CUDA_VISIBLE_DEVICES alone for actors that ask it for no GPU, such as colocated
    # engines.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_MEMORY_MONITOR": "1",
    # Ray would start a process for each core, of which a run needs one for each actor.
    "RAY_prestart_worker_first_driver": "0",
    # No pages of metrics, which Ray shows to whoever connects.
    "RAY_enable_metrics_collection": "0",
    "AUTOSCALER_METRIC_PORT": "-1",
    # Else a call of Ray before it is started, or after its end, starts another one.
    "RAY_ENABLE_AUTO_CONNECT": "0",
}
"""For Ray's processes and every rank."""

RAY_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Has Ray, on Linux too, listen on 127.0.0.1 only."""

KEPT_ENGINES = "MEGARL_ENGINES"
"""Variable of runs whose engines stay: the Ray namespace of their names."""

ENGINE_RANKS = "megarl_engine_ranks"
"""Ray resource by which `megarl run` limits a node's engine ranks without GPUs."""


def prepare_environment(num_threads: int) -> None:
    """Set this process's variables, before torch is imported; those of the user stay, but
    OMP_NUM_THREADS.
    """
    _use_built_operators()
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("DS_LOG_LEVEL", "warning")


def _use_built_operators() -> None:
    """Find the DeepSpeed operators that launch/env.sh has built in this virtual environment:
    another ninja or folder would build them again, for half a minute.
    """
    programs, path = str(Path(sys.executable).parent), os.environ.get("PATH", "")
    if path.split(os.pathsep)[0] != programs:
        os.environ["PATH"] = os.pathsep.join((programs, path)) if path else programs
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
        # What torch compiles lies below TMPDIR by default, which a run loses at its end.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(sys.prefix) / "torch_inductor"))


def engine_environment(*, on_cpu: bool, num_threads: int, kv_cache_gib: int) -> dict[str, str]:
    """Variables of a vLLM engine's process. `num_threads`, `kv_cache_gib`: only `on_cpu`."""
    settings = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONWARNINGS": "ignore",
        # The ranks of an engine are on one host; other users of the network need not reach them.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    if on_cpu:
        settings |= {
            "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(num_threads),
            # Lets the engine's core compute by itself (executor `uni`): a worker process of its own
            # would spin beside it.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # vLLM compiles a few sampling functions even for an eager engine: seconds in which the
            # first request waits, for a count over [sequences, vocab].
            "TORCHDYNAMO_DISABLE": "1",
            **KEEPS_FREED_MEMORY,
        }
    else:
        settings |= {
            # Left open, vLLM would choose by itself, and say so in a log that is not shown. Runner
            # 1 is deprecated, and launches a kernel for each request that has a seed.
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            # vLLM asks for it in a Ray actor, but not in the core below one, where it would fork
            # the workers of a tensor-parallel engine from a process with threads.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
    return settings


def own_cluster_token() -> str:
    """RAY_AUTH_TOKEN, or a new random token, which is then set."""
    return os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def use_cluster_token(token: str) -> None:
    """Call it before `ray.init`."""
    os.environ["RAY_AUTH_TOKEN"] = token


@contextlib.contextmanager
def without_variable(name: str) -> Iterator[None]:
    """Processes that the block starts do not inherit the variable `name`; "" for none."""
    value = os.environ.pop(name, None) if name else None
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value
