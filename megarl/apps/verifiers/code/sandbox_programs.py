"""Starts the programs of a job from the first process of a sandbox, writes their input, reads their
output, and ends them.

Imports only the standard library: the processes of a sandbox start in milliseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.apps.verifiers.code import sandbox_kernel as kernel

LOOK_EVERY_S = 0.02
"""Seconds between two looks at the memory of all processes of a program."""
LOOK_AGAIN_S = 0.0005
FORGET_EVERY_S = 0.1
END_WITHIN_S = 1.5
"""Most seconds until the processes of a program have ended once they are killed; less than
`sandbox_child.GRACE_S`."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PIPE_BYTES = 65536
MOST_FILES = 128
"""Most files that a process of a program has open."""
LEAST_NUMBER = 200
"""Lowest number of the descriptors that are copied on their way to their numbers."""
OWN_PROCESSES = 4
"""Processes of the sandbox that count as the program's own where both have the same user."""


@dataclass
class Running:
    """A program that runs, with this process's ends of its pipes."""

    handle: int
    """Descriptor that is readable once the process has ended."""
    into: int
    """Descriptor for what the program reads."""
    out: int
    """Descriptor for what the program writes: standard output, or replies."""
    waiting: memoryview = field(default_factory=lambda: memoryview(b""))
    """What is still to be written to it."""
    closes: bool = False
    """Its input ends with what waits."""
    received: bytearray = field(default_factory=bytearray)
    """What it has written."""

    def close(self) -> None:
        """Close all descriptors. May be called twice."""
        for name in ("handle", "into", "out"):
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)


