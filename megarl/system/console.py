"""What a command prints: results on standard output, its own lines on standard error, and all else,
of libraries and child processes, in `run.log` of the run folder.

    with console.diverted():          # file descriptors 1 and 2 go to a temporary file...
        console.open_log(folder)      # ...from here on to folder/run.log
        console.say("a line")         # standard error and run.log
        console.result("{...}")       # standard output

File descriptors are replaced, since C libraries and child processes write to them.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from megarl.errors import ProcessLost, UserError

LOG = "run.log"

STARTED_AT = time.time()
"""The command line imports this module first."""

SHOWN_CHARACTERS = 1500
"""Longest message of an unexpected error on the console; the log has all of it."""


class Arguments(argparse.ArgumentParser):
    """A parser for a command without a recipe; a mistake raises `UserError`, which ends with
    `usage`.
    """

    def __init__(self, command: str, usage: str = "") -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.command, self.said = command, usage or f"see {command} --help"

    def error(self, message: str) -> NoReturn:
        text = re.sub(r"^argument ([^:]+): (invalid )?", _about_option, message)
        raise UserError(f"{self.command}: {text}; {self.said}")


def _about_option(match: re.Match[str]) -> str:
    """ "argument --nodes: is" becomes "--nodes is"."""
    return f"{match[1]} has an invalid " if match[2] else f"{match[1]} "


class Options(argparse.Namespace):
    """The words behind a command that has a recipe."""

    recipe: str
    """A recipe, or a run folder."""
    overrides: Sequence[str] = ()
    """Such as `["--steps", "10"]`."""
    words: Sequence[str] = ()
    check: bool = False
    print_config: bool = False
    ranks: int | None = None
    port: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    cpu: bool = False
    dry_run: bool = False
    requeue: bool = False

    def given(self, *names: str) -> list[str]:
        """Those of the options `names` that were given, as words."""
        words: list[str] = []
        for name in names:
            if value := getattr(self, name):
                flag = f"--{name.replace('_', '-')}"
                words += [flag] if value is True else [flag, str(value)]
        return words


class Diverted:
    """State of `diverted`."""

    saved: tuple[int, int] | None = None
    """Copies of the descriptors 1 and 2 while they are diverted."""
    log: Path | None = None
    buffer = -1
    """Descriptor of the file in memory."""


_console = Diverted()
"""A process has one standard output."""


def flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):  # see `_log`
                stream.flush()


def _log(text: bytes) -> bool:
    """Append to run.log, on descriptor 2 while diverted. Returns False on failure: a full disk
    under the log alone must not end a run.
    """
    try:
        os.write(2, text)
    except OSError:
        return False
    return True


def prepare() -> None:
    """At the start: open closed descriptors 0 to 2 on /dev/null, and make the streams UTF-8
    whatever the locale is.
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
    """Write to what was descriptor 1 or 2 at the start, without a buffer: signal handlers write
    too.
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


CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\ufeff\u2028-\u202e\u2066-\u2069\ud800-\udfff"
    r"\U000e0000-\U000e007f]"
)
"""Characters that steer a terminal or its order of writing, and halves of characters."""


def printable(text: object, kept: str = "\n\t") -> str:
    r"""Text in which control characters but `kept` are escapes such as \x1b: what models say steers
    no terminal.
    """

    def escaped(match: re.Match[str]) -> str:
        return match[0] if match[0] in kept else match[0].encode("unicode_escape").decode()

    return CONTROL.sub(escaped, str(text))


def result(text: str, *, colours: bool = False) -> None:
    """Print a command's result on standard output. `colours`: the text is `printable` already.
    Raises `UserError` on a full disk; a closed pipe is no error.
    """
    try:
        _write(1, text if colours else printable(text))
    except OSError as error:
        raise UserError(
            f"standard output cannot be written: {error.strerror}; send it elsewhere, and repeat"
            " the command"
        ) from None


def say(text: str) -> None:
    """Print on standard error and, within `diverted`, to run.log. Errors of writing are ignored.
    Signal handlers may call it.
    """
    text = printable(text)
    _write(2, text)
    if _console.saved is not None:
        _log((text + "\n").encode(errors="backslashreplace"))


def elapsed_s() -> float:
    """Since the start of the command."""
    return time.time() - STARTED_AT


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """At the end of the block, on rank 0, say how long it took; nothing after an error."""
    started_at = time.monotonic()
    yield
    if os.environ.get("RANK", "0") == "0":
        say(f"{name}: {time.monotonic() - started_at:.1f} s  [{elapsed_s():.0f} s]")


def terminal() -> TextIO | None:
    """The command's standard error, for a progress bar, if it is a terminal."""
    if _console.saved is None:
        return sys.stderr if sys.stderr.isatty() else None
    terminal = _console.saved[1]
    return open(terminal, "w", buffering=1, closefd=False) if os.isatty(terminal) else None


