"""What a command prints: results on standard output, its own lines on standard error, and all else,
of libraries and child processes, in `run.log` of the run folder.

    with console.diverted():          # file descriptors 1 and 2 go to a temporary file...
        console.open_log(folder)      # ...from here on to folder/run.log
        console.say("a line")         # standard error and run.log
        console.result("{...}")       # standard output

File descriptors are replaced, and not only `sys.stdout`, because libraries in C and child processes
write to the descriptors. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from megarl.errors import UserError

LOG = "run.log"
"""Name of the log file in the run folder."""

STARTED_AT = time.time()
"""When the command started, in seconds since the epoch: the command line imports this module first.
"""

SHOWN_CHARACTERS = 1500
"""Longest message of an unexpected error on the console; the log has all of it."""


class Reported(Exception):
    """Raised in place of an error that the console has shown. `code`: the command's exit code."""

    def __init__(self, code: int = 1) -> None:
        self.code = code


class Console:
    """Where the lines of this process go. `diverted` opens and closes it."""

    def __init__(self) -> None:
        self.saved: tuple[int, int] | None = None
        """Copies of the descriptors 1 and 2 while these are diverted."""
        self.log: Path | None = None
        """The log file, once there is one."""
        self._buffer = -1

    def open(self) -> None:
        """Divert the descriptors 1 and 2 to a temporary file."""
        self.saved = os.dup(1), os.dup(2)
        with tempfile.TemporaryFile() as file:
            self._buffer = os.dup(file.fileno())
        self._divert(self._buffer)
        # Lines of one process come in their order, and none is lost where the process is killed.
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    def open_log(self, path: Path) -> None:
        """Divert the descriptors to the end of the file `path`, which gets what was kept so far."""
        log = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
        self._divert(log)
        os.close(log)
        self.log = path
        _log(self.kept())

    def kept(self) -> bytes:
        """What was written before there was a log file."""
        return os.pread(self._buffer, os.fstat(self._buffer).st_size, 0)

    def close(self) -> None:
        """Give the descriptors back."""
        assert self.saved is not None
        for number, saved in zip((1, 2), self.saved, strict=True):
            _flush()
            os.dup2(saved, number)
            os.close(saved)
        os.close(self._buffer)
        self.saved, self.log = None, None

    def _divert(self, descriptor: int) -> None:
        _flush()
        for number in (1, 2):
            os.dup2(descriptor, number)


_console = Console()
"""The console of this process: a process has one standard output."""


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):  # see `_log`
                stream.flush()


def _log(text: bytes) -> bool:
    """Write to descriptor 2, which is the log, or what is kept for it. Returns whether it could be
    written: a disk that is full ends a run by what it needs, not by its log.
    """
    try:
        os.write(2, text)
    except OSError:
        return False
    return True


