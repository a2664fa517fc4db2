"""The server process of a sandbox, between the verifier and the programs that it runs.

    overseer (descendants.oversee: ends all below it with the verifier's process)
      └─ server: one job after the other; starts programs, reads what they write, kills what is left
           └─ programs: in a Landlock domain, under a seccomp filter and limits; of root, as another
              user

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
import stat
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from megarl.apps.verifiers.code.assert_checker import check_asserts
from megarl.environments.descendants import (
    SET_DEATH_SIGNAL,
    SET_SUBREAPER,
    descendants,
    end_children,
)
from megarl.environments.isolation import (
    NEVER,
    READ_ANY,
    SCOPES_SINCE,
    Rules,
    become_user,
    call_libc,
    enter_own_domain,
    filter_calls,
    has_filters,
    landlock_version,
    own_capabilities,
)
from megarl.system.files import remove_folder

ENOUGH_BYTES = 2**24
"""Bytes of output of all tests of a job after which no further test is begun; the verifier then
gives the rest as another job."""
PROGRAM = "program"
"""Name of the program's file in the folder of the program."""
LOOK_EVERY_S = 0.02
"""Seconds between two looks at the memory of all processes of a program, and at its folder."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PIPE_BYTES = 65536
MOST_FILES = 128
"""Most files that each process of a program may have open."""
MOST_NAMES = 4096
"""Most files and folders in a program's folder."""
LEAST_NUMBER = 200
"""Lowest number of the copies of descriptors that are made before they get their final numbers."""
FILES_SINCE = 3
"""Version of Landlock that can keep a program from all writing (Linux 6.2)."""
USERS, NOBODY = 2 * 10**9, 65534
"""User ids of the programs of root: its own for each server, by the server's process id, or nobody
where a container has no such users."""
AS_OTHERS = {"CHOWN": 0, "DAC_OVERRIDE": 1, "KILL": 5, "SETGID": 6, "SETUID": 7}
"""Capabilities with which root runs programs as another user, and ends and removes them."""
NOT_STARTED = 127
CALLS: Rules = {
    # name: (number on x86_64, number on aarch64, never)
    "socket": (41, 198, NEVER),
    "ptrace": (101, 117, NEVER),
    "mount": (165, 40, NEVER),
    "fsopen": (430, 430, NEVER),
    "open_tree": (428, 428, NEVER),
    "chroot": (161, 51, NEVER),
    "unshare": (272, 97, NEVER),
    "setns": (308, 268, NEVER),
    "bpf": (321, 280, NEVER),
    "perf_event_open": (298, 241, NEVER),
    "userfaultfd": (323, 282, NEVER),
    "open_by_handle_at": (304, 265, NEVER),
    # They tell names of files that Landlock keeps from being read.
    "inotify_add_watch": (254, 27, NEVER),
    "fanotify_init": (300, 262, NEVER),
    "clone": (56, 220, [(0, 0x7E020000, (0,))]),  # into a namespace of its own
    "clone3": (435, 435, NEVER),
    # memory that counts for no process
    "memfd_create": (319, 279, NEVER),
    "memfd_secret": (447, 447, NEVER),
}
"""System calls that are refused besides those of `filter_calls(alone=True)`."""
SIGNALS: Rules = {
    "kill": (62, 129, NEVER),
    "tkill": (200, 130, NEVER),
    "tgkill": (234, 131, NEVER),
    "rt_sigqueueinfo": (129, 138, NEVER),
    "rt_tgsigqueueinfo": (297, 240, NEVER),
    "pidfd_send_signal": (424, 424, NEVER),
}
"""Those too where Landlock does not keep signals inside."""
OF_OWN_USER: Rules = {
    "chmod": (90, 53, NEVER),
    "fchmod": (91, 52, NEVER),
    "fchmodat": (268, 53, NEVER),
    "fchmodat2": (452, 452, NEVER),
    "utime": (132, 88, NEVER),
    "utimes": (235, 88, NEVER),
    "futimesat": (261, 88, NEVER),
    "utimensat": (280, 88, NEVER),
}
"""Refused too if programs run as megarl's own user, who owns other files; Landlock has no rules
for these calls."""


def main() -> None:
    """Main function of the process that `Sandbox` starts to run programs of a model. It reads lines
    of JSON from standard input: first the setup (protection, commands, limits), then jobs, each a
    program with its tests, one at a time. It answers each with a line of JSON on standard output:
    {"refused": why no program can run, or ""}, then {"results": list, one for each test} or
    {"failed": text}. It ends with standard input.
    """
    call_libc("prctl", SET_SUBREAPER, 1, 0, 0, 0)
    programs = Programs(json.loads(sys.stdin.buffer.readline()))
    _answer({"refused": programs.refusal()})
    for line in sys.stdin.buffer:
        try:
            reply: dict[str, Any] = {"results": run_job(programs, json.loads(line))}
        except Exception as error:
            reply = {"failed": f"{type(error).__name__}: {error}"}
        end_children()
        _answer(reply)


