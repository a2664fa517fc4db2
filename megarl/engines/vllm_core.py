"""Starts vLLM's engine core, the second process of an engine, in which vLLM computes: on the CPU
from a fork server, so that both processes import vLLM at the same time.

In a Ray actor vLLM uses the start method `spawn`: the core imports torch and vLLM only once the
actor has imported them, 8 s later. On a GPU the core is spawned: there a process must not fork
after CUDA is initialised. In both cases the core ends with its actor, which vLLM's does not if the
actor is killed: it would keep its GPU memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import multiprocessing
import os
import select
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
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

from megarl.system.private_folder import shared_name
from megarl.system.quick_imports import quick_imports
from megarl.system.spans import Recording

CORE_IMPORTS = "megarl.engines.core_imports"
"""Module that imports vLLM's engine core."""


class VllmProcess:
    """Base class of an object that owns an `AsyncLLM` of vLLM, which computes in processes of its
    own. A subclass starts the `AsyncLLM` and sets `_llm` to it.
    """

    _llm: Any = None
    """The `AsyncLLM`; None before the start."""

    @property
    def is_lost(self) -> bool:
        """Whether one of vLLM's processes has died, so that no request will be answered any more.
        To be read only after the start.
        """
        return self._llm.errored

    async def stop(self) -> None:
        """Shut down vLLM's processes, without blocking the event loop; before the start it does
        nothing.
        """
        if self._llm is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._llm.shutdown)


@contextlib.contextmanager
def vllm_imports(*, on_cpu: bool) -> Iterator[None]:
    """A context manager for the statements that import vLLM. It changes how vLLM will start its
    engine core, the process in which vLLM computes: the core will be killed when this process ends.
    If `on_cpu`, the core will be forked from a fork server, which imports vLLM at the same time as
    this process; otherwise it will be spawned.
    """
    if on_cpu:
        preload_openmp()
        multiprocessing.set_forkserver_preload([CORE_IMPORTS])
        forkserver.ensure_running()
    with quick_imports():
        yield
    from vllm.v1.engine import utils

    context = CoreContext if on_cpu else SpawnedCoreContext
    utils.get_mp_context = context  # pyright: ignore[reportPrivateImportUsage]


def preload_openmp() -> None:
    """Set LD_PRELOAD in this process's environment, so that child processes started afterwards load
    torch's OpenMP library. vLLM does so for its engine core: if the system's OpenMP library is
    loaded too, several threads run on one core. An LD_PRELOAD that names an OpenMP library already
    is not changed.
    """
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    found = glob.glob(str(Path(spec.origin).parent / "lib" / "libgomp*.so*"))
    before = os.environ.get("LD_PRELOAD", "")
    if found and "omp" not in before:
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [before, found[0]]))


class SpawnedCoreContext(SpawnContext):
    """The multiprocessing context with which vLLM spawns its engine core on a GPU, and with which
    the engine core spawns its tensor-parallel workers, as daemons. A process made with this context
    is killed when the process that made it ends.
    """

    def Process(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
        *,
        target: Callable[..., None],
        name: str,
        kwargs: dict[str, Any],
        daemon: bool = False,
    ) -> SpawnProcess:
        recording = None if daemon else Recording.beside("core")
        arguments = (None, os.getpid(), target, kwargs, recording)
        return SpawnProcess(target=run_in_environment, name=name, args=arguments, daemon=daemon)


class CoreContext(ForkServerContext):
    """The multiprocessing context with which vLLM forks its engine core on the CPU from a fork
    server. A process made with this context gets its maker's present environment variables, not
    those that the fork server was started with, and is killed when its maker ends.
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
    """First function of a new process: call `target(**kwargs)`, and kill the process when the
    process with the id `owner` ends. `environment`: all variables that this process is to have;
    None to leave them. `recording`: (where the run's processes record timelines of what they do,
    this process's name there); None to record nothing.
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
    """Make the shared memory of this process, and of the workers that vLLM starts from it, have
    names that begin with the name of the run's temporary folder. At the end of the run, shared
    memory with such names is removed, since vLLM does not always remove its own, and none if it is
    killed.
    """
    import vllm.v1.executor.multiproc_executor as executor

    multiproc_executor: Any = executor

    shared_memory._make_filename = lambda: f"/{shared_name()}"  # pyright: ignore
    # On the CPU the name of this file begins that of the memory.
    file = f"file://{tempfile.gettempdir()}/{shared_name()}"
    multiproc_executor.get_file_store_init_method = lambda: file
    if multiproc_executor.get_mp_context().get_start_method() == "spawn":
        multiproc_executor.get_mp_context = SpawnedCoreContext


def end_with(owner: int) -> None:
    """Wait until the process with the id `owner` has ended, then kill this process by SIGKILL; run
    in a thread. Without this, an engine core would outlive its engine's process if that is killed:
    the core's parent is the fork server, which lives as long as the core.
    """
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(owner)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
