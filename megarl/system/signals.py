"""SIGTERM, Ctrl-C and SIGHUP: the first signal lets a run save a checkpoint and end, a second one
ends it at once, and no process is left.

While a run starts, the first signal raises `EndedBySignal`. Inside of `graceful` it sets a flag,
and another one raises. `guard` ends the process by force where neither does so in time.
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
from megarl.system.files import in_thread

SIGNALS = tuple(
    number
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
)
"""Under `nohup` SIGHUP stays ignored."""

SAME_WITHIN_S = 1.0
"""Signals this close are one: torchrun's ranks get Ctrl-C from terminal and launcher."""

SAVE_WITHIN_S = 6.0
"""For step and checkpoint after a signal, unless `training.checkpoint.save_within_s` is set."""

SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""torchrun's variable: seconds after a signal until it kills its ranks."""

SHUTDOWN_S = 30
"""Its default."""


_save_within_s = SAVE_WITHIN_S


def save_within(seconds: float) -> None:
    """From now on, allow `seconds` for step and checkpoint after a signal."""
    global _save_within_s
    _save_within_s = seconds


class EndedBySignal(KeyboardInterrupt):
    """Raised in the main thread by a signal, so that all that was started is stopped.

    A call of Ray ends on no other exception than `KeyboardInterrupt`, and raises one of its own:
    catch that, and use `ending`.
    """

    def __init__(self, number: int, *, is_said: bool = False) -> None:
        """`is_said`: the user has been told how the run has ended."""
        super().__init__(number)
        self.number, self.is_said = number, is_said


_ended: EndedBySignal | None = None
"""What `_end` raised."""


def ending(caught: KeyboardInterrupt) -> EndedBySignal:
    """The `EndedBySignal` behind `caught`, or a new one for Ctrl-C."""
    return caught if isinstance(caught, EndedBySignal) else _ended or EndedBySignal(signal.SIGINT)


def _hear(handler: Any) -> dict[signal.Signals, Any]:
    """Install a handler; returns {signal: its handler before}."""
    return {number: signal.signal(number, handler) for number in SIGNALS}


class Stop:
    """A flag that is true once a signal has asked the run to stop; `graceful` yields it."""

    def __init__(self) -> None:
        self.number = 0
        """The signal."""
        self.at = 0.0
        """When it came, by `time.monotonic`."""
        self.done = threading.Event()

    def __bool__(self) -> bool:
        return self.number != 0

    def end(self, done: int, *, is_main: bool) -> NoReturn:
        """Raise `EndedBySignal`; with `is_main` say which checkpoint was saved."""
        self.done.set()
        if is_main:
            kept = f"the checkpoint of step {done} is saved" if done else "no step was finished"
            say(f"megarl: ended before step {done + 1}: {kept}; --resume auto goes on from there")
        raise EndedBySignal(self.number or signal.SIGTERM, is_said=True)


def handle() -> None:
    """From now on, the first signal raises `EndedBySignal`, and later ones are ignored."""
    _hear(_end)


def _end(number: int, frame: FrameType | None) -> None:
    global _ended
    _hear(signal.SIG_IGN)
    _ended = EndedBySignal(number)
    raise _ended


def ignore_while_closing() -> None:
    """Signals no longer interrupt this process, which has failed and is closing; `guard` goes
    on.
    """
    if threading.current_thread() is threading.main_thread():
        _hear(lambda number, frame: None)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """On Linux, get the signal `number` when the thread that started this process ends. If `parent`
    has ended already, exit.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, int(number))
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def become(parent: int, command: list[str], number: int = signal.SIGKILL) -> None:
    """Replace this process by `command`, which gets `number` when `parent` ends. Raises
    `OSError`.
    """
    die_with_parent(parent, number)
    os.execvp(command[0], command)  # noqa: S606 - the command is the caller's


AGENT = "MEGARL_AGENT"
"""Variable of ranks: the process id of megarl's torchrun."""


def die_with_launcher() -> None:
    """End with torchrun's agent, even a killed one: this rank would go on writing to the run
    folder.
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
    """Keep signals blocked in this thread, as SIGTERM is in Ray's processes: multiprocessing's
    first start of a process would unblock them, so another thread makes it.
    """
    from multiprocessing import resource_tracker

    in_thread("resource tracker", resource_tracker.ensure_running).result()


def name_of(number: int) -> str:
    """For users."""
    names = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP (the terminal was closed)"}
    return names.get(signal.Signals(number), signal.Signals(number).name)


_is_under_way = False
"""Whether `graceful` was entered."""


def say_end(command: str, ended: EndedBySignal, *, trains: bool) -> None:
    """On rank 0, say that a signal has ended the command, unless `ended.is_said`."""
    if not ended.is_said and os.environ.get("RANK", "0") == "0":
        stage = "while it was starting" if trains and not _is_under_way else "before it was done"
        say(f"megarl: {name_of(ended.number)}: megarl {command} ended {stage}")


@contextlib.contextmanager
def graceful() -> Iterator[Stop]:
    """For the training loop: the first signal only sets the yielded `Stop`; another one, more than
    a second later, raises `EndedBySignal`. Rank 0 says what happens.
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
        in_thread("checkpoint at a signal", too_late)

    before = _hear(first)
    try:
        yield stop
    finally:
        stop.done.set()
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if stop else handler)  # if it is ending already


def guard(within_s: float) -> None:
    """Start a thread that ends this process and its children `within_s` after a signal (and what
    `save_within` allows above 6), or 1.5 seconds after a second one.

    Signal handlers wait until C code returns. The thread reads the wake-up descriptor, to which the
    interpreter writes at once.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def wait() -> None:
        first, number, deadline = 0.0, 0, float("inf")
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([ours], [], [], None if number == 0 else left)[0]:
                continue
            received, now = ours.recv(1)[0], time.monotonic()
            if received in SIGNALS and number == 0:
                patience_s = within_s + max(0.0, _save_within_s - SAVE_WITHIN_S)
                first, number, deadline = now, received, now + patience_s
            elif received in SIGNALS and now - first > SAME_WITHIN_S:
                deadline = min(deadline, now + 1.5)
        end_now(number, time.monotonic() - first)

    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    in_thread("guard", wait)


def end_now(number: int, after_s: float) -> NoReturn:
    """Kill all children and exit with 128 + `number`, because the regular way out hangs."""
    import psutil

    say(f"megarl: still running {after_s:.1f} s after {name_of(number)}: killing child processes")
    with contextlib.suppress(OSError, ValueError):  # where each thread was, for run.log
        faulthandler.dump_traceback(2)
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(128 + number)
