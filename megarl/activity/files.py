"""Reads what the processes of a run have recorded, and says in words who waits for whom. The files
hold Chrome trace events, described in `megarl.activity.spans`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megarl.activity.process import condition, machine
from megarl.activity.spans import Event, micros
from megarl.files import parse_json

FOLDER = "activity"
"""Name of the folder in the run folder."""
MOST_BYTES = 64 * 2**20
"""Most bytes of a file that are read; processes begin another file long before."""
LONGEST_CHAIN = 6
"""Largest number of processes that a chain of waits names."""


@dataclass
class Life:
    """What one process of a run has recorded of itself, from its start to its last event, as
    `read_lives` returns it: its host and id, its spans (things that it did or does, with begin and
    end) and steps. A process that is started again under the same name has another `Life`. Times
    are in seconds since the epoch, those in events in microseconds.
    """

    process: str
    host: str
    pid: int
    started: str
    """Start of the process in the kernel's clock ticks; process ids are used again."""
    machine: str
    run: str
    signal: int
    begin: float
    last: float
    """Time of the last event."""
    closed: bool = False
    """Whether the process has ended regularly."""
    spans: dict[int, Event] = field(default_factory=dict)
    """{number of a span: the event of its begin}. The event of a span that has ended has the time
    of its end as `end`, in microseconds; `args` of a span for many requests has their numbers
    (`open`, `done`)."""
    steps: list[Event] = field(default_factory=list)
    """The events that training steps have begun."""

    @property
    def condition(self) -> str:
        """Whether the process lives: "alive", "stopped by a signal", "stopped by a debugger",
        "ended" (regularly), "gone" (without a regular end) or "on HOST" (another machine, unknown).
        """
        if self.closed:
            return "ended"
        is_here = self.machine and self.machine == machine()
        return condition(self.pid, self.started) if is_here else f"on {self.host}"

    @property
    def is_alive(self) -> bool | None:
        """Whether the process lives, also if it is stopped; None if it is on another machine, so
        that this is unknown.
        """
        found = self.condition
        return None if found.startswith("on ") else found not in ("ended", "gone")

    @property
    def is_out(self) -> bool:
        """Whether the process is known to have ended or to be stopped, so that it answers
        nothing.
        """
        return self.is_alive is False or self.condition.startswith("stopped")

    def ended_at(self, span: Event) -> int:
        """When the span `span`, the trace event of its begin as it is in this object's `spans`,
        ended, in microseconds since the epoch. For a span without an end: the time of the process's
        last event.
        """
        return span.get("end", micros(self.last))

    @property
    def open(self) -> list[Event]:
        """The innermost spans, trace events as dicts, that have not ended: what the process does
        now, or did when it ended. Spans that wait for another process come last.
        """
        found = [span for span in self.spans.values() if "end" not in span]
        outer = {span["in"] for span in found}
        inner = (span for span in found if span["span"] not in outer)
        return sorted(inner, key=lambda span: (bool(waits_on(span)), span["ts"]))

    def around(self, span: Event) -> list[Event]:
        """The spans (trace events, as dicts) that enclose `span`, the innermost first. `span`: a
        value of this object's dict `spans`.
        """
        found = []
        while (parent := self.spans.get(span["in"])) is not None and parent["span"] < span["span"]:
            found.append(parent)
            span = parent
        return found

    def doing(self, span: Event, at: float) -> str:
        """A phrase that says what the process does in the open span `span`, a value of this
        object's dict `spans`: name, enclosing spans, for how long, and for which processes it
        waits. `at`: the time now, in seconds since the epoch; for a process that has ended, the
        time of its last event counts instead.
        """
        args, until = span["args"], self.last if self.is_alive is False else at
        words = ", in ".join(one["name"] for one in [span, *self.around(span)])
        words += f", for {seconds(until - span['ts'] / 1e6)}"
        if "deadline_s" in args:
            words += f" of {seconds(args['deadline_s'])}"
        if "done" in args:
            words += f" ({args['open']} open, {args['done']} answered)"
        if waits_on(span):
            words += f", {'waits on' if span['cat'] == 'wait' else 'with'} "
        return words + ", ".join(waits_on(span))


