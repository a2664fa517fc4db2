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
"""Name of the log file in the run folder."""

STARTED_AT = time.time()
"""When the command started, in seconds since the epoch: the command line imports this module first.
"""

SHOWN_CHARACTERS = 1500
"""Longest message of an unexpected error on the console; the log has all of it."""


class Arguments(argparse.ArgumentParser):
    """An argparse parser for a command that takes no recipe. `command`: the words of the command,
    such as "megarl chat". A mistake raises `UserError`, whose single line ends with the text
    `usage`, or with "see COMMAND --help" if `usage` is "".
    """

    def __init__(self, command: str, usage: str = "") -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.command, self.said = command, usage or f"see {command} --help"

    def error(self, message: str) -> NoReturn:
        said = re.sub(r"^argument ([^:]+): (invalid )?", _about_option, message)
        raise UserError(f"{self.command}: {said}; {self.said}")


def _about_option(found: re.Match[str]) -> str:
    """The name of the option at the beginning of argparse's message, as the subject of a sentence:
    "argument --nodes: is" becomes "--nodes is". `found`: the match of that beginning.
    """
    return f"{found[1]} has an invalid " if found[2] else f"{found[1]} "


class Options(argparse.Namespace):
    """The words behind a command that has a recipe. An option that was not given, or that the
    command does not have, is None or False.
    """

    recipe: str
    """The first word: a recipe, or a run folder."""
    overrides: Sequence[str] = ()
    """Settings that replace those of the recipe, such as `["--steps", "10"]`."""
    words: Sequence[str] = ()
    """All words."""
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


class Reported(Exception):
    """Raised in place of an error that the user has already been shown: the caller prints nothing
    and ends the process with exit code `code`.
    """

    def __init__(self, code: int = 1) -> None:
        self.code = code


class Diverted:
    """State of this module's redirection of the file descriptors 1 and 2 (`diverted`), to which
    libraries and child processes write: to a file in memory, and to a log file after `open_log`.
    The module has one object of the class.
    """

    saved: tuple[int, int] | None = None
    """Copies of the descriptors 1 and 2 while these are diverted; None otherwise."""
    log: Path | None = None
    """The log file, once there is one."""
    buffer = -1
    """Descriptor of the file in memory."""


_console = Diverted()
"""A process has one standard output."""