def in_terminal() -> bool:
    """Whether the command's standard output is a terminal."""
    return os.isatty(1 if _console.saved is None else _console.saved[0])


def open_log(folder: Path) -> None:
    """Within `diverted`: append all output, also earlier one, to `folder`/run.log."""
    if _console.saved is not None:
        folder.mkdir(parents=True, exist_ok=True)
        log = os.open(folder / LOG, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
        _divert(log)
        os.close(log)
        _console.log = folder / LOG
        _log(_kept())


def _divert(descriptor: int) -> None:
    flush_streams()
    for number in (1, 2):
        os.dup2(descriptor, number)


def _kept() -> bytes:
    """What was written within `diverted` before there was a log."""
    return os.pread(_console.buffer, os.fstat(_console.buffer).st_size, 0)


def hold(folder: Path) -> Callable[[], None]:
    """Lock the run folder (flock) until the returned function is called or the process ends. Raises
    `UserError` if another process has it, `OSError` if it is missing. Without locks on the file
    system, a line says so.
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
    """For a whole command: keep what libraries and child processes print from the user, for
    `open_log`.

    An unexpected error is printed as one line, its traceback logged, or printed where there is no
    log; then `SystemExit` is raised. A `UserError` is logged and raised again.
    """
    saved = _console.saved = os.dup(1), os.dup(2)
    _console.buffer = os.memfd_create("megarl")
    _divert(_console.buffer)
    # Lines of one process come in their order, and none is lost where the process is killed.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        yield
    except UserError as error:
        _log(printable(f"megarl: error: {error}\n").encode(errors="backslashreplace"))
        raise
    except Exception as error:
        _report(error)
        raise SystemExit(1) from error
    finally:
        for number, descriptor in zip((1, 2), saved, strict=True):
            flush_streams()
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(_console.buffer)
        _console.saved, _console.log = None, None


@contextlib.contextmanager
def first_word() -> Iterator[None]:
    """Within `diverted`: show an error as soon as it leaves the block, and raise `SystemExit`.

    Before rank 0 has closed the engines, the other ranks fail too, and the launcher ends rank 0. A
    `UserError` of another rank is raised as it is: rank 0 shows it.
    """
    try:
        yield
    except UserError as error:
        if _console.saved is None or os.environ.get("RANK", "0") != "0":
            raise
        say(f"megarl: error: {error}")
        raise SystemExit(2) from error
    except Exception as error:
        if _console.saved is None:
            raise
        _report(error)
        raise SystemExit(1) from error


def _report(error: Exception) -> None:
    """Print an unexpected error as one line, and log or print its traceback."""
    trace = printable("".join(traceback.format_exception(error)))
    rank = os.environ.get("RANK", "0")
    who = f"error on rank {rank}" if rank != "0" else "error"
    message = " ".join(str(error).split()) or repr(error)
    line = f"megarl: {who}: {type(error).__name__}: {message[:SHOWN_CHARACTERS]}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        line += "; free some space where the run folder is, and go on with --resume auto"
    if isinstance(error, ProcessLost):  # the traceback of who asked it says nothing
        _log(f"rank {rank}: {trace}".encode(errors="backslashreplace"))
        say(f"megarl: {who}: {message}")
        return
    if _console.log is None:
        _write(2, printable(_kept().decode(errors="replace")) + trace + printable(line))
        return
    if _log(f"rank {rank}: {trace}".encode(errors="backslashreplace")):
        line += f" (the traceback, and what libraries said, are in {_console.log})"
    else:
        line += f" (the traceback could not be written to {_console.log})"
    say(line)
