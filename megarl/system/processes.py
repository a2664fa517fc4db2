"""Processes that surely are those that were meant, since a process is named by host, process id and
start time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence

import psutil

Process = tuple[str, int, float]
"""(host name, process id, start time in seconds since 1970) of a process. The process id alone is
not unique: another host, or a later process, may have the same."""

END_TIMEOUT_S = 10.0
"""Seconds to wait for killed processes to disappear: they hold memory until then."""


def with_descendants(process: Process) -> list[Process]:
    """`process` and all its descendants that run now, each as (host name, process id, start time in
    seconds since 1970); empty if `process` has ended or belongs to another host.
    """
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(process[1]) if is_alive(process) else None
        below = [found, *found.children(recursive=True)] if found is not None else []
        return [(process[0], one.pid, one.create_time()) for one in below]
    return []


def is_alive(process: Process) -> bool:
    """Whether `process` still runs on this host; a zombie does not. False for a process of another
    host, about which nothing is known here.
    """
    host, pid, born = process
    if host != socket.gethostname():
        return False
    try:
        found = psutil.Process(pid)
        return found.create_time() == born and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(processes: Sequence[Process], *, patience_s: float) -> None:
    """Wait `patience_s` seconds for these processes of this host to end by themselves, kill those
    that are left with SIGKILL, and wait at most `END_TIMEOUT_S` (10) seconds until they are gone.
    Processes of other hosts, and those that have ended, are passed over. Python's resource
    trackers, which remove the shared memory of killed processes, are killed only if they are still
    there 2 seconds after the others.
    """
    trackers = [process for process in processes if is_tracker(process)]
    others = [process for process in processes if process not in trackers]
    for part, patience in ((others, patience_s), (trackers, 2.0)):
        _wait(part, patience)
        for process in filter(is_alive, part):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process[1], signal.SIGKILL)
    _wait(processes, END_TIMEOUT_S)


def _wait(processes: Sequence[Process], within_s: float) -> None:
    """Wait until `processes` have ended, at most `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def is_tracker(process: Process) -> bool:
    """Whether `process` runs on this host and is a resource tracker of Python's multiprocessing,
    the helper that removes the shared memory of ended processes.
    """
    with contextlib.suppress(psutil.Error):
        words = psutil.Process(process[1]).cmdline() if is_alive(process) else []
        return "multiprocessing.resource_tracker" in " ".join(words)
    return False
