"""Processes by host, process id and start time, so that none is taken for another."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence

import psutil

Process = tuple[str, int, float]
"""(host name, process id, start in seconds since 1970)."""


def with_descendants(process: Process) -> list[Process]:
    """`process` and its descendants; empty if it has ended or is on another host."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(process[1]) if is_alive(process) else None
        below = [root, *root.children(recursive=True)] if root is not None else []
        return [(process[0], child.pid, child.create_time()) for child in below]
    return []


def is_alive(process: Process) -> bool:
    """On this host, and no zombie."""
    host, pid, born = process
    if host != socket.gethostname():
        return False
    try:
        running = psutil.Process(pid)
        return running.create_time() == born and running.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(processes: Sequence[Process], *, patience_s: float) -> None:
    """Wait `patience_s` for processes of this host, then kill them and wait again. Python's
    resource trackers, which remove their shared memory, get 2 seconds more.
    """
    trackers = [process for process in processes if is_tracker(process)]
    others = [process for process in processes if process not in trackers]
    for group, patience in ((others, patience_s), (trackers, 2.0)):
        _wait(group, patience)
        for process in filter(is_alive, group):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process[1], signal.SIGKILL)
    _wait(processes, 10.0)  # until they are gone, killed processes hold memory


def _wait(processes: Sequence[Process], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def is_tracker(process: Process) -> bool:
    """Whether it is a resource tracker of multiprocessing, which removes shared memory of ended
    processes.
    """
    with contextlib.suppress(psutil.Error):
        words = psutil.Process(process[1]).cmdline() if is_alive(process) else []
        return "multiprocessing.resource_tracker" in " ".join(words)
    return False
