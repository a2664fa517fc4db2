"""What this process does, as spans of a Chrome trace in `RUN/activity/<process>.json`.

    with activity("rollouts of step 7", kind="wait", of="service", deadline_s=600):
        ...

An event is written when a span begins and another when it ends, so that a span without an end is
what the process does now. Without an open recorder nothing is recorded. The file is a JSON array
without its last bracket, an event a line, which Perfetto and chrome://tracing open:

    {"name": "process_name", "ph": "M", "args": {"name": "rank0", "host": ...}, ...}
    {"name": "rollouts", "cat": "wait", "ph": "B", "span": 7, "in": 3, "tid": 0,
     "args": {"waits on": ["service"], "deadline_s": 600}, ...}                a span begins
    {"ph": "E", "span": 7, "tid": 0, ...}                                      it ends
    {"name": "responses", "ph": "C", "span": 9, "args": {"open": 12, "done": 300}, ...}
    {"name": "step 7", "ph": "i", "args": {"step": 7, "version": 6}, ...}      a step begins
    {"name": "closed", "ph": "i", ...}                                         an end in order

Every event has `pid`, the process id, since a process that was taken for dead may write once more
to the file of its successor, and `ts`, microseconds since the epoch, so that the files of several
processes and hosts can be laid over each other. `tid` is a lane: spans of one lane lie in each
other or apart. `in` is the number of the span around a span, where there is one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from megarl.activity.recording import SpanRecorder

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

POLL_S = 0.25
"""Seconds between two looks of a process at its spans; a shorter pause between two requests does
not end a span of `megarl.activity.busy.Busy`."""
NAMED_RANKS = 16
"""A wait for more ranks than these names their number only."""

Whom = str | Sequence[str | int]
"""On whom a span waits: a name such as "service" or "engine0", or several; a number is a rank."""
Event = dict[str, Any]
"""An event of a trace."""

RECORDERS: list[SpanRecorder] = []
"""The open recorder of this process, if there is one."""
_inner: ContextVar[int] = ContextVar("innermost_span", default=0)
"""Number of the innermost open span of this thread or asyncio task; 0 for none."""
_STARTED_AT = time.time() - time.monotonic()


def now() -> float:
    """The time in seconds since the epoch, by a clock that is never set back while this process
    runs.
    """
    return _STARTED_AT + time.monotonic()


def micros(seconds: float) -> int:
    """`seconds` as whole microseconds, the unit of time in traces."""
    return round(1e6 * seconds)


@dataclass(slots=True, eq=False)
class Span:
    """One thing that this process does, with begin and end: a context manager, made by
    `activity(...)`, that writes two events to the activity trace of this process, the file
    RUN/activity/PROCESS.json, if that is recorded. Times are in seconds since the epoch.
    """

    what: str
    kind: Kind
    of: Whom = ()
    deadline_s: float = 0.0
    """Seconds from `moved_at` to the deadline; 0 for none."""
    is_quiet: bool = False
    begin: float = 0.0
    moved_at: float = 0.0
    """When the process that this one waits for last made progress."""
    number: int = 0
    """Number of the span, from 1 in a process; 0 for a span that has not begun."""
    parent: int = 0
    lane: int = 0
    is_written: bool = False
    is_reported: bool = False
    """Whether a report about the wait was written since its deadline has passed."""
    recorder: SpanRecorder | None = None

    def moved(self, ago_s: float = 0.0) -> None:
        """Note that the process that this one waits for made progress `ago_s` seconds ago: the
        deadline counts from that time on.
        """
        self.moved_at = max(self.begin, now() - ago_s)

    def is_late(self, at: float) -> bool:
        """Whether the span's deadline has passed at `at`, in seconds since the epoch, and no report
        about it was written yet. False without a deadline.
        """
        return 0 < self.deadline_s <= at - self.moved_at and not self.is_reported

    def __enter__(self) -> Span:
        if RECORDERS:
            self.parent, self.recorder = _inner.get(), RECORDERS[0]
            self.recorder.start(self)
            _inner.set(self.number)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.recorder is not None:
            _inner.set(self.parent)
            if error is not None and self.is_late(now()):
                self.recorder.report([self])  # before the process ends by the error
            self.recorder.finish(self, now())

    def event(self, process: str) -> Event:
        """The Chrome trace event, a dict of JSON data, that says that this span has begun.
        `process`: name of this process, which is left out of the names that the span waits for.
        """
        of = [self.of] if isinstance(self.of, str) else self.of
        names = [f"rank{one}" if isinstance(one, int) else one for one in of]
        if len(names) > NAMED_RANKS:
            names = [f"{len(names)} ranks"]
        args: Event = {"waits on": [one for one in names if one not in (process, "")]}
        args["deadline_s"] = self.deadline_s
        about = {"name": self.what, "cat": self.kind, "ph": "B", "ts": micros(self.begin)}
        place = {"span": self.number, "in": self.parent, "tid": self.lane}
        return {**about, **place, "args": {key: one for key, one in args.items() if one}}


def activity(
    what: str, *, kind: Kind, of: Whom = (), deadline_s: float = 0.0, quiet: bool = False
) -> Span:
    """A context manager that records what this process does in its block, as a span of its Chrome
    trace RUN/activity/PROCESS.json; if this process records nothing (`Recording.open` was not
    called), it does nothing. Also for use in asyncio tasks.

    Args:
        what: name of the span for people, such as "rollouts of step 7".
        kind: one of `KINDS`: "generate", "wait", "train" and so on.
        of: names of the processes that this one waits for; a number is a rank.
        deadline_s: seconds after which the wait is reported; 0 for none. If the block raises an
            error after the deadline, the report is written first, which blocks for seconds; in an
            event loop use `megarl.activity.busy.Busy`.
        quiet: for what is done many times a step: it is written only where it lasts longer than a
            second.
    """
    return Span(what, kind, of, deadline_s, quiet)


def step_begins(step: int, version: int) -> None:
    """Write to the trace of what this process does, RUN/activity/PROCESS.json, that it begins
    training step `step` (from 1) with weights of version `version`. Does nothing if this process
    records nothing.
    """
    for recorder in RECORDERS:
        recorder.mark(f"step {step}", {"step": step, "version": version})