def _answer(reply: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
    sys.stdout.buffer.flush()


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

    def __init__(self, setup: dict[str, Any]) -> None:
        """`setup`: {"sandbox", "command", "server", "visible", "folder": absolute path of a folder
        for the programs' own} and the limits of `CodeConfig`.
        """
        self.setup = setup
        self.folder = self.home = os.path.join(setup["folder"], "box")
        self.null = os.open(os.devnull, os.O_RDWR)
        self.user = os.getuid()
        """User id of the programs."""

    def refusal(self) -> str:
        """Why this machine cannot run programs in the sandbox that the setup names; "" if it can.
        Starts the interpreter once, to see which user may run it.
        """
        if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
            return "this kernel tells no process's children (CONFIG_PROC_CHILDREN)"
        mode = self.setup["sandbox"]
        if mode == "auto" and (landlock_version() < FILES_SINCE or not has_filters()):
            return (
                "this machine has no Landlock of version 3 (Linux 6.2 or newer, with landlock in"
                " the kernel's parameter lsm=) or no seccomp; set environment.code.sandbox to"
                " rlimits or none, with which programs can read files and use the network"
            )
        is_other = mode != "none" and self.user == 0
        lacking = [name for name, bit in AS_OTHERS.items() if not own_capabilities()[0] >> bit & 1]
        if is_other and lacking:
            return (
                f"root runs programs as another user, and lacks the capabilities {lacking} for it;"
                " start the container with them, or megarl as another user than root"
            )
        command, null = self.setup["command"], self.null
        for user in (USERS + os.getpid(), NOBODY) if is_other else (self.user,):
            self.user = user
            with contextlib.suppress(OSError):  # there may be no such user
                handle = self.start([*command, self.fresh("")], 1.0, null, null, null)
                ended = os.waitid(os.P_PIDFD, handle, os.WEXITED)
                os.close(handle)
                if ended is None or ended.si_status != NOT_STARTED:
                    return ""
        return (
            f"programs run as the user {self.user}, who may not run {command[0]}; set"
            " environment.code.interpreter to one that all users may run"
        )

    def fresh(self, program: str) -> str:
        """End all running programs, empty the folder and write the text `program` to a file in it.
        Returns the file's name. Raises `TimeoutError` if processes do not end.
        """
        end_children()
        remove_folder(self.folder)
        os.mkdir(self.folder, 0o700)
        path = os.path.join(self.folder, PROGRAM)
        with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(program)
        os.chmod(path, 0o444)
        is_other = self.user != os.getuid()
        os.chown(self.folder, self.user, self.user if is_other else -1)
        reads_any = self.setup["sandbox"] == "auto" and own_capabilities()[0] >> READ_ANY & 1
        if not is_other or reads_any:
            return PROGRAM
        self.home = "/proc/self/cwd"  # which passes the run's folder above
        return f"{self.home}/{PROGRAM}"

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
                variables = {"PATH": paths, "LANG": "C.UTF-8"}
                variables |= {"HOME": self.home, "TMPDIR": self.home}
                os.execve(command[0], command, variables)  # noqa: S606 - there is no shell
        finally:
            os._exit(NOT_STARTED)

    def _confine(self, wiring: Sequence[int], limit_s: float) -> None:
        """Give this process its descriptors, domain, limits, user and system call filter."""
        is_guarded, is_other = self.setup["sandbox"] == "auto", self.user != os.getuid()
        os.setsid()
        os.chdir(self.folder)
        # First to numbers beyond those that are overwritten
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LEAST_NUMBER) for fd in wiring]
        for number, descriptor in enumerate(high):
            os.dup2(descriptor, number, inheritable=True)
        os.closerange(len(high), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if self.setup["sandbox"] != "none":
            self._set_limits(limit_s)
        if is_guarded:
            enter_own_domain(folder=self.folder, visible=self.setup["visible"])
        if is_other:
            become_user(self.user, reads_any=is_guarded)
        call_libc("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if is_guarded:
            signals = {} if landlock_version() >= SCOPES_SINCE else SIGNALS
            filter_calls(alone=True, more=CALLS | signals | ({} if is_other else OF_OWN_USER))
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, not by its children
            signal.signal(number, signal.SIG_DFL)

    def _set_limits(self, limit_s: float) -> None:
        mib = 2**20
        limits = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: MOST_FILES,
            resource.RLIMIT_FSIZE: self.setup["file_mib"] * mib,
            resource.RLIMIT_DATA: self.setup["memory_mib"] * mib,
            # Runtimes reserve more address space than they use.
            resource.RLIMIT_AS: 4 * self.setup["memory_mib"] * mib,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_CPU: int(limit_s) + 1,
            # The limit counts all processes of the user.
            resource.RLIMIT_NPROC: self.setup["processes"] + _tasks_of(self.user),
        }
        for limit, most in limits.items():
            hard = resource.getrlimit(limit)[1]  # a lower one is kept
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(limit, (most, most))

    def _too_large(self) -> bool:
        """Whether all programs together use more memory, or their folder holds more, than is
        allowed.
        """
        if self.setup["sandbox"] == "none":
            return False
        pages = 0
        for process in descendants():
            with contextlib.suppress(OSError), open(f"/proc/{process}/statm", "rb") as file:
                pages += int(file.read().split()[1])
        if pages * PAGE_BYTES > self.setup["memory_mib"] * 2**20:
            return True
        blocks, names, folders = _removed_blocks(), 0, [self.folder]
        while folders:
            try:
                entries = list(os.scandir(folders.pop()))
            except (FileNotFoundError, NotADirectoryError):
                continue  # removed meanwhile
            except OSError:
                return True  # closed to us, or too deep: what is inside cannot be counted
            names += len(entries)
            for entry in entries:
                with contextlib.suppress(OSError):
                    blocks += entry.stat(follow_symlinks=False).st_blocks
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
            if names > MOST_NAMES or blocks * 512 > self.setup["file_mib"] * 2**20:
                return True
        return False

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


def _removed_blocks() -> int:
    """Blocks of 512 bytes of removed files that programs still have open."""
    blocks = dict[tuple[int, int], int]()
    for process in descendants():
        with contextlib.suppress(OSError):
            for link in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{process}/fd/{link}")
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        blocks[status.st_dev, status.st_ino] = status.st_blocks
    return sum(blocks.values())