def flush_streams() -> None:
    """Flush Python's buffers of standard output and standard error; errors of writing are
    ignored.
    """
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
    """Called once, when a command starts. Closed file descriptors 0 to 2 are opened on /dev/null,
    because files that are opened later would get their numbers. `sys.stdout` and `sys.stderr`
    become UTF-8 whatever the locale is, since a recipe that is printed is read again as UTF-8.
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


CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\ufeff\u2028-\u202e\u2066-\u2069\ud800-\udfff"
    r"\U000e0000-\U000e007f]"
)
"""Characters that steer a terminal or the order in which it writes, and halves of characters."""


def printable(text: object, kept: str = "\n\t") -> str:
    """A value as text in which every control character but those in `kept` is a Python escape, such
    as \\x1b: what models, agents and names of files say reaches the terminal, and steers nothing.
    """

    def escaped(one: re.Match[str]) -> str:
        return one[0] if one[0] in kept else one[0].encode("unicode_escape").decode()

    return CONTROL.sub(escaped, str(text))


def result(text: str, *, colours: bool = False) -> None:
    """Print a command's result, `text` and a newline, on the standard output that the command
    started with; control characters are escaped but for `colours`, whose text the caller has made
    `printable`. Raises `UserError` if it cannot be written, as on a full disk; a closed pipe is no
    error.
    """
    try:
        _write(1, text if colours else printable(text))
    except OSError as error:
        raise UserError(
            f"standard output cannot be written: {error.strerror}; send it elsewhere, and repeat"
            " the command"
        ) from None


def say(text: str) -> None:
    """Print `text` and a newline on the standard error that the command started with and, within
    `diverted`, also to run.log; control characters are escaped. Errors of writing are ignored. May
    be called in a signal handler.
    """
    text = printable(text)
    _write(2, text)
    if _console.saved is not None:
        _log((text + "\n").encode(errors="backslashreplace"))


def elapsed_s() -> float:
    """Seconds since this process started the command."""
    return time.time() - STARTED_AT


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """A context manager for a phase of the start-up: at the end of the block, on rank 0, a line on
    standard error says how many seconds the phase `name` took. Nothing is printed after an error.
    """
    started_at = time.monotonic()
    yield
    if os.environ.get("RANK", "0") == "0":
        say(f"{name}: {time.monotonic() - started_at:.1f} s  [{elapsed_s():.0f} s]")


def terminal() -> TextIO | None:
    """The standard error that the command started with, as a stream for a progress bar, if it is a
    terminal; otherwise None.
    """
    if _console.saved is None:
        return sys.stderr if sys.stderr.isatty() else None
    terminal = _console.saved[1]
    return open(terminal, "w", buffering=1, closefd=False) if os.isatty(terminal) else None


def in_terminal() -> bool:
    """Whether the standard output that the command started with is a terminal."""
    return os.isatty(1 if _console.saved is None else _console.saved[0])


def open_log(folder: Path) -> None:
    """Within the context manager `diverted`: write what libraries and child processes have printed,
    and print from now on, to `folder`/run.log. Makes the folder if it is missing, and appends to an
    existing file. Does nothing outside of `diverted`.
    """
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
    """What was written to descriptors 1 and 2 within `diverted` before there was a log file."""
    return os.pread(_console.buffer, os.fstat(_console.buffer).st_size, 0)


def hold(folder: Path) -> Callable[[], None]:
    """Lock the run folder `folder` for this process (flock), so that no other run uses it, until
    the function that is returned is called or the process ends. Raises `UserError` if another
    process has it, `OSError` if there is no such folder. On a file system without locks, a line on
    standard error says so.
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
    """A context manager for a whole command: until the end of the block, what libraries and child
    processes print to file descriptors 1 and 2 is kept away from the user; `open_log` names the
    file that gets it, otherwise it is dropped. `say` and `result` still reach the user.

    An unexpected error of the block is printed on standard error as one line, and its traceback
    goes to the log; without a log, the traceback and what was kept go to standard error.
    `Reported`, which tells the caller to exit without a message, is then raised in its place. A
    `UserError` is written to the log and raised again.
    """
    saved = _console.saved = os.dup(1), os.dup(2)
    _console.buffer = os.memfd_create("megarl")
    _divert(_console.buffer)
    # Lines of one process come in their order, and none is lost where the process is killed.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        yield
    except Reported:
        raise
    except UserError as error:
        _log(printable(f"megarl: error: {error}\n").encode(errors="backslashreplace"))
        raise
    except Exception as error:
        _report(error)
        raise Reported from error
    finally:
        for number, descriptor in zip((1, 2), saved, strict=True):
            flush_streams()
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(_console.buffer)
        _console.saved, _console.log = None, None


@contextlib.contextmanager
def first_word() -> Iterator[None]:
    """A context manager for a block within `diverted`: an error is shown to the user as soon as it
    leaves the block, before the surrounding blocks clean up, and `Reported` is raised in its place.

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
    """Print one line about an exception that nobody has expected, and write its traceback to the
    run's log; without a log, print the traceback too.
    """
    trace = printable("".join(traceback.format_exception(error)))
    rank = os.environ.get("RANK", "0")
    who = f"error on rank {rank}" if rank != "0" else "error"
    said = " ".join(str(error).split()) or repr(error)
    line = f"megarl: {who}: {type(error).__name__}: {said[:SHOWN_CHARACTERS]}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        line += "; free some space where the run folder is, and go on with --resume auto"
    if isinstance(error, ProcessLost):  # the traceback of who asked it says nothing
        _log(f"rank {rank}: {trace}".encode(errors="backslashreplace"))
        say(f"megarl: {who}: {said}")
        return
    if _console.log is None:
        _write(2, printable(_kept().decode(errors="replace")) + trace + printable(line))
        return
    if _log(f"rank {rank}: {trace}".encode(errors="backslashreplace")):
        line += f" (the traceback, and what libraries said, are in {_console.log})"
    else:
        line += f" (the traceback could not be written to {_console.log})"
    say(line)
