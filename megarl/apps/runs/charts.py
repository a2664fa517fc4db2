"""Charts as inline SVG with HTML text, readable without JavaScript.

Lines and bars are an SVG that stretches with its box (stroke widths stay). Numbers and labels are
HTML over it, so that text has the same size on a phone and on a wide screen. JSON beside each chart
has the data of the tooltip, whose script is in `megarl.apps.runs.page`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from megarl.apps.runs.number_format import compact, power, ticks
from megarl.apps.runs.series import Series, gather, thinned

_UNIT = 1000.0
"""Width and height of the SVG in its own units."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Vertical axis: values to heights, 0 at the bottom and 1 at the top."""

    low: float
    """Value at the bottom of the axis; its log10 if the axis is logarithmic."""
    high: float
    log: bool
    marks: list[tuple[float, str]]
    """(height, label) of each mark on the axis."""

    def height(self, values: np.ndarray) -> np.ndarray:
        """[n] heights of [n] values; NaN for values that a logarithmic axis cannot show."""
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                values = np.where(values > 0, np.log10(np.maximum(values, 1e-300)), np.nan)
        return (values - self.low) / (self.high - self.low)


def _y_scale(
    values: np.ndarray,
    span: tuple[float, float] | None,
    log: bool,
    whole: bool,
    as_text: Callable[[float], str],
) -> _Scale:
    """The vertical axis for `values`, or for `span` (lowest, highest) where given.

    `log`: a logarithmic axis, which ignores `span` and `as_text`. `whole`: tick marks at whole
    numbers only. `as_text`: a tick's value as its label.
    """
    values = values[np.isfinite(values)]
    if log:
        logs = np.log10(values[values > 0])
        low, high = (math.floor(logs.min()), math.ceil(logs.max())) if len(logs) else (-8, 0)
        high = max(high, low + 1)
        stride = -(-(high - low) // 6)
        marks = [((e - low) / (high - low), power(10.0**e)) for e in range(low, high + 1, stride)]
        return _Scale(low, high, True, marks)
    low, high = span or (float(values.min()), float(values.max()))
    at = ticks(low, high, 5, whole=whole)
    low, high = at[0], at[-1]
    labels = [as_text(round(tick, 12)) for tick in at]
    if len(set(labels)) < len(labels):  # equal after rounding to three digits
        labels = [f"{tick:.6g}" for tick in at]
    return _Scale(
        low,
        high,
        False,
        [((tick - low) / (high - low), label) for tick, label in zip(at, labels, strict=True)],
    )


def chart(
    title: str,
    note: str,
    series: Sequence[Series],
    *,
    as_text: Callable[[float], str] = compact,
    span: tuple[float, float] | None = None,
    zero: bool = False,
    log: bool = False,
    whole: bool = False,
    wide: bool = False,
    x_span: tuple[float, float] | None = None,
) -> str:
    """A figure with axes, legend and tooltip, or "" where no series has a finite value.

    Args:
        title: what is shown.
        note: unit of the vertical axis, and how to read it.
        series: what to draw; bars are stacked in this order.
        as_text: a value as text, on the axis and in the tooltip.
        span: bounds of the vertical axis; by default those of the values.
        zero: the vertical axis begins at 0.
        log: logarithmic vertical axis; values of 0 are not drawn.
        whole: the values are counts, so marks stand at whole numbers.
        wide: twice the width, and taller.
        x_span: (first, last) step of the horizontal axis; by default those of the series.
    """
    series = [one for one in series if np.isfinite(one.values).any()]
    if not series:
        return ""
    stacked = any(one.kind == "bars" for one in series)
    drawn = [gather(one) if stacked else thinned(one) for one in series]
    tops = _stacked_tops(drawn)
    axis = _x_axis(drawn, x_span)
    values = np.concatenate([tops.ravel(), *(one.values for one in drawn if one.kind != "bars")])
    known = values[np.isfinite(values)]
    if log and not (known > 0).any():
        note += "; every one of these is exactly 0"
    if zero and span is None:
        span = (min(0.0, float(known.min())), float(known.max()) if known.max() > 0 else 1.0)
    scale = _y_scale(values, span, log, whole, as_text)
    shapes, rows = _draw(drawn, tops, axis, scale, as_text)
    names = ", ".join(one.label for one in series)
    return _figure(
        title,
        note,
        series,
        shapes,
        scale.marks,
        axis.marks,
        rows,
        f"{title}: {names}, by step",
        wide,
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    """Horizontal axis: steps to positions, 0 at the left edge and 1 at the right edge."""

    first: float
    last: float
    bar_width: float
    """Distance of neighbouring bars, in steps."""
    marks: list[tuple[float, str]]
    """(position, label) of each mark on the axis."""

    def across(self, steps: np.ndarray) -> np.ndarray:
        """[n] horizontal positions of [n] steps."""
        return (steps - self.first) / (self.last - self.first)


def _stacked_tops(drawn: Sequence[Series]) -> np.ndarray:
    """[series of bars, steps] upper end of each bar: the running sum over the series below."""
    stack = [one for one in drawn if one.kind == "bars"]
    if not stack:
        return np.zeros((0, 0))
    return np.cumsum([np.nan_to_num(one.values) for one in stack], axis=0)


def _x_axis(drawn: Sequence[Series], x_span: tuple[float, float] | None) -> _Axis:
    """The horizontal axis over `x_span`, by default over the steps of all series."""
    stack = [one for one in drawn if one.kind == "bars"]
    first, last = x_span or (
        min(float(one.steps.min()) - (one.each - 1) / 2 for one in drawn),
        max(float(one.steps.max()) + (one.each - 1) / 2 for one in drawn),
    )
    bar = float(np.diff(stack[0].steps).min()) if stack and len(stack[0].steps) > 1 else 1.0
    margin = 0.5 if stack or first == last else 0.0
    axis = _Axis(first - margin, last + margin, bar, [])
    marks = [(float(axis.across(np.array(tick))), f"{tick:,.0f}") for tick in _x_ticks(first, last)]
    return dataclasses.replace(axis, marks=marks)


def _draw(
    drawn: Sequence[Series],
    tops: np.ndarray,
    axis: _Axis,
    scale: _Scale,
    as_text: Callable[[float], str],
) -> tuple[str, list[dict[str, object]]]:
    """(SVG shapes, tooltip data) of every series; `tops` are the upper ends of stacked bars."""
    shapes, rows, bottom, number = [], [], np.zeros(tops.shape[1]), 0
    for one in drawn:
        x = axis.across(one.steps)
        if one.kind == "bars":
            top = tops[number]
            number += 1
            width = axis.bar_width / (axis.last - axis.first)
            width *= 0.78 if len(one.steps) <= 60 else 1.0
            heights = scale.height(top)
            shapes.append(_bars(one, x, scale.height(bottom), heights, width))
            bottom = top
        else:
            heights = scale.height(one.values)
            shapes.append(_line(one, x, heights, over_bars=len(tops) > 0))
        rows.append(_tooltip_row(one, x, heights, as_text))
    return "".join(shapes), rows


def _x_ticks(first: float, last: float) -> list[float]:
    """Round step numbers from `first` to `last`."""
    if last - first < 5:
        return [float(step) for step in range(math.ceil(first), math.floor(last) + 1)]
    return [tick for tick in ticks(first, last, 6, whole=True) if first <= tick <= last]


def _stroke(path: str, colour: str, width: float, extra: str = "") -> str:
    """An SVG path that is drawn as a line, `width` pixels wide."""
    return (
        f'<path d="{path}" stroke="{colour}" stroke-width="{width:g}"'
        f' vector-effect="non-scaling-stroke"{extra}/>'
    )


def _line(one: Series, x: np.ndarray, y: np.ndarray, *, over_bars: bool) -> str:
    """SVG of a line series, interrupted at NaN, from positions x and heights y [n].

    Points are strokes of length 0 with round ends, which stay round when the SVG is stretched.
    """
    places = [
        (f"{_UNIT * a:.1f} {_UNIT * (1 - b):.1f}" if np.isfinite(b) else "")
        for a, b in zip(x, y, strict=True)
    ]
    path, pen = [], "M"
    for place in places:
        if place:
            path.append(pen + place)
        pen = "L" if place else "M"
    dots = "".join(f"M{place}h.01" for place in places if place)
    ink, colour = "".join(path), f"var(--c{one.colour})"
    if one.kind in ("points", "rings"):
        inner = colour if one.kind == "points" else "var(--card)"
        return (
            _stroke(ink, colour, 1.25, ' stroke-dasharray="2 4"')
            + _stroke(dots, "var(--card)", 12)
            + _stroke(dots, colour, 8.5)
            + (_stroke(dots, inner, 4.5) if one.kind == "rings" else "")
        )
    if sum(map(bool, places)) == 1:
        return _stroke(dots, colour, 7)
    if one.kind == "faint":
        return _stroke(ink, colour, 1.25, ' opacity=".38"')
    dash = ' stroke-dasharray="6 4"' if one.kind == "dashed" else ""
    return (_stroke(ink, "var(--card)", 5) if over_bars else "") + _stroke(ink, colour, 2, dash)


def _bars(one: Series, x: np.ndarray, low: np.ndarray, high: np.ndarray, width: float) -> str:
    """SVG of a row of bars from heights `low` to `high` [n], at positions x [n]."""
    path = "".join(
        f"M{_UNIT * (a - width / 2):.1f}"
        f" {_UNIT * (1 - b):.1f}h{_UNIT * width:.1f}V{_UNIT * (1 - t):.1f}h{-_UNIT * width:.1f}z"
        for a, b, t in zip(x, low, high, strict=True)
        if t > b
    )
    seamless = ' shape-rendering="crispEdges"' if len(x) > 60 else ""
    return f'<path d="{path}" fill="var(--c{one.colour})"{seamless}/>'


def _named(step: float, each: int) -> str:
    """The steps of a value as text: "step 3" or "steps 1-5"."""
    half = (each - 1) / 2
    return (
        f"step {step:,.0f}"
        if each == 1
        else f"steps {step - half:,.0f}\N{EN DASH}{step + half:,.0f}"
    )


def _tooltip_row(
    one: Series, x: np.ndarray, y: np.ndarray, as_text: Callable[[float], str]
) -> dict[str, object]:
    """The tooltip's data of a series.

    A point is [position, height or null, steps as text, value as text].
    """
    points = [
        [
            round(float(a), 4),
            round(float(b), 4) if np.isfinite(b) else None,
            _named(float(step), one.each),
            as_text(float(value)),
        ]
        for a, b, step, value in zip(x, y, one.steps, one.values, strict=True)
        if np.isfinite(value)
    ]
    return {"label": one.label, "colour": one.colour, "kind": one.kind, "points": points}


def _figure(
    title: str,
    note: str,
    series: Sequence[Series],
    shapes: str,
    y_marks: list[tuple[float, str]],
    x_marks: list[tuple[float, str]],
    rows: list[dict[str, object]],
    name: str,
    wide: bool,
) -> str:
    """The HTML of a chart from its parts."""
    grid = "".join(f"M0 {_UNIT * (1 - at):.1f}H{_UNIT:g}" for at, _ in y_marks)
    legend = "".join(
        f'<li><i class="key {one.kind}"'
        f' style="--c:var(--c{one.colour})"></i>{escape(one.label)}</li>'
        for one in series
    )
    # "<" cannot end the script element early, whatever a label holds.
    data = json.dumps(rows, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        "<figure"
        f' class="chart{" wide" if wide else ""}"><figcaption><h3>{escape(title)}</h3><p>{escape(note)}</p></figcaption><ul'
        f' class="legend">{legend}</ul><div class="frame"><div class="y" aria-hidden="true">'
        + "".join(
            f'<span style="top:{100 * (1 - at):.2f}%">{escape(text)}</span>' for at, text in y_marks
        )
        + f'</div><div class="plot" tabindex="0" role="img" aria-label="{escape(name)}"><svg'
        f' viewBox="0 0 {_UNIT:g} {_UNIT:g}" preserveAspectRatio="none" fill="none"'
        ' stroke-linejoin="round" stroke-linecap="round"'
        f' aria-hidden="true">{_stroke(grid, "var(--grid)", 1)}{shapes}</svg><div class="cursor"'
        ' hidden></div><div class="tip" hidden></div></div><div class="x" aria-hidden="true">'
        + "".join(
            f'<span style="left:{100 * at:.2f}%">{escape(text)}</span>' for at, text in x_marks
        )
        + '</div><div class="unit" aria-hidden="true">step</div></div><script'
        f' type="application/json">{data}</script></figure>'
    )