def prepare() -> None:
    """Make the process's standard streams such that everything can be printed: descriptors that are
    closed go nowhere, as files that are opened would take their numbers, and text is UTF-8 whatever
    the locale is, since a recipe that is printed is read again as UTF-8.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
        elif _is_descriptor(stream, number):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _write(number: int, text: str) -> None:
    """Write to what was descriptor `number`, 1 or 2, when the command started. Without a buffer,
    because a signal handler may write while its own process is writing.
    """
    stream = (sys.stdout, sys.stderr)[number - 1]
    # Nobody reads, or where standard error goes the disk is full: the run goes on. A result that
    # cannot be written is an error.
    with contextlib.suppress(BrokenPipeError if number == 1 else OSError):
        if not _is_descriptor(stream, number):
            print(text, file=stream, flush=True)
            return
        descriptor = number if _console.saved is None else _console.saved[number - 1]
        data = (text + "\n").encode(errors="backslashreplace")
        while data:
            data = data[os.write(descriptor, data) :]


def _is_descriptor(stream: TextIO | None, number: int) -> bool:
    """Whether `stream` writes to descriptor `number`, and was not replaced, as by a test."""
    try:
        return stream is not None and stream.fileno() == number
    except (OSError, ValueError):
        return False


def result(text: str) -> None:
    """Print a command's result on standard output. Raises `UserError` where it cannot be written;
    that nobody reads it is no error.
    """
    try:
        _write(1, text)
    except OSError as error:
        raise UserError(
            f"standard output cannot be written: {error.strerror}; send it elsewhere, and repeat"
            " the command"
        ) from None


def say(text: str) -> None:
    """Print a line on standard error and in the log."""
    _write(2, text)
    if _console.saved is not None:
        _log((text + "\n").encode(errors="backslashreplace"))


def elapsed_s() -> float:
    """Seconds since the command started."""
    return time.time() - STARTED_AT


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """On rank 0, print how many seconds a phase of the start-up took, once it is over."""
    started_at = time.monotonic()
    yield
    if os.environ.get("RANK", "0") == "0":
        say(f"{name}: {time.monotonic() - started_at:.1f} s  [{elapsed_s():.0f} s]")


def terminal() -> TextIO | None:
    """Standard error as a stream, for a progress bar, if it is a terminal; otherwise None."""
    if _console.saved is None:
        return sys.stderr if sys.stderr.isatty() else None
    terminal = _console.saved[1]
    return open(terminal, "w", buffering=1, closefd=False) if os.isatty(terminal) else None


def in_terminal() -> bool:
    """Whether standard output is a terminal, which shows colours."""
    return os.isatty(1 if _console.saved is None else _console.saved[0])


def open_log(folder: Path) -> None:
    """From now on, write what libraries and child processes print to `folder`/run.log, which is
    made if it is missing. Does nothing outside of `diverted`.
    """
    if _console.saved is not None:
        folder.mkdir(parents=True, exist_ok=True)
        _console.open_log(folder / LOG)


def hold(folder: Path) -> Callable[[], None]:
    """Take the run folder for this process, until the function that is returned is called or the
    process ends. Raises `UserError` if another process has it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"folder {folder} is in use by another run that has not ended; wait for it, or set"
            " another folder"
        ) from None
    except OSError as error:  # a file system without locks
        say(f"megarl: folder {folder} cannot be locked ({error}); start no other run in it")
    return lambda: os.close(descriptor)


@contextlib.contextmanager
def diverted() -> Iterator[None]:
    """Keep what libraries and child processes print away from standard output and standard error,
    until the end of the block. Without `open_log` it is dropped.

    An unexpected error becomes one line on the console, and its traceback goes to the log; without
    a log, traceback and what was kept go to standard error. Raises `Reported` then. A `UserError`
    goes to the log, and is raised as it is.
    """
    _console.open()
    try:
        yield
    except Reported:
        raise
    except UserError as error:
        _log(f"megarl: error: {error}\n".encode(errors="backslashreplace"))
        raise
    except Exception as error:
        _report(error)
        raise Reported from error
    finally:
        _console.close()


@contextlib.contextmanager
def first_word() -> Iterator[None]:
    """Within `diverted`: show an error of the block as soon as it leaves the block, before what
    surrounds the block is closed, and raise `Reported`.

    Rank 0 of a run closes the engines and the rollout service after an error. The other ranks then
    fail too, and the launcher ends rank 0. Without this block, rank 0 would often be ended before
    it could show the error that was the cause. A `UserError` of another rank is raised as it is:
    most of them concern all ranks, and rank 0 shows them.
    """
    try:
        yield
    except UserError as error:
        if _console.saved is None or os.environ.get("RANK", "0") != "0":
            raise
        say(f"megarl: error: {error}")
        raise Reported(2) from error
    except Exception as error:
        if _console.saved is None or isinstance(error, Reported):
            raise
        _report(error)
        raise Reported from error


def _report(error: Exception) -> None:
    """Show an unexpected error; see `diverted`."""
    trace = "".join(traceback.format_exception(error))
    rank = os.environ.get("RANK", "0")
    who = f"error on rank {rank}" if rank != "0" else "error"
    said = " ".join(str(error).split()) or repr(error)
    line = f"megarl: {who}: {type(error).__name__}: {said[:SHOWN_CHARACTERS]}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        line += "; free some space where the run folder is, and go on with --resume auto"
    if _console.log is None:
        _write(2, _console.kept().decode(errors="replace") + trace + line)
        return
    if _log(f"rank {rank}: {trace}".encode(errors="backslashreplace")):
        line += f" (the traceback, and what libraries said, are in {_console.log})"
    else:
        line += f" (the traceback could not be written to {_console.log})"
    say(line)
