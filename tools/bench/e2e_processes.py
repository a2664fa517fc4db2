"""Processes of tools/bench/e2e.py: runs a command to its end, with a deadline, and measures its CPU
time and that of others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from common import ROOT, Others

TERM_WITHIN_S, KILL_WITHIN_S, LOOK_EVERY_S = 20, 3, 1.0


class Tree:
    """A process and all below it: their CPU time, and their end."""

    def __init__(self, pid: int) -> None:
        import psutil

        self._psutil, self._root = psutil, psutil.Process(pid)
        self._seen: dict[int, Any] = {pid: self._root}
        self._cpu_s: dict[int, float] = {}

    def look(self) -> float:
        """CPU seconds used so far, by those seen alive."""
        with contextlib.suppress(self._psutil.Error):
            self._seen |= {child.pid: child for child in self._root.children(recursive=True)}
        for pid, process in self._seen.items():
            with contextlib.suppress(self._psutil.Error):
                times = process.cpu_times()
                self._cpu_s[pid] = max(self._cpu_s.get(pid, 0.0), times.user + times.system)
        return sum(self._cpu_s.values())

    def end(self) -> None:
        """SIGTERM to the root's process group, and after some seconds SIGKILL to all that is left
        of the tree.
        """
        self.look()
        group = self._root.pid
        if self._root.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM)
            self._psutil.wait_procs([self._root], timeout=TERM_WITHIN_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        _, left = self._psutil.wait_procs(list(self._seen.values()), timeout=KILL_WITHIN_S)
        for process in left:  # launchers put their workers into groups of their own
            with contextlib.suppress(self._psutil.Error):
                process.kill()


def run(
    command: list[str], environment: dict[str, str], log: Path, deadline_s: float
) -> tuple[float, float]:
    """Run to the end; returns (share of the CPU others took, CPU seconds). Raises `RuntimeError` on
    failure or overtime.
    """
    started_at, cpu_s = time.monotonic(), 0.0
    with log.open("wb") as output, Others(lambda: cpu_s) as others:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        tree = Tree(process.pid)
        try:
            while process.poll() is None:
                cpu_s = tree.look()
                if time.monotonic() - started_at > deadline_s:
                    raise RuntimeError(
                        f"{' '.join(command[:6])} ... took longer than {deadline_s:g} s; raise"
                        " --deadline"
                    )
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=LOOK_EVERY_S)
        finally:
            tree.end()
            process.wait()
    if process.returncode != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise RuntimeError(f"{' '.join(command[:6])} ... ended with {process.returncode}:\n{end}")
    return others.share, cpu_s


def child_environment(work: Path, threads: int) -> dict[str, str]:
    """For both systems: no GPU, no hub, temporary files where they are removed."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMP_", "RAY_", "PYTHON"))
    }
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(work / "hf"),
        "TMPDIR": str(work),
    }
    environment |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if (
        len(str(work)) <= 30
    ):  # Ray's sockets lie below it, and a socket's path has at most 107 characters
        environment["RAY_TMPDIR"] = str(work)
    return environment


def launcher(python: str, processes: int) -> list[str]:
    """The interpreter, once or as several ranks."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [python, *(ranks if processes > 1 else [])]
