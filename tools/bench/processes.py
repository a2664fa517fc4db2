"""Child processes of tools: run a command to its end, with a deadline, and end whatever it has
started. All processes of a run have a mark in their environment, by which they are found again.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from common import ROOT, Others

MARK = "MEGARL_TOOL_RUN"
END_WITHIN_S = 20.0
"""Seconds that processes have between SIGTERM and SIGKILL."""


def is_running(process: psutil.Process) -> bool:
    """Whether a process lives; one that has ended and that nobody has waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def marked(mark: str) -> Iterator[psutil.Process]:
    """Living processes with `mark`, whoever is above them."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and is_running(process):
                yield process
        except psutil.Error:
            continue


def end_all(mark: str, pid: int) -> int:
    """End every process with `mark` and all below `pid`, by SIGTERM and then by SIGKILL; returns
    how many there were. Ray's processes write their titles over their environment.
    """
    left = {one.pid: one for one in marked(mark)}
    with contextlib.suppress(psutil.Error):
        left |= {one.pid: one for one in psutil.Process(pid).children(recursive=True)}
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for process in left.values():
            with contextlib.suppress(psutil.Error):
                send(process)
        psutil.wait_procs(left.values(), timeout=END_WITHIN_S)
    return len(left)


def run(command: list[str], log: Path, deadline_s: float, environment: Mapping[str, str]) -> float:
    """Run to the end, with all output in the file `log`; returns the share of the CPU that others
    took. Raises `RuntimeError` with the last lines of the log on failure or overtime.
    """
    mark, shown = uuid.uuid4().hex, f"{' '.join(command[:6])} ..."
    with log.open("wb") as output, Others() as others:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            late = f"{shown} took longer than {deadline_s:g} s; raise --deadline"
            raise RuntimeError(late) from None
        finally:
            end_all(mark, process.pid)
            process.wait()
    if process.returncode != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"{shown} ended with {process.returncode}:\n{end}")
    return others.share


def child_environment(work: Path, threads: int) -> dict[str, str]:
    """Environment variables of a run on the CPU: no GPU, no hub, temporary files in `work`."""
    others = ("OMP_", "RAY_", "PYTHON")
    environment = {name: v for name, v in os.environ.items() if not name.startswith(others)}
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hf"),
        "TMPDIR": str(work),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    # Ray's sockets lie below it, and a socket's path has at most 107 characters.
    return environment | ({"RAY_TMPDIR": str(work)} if len(str(work)) <= 30 else {})


def launcher(python: str, processes: int) -> list[str]:
    """The interpreter, once or as several ranks."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [python, *(ranks if processes > 1 else [])]


def megarl(
    recipe: Path | str,
    folder: Path,
    settings: Mapping[str, object],
    deadline_s: float = 1800.0,
    *,
    environment: Mapping[str, str] | None = None,
    processes: int = 1,
) -> tuple[list[dict[str, Any]], float]:
    """(metrics of each step, share of the CPU that others took) of `megarl run RECIPE` in
    `folder`, with its output beside it. `recipe`: a file, or a recipe's text, which is written
    beside the folder. `settings`: {name: value}.
    """
    if isinstance(recipe, str):
        folder.with_suffix(".yaml").write_text(recipe)
        recipe = folder.with_suffix(".yaml")
    pairs = {"folder": folder, **settings}.items()
    words = [word for name, value in pairs for word in (f"--{name}", str(value))]
    whole = [*launcher(sys.executable, processes), "-m", "megarl", "run", str(recipe), *words]
    environment = environment or {**os.environ, "HF_HUB_OFFLINE": "1"}
    others = run(whole, folder.with_suffix(".log"), deadline_s, environment)
    return lines_of(folder / "metrics.jsonl"), others


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; empty if the file does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
