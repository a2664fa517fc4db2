"""The processes that an untrusted program has started: they end with it.

A subreaper (prctl(2)) becomes the parent of every descendant whose own parent has ended, whatever
its session, group and environment. Each program has its own, which kills all that it leaves.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

from megarl.environments.isolation import call_libc

SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36
END_WITHIN_S = 1.5
"""Seconds within which killed processes must have ended."""


def oversee(parent: int, begin: Callable[[], object]) -> None:
    """Fork a process that calls `begin`, which replaces it by a program. When that ends, or this
    process gets SIGTERM, as at the end of `parent`, kill all that it started, and end as it has.
    Does not return.
    """
    both = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    call_libc("prctl", SET_SUBREAPER, 1, 0, 0, 0)
    call_libc("prctl", SET_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    pid = os.getpid()
    program = os.fork()
    if not program:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
        os.setsid()  # `kill 0` ends the program's processes only
        call_libc("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == pid:
            begin()
        os._exit(127)
    status = signal.SIGTERM
    while program and signal.sigwait(both) == signal.SIGCHLD:
        while program and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                program, status = 0, ended[1]
    end_children()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
        with contextlib.suppress(OSError):  # SIGKILL has no other
            signal.signal(-code, signal.SIG_DFL)
        os.kill(pid, -code)
    os._exit(code)


def end_overseen(process: Any) -> None:
    """End a `subprocess.Popen` that is in `oversee`, which first ends all that it has started."""
    from subprocess import TimeoutExpired  # which `oversee` need not import

    process.terminate()
    try:
        process.wait(END_WITHIN_S + 1.0)
    except TimeoutExpired:
        process.kill()
        process.wait()


def end_children() -> None:
    """Kill this process's descendants and reap them. It must be a subreaper, which adopts those
    whose parent has ended. Raises `TimeoutError` after 1.5 seconds.
    """
    until = time.monotonic() + END_WITHIN_S
    while time.monotonic() < until:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for process in descendants():
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.0005)
    raise TimeoutError("a program's processes did not end when they were killed")


def descendants() -> Iterator[int]:
    """Yield all descendants, each at once, so that the caller can kill it before it forks again."""
    above = [os.getpid()]
    while above:
        process = above.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{task}/children") as file:
                    for child in map(int, file.read().split()):
                        above.append(child)
                        yield child
