"""Data series of charts, and reducing them to as many points as a screen can show."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import numpy as np

DRAWN_POINTS = 400
"""A line is reduced to about this many points; a screen shows no more."""


DRAWN_BARS = 100
"""A bar chart is reduced to at most this many bars."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line, row of bars or set of points in a chart."""

    label: str
    """Name in the legend."""
    steps: np.ndarray
    """[n] training steps, ascending."""
    values: np.ndarray
    """[n] values, NaN where unknown."""
    colour: int
    """A colour of the page's palette, 1 to 5."""
    kind: Literal["line", "faint", "dashed", "points", "rings", "bars"] = "line"
    """"faint": raw values under a smoothed line; "points" and "rings": separate measurements,
    joined by a thin line; "bars": stacked."""
    each: int = 1
    """Number of consecutive steps that one value stands for; `steps` then holds the middle of each
    range."""


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """[n] mean over the `window` (odd) values around each, over fewer at the ends.

    NaN are left out.
    """
    known = np.isfinite(values)
    ones = np.ones(window)
    total = np.convolve(np.where(known, values, 0.0), ones, mode="full")
    count = np.convolve(known.astype(float), ones, mode="full")
    half = window // 2
    total, count = total[half : half + len(values)], count[half : half + len(values)]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def thin(
    steps: np.ndarray, values: np.ndarray, limit: int = DRAWN_POINTS
) -> tuple[np.ndarray, np.ndarray]:
    """At most about `limit` points that keep the minimum and maximum of each stretch."""
    if len(steps) <= limit:
        return steps, values
    chosen: list[int] = [0]
    for stretch in np.array_split(np.arange(len(steps)), limit // 2):
        if np.isfinite(values[stretch]).any():
            chosen += sorted(
                {stretch[np.nanargmin(values[stretch])], stretch[np.nanargmax(values[stretch])]}
            )
        else:
            chosen.append(stretch[0])
    index = np.unique([*chosen, len(steps) - 1])
    return steps[index], values[index]


def gather(one: Series, limit: int = DRAWN_BARS, *, largest: bool = False) -> Series:
    """At most `limit` points, each the mean (with `largest` the maximum) of consecutive steps."""
    size = -(-len(one.steps) // limit)
    if size <= 1:
        return one
    cuts = np.arange(0, len(one.steps), size)
    known = np.isfinite(one.values)
    count = np.add.reduceat(known.astype(int), cuts)
    if largest:
        values = np.maximum.reduceat(np.where(known, one.values, -np.inf), cuts)
    else:
        values = np.add.reduceat(np.where(known, one.values, 0.0), cuts) / np.maximum(count, 1)
    values = np.where(count > 0, values, np.nan)
    return dataclasses.replace(
        one, steps=one.steps[cuts] + (size - 1) / 2, values=values, each=size
    )


def thinned(one: Series) -> Series:
    """The series reduced to about `DRAWN_POINTS` points."""
    steps, values = thin(one.steps, one.values)
    return dataclasses.replace(one, steps=steps, values=values)
