"""The plots of docs/results.md, drawn from the tables of docs/results/.

    python tools/plot_results.py          # writes docs/results/*.svg anew

They are plain SVG, so that nothing has to be installed. `tests/unit/test_docs.py` holds the files
to the tables.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 50, 190, 40, 45
COLOURS = ("#1f5fbf", "#c2561a", "#2f8f4e")

Series = dict[str, list[tuple[float, float]]]
"""{name: points (x, y)}"""


def row(page: str, column: str, start: str) -> dict[str, str]:
    """{column: cell} of the first row that begins with `start`, in a table of docs/results/`page`
    that has the column.
    """
    head: list[str] = []
    for line in (RESULTS / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells
        elif column in head and line.startswith(f"| {start}"):
            return dict(zip(head, cells, strict=True))
    raise LookupError(f"docs/results/{page}: no row '{start}' with a column '{column}'")


def number(page: str, column: str, start: str) -> float:
    """The first number of that row's cell."""
    found = re.search(r"\d+(\.\d+)?", row(page, column, start)[column])
    assert found is not None
    return float(found[0])


def figure(title: str, body: list[str], height: int = HEIGHT) -> str:
    """An SVG on white, so that it is read in dark pages too."""
    head = f'<text x="10" y="22" font-size="15" font-weight="bold">{escape(title)}</text>'
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        *(head, *body, "</svg>\n"),
    ))  # fmt: skip


def lines(title: str, below: str, series: Series, ys: tuple[float, ...]) -> str:
    """Lines through the points; `ys` marks the vertical axis, `below` names the other."""
    xs = sorted({x for points in series.values() for x, _ in points})

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - xs[0]) / (xs[-1] - xs[0]) * (WIDTH - LEFT - RIGHT)
        up = (y - ys[0]) / (ys[-1] - ys[0]) * (HEIGHT - TOP - BOTTOM)
        return round(LEFT + across, 1), round(HEIGHT - BOTTOM - up, 1)

    body = [f'<text x="{LEFT}" y="{HEIGHT - 8}">{escape(below)}</text>']
    for y in ys:
        left, at = place(xs[0], y)
        body.append(f'<path d="M{left} {at}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        body.append(f'<text x="{LEFT - 8}" y="{at + 4}" text-anchor="end">{y:g}</text>')
    for x in xs:
        at, low = place(x, ys[0])
        body.append(f'<text x="{at}" y="{low + 17}" text-anchor="middle">{x:g}</text>')
    ends = []
    for colour, (name, points) in zip(COLOURS, series.items(), strict=False):
        drawn = [place(*point) for point in points]
        path = " ".join(f"{x},{y}" for x, y in drawn)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in drawn]
        ends.append((drawn[-1][1] + 4, name, colour))
    above = 0.0
    for end, name, colour in sorted(ends):
        above = max(end, above + 14)  # names do not cover each other
        at = f'x="{WIDTH - RIGHT + 8}" y="{above}"'
        body.append(f'<text {at} fill="{colour}">{escape(name)}</text>')
    return figure(title, body)


def bars(title: str, values: dict[str, float]) -> str:
    """A horizontal bar for each value, and a line at 1."""
    start, unit, height = 300, 60, TOP + 26 * len(values) + 10
    body = [
        f'<path d="M{start + unit} {TOP - 6}V{height - 8}" stroke="#999" stroke-dasharray="3"/>'
    ]
    for place, (name, value) in enumerate(values.items()):
        y, wide = TOP + 26 * place, round(unit * value, 1)
        body.append(f'<rect x="{start}" y="{y}" width="{wide}" height="16" fill="{COLOURS[0]}"/>')
        body.append(f'<text x="{start - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        body.append(f'<text x="{start + wide + 6}" y="{y + 12}">{value:g}</text>')
    return figure(title, body, height)


def learning() -> str:
    steps = ("0", "20", "40", "60", "80 steps")
    rows = {"seed 1": "the recipe:", "seed 2": "the same, seed 2", "seed 3": "the same, seed 3"}
    series: Series = {
        name: [(int(step.split()[0]), number("learning.md", step, start)) for step in steps]
        for name, start in rows.items()
    }
    title = "SmolLM2-135M: held-out accuracy of sums asked in words"
    return lines(title, "steps of training", series, (0, 0.2, 0.4, 0.6, 0.8))


def staleness() -> str:
    columns = {
        "throughput, to synchronous": "throughput",
        "accuracy at equal steps": "at equal steps",
        "accuracy at equal time": "at equal time",
    }
    series: Series = {
        name: [(s, number("speed.md", column, f"{s} |")) for s in (0, 1, 2, 4, 8)]
        for name, column in columns.items()
    }
    title = "Older rollouts: more of them, and slower learning"
    return lines(title, "rollout.max_staleness", series, (0.6, 0.8, 1, 1.2, 1.4, 1.6, 1.8))


def speed() -> str:
    trl = "x TRL"
    values = {
        "GRPO on SmolLM2": number("speed.md", trl, "megarl, synchronous, two threads"),
        "DPO": number("speed.md", trl, "DPO against"),
        "fine-tuning": number("speed.md", trl, "fine-tuning against"),
        "toy model, 64 new tokens": number("speed.md", trl, "64 |"),
        "toy model, 480 new tokens": number("speed.md", trl, "480 |"),
    }
    return bars("Times as fast as TRL 1.16, on two CPU cores", values)


PLOTS = {"learning.svg": learning, "staleness.svg": staleness, "speed.svg": speed}

if __name__ == "__main__":
    for name, draw in PLOTS.items():
        (RESULTS / name).write_text(draw())
