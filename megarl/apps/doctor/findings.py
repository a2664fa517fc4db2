"""Results of `megarl doctor`'s checks, and running programs with a deadline."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import psutil

PROCESS_WITHIN_S = 45.0
"""Default deadline in seconds of a program that a check runs. Starting Ray or importing vLLM takes
half of it on a busy machine with two cores and cold disks."""


GIB = 2**30
"""Bytes of a GiB."""


Status = Literal["ok", "warn", "FAIL", "late"]
"""`FAIL`: a run cannot start or would break; `warn`: a run can start. `late`: a program did not end
in time, which `megarl.apps.doctor.doctor.run_checks` turns into `warn` if other programs keep the
machine busy, and into `FAIL` otherwise."""


@dataclass(frozen=True)
class Finding:
    """Result of a check, one line of the table that `megarl doctor` prints: `status` ("ok", "warn",
    "FAIL" or "late", a timeout), `found` (what was found), `fix` (what to do about it; empty for
    nothing) and `check` (the check's name), as text of one line each.
    """

    status: Status
    found: str
    """What was found, as text of one line."""
    fix: str = ""
    """What the user can do about it, as text of one line; empty if nothing is to be done."""
    check: str = ""
    """What was checked; if empty, `run_checks` puts the check's name in `CHECKS` here."""


@dataclass(frozen=True)
class ProgramOutcome:
    """Outcome of a program that `run_program` ran with a deadline: `code`, its exit status (None if
    the deadline passed), `output`, its standard output, and `last_error`, the last line of its
    standard error or why the program failed.
    """

    code: int | None
    """Exit status, negative for a signal; None where the deadline passed, 1 if the program could
    not be started."""
    output: str
    """Standard output without white space at its ends; empty where the deadline passed."""
    last_error: str
    """Last line of standard error that is not blank, at most 200 characters, or else why the
    program failed."""

    def finding(self, good: str, fix: str) -> Finding:
        """The outcome as a finding of a check. Its status is `ok`, with the text `good`, if the
        program's exit status is 0. Otherwise its text is `last_error`, its advice `fix`, and its
        status `late` if the deadline passed or the program itself reports a timeout, else `FAIL`.
        """
        if self.code == 0:
            return Finding("ok", good)
        late = self.code is None or re.search("time(d|s)?[ -]?out", self.last_error, re.IGNORECASE)
        return Finding("late" if late else "FAIL", self.last_error, fix)


def run_program(
    command: list[str],
    *,
    within_s: float = PROCESS_WITHIN_S,
    environment: Mapping[str, str] | None = None,
) -> ProgramOutcome:
    """Run `command` (no shell) in the system's temporary folder for at most `within_s` seconds,
    then kill every process of its session and their descendants. Blocks until then. `environment`:
    variables to add to those of this process. Returns exit status, output and last error. The exit
    status is None if the deadline passed, and 1 if the program cannot be started; neither raises an
    error.
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
                env={**os.environ, **(environment or {})},
                cwd=tempfile.gettempdir(),  # no file of the user shadows a package
            )
        except OSError as error:
            return ProgramOutcome(1, "", str(error))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(within_s)
        code = process.poll()
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(one.pid) == process.pid:
                    for doomed in (*one.children(recursive=True), one):
                        doomed.kill()
        if code is None:
            return ProgramOutcome(None, "", f"no answer within {within_s:g} s")
        told: list[str] = []
        for file in (out, err):
            file.seek(0)
            told.append(file.read().decode(errors="replace"))
    lines = [line.strip() for line in told[1].splitlines() if line.strip()]
    return ProgramOutcome(code, told[0].strip(), lines[-1][:200] if lines else f"exit code {code}")


def ask_python(program: str, *arguments: str, **environment: str) -> ProgramOutcome:
    """Run `program`, the text of a Python program, with this interpreter for at most 45 seconds
    (`PROCESS_WITHIN_S`), and wait for its end. `arguments` are its sys.argv[1:]; `environment` is
    added to the variables of this process. The outcome is that of `run_program`.
    """
    return run_program([sys.executable, "-c", program, *arguments], environment=environment)
