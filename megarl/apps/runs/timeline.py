"""`megarl timeline RUN [--out FILE]`: what every process of a run did, as a trace that Perfetto
(https://ui.perfetto.dev) and chrome://tracing show.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from megarl.activity.files import FOLDER, Life, SpanRecord, read
from megarl.apps.runs.target import run_and_target, writing
from megarl.console import result
from megarl.errors import UserError

FILE = "timeline.json"
"""Name of the trace in the run folder."""


def main(arguments: list[str]) -> int:
    """Write the trace of a run folder; prints its path. Raises `UserError` for a folder without a
    record.
    """
    run, path = run_and_target("timeline", arguments, FILE)
    lives = read(run / FOLDER)
    if not lives:
        raise UserError(
            f"{run / FOLDER} holds no record; name the folder of a run, of which observe.activity"
            " is true"
        )
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        with aside.open("w") as file:
            json.dump({"traceEvents": list(trace(lives)), "displayTimeUnit": "ms"}, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    result(str(path))
    return 0


def trace(lives: list[Life]) -> Iterator[dict[str, Any]]:
    """The events of the trace. A process is a process of the trace, with a thread for each of its
    spans that overlap; a step is a mark through all of them.
    """
    first = min(life.begin for life in lives)

    def micros(at: float) -> float:
        return round(1e6 * (at - first), 1)

    names = list(dict.fromkeys(life.process for life in lives))
    for number, name in enumerate(names):
        about = {"pid": number, "tid": 0, "ph": "M"}
        yield about | {"name": "process_name", "args": {"name": name}}
        yield about | {"name": "process_sort_index", "args": {"sort_index": number}}
    for life in lives:
        number = names.index(life.process)
        for span, lane in lanes(life):
            about: dict[str, Any] = {"kind": span.kind}
            if span.of:
                about["waits on"] = ", ".join(span.of)
            if span.deadline_s:
                about["deadline_s"] = span.deadline_s
            if span.done:
                about["requests answered"] = span.done
            if span.end is None:
                about["has no end"] = True
            yield {
                "ph": "X",
                "name": span.what,
                "cat": span.kind,
                "pid": number,
                "tid": lane,
                "ts": micros(span.begin),
                "dur": micros(life.ended_at(span)) - micros(span.begin),
                "args": about,
            }
        if life.process == "rank0":
            for at, step, version in life.steps:
                mark = {"ph": "i", "s": "g", "name": f"step {step}", "cat": "step", "pid": number}
                yield mark | {"tid": 0, "ts": micros(at), "args": {"weights": version}}


def lanes(life: Life) -> Iterator[tuple[SpanRecord, int]]:
    """Each span with a number from 0, so that spans of one number lie in each other or apart; a
    span has the number of the span around it if it can.
    """
    open_in: list[list[float]] = []
    chosen: dict[int, int] = {}
    spans = life.spans.values()
    for span in sorted(spans, key=lambda one: (one.begin, -life.ended_at(one), one.number)):
        end, first = life.ended_at(span), chosen.get(span.parent, 0)
        order = [first, *(lane for lane in range(len(open_in)) if lane != first)]
        for lane in [*order, len(open_in)]:
            if lane == len(open_in):
                open_in.append([])
            ends = open_in[lane]
            while ends and ends[-1] <= span.begin:
                ends.pop()
            if not ends or end <= ends[-1]:
                ends.append(end)
                chosen[span.number] = lane
                yield span, lane
                break
