"""Reads what the processes of a run have recorded; see `megarl.activity.spans` for the lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.activity.process import machine, start_of, state_of
from megarl.files import parse_json

FOLDER = "activity"
"""Name of the folder in the run folder."""


@dataclass
class SpanRecord:
    """A span of a process. Times are seconds since the epoch."""

    number: int
    parent: int
    """Number of the span around it; 0 for none."""
    kind: str
    what: str
    of: tuple[str, ...]
    """On whom the process waits, as names of processes."""
    deadline_s: float
    """0 for none."""
    begin: float
    end: float | None = None
    """None for a span that has not ended as far as the file tells."""
    open: int = 0
    """Open requests, of a span that stands for many."""
    done: int = 0
    """Requests answered, of a span that stands for many."""


@dataclass
class Life:
    """What one process of a run has recorded from its start on. A process that is started again
    under the same name has another life.
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
    """Seconds since the epoch."""
    last: float
    """Time of the last line, in seconds since the epoch."""
    closed: bool = False
    """Whether the process has ended in order."""
    spans: dict[int, SpanRecord] = field(default_factory=dict)
    steps: list[tuple[float, int, int]] = field(default_factory=list)
    """(seconds since the epoch, step from 1, weights version) of each step's beginning."""

    @property
    def is_here(self) -> bool:
        """Whether the process, if it lives, can be seen from this process."""
        return bool(self.machine) and self.machine == machine()

    @property
    def is_alive(self) -> bool | None:
        """Whether the process lives; None if it is of another machine."""
        if self.closed:
            return False
        return start_of(self.pid) == self.started if self.is_here else None

    @property
    def state(self) -> str:
        """What the kernel says of a living process of this machine, otherwise ""."""
        return state_of(self.pid) if self.is_alive else ""

    def ended_at(self, span: SpanRecord) -> float:
        """When a span ended: the last sign of the process for one that it did not end itself."""
        return self.last if span.end is None else span.end

    @property
    def open(self) -> list[SpanRecord]:
        """What the process does now, or did when it ended: the open spans without an open span
        inside of them, those that wait for somebody last.
        """
        found = [span for span in self.spans.values() if span.end is None]
        outer = {span.parent for span in found}
        return sorted(
            (span for span in found if span.number not in outer),
            key=lambda span: (bool(span.of), span.begin),
        )

    def around(self, span: SpanRecord) -> list[SpanRecord]:
        """The spans around `span`, from the innermost."""
        found = []
        while (parent := self.spans.get(span.parent)) is not None and parent.number < span.number:
            found.append(parent)
            span = parent
        return found


def read(folder: Path, *, only_last: bool = False, tail_bytes: int = 2**62) -> list[Life]:
    """The lives of all processes of a run, in the order of the names, numbers as numbers. `folder`:
    RUN/activity. `only_last`: the newest life of each process, read from the last `tail_bytes`.
    """
    found = []
    for path in sorted(folder.glob("*.jsonl"), key=_order):
        if path.name.endswith(".1.jsonl"):
            continue
        older = [] if only_last else [path.with_suffix(".1.jsonl")]
        lives = _lives([*older, path], only_last, tail_bytes)
        found.extend(lives[-1:] if only_last else lives)
    return found


def of_run(lives: list[Life]) -> list[Life]:
    """The lives of the newest run among `lives`: of the one whose rank 0 started last."""
    newest = max(lives, key=lambda one: (one.process == "rank0", one.begin), default=None)
    return [one for one in lives if newest is not None and one.run == newest.run]


def _order(path: Path) -> tuple[bool, str, int]:
    """Sorts ranks first, and engine 10 behind engine 9."""
    name = path.name.removesuffix(".jsonl")
    letters = name.rstrip("0123456789")
    return letters != "rank", letters, int(name[len(letters) :] or 0)


def _lives(paths: list[Path], only_last: bool, tail_bytes: int) -> list[Life]:
    lives: dict[tuple[int, str], Life] = {}
    writers: dict[int, tuple[Life, float]] = {}
    for record in _records(paths, only_last, tail_bytes):
        try:
            if "process" in record:
                life = lives.setdefault((record["pid"], record["started"]), _life(record))
                writers[record["pid"]] = life, record["wall"] - record["t"]
            elif record["p"] in writers:
                life, offset = writers[record["p"]]
                _take(life, record, offset)
        except (KeyError, TypeError, ValueError):
            continue  # a line that is none of ours
    return list(lives.values())


def _records(paths: list[Path], only_last: bool, tail_bytes: int) -> Iterator[dict[str, Any]]:
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError:
            continue
        head = max(0, content.rfind(b'{"process"')) if only_last else 0
        lines = content[head:].split(b"\n")
        kept = max(1, len(lines) - tail_bytes // 100)
        for line in [lines[0], *lines[kept:]]:
            try:
                record = parse_json(line)
            except ValueError:
                continue  # the torn line of a killed process, or the one being written
            if isinstance(record, dict):
                yield record


def _life(head: dict[str, Any]) -> Life:
    wall = float(head["wall"])
    names = ("process", "host", "pid", "started", "machine", "run", "signal")
    return Life(**{name: head[name] for name in names}, begin=wall, last=wall)


def _take(life: Life, record: dict[str, Any], offset: float) -> None:
    """Add a line to a life. `offset`: wall clock minus monotonic clock of the process."""
    at = life.last = max(life.last, record["t"] + offset)
    if "begin" in record:
        life.spans.setdefault(
            record["begin"],
            SpanRecord(
                number=record["begin"],
                parent=record.get("in", 0),
                kind=record["kind"],
                what=record["what"],
                of=tuple(record.get("of", ())),
                deadline_s=record.get("deadline_s", 0.0),
                begin=record["t"] + offset,
            ),
        )
    elif "end" in record and record["end"] in life.spans:
        span = life.spans[record["end"]]
        span.end, span.open, span.done = record["t"] + offset, 0, record.get("done", 0)
    elif "busy" in record and record["busy"] in life.spans:
        span = life.spans[record["busy"]]
        span.open, span.done = record["open"], record["done"]
    elif "step" in record:
        step = (at, record["step"], record["version"])
        if step not in life.steps:
            life.steps.append(step)
    elif "closed" in record:
        life.closed = True
