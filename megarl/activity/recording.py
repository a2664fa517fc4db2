"""Writes what this process does to its file in the run folder; a thread watches the open spans."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.activity.files import FOLDER
from megarl.activity.process import machine, start_of
from megarl.activity.report import SIGNAL, STACKS, Stacks, last_report, report
from megarl.activity.spans import POLL_S, RECORDERS, Event, Span, micros, now
from megarl.console import say

if TYPE_CHECKING:
    from megarl.activity.busy import Busy

MAX_BYTES = 8 * 2**20
"""Size at which a file is renamed to `<process>.1.json`, in the place of the one before. A process
therefore keeps at most twice as many bytes."""
QUIET_S = 1.0
"""Seconds after which the begin of a span is written that was marked as quiet."""


@dataclass(frozen=True)
class Recording:
    """Where the processes of a run record what they do and wait for, each in a Chrome trace file
    RUN/activity/PROCESS.json. Made by `Recording.of`; `make` creates the folder once, on rank 0;
    then each process calls `open` with its own name. It can be pickled, for Ray's actors.
    """

    folder: str
    """RUN/activity as an absolute path."""
    run: str
    """Id of the run."""

    @classmethod
    def of(cls, run_folder: str | Path, run: str, *, enabled: bool) -> Recording | None:
        """The `Recording` of the run with the id `run` in the folder `run_folder`, which may be
        relative, to be passed to the run's processes; None if not `enabled`. Nothing is created
        yet.
        """
        return cls(str(Path(run_folder).absolute() / FOLDER), run) if enabled else None

    @classmethod
    def beside(cls, part: str) -> tuple[Recording, str] | None:
        """(recording, name) for a child process that does a part of this process's work, such as
        `part` "core": the child calls `recording.open(name)`. `name` is the name of this process
        and `part`, such as "engine0-core". None if this process does not record.
        """
        return next(((one.recording, f"{one.process}-{part}") for one in RECORDERS), None)

    def make(self, *, keep: bool) -> None:
        """Create the folder `activity` in the run folder. Called once, on rank 0, before any
        process calls `open`. `keep`: keep the files of an earlier start of the run, as for a run
        that resumes; otherwise they are removed. If the folder cannot be created, a line on
        standard error says so, and nothing is recorded.
        """
        try:
            if not keep:
                shutil.rmtree(self.folder, ignore_errors=True)
            (Path(self.folder) / STACKS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            say(f"megarl: what the processes do is not recorded: {error}")

    def open(self, process: str) -> Callable[[], None]:
        """Begin to write what this process does to the file RUN/activity/`process`.json. Returns a
        function without arguments that ends the recording. If the file cannot be written, a line on
        standard error says so, and the process goes on without recording.
        """
        try:
            RECORDERS[:] = [SpanRecorder(self, process)]
        except OSError as error:
            say(f"megarl: what {process} does is not recorded: {error}")
        return close_recording


def close_recording() -> None:
    """End the trace of what this process does, RUN/activity/PROCESS.json, as a regular end: the
    event "closed" is written. Does nothing if this process records nothing.
    """
    while RECORDERS:
        RECORDERS.pop().close()


class SpanRecorder:
    """Writes the spans of this process, things that it does with begin and end, to the Chrome trace
    file RUN/activity/`process`.json. Four times a second, a daemon thread writes the begin of quiet
    spans that have lasted a second, writes the stacks of this process if another one asks for them,
    and reports waits that have passed their deadline.
    """

    def __init__(self, recording: Recording, process: str) -> None:
        """Raises `OSError` if the file cannot be written."""
        self.recording, self.process = recording, process
        self.folder = Path(recording.folder)
        self.path = self.folder / f"{process}.json"
        self.open: dict[int, Span] = {}
        """Open spans by number, in the order in which they began."""
        self.busy: list[Busy] = []
        """The `Busy` objects of this process that have served a request."""
        self._numbers, self._lock, self._pid = itertools.count(1), threading.RLock(), os.getpid()
        self._marked: Event = {}
        self._stacks = Stacks(self.folder / STACKS, process)
        self._open_file()
        self._said, self._ended = last_report(self.folder), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="megarl activity", daemon=True)
        self._thread.start()

    def _open_file(self) -> None:
        self._file = self.path.open("ab", buffering=0)
        # Without the half line of a killed process.
        self._file.truncate(self.path.read_bytes().rfind(b"\n") + 1)
        if not self._file.seek(0, os.SEEK_END):
            self._file.write(b"[\n")
        args = {"name": self.process, "host": os.uname().nodename, "started": start_of(self._pid)}
        args |= {"machine": machine(), "run": self.recording.run, "signal": SIGNAL}
        self._put({"name": "process_name", "ph": "M", "ts": micros(now()), "args": args})
        begun = [one.event(self.process) for one in self.open.values() if one.is_written]
        for event in filter(None, [self._marked, *begun]):
            self._put(event)

    def _put(self, event: Event) -> None:
        told = {key: one for key, one in event.items() if one or key not in ("in", "args")}
        line = json.dumps({**told, "pid": self._pid}, separators=(",", ":"))
        self._file.write(line.encode() + b",\n")

    def write(self, event: Event) -> None:
        """Append a trace event, a dict of JSON data without the process id, to the file. Does
        nothing in a process forked from this one, or after an earlier event could not be written,
        which is said once on standard error.
        """
        with self._lock:
            if self._file.closed or os.getpid() != self._pid:
                return
            try:
                self._put(event)
                if self._file.tell() > MAX_BYTES:
                    self._file.close()
                    self.path.replace(self.path.with_suffix(".1.json"))
                    self._open_file()
            except OSError as error:
                self._file.close()
                say(f"megarl: what {self.process} does is recorded no more: {error}")

    def mark(self, name: str, args: Event) -> None:
        """Write an event without duration, such as the beginning of a step, with the time now.
        `args`: JSON data about it.
        """
        scope = "g" if self.process == "rank0" else "p"
        with self._lock:
            self._marked = {"name": name, "ph": "i", "s": scope, "ts": micros(now()), "tid": 0}
            self._marked["args"] = args
            self.write(self._marked)

    def start(self, span: Span) -> None:
        """Begin the span `span` now: sets its time, its number and its lane, the `tid` of trace
        events, of which no two spans overlap unless one encloses the other. Writes the event of its
        begin; for a quiet span (`is_quiet`) this is done only if it lasts a second.
        """
        with self._lock:
            span.number, span.begin = next(self._numbers), now()
            span.moved_at = span.begin
            last = {one.lane: one.number for one in self.open.values()}
            around = [self.open[span.parent].lane] if span.parent in self.open else []
            lanes = itertools.chain(around, itertools.count())
            span.lane = next(one for one in lanes if last.get(one, span.parent) == span.parent)
            self.open[span.number] = span
            if not span.is_quiet:
                self.begin(span)

    def begin(self, span: Span) -> None:
        """Write the event that `span`, an argument of `start`, has begun, unless it is written
        already or the span has ended. Called by `start` or, for a quiet span, once it has lasted a
        second or is late.
        """
        with self._lock:
            if span.number in self.open and not span.is_written:
                span.is_written = True
                self.write(span.event(self.process))

    def finish(self, span: Span, at: float, **counts: int) -> None:
        """Write the event that `span` ended at `at`, in seconds since the epoch, if its begin was
        written. `counts`: numbers for the event, such as how many requests were answered.
        """
        with self._lock:
            self.open.pop(span.number, None)
            if span.is_written:
                about = {"ph": "E", "span": span.number, "ts": micros(at), "tid": span.lane}
                self.write({**about, "args": counts})

    def close(self) -> None:
        """Write the event `closed`, which says that this process ended regularly; end the thread
        and close the file. Spans that begin or end later are not written. The handler of `SIGNAL`,
        with which another process may ask for stacks, stays installed, because that signal would
        otherwise end this process.
        """
        self._ended.set()
        self._thread.join(5.0)
        with self._lock:
            self.mark("closed", {})
            self._file.close()

    def report(self, late: Sequence[Span]) -> None:
        """Write a report, RUN/waits-TIME.txt, about the spans `late`, which have passed their
        deadline, unless a report about them exists already. Blocks for some seconds, in which all
        processes of the run are asked for their stacks.
        """
        for span in late:
            self.begin(span)
        try:
            report(self.folder, self.process, late, self._stacks.answer)
        except OSError as error:  # such as a full disk; the run goes on
            say(f"megarl: a wait of {self.process} cannot be reported: {error}")
        for span in late:
            span.is_reported = True

    def _watch(self) -> None:
        while not self._ended.wait(POLL_S):
            self._look(now())

    def _look(self, at: float) -> None:
        self._stacks.answer()
        spans = list(self.open.values())
        for span in spans:
            if span.is_quiet and at - span.begin >= QUIET_S:
                self.begin(span)
        spans += filter(None, [busy.look(at) for busy in list(self.busy)])
        if late := [span for span in spans if span.is_late(at)]:
            self.report(late)
        said = last_report(self.folder)
        if self.process == "rank0" and said.at and said != self._said:
            self._said = said
            say(said.line)
