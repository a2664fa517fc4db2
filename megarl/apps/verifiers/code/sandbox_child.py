"""The trusted processes of a sandbox, between the verifier and the programs that it runs.

    server (in its own user, mount and network namespace; one for each verifier process)
      └─ warden (one for each job; keeps the job's deadline)
           └─ first process of the job's process namespace: starts programs, reads what they write
                └─ programs, as another user, without privileges

The death of each kills those below it: by the parent death signal, and because the end of a process
namespace's first process ends all its processes. Without namespaces (`rlimits`, `none`) the third
process is an ordinary one that adopts and kills what programs leave behind; should it be killed,
the warden does so.

Messages on standard input's socket are 8 bytes of length and JSON. First {"setup"}, answered by
{"protection"} or {"refused"}; then jobs (`megarl.apps.verifiers.code.sandbox_jobs.run_job`), each
answered by {"results": list} or {"failed": text}.
"""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from typing import Any

from megarl.apps.verifiers.code import sandbox_kernel as kernel
from megarl.apps.verifiers.code.sandbox_jobs import run_job
from megarl.apps.verifiers.code.sandbox_programs import Programs, end_children

LENGTH = struct.Struct("!Q")
MOST_REPORT_BYTES = 2**28
GRACE_S = 2.0
"""Seconds after a job's own time limit until the warden kills it: it has its report to write."""
FOLDER = "megarl-program-"
"""Prefix of the temporary folders of programs that run without namespaces."""


def main(parent: int) -> None:
    """Serve jobs on the socket at standard input until the parent process `parent` closes it."""
    kernel.tie_to_parent(parent)
    kernel.prctl(kernel.SET_DUMPABLE, 0)
    channel = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    os.close(null)
    setup = _receive(channel)
    if setup is None:
        return
    try:
        protection = _protect(setup)
    except ValueError as error:
        _send(channel, json.dumps({"refused": str(error)}).encode())
        return
    except (OSError, KeyError) as error:
        said = getattr(error, "strerror", None) or str(error)
        refused = (
            f"this machine refuses namespaces ({said}); allow user namespaces (Linux 5.12 or"
            " newer), or set environment.code.sandbox to rlimits or none, with which programs can"
            " read files and use the network"
        )
        _send(channel, json.dumps({"refused": refused}).encode())
        return
    _send(channel, json.dumps({"protection": protection}).encode())
    while (job := _receive(channel)) is not None:
        _send(channel, _supervised(setup, job))


def _protect(setup: dict[str, Any]) -> str:
    """Enter the namespaces that all jobs share. Returns a description of the protection."""
    if setup["sandbox"] != "namespaces":
        _remove_old_folders()
        if setup["sandbox"] == "rlimits" and os.geteuid() == 0:
            _check_for_nobody(setup["command"][0])
        return setup["sandbox"]
    kernel.prctl(kernel.SET_DUMPABLE, 1)  # the files by which users are mapped are root's otherwise
    setup["is_root"] = os.geteuid() == 0
    kernel.new_user(setup["is_root"])
    kernel.prctl(kernel.SET_DUMPABLE, 0)
    kernel.build_root(setup["visible"])
    known = platform.machine() in kernel.AUDIT
    return "namespaces" if known else "namespaces, no system call filter on this kind of CPU"


def _check_for_nobody(program: str) -> None:
    """Raise `ValueError` unless the user nobody may run `program`: root's programs run as
    nobody, because limits do not bind root.
    """
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setresgid(kernel.NOBODY, kernel.NOBODY, kernel.NOBODY)
        os.setresuid(kernel.NOBODY, kernel.NOBODY, kernel.NOBODY)
        os._exit(0 if os.access(program, os.X_OK) else 1)
    if os.waitpid(child, 0)[1]:
        raise ValueError(
            f"programs run as the user nobody, who may not run {program}; set"
            " environment.code.interpreter to one that all users may run"
        )


def _supervised(setup: dict[str, Any], job: dict[str, Any]) -> bytes:
    """Run a job in a warden process. Returns its report as JSON."""
    read, write = os.pipe()
    warden = os.fork()
    if not warden:
        os.close(read)
        _warden(setup, job, write)
    os.close(write)
    deadline = time.monotonic() + job["total_s"] + 2 * GRACE_S
    report, whole = bytearray(), False
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([read], [], [], left)[0]:
            break
        part = os.read(read, 1 << 20)
        if not part or len(report) > MOST_REPORT_BYTES:
            whole = not part
            break
        report += part
    os.close(read)
    if not whole:
        os.kill(warden, signal.SIGKILL)
    os.waitpid(warden, 0)
    if whole and report.endswith(b"\n"):
        return bytes(report)
    return json.dumps({"failed": "the sandbox's own process ended before its report"}).encode()


def _warden(setup: dict[str, Any], job: dict[str, Any], report: int) -> None:
    """Run a job in a process of its own, and kill that at the deadline. Does not return."""
    try:
        kernel.tie_to_parent()
        in_namespaces = setup["sandbox"] == "namespaces"
        if in_namespaces:
            kernel.unshare(kernel.NEWPID | kernel.NEWNS | kernel.NEWIPC)
        else:
            kernel.prctl(kernel.SET_SUBREAPER, 1)
        first = os.fork()
        if not first:
            _first_process(setup, job, report, in_namespaces)
        os.close(report)
        # Reaped only below, so that its number stays its own.
        handle = os.pidfd_open(first)
        ended = select.select([handle], [], [], job["total_s"] + GRACE_S)[0]
        if not ended:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.waitpid(first, 0)
        if not in_namespaces:
            end_children()  # which are the program's, if the first process has not ended them
    finally:
        os._exit(0)


def _first_process(
    setup: dict[str, Any], job: dict[str, Any], report: int, in_namespaces: bool
) -> None:
    """Run a job and write its report to the descriptor `report`. Does not return."""
    folder = ""
    try:
        kernel.tie_to_parent()
        os.setsid()  # a signal to the process group stays in the sandbox
        if in_namespaces:
            _own_proc()
            programs = Programs(setup, kernel.FOLDER)
        else:
            kernel.prctl(kernel.SET_SUBREAPER, 1)
            folder = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-")
            programs = Programs(setup, folder)
        said: dict[str, Any] = {"results": run_job(programs, job)}
    except BaseException as error:
        said = {"failed": f"{type(error).__name__}: {error}"}
    try:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        body = memoryview(json.dumps(said).encode() + b"\n")
        while body:
            body = body[os.write(report, body) :]
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


def _remove_old_folders() -> None:
    """Remove folders of programs whose first process was killed."""
    base = tempfile.gettempdir()
    for name in os.listdir(base):
        process = name.removeprefix(FOLDER).partition("-")[0]
        if name.startswith(FOLDER) and process.isdigit() and not os.path.exists(f"/proc/{process}"):
            shutil.rmtree(os.path.join(base, name), ignore_errors=True)


def _receive(channel: socket.socket) -> dict[str, Any] | None:
    head = _exactly(channel, LENGTH.size)
    body = None if head is None else _exactly(channel, LENGTH.unpack(head)[0])
    return None if body is None else json.loads(body)


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _send(channel: socket.socket, body: bytes) -> None:
    channel.sendall(LENGTH.pack(len(body)) + body)


if __name__ == "__main__":
    main(int(sys.argv[1]))
