"""Reads the traces that `megarl.system.spans` describes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megarl.system.files import parse_json
from megarl.system.process_state import condition, machine
from megarl.system.spans import Event


@dataclass
class ProcessTrace:
    """One start of a process. `begin` and `last` (event) are seconds since the epoch, times in
    events microseconds.
    """

    name: str
    host: str
    pid: int
    started: str
    """In the kernel's clock ticks; process ids are used again."""
    machine: str
    run: str
    begin: float
    last: float
    is_closed: bool = False
    spans: dict[int, Event] = field(default_factory=dict)
    """{number: event of the begin}, with the time of its end, if any, as `end`."""
    steps: list[Event] = field(default_factory=list)

    @property
    def condition(self) -> str:
        """ "alive", "stopped by ...", "ended" (regularly), "gone" or "on HOST" (unknown)."""
        if self.is_closed:
            return "ended"
        is_here = self.machine and self.machine == machine()
        return condition(self.pid, self.started) if is_here else f"on {self.host}"

    @property
    def is_alive(self) -> bool | None:
        """None on another machine."""
        state = self.condition
        return None if state.startswith("on ") else state not in ("ended", "gone")

    @property
    def open(self) -> list[Event]:
        """Spans without an end."""
        return sorted((s for s in self.spans.values() if "end" not in s), key=lambda s: s["ts"])


def read_traces(folder: Path) -> list[ProcessTrace]:
    """Each start of each process in `folder`, ranks first; torn lines are passed over."""
    traces: list[ProcessTrace] = []
    paths = (path for path in folder.glob("*.json") if not path.stem.endswith(".1"))
    for path in sorted(paths, key=lambda path: (path.stem[:4] != "rank", len(path.stem), path)):
        starts: dict[int, ProcessTrace] = {}
        for line in (*_lines(path.with_suffix(".1.json")), *_lines(path)):
            with suppress(AttributeError, LookupError, TypeError, ValueError):
                _add(parse_json(line.removesuffix(b",")), starts)
        traces += starts.values()
    return traces


def _lines(path: Path) -> Iterator[bytes]:
    with suppress(OSError):
        yield from path.read_bytes().split(b"\n")


def _add(event: Event, starts: dict[int, ProcessTrace]) -> None:
    at, number, args = event["ts"] / 1e6, event["pid"], event.get("args", {})
    if event["ph"] == "M":
        starts.setdefault(number, ProcessTrace(**args, begin=at, last=at))
    trace = starts[number]
    trace.last = max(trace.last, at)
    match event["ph"]:
        case "B":
            trace.spans.setdefault(event["id"], {**event, "args": args})
        case "E":
            trace.spans[event["id"]]["end"] = event["ts"]
        case "i" if "step" in args and event not in trace.steps[-1:]:
            trace.steps.append(event)
        case "i" if event["name"] == "closed":
            trace.is_closed = True


def newest_traces(traces: list[ProcessTrace]) -> list[ProcessTrace]:
    """The last start of each process of the run whose rank 0 started last."""
    newest = {trace.name: trace for trace in traces}
    of_run = newest.get("rank0") or next(iter(newest.values()), None)
    return [trace for trace in newest.values() if of_run and trace.run == of_run.run]
