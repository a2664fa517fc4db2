"""The trusted processes of a sandbox, between the verifier and the programs that it runs.

    server (in its own user, mount and network namespace; one for each verifier process)
      └─ warden (one for each job; keeps the job's deadline)
           └─ first process of the job's process namespace: starts programs, reads what they write
                └─ programs, as another user, without privileges

The death of each kills those below it: by the parent death signal, and because the end of a process
namespace's first process ends all its processes. Without namespaces (`rlimits`, `none`) the third
process is an ordinary one that adopts and kills what programs leave behind; should it be killed,
the warden does so.

Messages on standard input and output are JSON, a line each. First the setup, answered by
{"refused": why, or ""}; then jobs, each answered by {"results": list} or {"failed": text}.

    stdin     input of a program -> its standard output
    calls     arguments of a function -> its value, as JSON
    asserts   Python statements that call the program's functions -> whether they hold

Expected outputs and values never come here: the verifier compares outside. Asserts run in a process
of their own (`megarl.apps.verifiers.code.assert_checker`).
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from megarl.apps.verifiers.code import sandbox_kernel as kernel
from megarl.apps.verifiers.code.assert_checker import check_asserts
from megarl.environments.descendants import descendants, end_children
from megarl.system.files import remove_folder

GRACE_S = 2.0
"""Seconds after a job's own time limit until the job is killed: its report is still to be written.
"""
FOLDER = "megarl-program-"
"""Prefix of the temporary folders of programs that run without namespaces."""
ENOUGH_BYTES = 2**24
"""Bytes of output of all tests of a job after which no further test is begun; the verifier then
gives the rest as another job."""
FAILED = json.dumps({"failed": "the sandbox's own process ended before its report"}).encode()
PROGRAM = "program"
"""Name of the program's file in the folder of the program."""
LOOK_EVERY_S = 0.02
"""Seconds between two looks at the memory of all processes of a program."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PIPE_BYTES = 65536
MOST_FILES = 128
"""Most files that each process of a program may have open."""
LEAST_NUMBER = 200
"""Lowest number of the copies of descriptors that are made before they get their final numbers."""
OWN_PROCESSES = 4
"""Number of processes of the sandbox that count as the program's own where both have the same user.
"""


def main() -> None:
    """Main function of the process that `Sandbox` starts to run programs of a model. It reads lines
    of JSON from standard input: first the setup (protection, commands, limits), then jobs, each a
    program with its tests, one at a time. It answers each with a line of JSON on standard output:
    {"refused": why no program can run, or ""}, then {"results": list, one for each test} or
    {"failed": text}. It ends with standard input or with the process that started it.
    """
    kernel.tie_to_parent()
    setup = json.loads(sys.stdin.buffer.readline())
    try:
        refused = _protect(setup)
    except (OSError, KeyError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        refused = (
            f"this machine refuses namespaces ({cause}); allow user namespaces (Linux 5.12 or"
            " newer), or set environment.code.sandbox to rlimits or none, with which programs can"
            " read files and use the network"
        )
    kernel.prctl(kernel.SET_DUMPABLE, 0)  # for programs this process is closed
    _answer(json.dumps({"refused": refused}).encode())
    for line in sys.stdin.buffer:
        read, write = os.pipe()
        warden = os.fork()
        if not warden:
            _warden(setup, json.loads(line), write)
        os.close(write)
        with open(read, "rb") as file:
            report = file.read()  # to its end: neither the warden nor what it started is left
        os.waitpid(warden, 0)
        _answer(report if report.endswith(b"\n") else FAILED)


def _answer(line: bytes) -> None:
    """Write an answer, JSON text with or without a newline, as one line to standard output."""
    sys.stdout.buffer.write(line.rstrip() + b"\n")
    sys.stdout.buffer.flush()


def _protect(setup: dict[str, Any]) -> str:
    """Enter the namespaces that all jobs share. Returns why programs cannot run, or "". Raises
    `OSError` or `KeyError` where the kernel refuses namespaces.
    """
    setup["is_root"] = is_root = os.geteuid() == 0
    if setup["sandbox"] == "namespaces":
        kernel.new_user(is_root)
        kernel.build_root(setup["visible"])
    elif not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return "this kernel tells no process's children (CONFIG_PROC_CHILDREN); set namespaces"
    else:
        _remove_old_folders()
    if setup["sandbox"] == "rlimits" and is_root:  # as nobody, because limits do not bind root
        program = setup["command"][0]
        nobody: Any = {"user": kernel.NOBODY, "group": kernel.NOBODY, "extra_groups": []}
        if subprocess.run(["test", "-x", program], check=False, **nobody).returncode:
            return (
                f"programs run as the user nobody, who may not run {program}; set"
                " environment.code.interpreter to one that all users may run"
            )
    return ""


def _remove_old_folders() -> None:
    """Remove folders of programs whose warden was killed."""
    base = tempfile.gettempdir()
    for name in os.listdir(base):
        process = name.removeprefix(FOLDER).partition("-")[0]
        if name.startswith(FOLDER) and process.isdigit() and not os.path.exists(f"/proc/{process}"):
            remove_folder(os.path.join(base, name))


def _warden(setup: dict[str, Any], job: dict[str, Any], report: int) -> None:
    """Run a job in a process of its own, and kill that at the deadline. Does not return."""
    try:
        kernel.tie_to_parent()
        in_namespaces, top = setup["sandbox"] == "namespaces", ""
        if in_namespaces:
            kernel.call_libc("unshare", kernel.NEWPID | kernel.NEWNS | kernel.NEWIPC)
        else:
            kernel.prctl(kernel.SET_SUBREAPER, 1)
            # This process's own: else a program, or another user, could put a link there.
            top = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-")
            os.chmod(top, 0o711)  # noqa: S103 - programs of root run as nobody
        first = os.fork()
        if not first:
            _first_process(Programs(setup, top + kernel.FOLDER), job, report)
        select.select([os.pidfd_open(first)], [], [], job["total_s"] + GRACE_S)
        os.kill(first, signal.SIGKILL)  # not reaped before, so its number is its own
        os.waitpid(first, 0)
        if not in_namespaces:
            end_children()  # which are the program's
            remove_folder(top)
    finally:
        os._exit(0)


def _first_process(programs: Programs, job: dict[str, Any], report: int) -> None:
    """Run a job and write its report to the descriptor `report`. Does not return."""
    try:
        kernel.tie_to_parent()
        os.setsid()  # a signal to the process group stays in the sandbox
        try:
            if programs.in_namespaces:
                _own_proc()
            else:
                kernel.prctl(kernel.SET_SUBREAPER, 1)
            reply: dict[str, Any] = {"results": run_job(programs, job)}
        except Exception as error:
            reply = {"failed": f"{type(error).__name__}: {error}"}
        with open(report, "wb") as file:
            file.write(json.dumps(reply).encode() + b"\n")
    finally:
        os._exit(0)


def _own_proc() -> None:
    """Mount a `/proc` that shows the processes of this namespace only; an empty folder where the
    kernel refuses it, as in containers whose own `/proc` is covered in parts.
    """
    flags = kernel.RDONLY | kernel.NOSUID | kernel.NODEV | kernel.NOEXEC
    try:
        kernel.mount("proc", "/proc", "proc", flags, "hidepid=2")
    except OSError:
        kernel.mount("tmpfs", "/proc", "tmpfs", flags, "size=4k")


def run_job(programs: Programs, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the tests of a job in order, up to the first whose status is not "ok", or all of them
    with `go_on`. Blocks for at most `total_s` seconds.

    job: {"kind": "stdin", "calls" or "asserts", "program": its text, "tests": list, "total_s":
    seconds, "go_on": bool}, and for asserts {"setup": text, "names": functions of the program,
    "modules": of Python}.
    Returns a dict for each test that was run, in order. Its "status" is "ok" (with "output", the
    program's output or a function's reply as text; none for asserts), "failed" (exit code,
    exception or assertion), or the limit that was exceeded: "time", "output" or "memory". The last
    tests are not run if time is over or there is much output.
    """
    form, tests, size = job["kind"], job["tests"], 0
    until = time.monotonic() + job["total_s"]
    running: Running | None = None
    results: list[dict[str, Any]] = []
    while len(results) < len(tests) and time.monotonic() < until and size <= ENOUGH_BYTES:
        running = running or _begin(programs, job, tests[len(results) :])
        limit = min(until, time.monotonic() + programs.setup["time_limit_s"])
        status, output = programs.exchange(running, limit, one_line=form != "stdin")
        size += len(output)
        result = {"status": status}
        if form == "stdin" or status != "ok":
            running = None
        if status == "ok" and form == "asserts":
            verdict = json.loads(output)
            result["status"] = "ok" if verdict["passed"] else "failed"
            running = None if verdict["gone"] else running
        elif status == "ok":
            result["output"] = output.decode("utf-8", "replace")
        results.append(result)
        if result["status"] != "ok" and not job["go_on"]:
            break
    return results


