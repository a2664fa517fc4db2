"""The report of a wait that has passed its deadline: what every process of the run does, with the
Python stacks of its threads, as `faulthandler` writes them.

Each process has a file RUN/activity/stacks/<process>.txt for its stacks. It writes to the file when
the content of the file `request` in that folder changes, or, where C code holds Python's lock, when
it gets a signal. A stopped process does neither.
"""

from __future__ import annotations

import faulthandler
import fcntl
import itertools
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from megarl.activity.files import Life, chain, content_of, of_run, read_lives, seconds
from megarl.activity.process import below
from megarl.activity.spans import Span, now
from megarl.console import say
from megarl.files import read_json

LAST = "last_report"
"""Name of the file in RUN/activity with the newest report's time, line and waits."""
STACKS, REQUEST = "stacks", "request"
SIGNAL = getattr(signal, "SIGRTMIN", -8) + 8
"""A real-time signal, which neither Python, torch, Ray nor vLLM uses. It is sent only to processes
that say in their file that they handle it; 0 where there is no such signal."""
ANSWER_S = 1.5
"""Seconds that processes have to answer the request, and then again, if they do not, the signal."""
PATIENCE_S = 5.0
"""Seconds that a process waits for another one that writes a report, and in which no second report
is written about waits that began before the first."""
SAME_S = 30.0
"""The same number of seconds while a wait goes on that the first report names as overdue."""


MOST_RECENT = b"(most recent call first)"
"""Text that faulthandler writes above the stack of each thread."""


class Stacks:
    """Writes the Python stacks of this process's threads to the file `folder`/`process`.txt: after
    construction when the process gets the signal `SIGNAL` (SIGRTMIN + 8), and by `answer`.
    `folder`: RUN/activity/stacks.
    """

    def __init__(self, folder: Path, process: str) -> None:
        """`folder`: RUN/activity/stacks. Raises `OSError`."""
        self._request, self._file = folder / REQUEST, (folder / f"{process}.txt").open("w")
        self._asked = content_of(self._request)
        if SIGNAL:
            faulthandler.register(SIGNAL, self._file, all_threads=True)

    def answer(self) -> None:
        """Write the stacks of all threads to this process's file if the content of the file
        `request` in the same folder, by which another process asks for them, has changed since the
        last call. Called again and again.
        """
        if (asked := content_of(self._request)) not in (b"", self._asked):
            self._asked = asked
            with suppress(OSError):  # such as a full disk
                for one in threading.enumerate():
                    self._file.write(f"thread {one.ident or 0:#018x} is {one.name}\n")
                self._file.flush()
                faulthandler.dump_traceback(self._file, all_threads=True)
                os.fsync(self._file.fileno())  # or another host reads it late, over NFS


def stacks_of(
    folder: Path, lives: Sequence[Life], own: Callable[[], None] = lambda: None
) -> dict[str, str]:
    """Ask the processes in `lives` for their Python stacks and wait for at most 3 seconds. Returns
    {name of the process: its stacks as text, or why there are none}. `folder`: `activity` in the
    run folder. `own`: function that writes this process's own stacks when asked, such as
    `Stacks.answer`; called again and again during the wait. Raises `OSError` if the request cannot
    be written.
    """
    found = {one.process: "none: the process did not answer" for one in lives}
    found |= {one.process: f"none: the process is {one.condition}" for one in lives if one.is_out}
    waiting = {one.process: one for one in lives if not one.is_out}
    files = {name: folder / STACKS / f"{name}.txt" for name in waiting}
    before, seen = {name: len(content_of(file)) for name, file in files.items()}, {}
    (folder / STACKS / REQUEST).write_text(uuid.uuid4().hex)
    for note in ("", "(the process answered only a signal: C code runs)\n"):
        for one in waiting.values() if note else ():
            if one.signal and one.is_alive:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(one.pid, one.signal)
        until = time.monotonic() + ANSWER_S
        while waiting and time.monotonic() < until:
            own()
            time.sleep(0.05)
            for name in list(waiting):
                text = content_of(files[name])[before[name] :]
                # Names of threads come first; the stacks of the last thread are the end.
                if MOST_RECENT in text and text == seen.get(name):
                    found[name] = note + text.decode(errors="replace")
                    del waiting[name]
                seen[name] = text
    return found


class Last(NamedTuple):
    """The newest report of a run: when it was written (`at`), its first line (`line`), and the
    waits that it names as overdue, by their process (`process`) and the numbers of their spans
    (`numbers`).
    """

    at: float = 0.0
    """When it was written, in seconds since the epoch; 0 for none."""
    line: str = ""
    process: str = ""
    """Name of the process whose waits the report names as overdue."""
    numbers: Sequence[int] = ()
    """Numbers of the spans of these waits."""


