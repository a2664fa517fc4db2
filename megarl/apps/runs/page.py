"""The templates of a report, the data of its charts, and how its page is written."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2
import numpy as np

from megarl.system.files import UNFINISHED

DRAWN = 500
"""Most values of a series in the page; longer series are reduced to so many."""
Kind = Literal["line", "dashed", "points", "rings", "bars"]
"""How a series is drawn: points and rings are separate measurements, joined by a thin line; bars
are stacked."""

Chart = dict[str, Any]
"""JSON data of a chart, which the page's script draws: `title`, `note`, `series`, `wide` and what
else `chart` was given."""
Series = dict[str, Any]
"""JSON data of a line, row of bars or set of points of a chart, made by `series`: `label`,
`colour`, `kind`, `each` (steps that one value stands for), `steps`, `rows` (the values of each run,
None where unknown), `smooth` (whether the page takes a moving mean), `raw` (whether it then shows
the values too) and `spikes`, the values of which `rows` has means."""


@functools.cache
def pages() -> jinja2.Environment:
    """The templates of report pages, loaded once in a process. Every value that a template is given
    is escaped as HTML, with control characters, which HTML forbids, as visible symbols.
    """
    controls = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}

    def visible(value: Any) -> Any:
        if type(value) is not str:  # HTML of the template is a class of its own
            return value
        return value.replace("\r\n", "\n").translate(controls | {127: 0x2421})

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["count"] = "{:,}".format
    environment.filters["sha256"] = lambda text: base64.b64encode(
        hashlib.sha256(text.encode()).digest()
    ).decode()
    return environment


def write_page(target: Path, text: str) -> Path:
    """Write the page `text` to the file `target`, in one atomic rename; returns `target`."""
    # Not synced: a run writes it again and again, and waits for no disk.
    being_written = target.with_name(f".report.{os.getpid()}{UNFINISHED}")
    # A lone surrogate in a transcript has no UTF-8; it is shown as a question mark.
    being_written.write_text(text, encoding="utf-8", errors="replace")
    being_written.replace(target)
    return target


def chart(title: str, note: str, drawn: Sequence[Series], **how: Any) -> Chart | None:
    """Data of a chart over the steps for the script of a report page, as a dict for JSON; None
    where no series has a finite value.

    Args:
        title: what is shown.
        note: unit of the vertical axis, and how to read it.
        drawn: the series, made by `series`; bars are stacked in this order.
        how: `wide` for the whole width of the page; `percent` for fractions from 0 to 1, shown as
            percentages; `zero` where the vertical axis begins at 0; `span` for its (lowest,
            highest) value; `whole` for counts; `unless_zero` for a chart that is left out where all
            values are 0; `log` for a logarithmic axis, on which values of 0
            are not drawn.
    """
    values = [[value for row in line["rows"] for value in row] for line in drawn]
    drawn = [
        line
        for line, known in zip(drawn, values, strict=True)
        if any(value is not None for value in known)
    ]
    if not drawn or (how.pop("unless_zero", False) and not any(v for row in values for v in row)):
        return None
    if how.get("log") and not any(value for known in values for value in known):
        note += "; every one of these is exactly 0"
    return {"title": title, "note": note, "series": drawn, "wide": False} | how


def series(
    label: str,
    steps: np.ndarray,
    values: np.ndarray,
    colour: int,
    kind: Kind = "line",
    pick: Callable[..., np.ndarray] = np.ma.mean,
) -> Series:
    """A series of a report's chart as a dict for JSON: [n] `values`, or [runs, n], at [n] ascending
    `steps`, NaN where unknown. Of more than `DRAWN` values, several consecutive ones become one, by
    `pick`, a function of a masked array [m, k] and `axis=1` that returns [m], such as `np.ma.mean`.

    `label`: its name on the page. `colour`: 1 to 10, of the page's palette.
    """
    each = max(1, -(-len(steps) // DRAWN))

    def cut(one: np.ndarray) -> np.ma.MaskedArray:
        padded = np.pad(one, (0, -len(one) % each), constant_values=np.nan)
        return np.ma.masked_invalid(padded.reshape(-1, each))

    def row(one: np.ndarray) -> list[float | None]:
        picked = np.ma.filled(pick(cut(one), axis=1), np.nan)
        return [float(f"{value:.5g}") if np.isfinite(value) else None for value in picked]

    return {
        "label": label,
        "colour": colour,
        "kind": kind,
        "each": each,
        "smooth": False,
        "steps": [short_step(step) for step in cut(steps).mean(axis=1)],
        "rows": [row(one) for one in np.atleast_2d(values)],
    }


def short_step(step: float) -> float:
    """A step as a number that is short in JSON."""
    return int(step) if step == int(step) else float(f"{step:.8g}")


def farthest(rows: np.ma.MaskedArray, *, axis: int) -> np.ndarray:
    """Of each of the n rows of `rows` [n, k] the value farthest from the row's mean: returns [n].
    It reduces many values of a chart to few and keeps spikes, which a mean would hide. `axis` is 1.
    """
    gaps = abs(rows - rows.mean(axis=axis, keepdims=True))
    return rows[np.arange(len(rows)), gaps.argmax(axis=axis)]