def _begin(programs: Programs, job: dict[str, Any], tests: list[Any]) -> Running:
    """Start the program of a job in an empty folder, for the first of `tests` or, as a server of
    its functions, for all of them; for asserts, start what runs `tests` beside it too.
    """
    setup, null, total_s = programs.setup, programs.null, job["total_s"]
    path = programs.fresh(job["program"])
    out, writes = os.pipe()
    if job["kind"] == "stdin":
        command, reads = [*setup["command"], path], _as_file(tests[0])
        handle = programs.start(command, setup["time_limit_s"], reads, writes, null)
        return Running(handle, out)
    command = [*setup["server"], path]
    if job["kind"] == "calls":
        reads = _as_file("".join(f"{json.dumps(test)}\n" for test in tests))
        return Running(programs.start(command, total_s, null, null, null, reads, writes), out)

    def check() -> None:
        check_asserts(tests, job["setup"], job["names"], job["modules"], job["program"])

    reads, asks = os.pipe()
    results, tells = os.pipe()
    os.close(programs.start(command, total_s, null, null, null, reads, writes))
    return Running(programs.start(check, total_s, null, null, null, out, asks, tells), results)


def _as_file(text: str) -> int:
    """Descriptor of a file in memory that holds `text` and that nobody can change."""
    number = os.memfd_create("input", os.MFD_ALLOW_SEALING)
    with open(number, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "replace"))
    os.lseek(number, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(number, fcntl.F_ADD_SEALS, seals)
    return number


class Running:
    """A running program (`handle`) and this process's end of the pipe on which the program writes;
    both descriptors are closed when the object is deleted.
    """

    def __init__(self, handle: int, out: int) -> None:
        """`handle`: pidfd of the process, readable once the process has ended. `out`: descriptor to
        read what the program writes, standard output or replies.
        """
        self.handle, self.out = io.FileIO(handle), io.FileIO(out)
        os.set_blocking(out, False)
        self.received = bytearray()
        """Bytes that the program has written and that were not returned yet."""


class Programs:
    """Starts and ends the processes of one tested program: `fresh` prepares its folder, `start`
    starts it, `exchange` reads what it writes.
    """

    def __init__(self, setup: dict[str, Any], folder: str) -> None:
        """`setup`: {"sandbox", "is_root", "command", "server"} and the limits of `CodeConfig`.
        `folder`: absolute path of the folder in which programs may write.
        """
        self.setup = setup
        self.in_namespaces = setup["sandbox"] == "namespaces"
        self.folder = folder
        self.null = os.open(os.devnull, os.O_RDWR)

    def fresh(self, program: str) -> str:
        """End all running programs, empty the folder and write the text `program` to a file in it.
        Returns the file's path. Raises `TimeoutError` if processes do not end.
        """
        end_children(all_of_namespace=self.in_namespaces)
        if self.in_namespaces:
            if os.path.ismount(self.folder):
                kernel.call_libc("umount2", self.folder, kernel.DETACH)
            options = f"size={self.setup['file_mib']}m,nr_inodes=4096,mode=0777"
            kernel.mount("tmpfs", self.folder, "tmpfs", kernel.NOSUID | kernel.NODEV, options)
        else:
            remove_folder(self.folder)
            os.mkdir(self.folder, 0o700)
            if self.setup["is_root"]:
                os.chown(self.folder, kernel.NOBODY, kernel.NOBODY)
        path = os.path.join(self.folder, PROGRAM)
        with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(program)
        os.chmod(path, 0o444)
        return path

    def start(self, command: list[str] | Callable[[], None], limit_s: float, *wiring: int) -> int:
        """Start a program, `command`, in the folder under all limits, or call a function in a
        forked copy of this process under the same limits. Does not wait. Returns a pidfd, which is
        readable once the process has ended.

        `limit_s`: seconds of CPU time. `wiring`: descriptors that become the new process's 0, 1, 2
        and so on, and are closed in this process.
        """
        process = os.fork()
        if process:
            for descriptor in set(wiring) - {self.null}:
                os.close(descriptor)
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
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LEAST_NUMBER) for fd in wiring]
        for number, descriptor in enumerate(high):
            os.dup2(descriptor, number, inheritable=True)
        os.closerange(len(high), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if self.setup["sandbox"] != "none":
            self._set_limits(limit_s)
            if self.setup["is_root"]:
                user = kernel.INSIDE if self.in_namespaces else kernel.NOBODY
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
        kernel.tie_to_parent()
        if self.in_namespaces:
            # What it has given up does not come back through a set-user-id program.
            kernel.prctl(kernel.SET_NO_NEW_PRIVILEGES, 1)
            kernel.clear_capabilities()
            kernel.deny_system_calls()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, not by its children
            signal.signal(number, signal.SIG_DFL)

    def _set_limits(self, limit_s: float) -> None:
        mib, count = 2**20, self.setup["processes"]
        if self.in_namespaces:
            count += 1 if self.setup["is_root"] else OWN_PROCESSES
        else:  # the limit counts all processes of the user
            count += _tasks_of(kernel.NOBODY if self.setup["is_root"] else os.getuid())
        limits = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: MOST_FILES,
            resource.RLIMIT_FSIZE: self.setup["file_mib"] * mib,
            resource.RLIMIT_DATA: self.setup["memory_mib"] * mib,
            # Runtimes reserve more address space than they use.
            resource.RLIMIT_AS: 4 * self.setup["memory_mib"] * mib,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_CPU: int(limit_s) + 1,
            resource.RLIMIT_NPROC: count,
        }
        for limit, most in limits.items():
            hard = resource.getrlimit(limit)[1]  # a lower one is kept
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(limit, (most, most))

    def _too_large(self) -> bool:
        """Whether all programs together use more memory than is allowed."""
        if self.setup["sandbox"] == "none":
            return False
        if self.in_namespaces:
            processes = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        else:
            processes = descendants()
        pages = 0
        for process in processes:
            with contextlib.suppress(OSError), open(f"/proc/{process}/statm", "rb") as file:
                pages += int(file.read().split()[1])
        return pages * PAGE_BYTES > self.setup["memory_mib"] * 2**20

    def exchange(self, running: Running, until: float, *, one_line: bool) -> tuple[str, bytes]:
        """Read what a program writes, to its end or, with `one_line`, until there is a whole line.
        Blocks until then, or until the time `until` (of `time.monotonic`).

        Returns (status, bytes that were read): "ok" after the line, or if the program ended with
        exit code 0; "failed" if it ended otherwise; "time", "output" or "memory", with no bytes, if
        it went beyond that limit.
        """
        look_at, reads = time.monotonic() + LOOK_EVERY_S, [running.handle, running.out]
        received = running.received
        while True:
            end = received.find(b"\n") if one_line else -1
            if (len(received) if end < 0 else end) > self.setup["output_kib"] * 1024:
                return "output", b""
            if end >= 0:
                line = bytes(received[:end])
                del received[: end + 1]
                return "ok", line
            now = time.monotonic()
            if now >= until:
                return "time", b""
            if now >= look_at:
                if self._too_large():
                    return "memory", b""
                look_at = time.monotonic() + LOOK_EVERY_S
            readable = select.select(reads, [], [], max(0.0, min(until, look_at) - now))[0]
            if running.out in readable:
                chunk = running.out.read(PIPE_BYTES) or b""
                received += chunk
                reads = reads if chunk else [running.handle]
            elif running.handle in readable:
                ended = os.waitid(os.P_PIDFD, running.handle.fileno(), os.WEXITED)
                is_clean = ended and (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)
                return "ok" if is_clean and not one_line else "failed", bytes(received)


def _tasks_of(user: int) -> int:
    """Number of processes and threads of a user."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count
