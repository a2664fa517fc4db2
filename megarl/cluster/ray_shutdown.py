"""Ends the Ray that this process has started or joined, within a deadline: `ray.shutdown` waits for
ever for a raylet that hangs.
"""

from __future__ import annotations

import contextlib
import socket
import threading

import psutil
import ray
from ray._private import worker

from megarl.cluster.processes import Process, end, with_descendants
from megarl.console import say

SHUTDOWN_S = 15.0
"""Seconds that `ray.shutdown` may take."""
LINGER_S = 1.0
"""Seconds that Ray's processes have afterwards to end by themselves."""


def started_processes() -> list[Process]:
    """The processes of Ray that this process has started, and all below them, such as actors; none
    where it has joined another's Ray.
    """
    node = worker._global_node
    found: list[Process] = []
    for infos in list(node.all_processes.values()) if node is not None else ():
        for info in infos:
            with contextlib.suppress(psutil.Error):
                born = psutil.Process(info.process.pid).create_time()
                found += with_descendants((socket.gethostname(), info.process.pid, born))
    return found


def shut_down(timeout_s: float = SHUTDOWN_S) -> None:
    """End Ray, and kill what is left of the processes that were started here, stopped ones too.
    Returns within a few seconds more than `timeout_s`.
    """
    processes = started_processes()

    def work() -> None:
        with contextlib.suppress(Exception):
            ray.shutdown()

    thread = threading.Thread(target=work, name="end of Ray", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        say(f"megarl: Ray has not shut down within {timeout_s:g} s; its processes are killed")
        end(processes, patience_s=0.0)
    end(processes, patience_s=LINGER_S)
