"""SIGTERM, Ctrl-C and SIGHUP (the terminal was closed): the first signal lets a run save a
checkpoint and end, a second one ends it at once, and no process that the run has started is left.

While a run starts, the first signal raises `EndedBySignal`. Inside of `graceful`, the first signal
sets a flag, on which the training loop saves a checkpoint and ends; another one raises
`EndedBySignal`. `guard` ends the process by force where neither does so in time.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from megarl.system.console import say

SIGNALS = tuple(
    number
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
)
"""Signals on which a run stops its processes and exits. Under `nohup`, which starts a process with
SIGHUP ignored, SIGHUP stays ignored."""

SAME_WITHIN_S = 1.0
"""Signals that arrive within this many seconds are one: under torchrun a rank gets Ctrl-C from the
terminal and from the launcher."""

SAVE_WITHIN_S = 6.0
"""Seconds after a signal until the step and its checkpoint must be finished, where the recipe's
`training.checkpoint.save_within_s` does not say otherwise."""

SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Name of torchrun's environment variable: seconds after a signal until it kills its ranks."""

SHUTDOWN_S = 30
"""The same where the variable is not set."""

SECOND_WITHIN_S = 1.5
"""Seconds after a second signal until the process ends by force."""


_save_within_s = SAVE_WITHIN_S
"""What `save_within` was called with last."""


def save_within(seconds: float) -> None:
    """From now on, allow `seconds` seconds after a signal for the training step under way and its
    checkpoint, in place of the default of 6 (`SAVE_WITHIN_S`). After that time the user is told
    that there is no checkpoint, and the thread of `guard` soon ends the process.
    """
    global _save_within_s
    _save_within_s = seconds


class EndedBySignal(KeyboardInterrupt):
    """Raised in the main thread by SIGTERM, Ctrl-C or SIGHUP, like an error, so that everything
    that was started is stopped. `number`: the signal. `is_said`: the user has been told how the run
    has ended.

    It is a `KeyboardInterrupt`, because a call of Ray ends on no other exception of a signal
    handler; Ray then raises a `KeyboardInterrupt` of its own. Catch `KeyboardInterrupt`; `ending`
    returns the `EndedBySignal` behind it.
    """

    def __init__(self, number: int, *, is_said: bool = False) -> None:
        """`number`: the signal. `is_said`: the user has been told how the run has ended."""
        super().__init__(number)
        self.number, self.is_said = number, is_said


_ended: EndedBySignal | None = None
"""What `_end` raised; None before."""


def ending(caught: KeyboardInterrupt) -> EndedBySignal:
    """The `EndedBySignal` behind `caught`, which is `caught` itself if it is one. Libraries such as
    Ray raise a plain `KeyboardInterrupt` instead: for such a one, returns what the signal handler
    of this process has raised, or, if it has raised nothing, a new `EndedBySignal` for Ctrl-C.
    """
    return caught if isinstance(caught, EndedBySignal) else _ended or EndedBySignal(signal.SIGINT)


def _hear(handler: Any) -> dict[signal.Signals, Any]:
    """Install a handler of all these signals; returns {signal: its handler before}."""
    return {number: signal.signal(number, handler) for number in SIGNALS}


class Stop:
    """A flag that says whether a signal has asked the run to stop; true in conditions (`if stop:`)
    once that is so. The context manager `graceful` yields it, and the training loop reads it
    between two steps, saves a checkpoint and calls `end`.
    """

    def __init__(self) -> None:
        self.number = 0
        """The signal; 0 before there is one."""
        self.at = 0.0
        """When the signal came, by `time.monotonic`."""
        self.done = threading.Event()

    def __bool__(self) -> bool:
        return self.number != 0

    def end(self, done: int, *, is_main: bool) -> NoReturn:
        """End a run of which `done` steps are done and saved, by raising `EndedBySignal`, after
        which the process exits. With `is_main`, on rank 0, a line on standard error says which
        checkpoint was saved.
        """
        self.done.set()
        if is_main:
            kept = f"the checkpoint of step {done} is saved" if done else "no step was finished"
            say(f"megarl: ended before step {done + 1}: {kept}; --resume auto goes on from there")
        raise EndedBySignal(self.number or signal.SIGTERM, is_said=True)


def handle() -> None:
    """Install signal handlers, so that the first SIGTERM, Ctrl-C or SIGHUP raises `EndedBySignal`
    in the main thread, and later ones are ignored. Called once, in the main thread, when the
    command starts.
    """
    _hear(_end)


def _end(number: int, frame: FrameType | None) -> None:
    """Signal handler: raise `EndedBySignal` at the first signal and ignore later ones."""
    global _ended
    _hear(signal.SIG_IGN)
    _ended = EndedBySignal(number)
    raise _ended


def ignore_while_closing() -> None:
    """From now on, SIGTERM, Ctrl-C and SIGHUP no longer interrupt this process, which has failed
    and is closing what it has started. The thread of `guard` still ends the process by force, as
    long after a signal as always. Does nothing outside of the main thread.
    """
    if threading.current_thread() is threading.main_thread():
        _hear(lambda number, frame: None)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """On Linux, make the kernel send this process the signal `number` when the thread that started
    it ends for any reason. `parent`: process id of the parent; if it has ended already, this
    process exits with code 1.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(number))
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def become(parent: int, command: list[str], number: int = signal.SIGKILL) -> None:
    """Replace this process by the program `command` (exec), which gets the signal `number` when its
    parent, the process with the id `parent`, ends. Never returns; raises `OSError` if the program
    cannot be started.
    """
    die_with_parent(parent, number)
    os.execvp(command[0], command)  # noqa: S606 - the command is the caller's


AGENT = "MEGARL_AGENT"
"""Name of an environment variable of ranks: the process id of megarl's torchrun."""


