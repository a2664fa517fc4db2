"""Results of `megarl doctor`'s checks, and running programs with a deadline."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Literal

import psutil

PROCESS_WITHIN_S = 45.0
"""Deadline in seconds of a program. Starting Ray or importing vLLM takes half of it on a busy
machine with two cores and cold disks."""


GIB = 2**30
"""Bytes of a GiB."""


Status = Literal["ok", "warn", "FAIL", "late"]
"""`late`: a program did not end in time. On a busy machine that says little, so that
`megarl.apps.doctor.doctor.run_checks` makes a warning of it there, and a failure elsewhere."""


@dataclass(frozen=True)
class Finding:
    """Result of a check: one line of the table."""

    check: str
    """What was checked."""
    status: Status
    found: str
    """What was found."""
    fix: str = ""
    """What to do about it; empty if nothing is to be done."""


@dataclass(frozen=True)
class ProgramOutcome:
    """Outcome of a program that was run with a deadline."""

    code: int | None
    """Exit status, or None where the deadline passed."""
    output: str
    """Standard output."""
    last_error: str
    """Last line of standard error."""

    def failure(self, check: str, fix: str) -> Finding:
        """The finding of a check whose program has failed or was late, be it by a deadline of its
        own.
        """
        late = self.code is None or re.search("time(d|s)?[ -]?out", self.last_error, re.IGNORECASE)
        return Finding(check, "late" if late else "FAIL", self.last_error, fix)


def core_share(spin_s: float = 0.3) -> float:
    """Share of one core's time that this thread gets, measured with a loop of `spin_s` seconds:
    near 1 unless other threads want more cores than there are.
    """
    wall, own = time.perf_counter(), time.thread_time()
    while time.perf_counter() - wall < spin_s:
        pass
    return (time.thread_time() - own) / (time.perf_counter() - wall)


def run_program(
    command: list[str], *, within_s: float, environment: dict[str, str] | None = None
) -> ProgramOutcome:
    """Run `command` for at most `within_s` seconds, then kill every process that it started.

    `environment` is added to the current one.
    """
    settings = os.environ | (environment or {})
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=settings,
            cwd=tempfile.gettempdir(),  # no file of the user shadows a package
        )
    except OSError as error:
        return ProgramOutcome(1, "", str(error))
    code: int | None
    try:
        out, err = process.communicate(timeout=within_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        code = None
    _end(process)
    if code is None:
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # a process that is left has the pipe open
            process.communicate(timeout=1.0)
        return ProgramOutcome(None, "", f"no answer within {within_s:g} s")
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    return ProgramOutcome(code, out.strip(), lines[-1][:200] if lines else f"exit code {code}")


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a process, its session and its descendants."""
    doomed: set[int] = set()
    with contextlib.suppress(psutil.Error):
        doomed |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == process.pid:
                doomed.add(pid)
    for pid in doomed:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def ask_python(
    program: str, *arguments: str, within_s: float = PROCESS_WITHIN_S, **environment: str
) -> ProgramOutcome:
    """Run a Python program with this interpreter for at most `within_s` seconds.

    `arguments` are its command line, `environment` is added to the current one.
    """
    return run_program(
        [sys.executable, "-c", program, *arguments], within_s=within_s, environment=environment
    )
