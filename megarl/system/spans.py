"""What each process of a run does, as Chrome trace events in RUN/activity/PROCESS.json.

    with activity("rollouts of step 7", kind="wait", of="service", deadline_s=600):
        ...

A span has a line for its begin and one for its end: without the latter it goes on.

    {"ph": "M", "name": "process_name", "args": {"name": "rank0", "host": ...}}   the process starts
    {"ph": "B", "id": 7, "name": "rollouts of step 7", "cat": "wait",
     "args": {"waits on": ["service"], "deadline_s": 600}}                        a span begins
    {"ph": "E", "id": 7}                                                          it ends
    {"ph": "i", "name": "step 7", "args": {"step": 7, "version": 6}}              a step begins
    {"ph": "i", "name": "closed"}                                                 a regular end

Each event has `ts` (microseconds since the epoch), `pid` (of this start of the process, unique in
the run) and `tid` (of open spans no two have the same).
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.system.console import say
from megarl.system.files import in_thread
from megarl.system.process_state import machine, start_of

Kind = (
    Literal["generate", "score", "wait", "logprobs", "train", "optimizer"]
    | Literal["publish", "checkpoint", "evaluate", "load"]
)
Whom = str | Sequence[str | int]
"""A name such as "service" or "engine0", or several; a number is a rank."""
Event = dict[str, Any]

FOLDER, STACKS = "activity", "stacks"
"""In the run folder, and in that for Python stacks."""
SIGNAL = signal.SIGRTMIN + 8
"""Has a recording process write its stacks to STACKS/PROCESS.txt. Neither Python, torch, Ray nor
vLLM uses it.
"""
MAX_BYTES = 4 * 2**20
"""Size at which a file becomes PROCESS.1.json."""
QUIET_S = 1.0
"""Until a quiet span is written."""
NAMED_RANKS = 16
"""A wait for more ranks tells only how many."""

WRITERS: list[TraceWriter] = []
"""The open trace, if there is one."""
os.register_at_fork(after_in_child=WRITERS.clear)
_STARTED_AT = time.time() - time.monotonic()


def micros() -> int:
    """Since the epoch, by a clock that is not set back."""
    return round(1e6 * (_STARTED_AT + time.monotonic()))


@dataclass(frozen=True)
class Recording:
    """Where a run's processes record; can be pickled."""

    folder: str
    """RUN/activity, absolute."""
    run: str
    """Id of the run."""

    @classmethod
    def of(cls, run_folder: str | Path, run: str, *, enabled: bool) -> Recording | None:
        """None unless `enabled`. Creates nothing."""
        return cls(str(Path(run_folder).absolute() / FOLDER), run) if enabled else None

    @classmethod
    def beside(cls, part: str) -> tuple[Recording, str] | None:
        """(recording, name such as "engine0-core") for a child process, if this one records."""
        return next(((writer.recording, f"{writer.process}-{part}") for writer in WRITERS), None)

    def make(self, *, keep: bool) -> None:
        """On rank 0, first: create the folder. `keep`: earlier traces."""
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # `open` tells it
            (Path(self.folder) / STACKS).mkdir(parents=True, exist_ok=True)

    def open(self, process: str) -> Callable[[], None]:
        """Record this process; returns `close_recording`. Where that is impossible, a line says
        so.
        """
        try:
            WRITERS[:] = [TraceWriter(self, process)]
        except OSError as error:
            say(f"megarl: what {process} does is not recorded: {error}")
        return close_recording


def close_recording() -> None:
    """Record the regular end of this process."""
    while WRITERS:
        WRITERS.pop().close()


@dataclass(eq=False)
class Span:
    """What this process does in a block."""

    event: Event
    is_quiet: bool
    is_written: bool = False

    def __enter__(self) -> Span:
        for writer in WRITERS:
            writer.start(self)
        return self

    def __exit__(self, *_: object) -> None:
        for writer in WRITERS:
            writer.finish(self)


def activity(
    what: str, *, kind: Kind, of: Whom = (), deadline_s: float = 0.0, quiet: bool = False
) -> Span:
    """Records its block. `of`: whom it waits for; `deadline_s`: after which it fails; `quiet`:
    written only if it lasts.
    """
    names = [f"rank{name}" if isinstance(name, int) else name for name in of]
    whom = [of] if isinstance(of, str) else names
    whom = whom if len(whom) <= NAMED_RANKS else [f"{len(whom)} ranks"]
    args = {"waits on": whom, "deadline_s": deadline_s}
    return Span({"ph": "B", "name": what, "cat": kind, "args": args}, quiet)


