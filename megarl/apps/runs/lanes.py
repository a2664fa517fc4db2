"""The picture of a run's last steps in the report: a row for each process, coloured by what it
does, and the share of the time in which it waits or has nothing to do.
"""

from __future__ import annotations

import re
from collections import Counter
from html import escape
from itertools import groupby
from pathlib import Path

from megarl.activity.files import FOLDER, Life, of_run, read_lives, seconds
from megarl.activity.spans import KINDS, Event, micros

STEPS = 6
"""Steps that the picture shows."""
CELLS = 1200
"""Pieces of equal length that a row is made of; each has the colour of what fills it last."""
MOST_ROWS = 40
"""Processes that the picture shows."""
COLOURS: dict[str, int] = {
    **{"generate": 1, "train": 2, "score": 3, "publish": 4, "wait": 5, "logprobs": 6},
    **{"optimizer": 7, "checkpoint": 8, "evaluate": 9, "load": 10},
}
"""{kind: number of its colour in the style sheet}"""

Row = list[Event | None]
"""The span that a process is in, in each of `CELLS` pieces of the picture; None for nothing."""


def last_steps(run: Path) -> str:
    """HTML of the picture, or "" for a run that has recorded no step."""
    lives = of_run(read_lives(run / FOLDER, only_last=True))
    leader = next((life for life in lives if life.process == "rank0" and life.steps), None)
    if leader is None:
        return ""
    marks = leader.steps[-STEPS:]
    # Without the end of the run, which takes seconds.
    ends = [leader.ended_at(span) for span in leader.spans.values()] if leader.closed else []
    first, last = marks[0]["ts"], max(ends or [micros(life.last) for life in lives])
    if last <= first:
        return ""
    # A part of a process, such as "engine0-core", records only a part of what it does.
    active = [life for life in lives if life.spans and "-" not in life.process][:MOST_ROWS]
    rows = {escape(life.process): cells(life, first, last) for life in active}
    lead = next(iter(rows.values()))
    kinds = {span["cat"] for row in rows.values() for span in row if span is not None}
    legend = "".join(
        f'<li><i class="key bars" style="--c:var(--c{COLOURS[kind]})"></i>{kind}</li>'
        for kind in KINDS
        if kind in kinds
    )
    at = {step["name"]: (step["ts"] - first) / (last - first) for step in marks}
    lines = "".join(f"M{CELLS * place:.1f} 0V10" for place in at.values())
    axis = "".join(
        f'<span style="left:{100 * one:.2f}%">{escape(name)}</span>' for name, one in at.items()
    )
    drawn = "".join(
        f'<div class="who">{name}</div><div class="lane"><svg viewBox="0 0 {CELLS} 10"'
        f' preserveAspectRatio="none" role="img">{_row(row, (last - first) / 1e6 / CELLS)}'
        f'<path d="{lines}" stroke="var(--ink)" stroke-width="1" opacity=".35"'
        ' vector-effect="non-scaling-stroke"/></svg></div>'
        for name, row in rows.items()
    )
    words = "".join(f"<li>{name}: {escape(idle(row, lead))}</li>" for name, row in rows.items())
    return (
        '<figure class="lanes"><figcaption><h3>What each process did</h3>'
        f"<p>the last {len(marks)} steps, {seconds((last - first) / 1e6)}</p></figcaption>"
        f'<ul class="legend">{legend}</ul><div class="grid">{drawn}'
        f'<div></div><div class="steps">{axis}</div></div><ul class="idle">{words}</ul></figure>'
    )


def cells(life: Life, first: int, last: int) -> Row:
    """What the process does in each piece from `first` to `last`, in microseconds: the innermost
    span; of several that do not lie in each other, one that does not wait.
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
    """The share of the time in which a process waits or does nothing, with the main cause. `leader`:
    the row of rank 0, which tells why others have nothing to do.
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


def _row(row: Row, cell_s: float) -> str:
    """SVG of a process's row, of which a piece lasts `cell_s` seconds."""
    parts, begin = [], 0
    for span, group in groupby(row):
        width = len(list(group))
        if span is not None:
            text = escape(f"{span['name']} ({span['cat']}), {seconds(cell_s * width)}")
            parts.append(
                f'<rect x="{begin}" y="0" width="{width}" height="10"'
                f' fill="var(--c{COLOURS.get(span["cat"], 5)})"><title>{text}</title></rect>'
            )
        begin += width
    return "".join(parts)
