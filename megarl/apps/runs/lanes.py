"""Chart of a run's last steps in `report.html`: a row for each process, coloured by what the
process does, and the fraction of the time in which it waits or has nothing to do.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

from megarl.activity.files import FOLDER, Life, of_run, read_lives, seconds
from megarl.activity.spans import KINDS, Event, micros

STEPS = 6
"""Number of steps that the chart shows."""
CELLS = 1200
"""Number of pieces of equal length that a row consists of; a piece has the colour of the activity
that fills it last."""
MOST_ROWS = 40
"""Most processes that the chart shows."""
COLOURS: dict[str, int] = {
    **{"generate": 1, "train": 2, "score": 3, "publish": 4, "wait": 5, "logprobs": 6},
    **{"optimizer": 7, "checkpoint": 8, "evaluate": 9, "load": 10},
}
"""{kind of an activity: number of its colour in the style sheet}"""

Row = list[Event | None]
"""For each of the `CELLS` pieces of a row the activity that the process is in (a span, as a trace
event with `name`, `cat` and `ts` in microseconds); None for nothing."""


def last_steps(run: Path) -> dict[str, Any] | None:
    """Data of the chart in a run's report that shows what each process did in the last 6 steps, for
    the page's template; None for a run that has recorded no step. `run`: path of the run folder.

    Returns a dict with the keys:
        about: what the chart shows, in words.
        cells: 1200, the number of pieces of equal time of a row.
        legend: {kind of activity: number of its colour}.
        marks: (name, position from 0 to 1 in the row) of each step's beginning.
        rows: for each process (name, its bars, its idle time in words); a bar is (first piece,
            number of pieces, number of its colour, words).
    """
    lives = of_run(read_lives(run / FOLDER, only_last=True))
    leader = next((life for life in lives if life.process == "rank0" and life.steps), None)
    if leader is None:
        return None
    marks = leader.steps[-STEPS:]
    # Without the end of the run, which takes seconds.
    ends = [leader.ended_at(span) for span in leader.spans.values()] if leader.closed else []
    first, last = marks[0]["ts"], max(ends or [micros(life.last) for life in lives])
    if last <= first:
        return None
    # A part of a process, such as "engine0-core", records only a part of what it does.
    active = [life for life in lives if life.spans and "-" not in life.process][:MOST_ROWS]
    rows = {life.process: cells(life, first, last) for life in active}
    lead, total_s = next(iter(rows.values())), (last - first) / 1e6
    drawn = {span["cat"] for row in rows.values() for span in row if span is not None}
    return {
        "about": f"the last {len(marks)} steps, {seconds(total_s)}",
        "cells": CELLS,
        "legend": {kind: COLOURS[kind] for kind in KINDS if kind in drawn},
        "marks": [(step["name"], (step["ts"] - first) / (last - first)) for step in marks],
        "rows": [
            (name, _bars(row, total_s / CELLS), idle(row, lead)) for name, row in rows.items()
        ],
    }


def cells(life: Life, first: int, last: int) -> Row:
    """What the process `life` does in each of 1200 equal pieces of the time from `first` to `last`,
    in microseconds since the epoch: a list with one activity (dict with `name`, `cat` and `ts`) for
    each piece, None for nothing. Of nested activities it has the innermost; of others at the same
    time one that does not wait.
    """
    found: Row = [None] * CELLS
    order = {
        number: (len(life.around(one)), one["cat"] != "wait", one["ts"])
        for number, one in life.spans.items()
        if one.get("end", last) > first
    }
    for one in (life.spans[number] for number in sorted(order, key=order.__getitem__)):
        end = last if life.is_alive and "end" not in one else life.ended_at(one)
        begins, ends = (round(CELLS * (at - first) / (last - first)) for at in (one["ts"], end))
        begins, ends = max(0, begins), min(CELLS, ends)
        found[begins:ends] = [one] * (ends - begins)
    return found


def idle(row: Row, leader: Row) -> str:
    """Words for a report page on the time in which a process waits or does nothing: percentage and
    main cause, such as "12% idle, waiting for rollouts". `row`: what the process does in equal
    pieces of time, as `cells` returns it; `leader`: the row of rank 0, whose activity is given as
    the cause where another process does nothing.
    """
    causes: Counter[str] = Counter()
    for mine, first in zip(row, leader, strict=True):
        if mine is not None and mine["cat"] == "wait":
            causes[f"waiting for {_short(mine)}"] += 1
        elif mine is None and row is leader:
            causes["between two activities"] += 1
        elif mine is None:
            causes[f"while rank0 is at: {_short(first)}" if first else "no request"] += 1
    if not causes:
        return "never idle"
    (cause, count), total = causes.most_common(1)[0], causes.total()
    most = "" if count == total else f"most of it ({count / len(row):.0%}) "
    return f"{total / len(row):.0%} idle, {most}{cause}"


def _short(span: Event) -> str:
    """What a span is about without the number of its step, so that spans can be counted together."""
    return re.sub(r"( of| after)? step \d+| \d+$", "", span["name"])


def _bars(row: Row, cell_s: float) -> list[tuple[int, int, int, str]]:
    """(first piece, pieces, number of the colour, words) of each span of a row, of which a piece
    lasts `cell_s` seconds.
    """
    found, begin = [], 0
    for span, group in groupby(row):
        width = len(list(group))
        if span is not None:
            about = f"{span['name']} ({span['cat']}), {seconds(cell_s * width)}"
            found.append((begin, width, COLOURS.get(span["cat"], 5), about))
        begin += width
    return found
