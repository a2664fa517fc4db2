"""Runs a function of a test file on several gloo ranks, each a process of its own, with a deadline
that ends them all.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from megarl.parallel.launcher import free_port

ROOT = Path(__file__).resolve().parents[2]
PATHS = [ROOT, *(ROOT / name for name in ("tests", "tools"))]
"""Where test files find what they import; the same as `pythonpath` in pyproject.toml."""
IMPORTS = [
    "deepspeed", "transformers.models.qwen2.modeling_qwen2", "megarl.trainer.policy",
    "megarl.trainer.role", "deepspeed.runtime.zero.muon.muon_optimizer",
]  # fmt: skip
"""What most ranks import; the last one in `deepspeed.initialize`, with all of torch's compiler."""


def run_ranks(
    num_ranks: int,
    file: str,
    function: str,
    *arguments: Any,
    timeout_s: float = 240.0,
    is_last_fresh: bool = False,
) -> list[Any]:
    """What `function(*arguments)` of `file` returns on each of `num_ranks` ranks; raises with their
    output on failure.

    Ranks are forks of one process (`_fork_server`), so all sets of strings have the same order.
    `is_last_fresh`: the last rank is a process of its own, as all are under torchrun, and a
    collective whose order follows such a set fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), str(free_port())
        (folder / "arguments").write_bytes(pickle.dumps(arguments))
        ranks: list[BaseProcess] = []
        for rank in range(num_ranks):
            environment = {
                **os.environ,
                # With another ninja than that of sys.executable, DeepSpeed compiles again.
                "PATH": os.pathsep.join(
                    [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
                ),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
            }
            is_fresh = is_last_fresh and rank == num_ranks - 1
            context = multiprocessing.get_context("spawn") if is_fresh else _fork_server()
            process = context.Process(
                target=_rank,
                args=(sys.executable, environment, file, function, str(folder), rank),
            )
            process.start()
            ranks.append(process)
        _wait(ranks, time.monotonic() + timeout_s)
        failures = [
            f"rank {rank} ended with {process.exitcode}:\n"
            + (folder / f"output-{rank}").read_text(errors="replace")[-3000:]
            for rank, process in enumerate(ranks)
            if process.exitcode != 0
        ]
        if failures:  # all of them: where one rank fails, the others lose their connections
            raise AssertionError(f"{len(failures)} of {num_ranks} ranks\n" + "\n".join(failures))
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(num_ranks)]


def _wait(ranks: list[BaseProcess], deadline: float) -> None:
    """Until all ranks have ended, which those that are left are made to do if one has failed or
    the deadline has passed.
    """
    try:
        while any(rank.exitcode is None for rank in ranks) and time.monotonic() < deadline:
            if any(rank.exitcode not in (None, 0) for rank in ranks):
                break
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()  # does nothing to one that has ended
        for rank in ranks:
            rank.join()


def _fork_server() -> ForkServerContext:
    """Starts processes as forks of one that has imported what ranks need, which takes each of them
    4 seconds of CPU otherwise. Without the imports on a machine with GPUs: CUDA does not survive a
    fork.
    """
    import torch

    context = multiprocessing.get_context("forkserver")
    if not torch.cuda.is_available():
        context.set_forkserver_preload(IMPORTS)
    return context


def _rank(
    python: str, environment: dict[str, str], file: str, function: str, folder: str, rank: int
) -> None:
    """One rank, in its process: leaves what it returns in `folder`, with all that it wrote. What it
    starts is started by `python`.
    """
    sys.executable = python
    gc.freeze()  # else every collection, of which DeepSpeed makes many, goes through all imports
    output = os.open(f"{folder}/output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    np.random.seed()  # else all forks have the same numbers
    spec = importlib.util.spec_from_file_location("under_test", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["under_test"] = module  # where pickle looks for what the file defines
    spec.loader.exec_module(module)
    arguments = pickle.loads(Path(folder, "arguments").read_bytes())
    result = getattr(module, function)(*arguments)
    Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
    atexit._run_exitfuncs()  # which a process of multiprocessing leaves out