def last_report(folder: Path) -> Last:
    """The newest report about a wait that took too long, read from `folder`, which is `activity` in
    the run folder; an empty `Last`, with `at` 0, if there is none.
    """
    with suppress(OSError, ValueError, TypeError):
        return Last(*read_json(folder / LAST))
    return Last()


def report(
    folder: Path, process: str, late: Sequence[Span], own: Callable[[], None] = lambda: None
) -> None:
    """Write RUN/waits-<time>.txt about the spans `late` of the process named `process`, which have
    passed their deadline, with the state and stacks of all processes. Does nothing if the newest
    report tells of these waits already. Blocks for some seconds. `folder`: RUN/activity. `own`:
    function that writes this process's own stacks when asked, such as `Stacks.answer`; called again
    and again meanwhile. Raises `OSError` if a file cannot be written.
    """
    until = time.monotonic() + PATIENCE_S
    with (folder / ".lock").open("w") as lock:
        # A writer may be stopped, and a file system be without locks: two reports are better than
        # none.
        while time.monotonic() < until:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                own()
                time.sleep(0.05)
            except OSError:
                break
        lives = {one.process: one for one in of_run(read_lives(folder, only_last=True))}
        if process in lives and not _has(last_report(folder), late, lives):
            answered = stacks_of(folder, list(lives.values()), own)
            _write(folder, process, late, lives, answered)


def _has(last: Last, late: Sequence[Span], lives: Mapping[str, Life]) -> bool:
    """Whether the newest report has the waits `late` too. `lives`: {process: its record}."""
    spans = lives[last.process].spans if last.process in lives else {}
    lasts = any("end" not in spans.get(number, {"end": 0}) for number in last.numbers)
    age_s, began = now() - last.at, min(one.moved_at for one in late)
    return last.at > began and age_s < (SAME_S if lasts else PATIENCE_S)


def _write(
    folder: Path,
    process: str,
    late: Sequence[Span],
    lives: Mapping[str, Life],
    answered: Mapping[str, str],
) -> None:
    at, name = now(), time.strftime("waits-%Y%m%d-%H%M%S")
    names = (f"{name}{f'-{number}' if number > 1 else ''}.txt" for number in itertools.count(1))
    path = next(path for one in names if not (path := folder.parent / one).exists())
    span = late[0].event(process)
    around = "".join(f", in {one['name']}" for one in lives[process].around(span))
    keeps = "; ".join(chain(process, span, lives, at)) or "who that is, is not recorded"
    line = (
        f"megarl: {process} has waited {seconds(at - late[0].moved_at)} for {late[0].what}{around}"
        f" (deadline {seconds(late[0].deadline_s)}): {keeps};"
        f" all processes and their stacks: {path}"
    )
    lines = [line, "", f"{time.strftime('%Y-%m-%d %H:%M:%S')}, written by {process}", ""]
    for one in late:
        waited = f"{seconds(at - one.moved_at)} of {seconds(one.deadline_s)}"
        lines.append(f"overdue: {process}: {one.what}, {waited}")
    lines += ["", "processes:", *described(list(lives.values()), answered, at), ""]
    last = json.dumps(Last(at, line, process, [one.number for one in late]))
    for target, text in ((path, "\n".join(lines)), (folder / LAST, last)):
        # Not synced: it is written where something hangs, which may be the disk.
        aside = target.with_name(f".{target.name}.{os.getpid()}")
        aside.write_text(text, errors="backslashreplace")
        aside.replace(target)
    if "rank0" not in lives or lives["rank0"].condition != "alive":
        say(line)  # otherwise rank 0 does: its standard error is the user's


def described(lives: Sequence[Life], answered: Mapping[str, str], at: float) -> Iterator[str]:
    """Iterate over the lines of a report. First comes what each process does at `at`, in seconds
    since the epoch. Then, unless `answered` is empty, come the child processes and the stacks of
    each process. `lives`: recordings of the processes; `answered`: {name of a process: text of its
    stacks}.
    """
    for one in lives:
        head = f"  {one.process:12} {one.condition:20} "
        last = f"idle, last line {seconds(at - one.last)} ago"
        idle = last if one.spans else "only its stacks are recorded"
        for does in [one.doing(span, at) for span in one.open] or [idle]:
            yield head + does
            head = " " * len(head)
    known = frozenset(one.pid for one in lives)
    for one in lives if answered else ():
        yield from ("", f"==== {one.process} (process {one.pid} on {one.host}), {one.condition}")
        for child in below(one.pid, known) if one.is_alive else ():
            with suppress(psutil.Error):
                used_s, words = sum(child.cpu_times()[:2]), " ".join(child.cmdline())
                about = f"{child.status()}, {used_s:.1f} s of CPU: {words[:80]}"
                yield f"  below it: process {child.pid}, {about}"
        yield from ("", answered.get(one.process, "").rstrip())
