"""Environment variables that third parties read, set here and nowhere else. Imports none of them:
they read at import.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

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
}
"""Variables of Ray's own processes and of every rank."""


def prepare_environment(num_threads: int) -> None:
    """Settings that libraries read when they are imported; call before torch is."""
    # Programs of this environment come first on PATH: DeepSpeed's operators, built by its ninja at
    # installation, would be built again by every other ninja, which takes half a minute.
    programs = str(Path(sys.executable).parent)
    if os.environ.get("PATH", "").split(os.pathsep)[0] != programs:
        os.environ["PATH"] = programs + os.pathsep + os.environ.get("PATH", "")
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("DS_LOG_LEVEL", "warning")


def engine_environment(*, on_cpu: bool, num_threads: int, kv_cache_gib: int) -> dict[str, str]:
    """What a vLLM engine's process needs to find in its environment."""
    settings = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    if on_cpu:
        settings |= {
            "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(num_threads),
            # Lets the engine's core compute by itself (executor `uni`): a worker process of its own
            # would spin beside it.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    return settings


def own_cluster_token() -> str:
    """The token of the Ray cluster this run starts or joins: the user's own where there is one,
    else a fresh one.
    """
    return os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def use_cluster_token(token: str) -> None:
    """Join with `token`, which rank 0 has told."""
    os.environ["RAY_AUTH_TOKEN"] = token