def die_with_launcher() -> None:
    """Under torchrun, make the kernel kill this rank when torchrun's agent ends, even if the agent
    is killed: a rank of a dead run would go on writing to the run folder. Without torchrun, as
    under a shell or srun, nothing is done.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent, agent = os.getppid(), os.environ.get(AGENT, "")
    if agent.isdecimal():
        try:
            os.kill(int(agent), 0)
        except ProcessLookupError:  # it ended while this rank started
            os._exit(1)
    die_with_parent(parent)


def keep_blocked_signals() -> None:
    """Keep the signals blocked that are blocked in the calling thread, such as SIGTERM in Ray's
    processes under `megarl run`. Called once, before this process first starts another one by
    multiprocessing: that would unblock SIGTERM and SIGINT in the calling thread. Here another
    thread takes this effect.
    """
    from multiprocessing import resource_tracker

    thread = threading.Thread(target=resource_tracker.ensure_running)
    thread.start()
    thread.join()


def name_of(number: int) -> str:
    """The name of a signal for users: "Ctrl-C" for SIGINT, otherwise such as "SIGTERM"."""
    names = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP (the terminal was closed)"}
    return names.get(signal.Signals(number), signal.Signals(number).name)


_is_under_way = False
"""Whether `graceful` was entered."""


def say_end(command: str, ended: EndedBySignal, *, trains: bool) -> None:
    """On rank 0, print a line on standard error that a signal has ended `megarl COMMAND`, unless
    `ended.is_said`. `trains`: the command trains, so that the line says whether the run was still
    starting.
    """
    if not ended.is_said and os.environ.get("RANK", "0") == "0":
        stage = "while it was starting" if trains and not _is_under_way else "before it was done"
        say(f"megarl: {name_of(ended.number)}: megarl {command} ended {stage}")


@contextlib.contextmanager
def graceful() -> Iterator[Stop]:
    """A context manager for the training loop, in the main thread: until the end of the block, the
    first SIGTERM, Ctrl-C or SIGHUP only sets the yielded `Stop`, at which the loop looks between
    two steps. A second signal, more than a second later, raises `EndedBySignal`. Rank 0 says on
    standard error what happens.
    """
    global _is_under_way
    _is_under_way, stop = True, Stop()
    is_main = os.environ.get("RANK", "0") == "0"

    def too_late() -> None:
        if not stop.done.wait(_save_within_s) and is_main:
            say(
                f"megarl: no checkpoint of this moment: the step and its checkpoint were not"
                f" finished {_save_within_s:g} s after the signal; earlier checkpoints are whole"
                " (training.checkpoint: save_within_s, every)"
            )

    def first(number: int, frame: FrameType | None) -> None:
        if stop:
            if time.monotonic() - stop.at > SAME_WITHIN_S:
                _end(number, frame)
            return
        stop.number, stop.at = number, time.monotonic()
        if is_main:
            say(
                f"megarl: {name_of(number)}: the run saves a checkpoint of the last finished step"
                f" and ends, within {_save_within_s:g} s; once more to end at once"
            )
        threading.Thread(target=too_late, daemon=True).start()

    before = _hear(first)
    try:
        yield stop
    finally:
        stop.done.set()
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if stop else handler)  # if it is ending already


def guard(within_s: float) -> None:
    """Start a daemon thread that ends this process and its children by force if the process still
    runs `within_s` seconds after a SIGTERM, Ctrl-C or SIGHUP, or 1.5 seconds after a second signal.
    If `save_within` allows more than 6 seconds, the seconds above 6 are added to `within_s`.
    Returns at once; called once, in the main thread.

    A Python signal handler waits until a library's C code returns. This thread does not: it reads
    the wake-up descriptor, to which the interpreter writes a byte as soon as a signal arrives.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def wait() -> None:
        first, number, deadline = 0.0, 0, float("inf")
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([ours], [], [], None if number == 0 else left)[0]:
                continue
            found, now = ours.recv(1)[0], time.monotonic()
            if found in SIGNALS and number == 0:
                patience_s = within_s + max(0.0, _save_within_s - SAVE_WITHIN_S)
                first, number, deadline = now, found, now + patience_s
            elif found in SIGNALS and now - first > SAME_WITHIN_S:
                deadline = min(deadline, now + SECOND_WITHIN_S)
        end_now(number, time.monotonic() - first)

    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    threading.Thread(target=wait, daemon=True).start()


def end_now(number: int, after_s: float) -> NoReturn:
    """Kill all child processes and exit with code 128 + `number`, the signal that asked for the end
    `after_s` seconds ago, because the regular way out hangs, for example in a collective. A line on
    standard error says so.
    """
    import psutil

    say(f"megarl: still running {after_s:.1f} s after {name_of(number)}: killing child processes")
    with contextlib.suppress(OSError, ValueError):  # where each thread was, for run.log
        faulthandler.dump_traceback(2)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(128 + number)
