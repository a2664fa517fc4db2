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

from megarl.activity.recording import Recording
from megarl.private_folder import shared_name
from megarl.quick_imports import quick_imports

CORE_IMPORTS = "megarl.rollout.core_imports"
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
        Only after the start.
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
    """A context manager for the statements that import vLLM. Afterwards vLLM starts its engine
    core, the process in which it computes, so that the core ends with this process: forked from a
    process that imports vLLM meanwhile if `on_cpu`, else spawned.
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
    """Set LD_PRELOAD of this process so that its child processes load torch's OpenMP library first,
    as vLLM has its core do: with the system's library beside it, threads share a core. It must be
    in the environment of a process when that starts. A preload of some OpenMP is left as it is.
    """
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    found = glob.glob(str(Path(spec.origin).parent / "lib" / "libgomp*.so*"))
    before = os.environ.get("LD_PRELOAD", "")
    if found and "omp" not in before:
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [before, found[0]]))


class SpawnedCoreContext(SpawnContext):
    """The multiprocessing context by which vLLM spawns its engine core on a GPU, and this one its
    tensor-parallel workers, which are daemons. Processes that it makes are killed when the process
    that made them ends.
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
    """The multiprocessing context by which vLLM forks its engine core on the CPU from a fork
    server. Processes that it makes get the present environment variables of the process that made
    them, also those set since the fork server started, and are killed when that process ends.
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
    None to leave them. `recording`: (the run's folder of activity files, to which this process
    writes what it does; its name there), or None.
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
    """Have this process, and the workers that vLLM starts from it, give shared memory names that
    belong to the run's folder, so that the run's end removes it. vLLM leaves some where it ends
    well, and all of it where it is killed.
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
    in a thread. An engine's process that is killed cannot shut its engine core down, and the core's
    own parent, the fork server, waits for the core.
    """
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(owner)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