def read_lives(folder: Path, *, only_last: bool = False) -> list[Life]:
    """Read what all processes of a run have recorded of themselves from `folder`, RUN/activity.
    Returns a `Life`, with name, host, spans and steps, for each start of a process, sorted by name
    (ranks first, engine10 after engine9). With `only_last`: only the newest start of each process,
    without older events, which large traces move to PROCESS.1.json.
    """
    found = []
    for path in sorted(folder.glob("*.json"), key=_order):
        lives = _Lives()
        told = content_of(path)
        if only_last:
            told = told[max(0, told.rfind(START)) :]
        else:
            told = content_of(path.with_suffix(".1.json")) + told
        lives.take(b"" if path.stem.endswith(".1") else told)
        found += lives.found.values()
    return found


START = b'{"name":"process_name"'
"""Beginning of the event with which a process begins its file."""


class _Lives:
    """The lives that the events of one file tell of."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, str], Life] = {}
        self._writers: dict[int, Life] = {}

    def take(self, told: bytes) -> None:
        """Add the events in `told`, whole lines of the file."""
        for event in trace_events(told):
            try:
                if event["ph"] == "M":
                    life = _life(event)
                    self._writers[life.pid] = self.found.setdefault((life.pid, life.started), life)
                else:
                    _take(self._writers[event["pid"]], event)
            except (AttributeError, LookupError, TypeError, ValueError):
                continue  # an event that is none of ours


class Appended:
    """What another process appends to the file `path`. `read` returns the whole lines that are new
    since the last call; of a file that is read for the first time at most the last `most_bytes`.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._file, self._end = (0, 0), 0

    def read(self) -> tuple[bool, bytes]:
        """(whether these lines are of another file than those before, or of one that was cut, so
        that what was read before is void; the new lines). Raises `OSError`.
        """
        with self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            is_other = (found.st_dev, found.st_ino) != self._file or found.st_size < self._end
            if is_other:
                self._file = found.st_dev, found.st_ino
                self._end = max(0, found.st_size - self._most_bytes)
            file.seek(self._end)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        self._end += len(new)
        return is_other, new


