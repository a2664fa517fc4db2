"""Records what this process does, as spans in `RUN/activity/<process>.jsonl`.

    with activity("rollouts of step 7", kind="wait", of="service", deadline_s=600):
        ...

A line is written when a span begins and another when it ends, so that a span without an end is what
the process does now. Without an open recorder nothing is recorded. Lines:

    {"process": "rank0", "host": ..., "pid": ..., "wall": ..., "t": ...}    a process begins
    {"begin": 7, "in": 3, "kind": "wait", "what": ..., "of": ["service"], "deadline_s": 600, "t": 8}
    {"end": 7, "t": 9.1}
    {"busy": 9, "open": 12, "done": 300, "t": 9.5}                          requests so far
    {"step": 7, "version": 6, "t": 9.9}                                     a step begins
    {"closed": true, "t": 10.0}                                             a process ends in order

`t` is the monotonic clock in seconds; the head line has both clocks, so that files of several
processes and hosts can be laid over each other. Every line but the head has the process id as `p`,
since a process that was taken for dead may write once more to the file of its successor.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

from megarl.activity.process import machine, start_of
from megarl.console import say

if TYPE_CHECKING:
    from megarl.activity.busy import Busy

Kind = Literal[
    "generate",
    "score",
    "wait",
    "logprobs",
    "train",
    "optimizer",
    "publish",
    "checkpoint",
    "evaluate",
    "load",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What a span can be about."""

MAX_BYTES = 8 * 2**20
"""Size at which a file is renamed to `<process>.1.jsonl`, in the place of the one before. A process
therefore keeps at most twice as many bytes."""
NAMED_RANKS = 16
"""A wait for more ranks than these names their number only."""

Whom = str | Sequence[str | int]
"""On whom a span waits: a name such as "service" or "engine0", or several; a number is a rank."""

_inner: ContextVar[int] = ContextVar("innermost_span", default=0)
"""Number of the innermost open span of this thread or asyncio task; 0 for none."""


