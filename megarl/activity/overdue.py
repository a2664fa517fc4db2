"""The report of a wait that has passed its deadline: what every process of the run does."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.activity import stacks
from megarl.activity.files import Life, SpanRecord, of_run, read
from megarl.activity.process import descendants
from megarl.activity.state import chain, condition, doing, seconds
from megarl.console import say
from megarl.files import read_json

LAST = "last_report"
"""Name of the file in RUN/activity that tells of the newest report."""
SAME_S = 30.0
"""Seconds after a report in which no other one is written about a wait that began before it, as
long as a wait that the report names as overdue lasts."""
AT_ONCE_S = 5.0
"""Seconds in which no other report is written even if that wait has ended: where a process hangs,
the waits of several others for it pass their deadlines and end one shortly after the other."""
LOCK_WITHIN_S = 4.0
"""Seconds to wait for another process of the run that writes a report."""
TAIL_BYTES = 2**18
"""Bytes read from the end of a file for what its process does now."""


@dataclass(frozen=True)
class Overdue:
    """A wait of this process that has passed its deadline."""

    number: int
    """Number of the span; 0 for a wait without one."""
    what: str
    of: list[str]
    waited_s: float
    deadline_s: float


def report(
    folder: Path,
    process: str,
    found: Sequence[Overdue],
    own_stacks: Callable[[], None] = lambda: None,
) -> Path | None:
    """Write RUN/waits-<time>.txt about waits of `process`; returns its path. Of several processes
    that call it at once one writes; None for the others. `folder`: RUN/activity. `own_stacks`:
    see `stacks.collect`. Raises `OSError`.
    """
    asked_at = time.time()
    with _lock(folder, own_stacks):
        lives = {one.process: one for one in of_run(read(folder, only_last=True))}
        since = asked_at - max(one.waited_s for one in found)
        if process not in lives or _is_reported(folder, lives, since, asked_at):
            return None
        answered = stacks.collect(folder / stacks.FOLDER, list(lives.values()), own_stacks)
        lives = {one.process: one for one in of_run(read(folder, only_last=True))} or lives
        path = _unused(folder.parent)
        line = summary(found[0], process, lives, path)
        text = "\n".join([line, "", *_body(found, process, lives, answered)])
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.write_text(text)
        aside.replace(path)
        aside = folder / f".{LAST}.{os.getpid()}"
        aside.write_text(json.dumps([time.time(), line, process, [one.number for one in found]]))
        aside.replace(folder / LAST)
    speaker = lives.get("rank0")
    if speaker is None or condition(speaker) != "alive":
        say(line)
    return path


def last_report(folder: Path) -> tuple[float, str] | None:
    """(seconds since the epoch, line) of the newest report; None without one."""
    with suppress(OSError, ValueError, TypeError):
        at, line, *_ = read_json(folder / LAST)
        return float(at), str(line)
    return None


def _is_reported(folder: Path, lives: Mapping[str, Life], since: float, now: float) -> bool:
    """Whether no report is needed of a wait that began at `since`, because the newest report has it
    too. Both in seconds since the epoch; `lives`: {process: what it has recorded}.
    """
    try:
        at, _, process, numbers = read_json(folder / LAST)
    except (OSError, ValueError, TypeError):
        return False
    if at <= max(since, now - SAME_S):
        return False
    spans = lives[process].spans if process in lives else {}
    lasts = any(number in spans and spans[number].end is None for number in numbers)
    return lasts or at > now - AT_ONCE_S


def summary(found: Overdue, process: str, lives: Mapping[str, Life], path: Path) -> str:
    """The line on standard error: which wait, on whom, how long, and what that process does."""
    own, now = lives[process], time.time()
    span = own.spans.get(found.number) or SpanRecord(
        found.number, 0, "wait", found.what, tuple(found.of), found.deadline_s, now - found.waited_s
    )
    around = "".join(f", in {one.what}" for one in own.around(span))
    keeps = "; ".join(chain(process, span, lives, now)) or "who that is, is not recorded"
    return (
        f"megarl: {process} has waited {seconds(found.waited_s)} for {found.what}{around} (deadline"
        f" {seconds(found.deadline_s)}): {keeps}; all processes and their stacks: {path}"
    )


def _body(
    found: Sequence[Overdue],
    process: str,
    lives: Mapping[str, Life],
    answered: Mapping[str, str],
) -> list[str]:
    now, known = time.time(), frozenset(one.pid for one in lives.values())
    lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')}, written by {process}", ""]
    lines += [
        f"overdue: {process}: {one.what}, {seconds(one.waited_s)} of {seconds(one.deadline_s)}"
        for one in found
    ]
    lines += ["", "processes:"]
    for one in lives.values():
        lines += table(one, now)
    for one in lives.values():
        lines += ["", f"==== {one.process} (process {one.pid} on {one.host}), {condition(one)}"]
        if one.is_alive:
            lines += below(one, known)
        lines += ["", answered.get(one.process, "").rstrip()]
    return [*lines, ""]


def table(life: Life, now: float) -> list[str]:
    """The lines about one process: what it does, one line for each thing."""
    spans = life.open
    head = f"  {life.process:12} {condition(life):20} "
    rest = [doing(life, span, now) for span in spans] or [
        f"idle, last line {_ago(life, now)}" if life.spans else "only its stacks are recorded"
    ]
    return [head + rest[0], *(" " * len(head) + text for text in rest[1:])]


def below(life: Life, without: frozenset[int]) -> list[str]:
    """The lines about the processes that a process has started, such as vLLM's."""
    return [
        f"  below it: process {one.process}, {one.state}, {one.cpu_s:.1f} s of CPU: {one.name}"
        for one in descendants(life.pid, without=without - {life.pid})
    ]


def _ago(life: Life, now: float) -> str:
    return f"{seconds(now - life.last)} ago"


def _unused(folder: Path) -> Path:
    """A path for a report that is not there yet."""
    name = f"waits-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        path = folder / f"{name}{f'-{number}' if number > 1 else ''}.txt"
        if not path.exists():
            return path
    raise FileExistsError(f"{folder}/{name}-999.txt is there already")


@contextmanager
def _lock(folder: Path, meanwhile: Callable[[], None]) -> Iterator[None]:
    """A context that one process of the run is in at a time. A process that waits too long, or a
    file system without locks, goes in all the same: two reports are better than none. `meanwhile`:
    called again and again while this process waits.
    """
    descriptor = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o644)
    try:
        deadline = time.monotonic() + LOCK_WITHIN_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                meanwhile()
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)
