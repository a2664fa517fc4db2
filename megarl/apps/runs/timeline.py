"""`megarl timeline RUN [--out FILE]`: what every process of a run did, as a trace that Perfetto
(https://ui.perfetto.dev) and chrome://tracing show.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megarl.activity.files import FOLDER, Life, read_lives
from megarl.activity.spans import Event
from megarl.console import Arguments, result
from megarl.errors import UserError
from megarl.files import new_file

FILE = "timeline.json"
"""Name of the trace's file in the run folder."""


def main(arguments: list[str]) -> int:
    """Run `megarl timeline`: write the activity of a run's processes as a trace, a JSON file in the
    Trace Event Format, to RUN/timeline.json or `--out`, and print its path. `arguments`: the words
    after `megarl timeline`. Returns the exit code 0. Raises `UserError` for a folder in which no
    run has recorded its activity (`observe.activity`).
    """
    parser = Arguments(
        "megarl timeline", "it needs one run folder: megarl timeline RUN [--out FILE]"
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_intermixed_args(arguments)
    run, path = options.run, options.out or options.run / FILE
    path = path / FILE if path.is_dir() else path
    lives = read_lives(run / FOLDER)
    if not lives:
        raise UserError(
            f"{run / FOLDER} holds no record; name the folder of a run, of which observe.activity"
            " is true"
        )
    try:
        with new_file(path) as file:
            file.write(json.dumps({"traceEvents": list(trace(lives))}).encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; set --out FILE") from None
    result(str(path))
    return 0


def trace(lives: list[Life]) -> Iterator[Event]:
    """Yield the events of a trace in the Trace Event Format, as dicts; times are microseconds since
    the epoch. `lives`: what each process has recorded from a start to its end. The `pid` of an
    event is the position of the process's name among the names in `lives`, so that a process keeps
    it when it is started again. A span without an end lasts to the last event of that start of its
    process.
    """
    names = list(dict.fromkeys(life.process for life in lives))
    for number, name in enumerate(names):
        about: Event = {"ph": "M", "pid": number}
        yield about | {"name": "process_name", "args": {"name": name}}
        yield about | {"name": "process_sort_index", "args": {"sort_index": number}}
    for life in lives:
        own = {"pid": names.index(life.process)}
        yield from (step | own for step in life.steps)
        for span in life.spans.values():
            args = span["args"] | ({} if "end" in span else {"has no end": True})
            yield span | own | {"ph": "X", "dur": life.ended_at(span) - span["ts"], "args": args}
