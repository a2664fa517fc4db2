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

TRACKER_S = 2.0
END_TIMEOUT_S = 10.0
"""Seconds to wait for killed processes to disappear: they hold memory until then."""


def with_descendants(process: Process) -> list[Process]:
    """`process` and all its descendants that run now, each as (host name, process id, start time in
    seconds since 1970); empty if `process` has ended or belongs to another host.
    """
    if not is_alive(process):
        return []
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(process[1])
        return [
            (process[0], one.pid, one.create_time())
            for one in (found, *found.children(recursive=True))
        ]
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
    there `TRACKER_S` (2) seconds after the others.
    """
    deadline = time.monotonic() + patience_s
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    trackers = [process for process in processes if is_tracker(process)]
    _kill([process for process in processes if process not in trackers])
    deadline = time.monotonic() + TRACKER_S
    while any(map(is_alive, trackers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    _kill(trackers)
    deadline = time.monotonic() + END_TIMEOUT_S
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _kill(processes: Sequence[Process]) -> None:
    for process in filter(is_alive, processes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process[1], signal.SIGKILL)


def is_tracker(process: Process) -> bool:
    """Whether `process` runs on this host and is a resource tracker of Python's multiprocessing,
    the helper that removes the shared memory of ended processes.
    """
    if not is_alive(process):
        return False
    with contextlib.suppress(psutil.Error):
        return "multiprocessing.resource_tracker" in " ".join(psutil.Process(process[1]).cmdline())
    return False