class LatestLives:
    """The newest start of each process of a run, for a reader that looks at `folder`, RUN/activity,
    again and again: `read` parses only what the processes have written since the last call.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, tuple[Appended, _Lives]] = {}

    def read(self) -> list[Life]:
        """A `Life`, sorted by name, for the newest start of each process, of whose spans it has
        those that have not ended. The objects are the same ones at each call. A file that cannot be
        read has none.
        """
        paths = [one for one in self._folder.glob("*.json") if not one.stem.endswith(".1")]
        known = {
            path: self._files.get(path) or (Appended(path, MOST_BYTES), _Lives())
            for path in sorted(paths, key=_order)
        }
        for path, (file, lives) in known.items():
            is_other, new = True, b""
            with suppress(OSError):
                is_other, new = file.read()
            begin = new.rfind(START)
            if is_other or begin >= 0:  # what is known is of an earlier start, or written again
                lives = _Lives()
            lives.take(new[max(0, begin) :])
            for life in lives.found.values():
                life.spans = {key: one for key, one in life.spans.items() if "end" not in one}
            known[path] = file, lives
        self._files = known
        return [life for _, lives in known.values() for life in lives.found.values()]


def of_run(lives: list[Life]) -> list[Life]:
    """Those of `lives`, the recordings of processes, that belong to the newest run in the folder:
    the run whose process "rank0" started last.
    """
    newest = max(lives, key=lambda one: (one.process == "rank0", one.begin), default=None)
    return [one for one in lives if newest is not None and one.run == newest.run]


def content_of(file: Path) -> bytes:
    """The bytes of a file; empty if it cannot be read."""
    with suppress(OSError):
        return file.read_bytes()
    return b""


def trace_events(content: bytes) -> Iterator[Event]:
    """Iterate over the Chrome trace events, as dicts, in the bytes of a trace file, or in a part of
    it. Lines that are not complete JSON objects are left out.
    """
    for line in content.split(b"\n"):
        try:
            event = parse_json(line.removesuffix(b","))
        except ValueError:
            continue  # the bracket, the torn line of a killed process, or one being written
        if isinstance(event, dict):
            yield {"args": {}, **event}


def _order(path: Path) -> tuple[bool, list[str | int]]:
    """Sorts ranks first, and engine 10 behind engine 9."""
    parts = re.split(r"(\d+)", path.stem)
    is_rank = path.stem.startswith("rank")
    return not is_rank, [int(one) if one.isdecimal() else one for one in parts]


def _life(event: Event) -> Life:
    args, at = dict(event["args"]), event["ts"] / 1e6
    return Life(process=args.pop("name"), pid=event["pid"], begin=at, last=at, **args)


def _take(life: Life, event: Event) -> None:
    """Add an event to a life."""
    life.last, args = max(life.last, event["ts"] / 1e6), event["args"]
    match event["ph"]:
        case "B" if event["span"] not in life.spans:
            life.spans[event["span"]] = {"name": "", "cat": "", "in": 0, "tid": 0, **event}
        case "E":
            life.spans[event["span"]]["end"] = event["ts"]
            life.spans[event["span"]]["args"] |= args
        case "C":
            life.spans[event["span"]]["args"] |= args
        case "i" if "step" in args and event not in life.steps[-1:]:
            life.steps.append(event)
        case "i" if event["name"] == "closed":
            life.closed = True


def waits_on(span: Event) -> list[str]:
    """Names of the processes, such as "rank1" or "service", that a process waits for in the span
    `span`, the trace event (dict) of its begin; empty if it waits for none.
    """
    return span["args"].get("waits on", [])


def processes_named(span: Event, lives: Mapping[str, Life]) -> list[Life]:
    """Of `lives`, {name of a process: its recording}, the recordings of the processes for which a
    process waits in the span `span`, the trace event (dict) of its begin. The name "engines" in a
    span stands for every engine, "3 ranks" for every rank.
    """
    found = []
    for name in waits_on(span):
        kind = "engine" if name == "engines" else "rank" if name.endswith(" ranks") else ""
        found += [
            one for key, one in lives.items() if key == name or (kind and key.startswith(kind))
        ]
    return found


def culprit(span: Event, waiting: str, lives: Mapping[str, Life]) -> Life | None:
    """Of the processes that process `waiting` waits for in `span`, a trace event, the one that most
    likely keeps it waiting: one that is gone or stopped; else one that is not itself in a span
    named as `span` is; else any. None if none of them is in `lives`, {name: record of the process}.
    """
    found = [one for one in processes_named(span, lives) if one.process != waiting]
    dead = [one for one in found if one.is_out]
    other = [one for one in found if span["name"] not in [open["name"] for open in one.open]]
    return next(iter([*dead, *other, *found]), None)


def chain(waiting: str, span: Event, lives: Mapping[str, Life], at: float) -> list[str]:
    """Who keeps whom waiting, as phrases: one for each process that the process `waiting` waits for
    in `span`, directly or through others, at most six. `lives`: {name: record of the process}.
    `at`: the time now, in seconds since the epoch.
    """
    found, seen = [], {waiting}
    if waits_on(span) and not processes_named(span, lives):
        return [f"{', '.join(waits_on(span))}, of which nothing is recorded"]
    while len(found) < LONGEST_CHAIN and (keeps := culprit(span, waiting, lives)) is not None:
        waiting, state, inner = keeps.process, keeps.condition, keeps.open
        if waiting in seen:
            return [*found, f"{waiting} again: a circle"]
        seen.add(waiting)
        said = f"{waiting} is {state}" if state != "alive" else waiting
        if not inner:
            return [*found, f"{said}: idle"]
        span = next(filter(waits_on, inner), inner[-1])
        found.append(f"{said}: {keeps.doing(span, at)}")
        # What a process computes may be in a part of it, such as "engine0-core".
        parts = [one for key, one in lives.items() if key.startswith(f"{waiting}-") and one.is_out]
        if parts or state != "alive":
            return found + [f"{one.process} is {one.condition}" for one in parts]
    return found


def seconds(value: float) -> str:
    """A duration in words, such as "12.3 s", "4 min 05 s" or "2 h 07 min"."""
    if value < 60:
        return f"{max(0.0, value):.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