class Programs:
    """Starts and ends the programs of one job."""

    def __init__(self, setup: dict[str, Any], folder: str) -> None:
        """`setup`: {"sandbox", "is_root", "limits"}. `folder`: where programs may write."""
        self._limits: dict[str, int] = setup["limits"]
        self.folder = folder
        self.sandbox: str = setup["sandbox"]
        self._is_root = setup.get("is_root", os.geteuid() == 0)
        self.most_output: int = self._limits["output_kib"] * 1024
        self._mounted = False

    def fresh(self, files: dict[str, str]) -> None:
        """End all programs and empty the folder, then write {name: text} to it, readable only."""
        self.end_all()
        if self.sandbox == "namespaces":
            if self._mounted:
                kernel.unmount(self.folder)
            options = f"size={self._limits['file_mib']}m,nr_inodes=4096,mode=0777"
            kernel.mount("tmpfs", self.folder, "tmpfs", kernel.NOSUID | kernel.NODEV, options)
            self._mounted = True
        else:
            for name in os.listdir(self.folder):
                path = os.path.join(self.folder, name)
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    os.unlink(path)
            if self._is_root:
                os.chown(self.folder, kernel.NOBODY, kernel.NOBODY)
        for name, text in files.items():
            path = os.path.join(self.folder, name)
            with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(text)
            os.chmod(path, 0o444)

    def start(self, command: list[str] | Callable[[], None], limit_s: float, *wiring: int) -> int:
        """Start a program in the folder, or a function in a copy of this process. Returns a
        descriptor that is readable once it has ended.

        `limit_s`: CPU time. `wiring`: descriptors that become its 0, 1, 2 and so on.
        """
        process = os.fork()
        if process:
            return os.pidfd_open(process)
        try:
            self._confine(wiring, limit_s)
            if callable(command):
                command()
            else:
                paths = "/usr/local/bin:/usr/bin:/bin"
                home = {"PATH": paths, "LANG": "C.UTF-8", "HOME": self.folder}
                os.execve(command[0], command, home)  # noqa: S606 - there is no shell
        finally:
            os._exit(127)

    def _confine(self, wiring: Sequence[int], limit_s: float) -> None:
        """Give this process its descriptors, limits, user and system call filter."""
        os.setsid()
        os.chdir(self.folder)
        # First to numbers beyond those that are overwritten
        high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, LEAST_NUMBER) for one in wiring]
        for number, descriptor in enumerate(high):
            os.dup2(descriptor, number, inheritable=True)
        os.closerange(len(high), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._set_limits(limit_s)
        in_namespaces = self.sandbox == "namespaces"
        if in_namespaces:
            kernel.drop_capabilities()
        if self._is_root and self.sandbox != "none":
            user = kernel.INSIDE if in_namespaces else kernel.NOBODY
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        kernel.tie_to_parent()
        if in_namespaces:
            kernel.clear_capabilities()
            kernel.deny_system_calls()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, not by its children
            signal.signal(number, signal.SIG_DFL)

    def _set_limits(self, limit_s: float) -> None:
        if self.sandbox == "none":
            return
        mib, most = 2**20, self._limits
        kernel.limit(resource.RLIMIT_CORE, 0)
        kernel.limit(resource.RLIMIT_NOFILE, MOST_FILES)
        kernel.limit(resource.RLIMIT_FSIZE, most["file_mib"] * mib)
        kernel.limit(resource.RLIMIT_DATA, most["memory_mib"] * mib)
        # Runtimes reserve more address space than they use.
        kernel.limit(resource.RLIMIT_AS, 4 * most["memory_mib"] * mib)
        kernel.limit(resource.RLIMIT_MSGQUEUE, 0)
        seconds = int(limit_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        count = most["processes"]
        if self.sandbox == "namespaces":
            count += 1 if self._is_root else OWN_PROCESSES
        else:  # the limit counts all processes of the user
            count += _tasks_of(kernel.NOBODY if self._is_root else os.getuid())
        kernel.limit(resource.RLIMIT_NPROC, count)

    def memory_bytes(self) -> int:
        """Memory of all processes that programs have started, in bytes."""
        return sum(_resident(process) for process in self._all())

    def too_large(self) -> bool:
        """Whether all programs together use more memory than is allowed."""
        if self.sandbox == "none":
            return False
        return self.memory_bytes() > self._limits["memory_mib"] * 2**20

    def _all(self) -> list[int]:
        """Numbers of all processes that programs have started."""
        if self.sandbox == "namespaces":
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return list(_reaching({os.getpid()}, _parents(processes)))

    def end_all(self) -> None:
        """Kill all processes that programs have started, and wait for their end. Raises
        `TimeoutError` after `END_WITHIN_S` seconds.
        """
        end_children(all_of_namespace=self.sandbox == "namespaces")

    def exchange(
        self, running: Running, until: float, enough: Callable[[bytearray], bool] = lambda _: False
    ) -> str:
        """Write what waits and read what comes until `enough(received)` or the program's end.

        Returns "ok" then; "time" at `until` (of `time.monotonic`), "output" or "memory" if the
        program went beyond those limits; "ended" if it ended before.
        """
        look_at, is_open = time.monotonic() + LOOK_EVERY_S, True
        while not enough(running.received):
            now = time.monotonic()
            if now >= until:
                return "time"
            if now >= look_at:
                if self.too_large():
                    return "memory"
                look_at = time.monotonic() + LOOK_EVERY_S
            if running.closes and not running.waiting and running.into >= 0:
                os.close(running.into)
                running.into = -1
            writes = [running.into] if running.waiting else []
            reads = [running.handle, running.out] if is_open else [running.handle]
            within = max(0.0, min(until, look_at) - now)
            readable, writable, _ = select.select(reads, writes, [], within)
            if writable:
                _write_some(running)
            if running.out in readable:
                part = os.read(running.out, PIPE_BYTES)
                running.received += part
                is_open = bool(part)
                if len(running.received) > self.most_output:
                    return "output"
            elif running.handle in readable:
                return "ended"
        return "ok"


def end_children(*, all_of_namespace: bool = False) -> None:
    """Kill this process's children and theirs until there is none. Those whose parent has ended
    must become this process's own, by `kernel.SET_SUBREAPER` or as its namespace's first process.
    Raises `TimeoutError` after `END_WITHIN_S` seconds.

    `all_of_namespace`: kill all processes of this namespace but its first, in one system call.
    """
    begun, others, forget_at = time.monotonic(), set[int](), 0.0
    while _has_children():
        now = time.monotonic()
        if now >= begun + END_WITHIN_S:
            raise TimeoutError("a program's processes did not end when they were killed")
        if all_of_namespace:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            time.sleep(LOOK_AGAIN_S)
            continue
        if now >= forget_at:  # a number may have become that of a program's process
            others, forget_at = {0}, now + FORGET_EVERY_S
        if not _kill_descendants(others):
            time.sleep(LOOK_AGAIN_S)


def _has_children() -> bool:
    """Whether this process has children, after those that have ended are forgotten."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _kill_descendants(others: set[int]) -> bool:
    """Kill the descendants of this process that one look at `/proc` finds. Returns whether there
    was one.

    `others`: numbers of processes that are none, and 0; new ones are added. They are not looked at
    again: only a short look catches processes that fork and end all the time.
    """
    new = {int(name) for name in os.listdir("/proc") if name.isdigit()} - others
    own = os.getpid()
    parents = _parents(new - {own})
    found = _reaching({own}, parents)
    for process in found:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
    # Not those whose parent has ended since: it may have been one of a program's.
    others |= _reaching(others, parents)
    return bool(found)


def _reaching(roots: set[int], parents: dict[int, int]) -> set[int]:
    """The descendants of `roots`. `parents`: {process: its parent}."""
    found, new = set[int](), roots
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def _write_some(running: Running) -> None:
    try:
        written = os.write(running.into, running.waiting[:PIPE_BYTES])
        running.waiting = running.waiting[written:]
    except BlockingIOError:
        return
    except OSError:  # it reads no more
        running.waiting = memoryview(b"")


def _parents(processes: Iterable[int]) -> dict[int, int]:
    """{process: its parent} of those that are there."""
    found = {}
    for process in processes:
        with contextlib.suppress(OSError), open(f"/proc/{process}/stat", "rb") as file:
            found[process] = int(file.read().rpartition(b")")[2].split()[1])
    return found


def _tasks_of(user: int) -> int:
    """Number of processes and threads of a user."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _resident(process: int) -> int:
    try:
        with open(f"/proc/{process}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE_BYTES
    except OSError:
        return 0
