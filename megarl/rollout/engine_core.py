"""Starts vLLM's engine core on the CPU from a fork server, so that vLLM is imported by both
processes of an engine at the same time.

vLLM computes in a second process, the engine core. In a Ray actor vLLM uses the start method
`spawn`: the core imports torch and vLLM only once the actor has imported them, 8 s later. On a GPU
the core is spawned: there a process must not fork after CUDA is initialised. In both cases the core
ends with its actor, which vLLM's does not if the actor is killed: it would keep its GPU memory.
"""

from __future__ import annotations

import contextlib
import glob
import multiprocessing
import os
import select
import signal
import tempfile
import threading
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import forkserver, shared_memory
from multiprocessing.context import (
    ForkServerContext,
    ForkServerProcess,
    SpawnContext,
    SpawnProcess,
)
from pathlib import Path
from typing import Any

from megarl.activity.recording import Recording
from megarl.private_folder import shared_name

CORE_IMPORTS = "megarl.rollout.core_imports"
"""Module that imports vLLM's engine core."""


def import_core_ahead() -> None:
    """Start a process that imports vLLM's engine core while this process imports the rest of vLLM.
    Call it before vLLM is imported, and `fork_core` after.
    """
    preload_openmp()
    multiprocessing.set_forkserver_preload([CORE_IMPORTS])
    forkserver.ensure_running()


def preload_openmp() -> None:
    """Have child processes load torch's OpenMP library first, as vLLM has its core do: with the
    system's beside it, threads share a core. It must be in the environment of the new process.
    """
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    found = glob.glob(str(Path(spec.origin).parent / "lib" / "libgomp*.so*"))
    before = os.environ.get("LD_PRELOAD", "")
    if found and "omp" not in before:
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [before, found[0]]))


def fork_core() -> None:
    """Have vLLM fork its engine core from the process of `import_core_ahead`."""
    from vllm.v1.engine import utils

    utils.get_mp_context = CoreContext  # pyright: ignore[reportPrivateImportUsage]


def spawn_core() -> None:
    """Have vLLM spawn its engine core, as it does by itself in a Ray actor, but so that the core
    ends with this process.
    """
    from vllm.v1.engine import utils

    utils.get_mp_context = SpawnedCoreContext  # pyright: ignore[reportPrivateImportUsage]


class SpawnedCoreContext(SpawnContext):
    """The multiprocessing context of an engine core on a GPU: its processes end with the process
    that wanted them.
    """

    def Process(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, *, target: Callable[..., None], name: str, kwargs: dict[str, Any]
    ) -> SpawnProcess:
        arguments = (None, os.getpid(), target, kwargs, Recording.beside("core"))
        return SpawnProcess(target=run_in_environment, name=name, args=arguments)


class CoreContext(ForkServerContext):
    """The multiprocessing context of the engine core: its processes get the environment variables
    that vLLM has set since the fork server started, and end with the process that wanted them.
    """

    def Process(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, *, target: Callable[..., None], name: str, kwargs: dict[str, Any]
    ) -> ForkServerProcess:
        arguments = (dict(os.environ), os.getpid(), target, kwargs, Recording.beside("core"))
        return ForkServerProcess(target=run_in_environment, name=name, args=arguments)


def run_in_environment(
    environment: dict[str, str] | None,
    owner: int,
    target: Callable[..., None],
    kwargs: dict[str, Any],
    recording: tuple[Recording, str] | None,
) -> None:
    """Call `target` in a process that ends with the process `owner`. `environment`: the variables
    that the owner has; None where this process has them already. `recording`: where this process
    records what it does, and its name there.
    """
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    if recording is not None:
        recording[0].open(recording[1])
    threading.Thread(target=end_with, args=(owner,), daemon=True).start()
    name_shared_memory()
    target(**kwargs)


def name_shared_memory() -> None:
    """Have this process, and those that vLLM starts from it, name shared memory after the run's
    folder. vLLM leaves some where it ends well, and all of it where it is killed.
    """
    import vllm.v1.executor.multiproc_executor as executor

    multiproc_executor: Any = executor

    shared_memory._make_filename = lambda: f"/{shared_name()}"  # pyright: ignore
    # On the CPU the name of this file begins that of the memory.
    file = f"file://{tempfile.gettempdir()}/{shared_name()}"
    multiproc_executor.get_file_store_init_method = lambda: file
    if multiproc_executor.get_mp_context().get_start_method() == "spawn":
        multiproc_executor.get_mp_context = SpawnedWorkerContext


class SpawnedWorkerContext(SpawnContext):
    """The multiprocessing context of the tensor-parallel workers of an engine core on a GPU."""

    def Process(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, *, target: Callable[..., None], name: str, kwargs: dict[str, Any], daemon: bool
    ) -> SpawnProcess:
        arguments = (None, os.getpid(), target, kwargs, None)
        return SpawnProcess(target=run_in_environment, name=name, args=arguments, daemon=daemon)


def end_with(owner: int) -> None:
    """Kill this process once the process `owner` has ended. One that is killed by force cannot shut
    its engine core down, and the core's own parent, the fork server, waits for the core.
    """
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(owner)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