class Recorder:
    """Writes the spans of this process to its file. `megarl.activity.recording` opens it."""

    def __init__(self, folder: Path, process: str, run: str, *, signal: int = 0) -> None:
        """`folder`: RUN/activity, which must exist. `run`: id of the run. `signal`: number of the
        signal on which this process writes its stacks; 0 for none. Raises `OSError` if the file
        cannot be written.
        """
        self.folder, self.process, self.run, self.signal = folder, process, run, signal
        self.path = folder / f"{process}.jsonl"
        self.open: dict[int, Span] = {}
        """Open spans by number, in the order in which they began."""
        self.busy: list[Busy] = []
        """The `Busy` objects of this process that have served a request."""
        self.late: Callable[[Span], None] | None = None
        """Called with a span that ends by an error after its deadline, before the error goes on."""
        self.stop: Callable[[], None] = lambda: None
        """Ends what watches the spans."""
        self._numbers, self._lock, self._pid = itertools.count(1), threading.RLock(), os.getpid()
        self._place: dict[str, int] = {}
        self._file = self._size = -1
        self._open_file()

    def _open_file(self) -> None:
        self._file = os.open(self.path, os.O_APPEND | os.O_CREAT | os.O_RDWR, 0o644)
        self._size = os.fstat(self._file).st_size
        if self._size and os.pread(self._file, 1, self._size - 1) != b"\n":
            self._put_bytes(b"\n")  # after the half line of a killed process
        self._put(
            {
                "process": self.process,
                "host": os.uname().nodename,
                "pid": self._pid,
                "started": start_of(self._pid),
                "machine": machine(),
                "run": self.run,
                "signal": self.signal,
                "wall": round(time.time(), 6),
                "t": round(time.monotonic(), 6),
            }
        )

    def number(self) -> int:
        """A number for a new span, from 1."""
        return next(self._numbers)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record` to the activity file as a line of JSON. Does nothing in a process forked
        from this one, and after a line could not be written, which is said once.
        """
        with self._lock:
            if self._file < 0 or os.getpid() != self._pid:
                return
            try:
                if "step" in record:
                    self._place = dict(record)
                self._put({**record, "p": self._pid})
                if self._size > MAX_BYTES:
                    self._rotate()
            except OSError as error:
                os.close(self._file)
                self._file = -1
                say(f"megarl: what {self.process} does is recorded no more: {error}")

    def begin(self, span: Span) -> None:
        """Write that `span` has begun, unless that is written already or the span is over."""
        with self._lock:
            if span.number in self.open and not span.is_written:
                span.is_written = True
                self.write(span.record(self.process))

    def end(self, span: Span, at: float, **counts: int) -> None:
        """Write that `span` is over, if its begin was written. `at`: when it ended, in seconds of
        `time.monotonic()`. `counts`: further fields of the line, such as how many requests were
        answered.
        """
        with self._lock:
            self.open.pop(span.number, None)
            if span.is_written:
                self.write({"end": span.number, "t": round(at, 6), **counts})

    def close(self) -> None:
        """Write that this process ends as planned, and close its activity file. Later calls of
        `write`, `begin` and `end` write nothing.
        """
        with self._lock:
            self.write({"closed": True, "t": round(time.monotonic(), 6)})
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _rotate(self) -> None:
        os.close(self._file)
        os.replace(self.path, self.path.with_suffix(".1.jsonl"))
        self._open_file()
        open_ones = [one.record(self.process) for one in self.open.values() if one.is_written]
        for record in [*([self._place] if self._place else []), *open_ones]:
            self._put({**record, "p": self._pid})

    def _put(self, record: Mapping[str, Any]) -> None:
        self._put_bytes(json.dumps(record, separators=(",", ":")).encode() + b"\n")

    def _put_bytes(self, line: bytes) -> None:
        os.write(self._file, line)
        self._size += len(line)


class _Process:
    """The recorder of this process: a process has one activity file."""

    recorder: Recorder | None = None


_process = _Process()


def recorder() -> Recorder | None:
    """The open recorder of this process, or None."""
    return _process.recorder


def use(found: Recorder | None) -> None:
    """From now on, record with `found`; None records nothing."""
    _process.recorder = found


class Span:
    """A context manager: what this process does in the block. See `activity`."""

    __slots__ = (
        "_recorder",
        "deadline_s",
        "is_quiet",
        "is_reported",
        "is_written",
        "kind",
        "moved_at",
        "number",
        "of",
        "parent",
        "since",
        "what",
    )

    def __init__(self, what: str, kind: Kind, of: Whom, deadline_s: float, is_quiet: bool) -> None:
        self.what, self.of = what, of
        self.kind: Kind = kind
        self.deadline_s, self.is_quiet = deadline_s, is_quiet
        self.is_written = self.is_reported = False
        self.number = self.parent = 0
        self.since = self.moved_at = 0.0

    def moved(self, ago_s: float = 0.0) -> None:
        """Note that what is waited for has made progress `ago_s` seconds ago: the deadline counts
        from then on.
        """
        self.moved_at = max(self.since, time.monotonic() - ago_s)

    def __enter__(self) -> Span:
        found = self._recorder = _process.recorder
        if found is not None:
            self.number, self.parent = found.number(), _inner.get()
            self.since = self.moved_at = time.monotonic()
            _inner.set(self.number)
            found.open[self.number] = self
            if not self.is_quiet:
                found.begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        found = self._recorder
        if found is None:
            return
        _inner.set(self.parent)
        now = time.monotonic()
        if error is not None and 0 < self.deadline_s <= now - self.moved_at and found.late:
            found.late(self)
        found.end(self, now)

    def names(self) -> list[str]:
        """On whom it waits, as names of processes."""
        if isinstance(self.of, str):
            return [self.of] if self.of else []
        if len(self.of) > NAMED_RANKS:
            return [f"{len(self.of)} ranks"]
        return [f"rank{one}" if isinstance(one, int) else one for one in self.of]

    def record(self, process: str) -> dict[str, Any]:
        """The line that says that the span has begun. `process`: which does not wait on itself."""
        found: dict[str, Any] = {"begin": self.number}
        if self.parent:
            found["in"] = self.parent
        found |= {"kind": self.kind, "what": self.what}
        if of := [name for name in self.names() if name != process]:
            found["of"] = of
        if self.deadline_s:
            found["deadline_s"] = self.deadline_s
        return found | {"t": round(self.since, 6)}


def activity(
    what: str, *, kind: Kind, of: Whom = (), deadline_s: float = 0.0, quiet: bool = False
) -> Span:
    """A context manager that records what this process does in its block.

    Args:
        what: for people, such as "rollouts of step 7".
        kind: one of `KINDS`.
        of: on whom the process waits, as names of processes; ranks may be given as numbers.
        deadline_s: seconds after which the wait is reported; 0 for none.
        quiet: for what is done many times a step: it is written only where it lasts longer than
            `megarl.activity.watcher.QUIET_S`.
    """
    return Span(what, kind, of, deadline_s, quiet)


def step_begins(step: int, version: int) -> None:
    """Note that this process begins `step` (from 1) with weights `version`."""
    if (found := _process.recorder) is not None:
        found.write({"step": step, "version": version, "t": round(time.monotonic(), 6)})
