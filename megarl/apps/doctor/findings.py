"""Results of `megarl doctor`'s checks, and running programs with a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Literal, NamedTuple

import psutil

PROCESS_WITHIN_S = 90.0
"""Default deadline in seconds of a program that a check runs. Starting Ray or importing vLLM takes
a quarter of it on a busy machine with two cores and cold disks."""
GIB = 2**30
"""Bytes of a GiB."""
Status = Literal["ok", "warn", "FAIL"]
"""`FAIL`: a run cannot start or would break; `warn`: a run can start."""


@dataclass(frozen=True)
class Finding:
    """Result of a check, one line of the table that `megarl doctor` prints: what was found, what
    the user can do about it ("" for nothing), and the check's name ("" for that in `CHECKS`).
    """

    status: Status
    found: str
    fix: str = ""
    check: str = ""


class ProgramOutcome(NamedTuple):
    """Outcome of a program: exit status (negative for a signal, None where the deadline passed),
    standard output, and the last line of standard error, or else why the program failed.
    """

    code: int | None
    output: str
    last_error: str

    def finding(self, good: str, fix: str) -> Finding:
        """The outcome as a finding: `ok` with the text `good`, or `FAIL` with the last error and
        the advice `fix`.
        """
        return Finding("ok", good) if self.code == 0 else Finding("FAIL", self.last_error, fix)


def run_program(command: list[str], *, within_s: float = PROCESS_WITHIN_S) -> ProgramOutcome:
    """Run `command` (no shell) in the system's temporary folder for at most `within_s` seconds,
    then kill it with all that it started. Never raises; the exit status of a program that cannot be
    started is 1.
    """
    # Files and not pipes, which a process that is left would keep open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                cwd=tempfile.gettempdir(),  # no file of the user shadows a package
            )
        except OSError as error:
            return ProgramOutcome(1, "", str(error))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(within_s)
        code = process.poll()
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if code is None:
            return ProgramOutcome(
                None, "", f"no answer within {within_s:g} s; is the machine busy?"
            )
        out.seek(0)
        err.seek(0)
        output, errors = (file.read().decode(errors="replace").strip() for file in (out, err))
    last = errors.splitlines()[-1].strip() if errors else f"exit code {code}"
    return ProgramOutcome(code, output, last[:200])


def ask_python(program: str) -> ProgramOutcome:
    """Run `program`, the text of a Python program, with this interpreter, and wait for its end."""
    return run_program([sys.executable, "-c", program])
