"""Starts vLLM's engine core, the process in which vLLM computes.

vLLM would spawn it once the actor has imported torch and vLLM, 8 s later. On the CPU it is forked
from a server that imports vLLM meanwhile; on a GPU spawned, as no process may fork after CUDA is
initialised. It ends with its actor, even a killed one, whose GPU memory it would keep.
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
from collections.abc import Callable, Iterator
from functools import partial
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

from megarl.system.files import in_thread
from megarl.system.private_folder import shared_name
from megarl.system.quick_imports import quick_imports
from megarl.system.spans import Recording

CORE_IMPORTS = "megarl.engines.core_imports"


class VllmProcess:
    """Base class of owners of an `AsyncLLM`, which a subclass starts and sets as `_llm`."""

    _llm: Any = None

    @property
    def is_lost(self) -> bool:
        """Whether one of vLLM's processes has died; only after the start."""
        return self._llm.errored

    async def stop(self) -> None:
        if self._llm is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._llm.shutdown)


@contextlib.contextmanager
def vllm_imports(*, on_cpu: bool) -> Iterator[None]:
    """For the statements that import vLLM: its core will be killed when this process ends, and is
    forked if `on_cpu`.
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
    """Have child processes load torch's OpenMP, as vLLM does: with the system's too, several
    threads run on one core. Keeps an LD_PRELOAD that names one.
    """
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    libraries = glob.glob(str(Path(spec.origin).parent / "lib" / "libgomp*.so*"))
    before = os.environ.get("LD_PRELOAD", "")
    if libraries and "omp" not in before:
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [before, libraries[0]]))


class SpawnedCoreContext(SpawnContext):
    """Spawns vLLM's core on a GPU, and the core's tensor-parallel workers, as daemons; they end
    with their maker.
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
    """Forks vLLM's core on the CPU, with its maker's environment variables; it ends with its
    maker.
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
    """First function of a new process, killed when the process `owner` ends. `environment`: all its
    variables; None to leave them.
    """
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    if recording is not None:
        recording[0].open(recording[1])
    in_thread("owner", partial(end_with, owner))
    name_shared_memory()
    target(**kwargs)


def name_shared_memory() -> None:
    """Give the shared memory of this process and its workers names of the run's temporary folder,
    by which it is removed at the end: vLLM does not always do so.
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
    """Kill this process once `owner` has ended; in a thread. A core's parent is the fork server,
    which lives on.
    """
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(owner)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
