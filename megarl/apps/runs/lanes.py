"""The picture of a run's last steps in the report: a row for each process, coloured by what it
does, and the share of the time in which it waits or has nothing to do.
"""

from __future__ import annotations

import re
from collections import Counter
from html import escape
from pathlib import Path

import numpy as np

from megarl.activity.files import FOLDER, Life, SpanRecord, of_run, read
from megarl.activity.spans import KINDS
from megarl.activity.state import seconds

STEPS = 6
"""Steps that the picture shows."""
CELLS = 1200
"""Pieces of equal length that a row is made of; each has the colour of what fills it last."""
MOST_ROWS = 40
"""Processes that the picture shows."""
READ_BYTES = 2**20
"""Bytes read from the end of each process's file."""
COLOURS = {
    kind: number
    for kind, number in zip(
        ("generate", "train", "score", "publish", "wait", "logprobs", "optimizer", "checkpoint"),
        range(1, 9),
        strict=True,
    )
} | {"evaluate": 9, "load": 10}
"""{kind: number of its colour in the style sheet}"""

Row = list[SpanRecord | None]
"""What a process does in each of `CELLS` pieces of the picture; None for nothing."""


def last_steps(run: Path) -> str:
    """HTML of the picture, or "" for a run that has recorded no step."""
    lives = of_run(read(run / FOLDER, only_last=True, tail_bytes=READ_BYTES))
    window = shown(lives)
    if window is None:
        return ""
    first, last, marks = window
    # A part of a process, such as "engine0-core", records only a part of what it does.
    active = [life for life in lives if life.spans and "-" not in life.process][:MOST_ROWS]
    rows = {life.process: cells(life, first, last) for life in active}
    leader = next(iter(rows.values()))
    kinds = {span.kind for row in rows.values() for span in row if span is not None}
    legend = "".join(
        f'<li><i class="key bars" style="--c:var(--c{COLOURS[kind]})"></i>{kind}</li>'
        for kind in KINDS
        if kind in kinds
    )
    drawn = "".join(
        f'<div class="who">{escape(name)}</div><div class="lane">{_row(row, marks, first, last)}'
        f"</div>"
        for name, row in rows.items()
    )
    words = "".join(
        f"<li>{escape(name)}: {escape(idle(row, leader, name))}</li>" for name, row in rows.items()
    )
    axis = "".join(
        f'<span style="left:{100 * (at - first) / (last - first):.2f}%">step {step}</span>'
        for at, step in marks
    )
    return (
        '<figure class="lanes"><figcaption><h3>What each process did</h3>'
        f"<p>the last {len(marks)} steps, {seconds(last - first)}</p></figcaption>"
        f'<ul class="legend">{legend}</ul><div class="grid">{drawn}'
        f'<div></div><div class="steps">{axis}</div></div><ul class="idle">{words}</ul></figure>'
    )


def shown(lives: list[Life]) -> tuple[float, float, list[tuple[float, int]]] | None:
    """(begin, end, (begin, number) of each step) of the picture, in seconds since the epoch; None
    where no step is recorded.
    """
    leader = next((life for life in lives if life.process == "rank0" and life.steps), None)
    if leader is None:
        return None
    marks = [(at, step) for at, step, _ in leader.steps[-STEPS:]]
    # Without the end of the run, which takes seconds.
    ended = [leader.ended_at(span) for span in leader.spans.values()] if leader.closed else []
    last = max(ended or [life.last for life in lives])
    return (marks[0][0], last, marks) if last > marks[0][0] else None


def cells(life: Life, first: float, last: float) -> Row:
    """What the process does in each piece from `first` to `last`, in seconds since the epoch: the
    innermost span; of several that do not lie in each other, one that does not wait.
    """
    found: Row = [None] * CELLS
    spans = [one for one in life.spans.values() if life.ended_at(one) > first and one.begin < last]
    end_of_open = last if life.is_alive else life.last
    depth = {one.number: len(life.around(one)) for one in spans}
    spans.sort(key=lambda one: (depth[one.number], one.kind != "wait", one.begin))
    for one in spans:
        end = end_of_open if one.end is None else one.end
        begins = CELLS * (one.begin - first) / (last - first)
        ends = CELLS * (end - first) / (last - first)
        for place in range(max(0, round(begins)), min(CELLS, round(ends))):
            found[place] = one
    return found


def idle(row: Row, leader: Row, name: str) -> str:
    """The share of the time in which a process waits or does nothing, with the main cause. `leader`:
    the row of rank 0, which tells why others have nothing to do.
    """
    causes: Counter[str] = Counter()
    for mine, first in zip(row, leader, strict=True):
        if mine is None:
            doing = f"while rank0 is at: {_short(first)}" if first is not None else "no request"
            causes[doing if row is not leader else "between two activities"] += 1
        elif mine.kind == "wait":
            causes[f"waiting for {_short(mine)}"] += 1
    total = causes.total()
    if not total:
        return "never idle"
    cause, count = causes.most_common(1)[0]
    share = f"{total / len(row):.0%} idle"
    if count == total:
        return f"{share}, {cause}"
    return f"{share}, most of it ({count / len(row):.0%}) {cause}"


def _short(span: SpanRecord | None) -> str:
    """What a span is about without the number of its step, so that spans can be counted together."""
    return "" if span is None else re.sub(r"( of| after)? step \d+| \d+$", "", span.what)


def _row(row: Row, marks: list[tuple[float, int]], first: float, last: float) -> str:
    """SVG of a process's row, with a line at each step."""
    parts, begin = [], 0
    for place in np.flatnonzero([a is not b for a, b in zip(row, [*row[1:], ""], strict=True)]):
        span, width = row[begin], int(place) + 1 - begin
        if span is not None:
            spent = seconds((last - first) * width / CELLS)
            text = escape(f"{span.what} ({span.kind}), {spent}")
            parts.append(
                f'<rect x="{begin}" y="0" width="{width}" height="10"'
                f' fill="var(--c{COLOURS.get(span.kind, 5)})"><title>{text}</title></rect>'
            )
        begin = int(place) + 1
    lines = "".join(f"M{CELLS * (at - first) / (last - first):.1f} 0V10" for at, _ in marks)
    return (
        f'<svg viewBox="0 0 {CELLS} 10" preserveAspectRatio="none" role="img">{"".join(parts)}'
        f'<path d="{lines}" stroke="var(--ink)" stroke-width="1" opacity=".35"'
        ' vector-effect="non-scaling-stroke"/></svg>'
    )