class Requests:
    """Overlapping requests of one event loop as one span; each is a block `with requests:`."""

    def __init__(self, what: str, *, kind: Kind, of: Whom = ()) -> None:
        self._new, self._open = lambda: activity(what, kind=kind, of=of), 0

    def __enter__(self) -> None:
        if not self._open:
            self._span = self._new().__enter__()
        self._open += 1

    def __exit__(self, *_: object) -> None:
        self._open -= 1
        if not self._open:
            self._span.__exit__()


def step_begins(step: int, version: int) -> None:
    """`step` counts from 1."""
    for writer in WRITERS:
        writer.mark(f"step {step}", step=step, version=version)


class TraceWriter:
    """Writes the spans of this process; a thread writes quiet ones that last."""

    def __init__(self, recording: Recording, process: str) -> None:
        """Raises `OSError`."""
        self.recording, self.process = recording, process
        folder, pid = Path(recording.folder), os.getpid()
        labels = {"name": process, "host": os.uname().nodename, "pid": pid}
        labels |= {"started": start_of(pid), "machine": machine(), "run": recording.run}
        self._head = {"name": "process_name", "ph": "M", "ts": micros(), "args": labels}
        self._number, self._step = zlib.crc32(json.dumps(self._head).encode()), Event()
        self._open, self._ids, self._lock = list[Span](), itertools.count(1), threading.RLock()
        faulthandler.register(SIGNAL, (folder / STACKS / f"{process}.txt").open("w"))
        self._path, self._closed = folder / f"{process}.json", threading.Event()
        self._open_file()
        in_thread("megarl activity", self._watch)

    def _open_file(self) -> None:
        self._file = self._path.open("ab", buffering=0)
        self._file.write(b"\n[\n")  # after the half line of a process that was killed
        begun = [span.event for span in self._open if span.is_written]
        for event in filter(None, [self._head, self._step, *begun]):
            self._put(event)

    def _put(self, event: Event) -> None:
        line = json.dumps({**event, "pid": self._number}, separators=(",", ":"))
        self._file.write(line.encode() + b",\n")

    def _write(self, event: Event) -> None:
        """Append an event; a full file becomes PROCESS.1.json. A disk error ends the recording."""
        if self._closed.is_set():
            return
        try:
            self._put(event)
            if self._file.tell() > MAX_BYTES:
                self._path.replace(self._path.with_suffix(".1.json"))
                self._open_file()
        except OSError as error:  # such as a full disk
            self._closed.set()
            say(f"megarl: what {self.process} does is recorded no more: {error}")

    def _begin(self, span: Span) -> None:
        span.is_written = True
        self._write(span.event)

    def start(self, span: Span) -> None:
        with self._lock:
            lanes = {other.event["tid"] for other in self._open}
            lane = next(lane for lane in itertools.count() if lane not in lanes)
            span.event |= {"id": next(self._ids), "ts": micros(), "tid": lane}
            self._open.append(span)
            if not span.is_quiet:
                self._begin(span)

    def finish(self, span: Span) -> None:
        """Another writer may have begun it."""
        with self._lock:
            if span in self._open:
                self._open.remove(span)
                if span.is_written:
                    numbers = {key: span.event[key] for key in ("id", "tid")}
                    self._write({"ph": "E", "ts": micros(), **numbers})

    def mark(self, name: str, **args: int) -> None:
        """Record a moment."""
        with self._lock:
            self._step = {"ph": "i", "s": "p", "name": name, "ts": micros(), "tid": 0, "args": args}
            self._write(self._step)

    def close(self) -> None:
        """`SIGNAL` stays handled: it would end the process."""
        with self._lock:
            self.mark("closed")
            self._closed.set()
            self._file.close()

    def _watch(self) -> None:
        while not self._closed.wait(QUIET_S / 2):
            with self._lock:
                for span in self._open:
                    if not span.is_written and micros() - span.event["ts"] >= 1e6 * QUIET_S:
                        self._begin(span)
