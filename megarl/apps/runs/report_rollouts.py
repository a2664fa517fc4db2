"""The parts of a report that show what the model writes: held-out problems before and after,
rollouts to browse, and histograms of their rewards.

    transcripts --Listing: items as HTML, fields to choose by--> report_rollouts.html.j2

A list takes at most 1 MiB of the page, however long the run and its responses are. The HTML of each
item is measured, and items are added until the list is full."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from megarl.apps.runs.page import pages
from megarl.observe.summary import Evaluation, Run

LIST_BYTES = 2**20
"""Most bytes of HTML of one list."""
MOST_ITEMS = 300
"""Most items of one list."""
OF_A_GROUP = 8
"""Most rollouts that are shown of a group."""
OPEN, SHORT = 3, 1000
"""Number of problems that are open when the page is opened, if the responses have fewer characters.
"""
PANELS, BINS = 8, 20
"""Number of histograms, each over as many steps as the others, and of the bars of one."""
FIELDS = {"step": "range", "reward": "range", "tokens": "range", "source": "choice"}
"""{what the items of a list are chosen by: "range" for numbers, "choice" for one of several}"""


@dataclass
class Listing:
    """A list of the page whose items a reader can choose by their fields."""

    title: str
    about: str
    """What is shown, in words."""
    fields: dict[str, str]
    """{name of a field: "range" or "choice"}"""
    items: list[str] = field(default_factory=list)
    """HTML of each item, safe to be put in a page."""
    moves: Counter[tuple[bool, bool]] | None = None
    """{(right at the first, right at the last evaluation): number of problems}; None without two
    evaluations."""


def listings(run: Run) -> list[Listing]:
    """The lists of rollouts that the report of `run` shows: held-out problems at the first and the
    last evaluation, and rollouts of training; without what the run lacks.
    """
    return [one for one in (problem_listing(run), rollout_listing(run)) if one is not None]


@functools.cache
def macros() -> Any:
    """The macros of report_rollouts.html.j2, functions that return HTML."""
    return pages().get_template("report_rollouts.html.j2").module


def fitting(items: Iterable[str]) -> list[str]:
    """As many of `items`, from the first on, as a list has room for."""
    found, size = [], 0
    for one in items:
        size += len(one.encode(errors="replace"))
        if size > LIST_BYTES or len(found) == MOST_ITEMS:
            break
        found.append(one)
    return found


# ---------------------------------------------------------------------------- before and after


def problem_listing(run: Run) -> Listing | None:
    """The list of held-out problems with a response of the first and one of the last evaluation, in
    the order of the file; None for a run without evaluations.
    """
    written = [one for one in run.evaluations if one.transcripts]
    if not written:
        return None
    ends = (written[0], written[-1])[: len(written)]
    pairs, moves = [(one,) for one in ends[0].transcripts], None
    about = "Held-out problems, in their order; none was picked."
    if len(ends) == 2:
        pairs = same_problems(ends[0].transcripts, ends[1].transcripts)
        about = "The same held-out problems at the first and the last evaluation, in their order."
        moves = Counter((bool(old["correct"]), bool(new["correct"])) for old, new in pairs)
    words = [when(one) for one in ends]

    def items() -> Iterator[str]:
        for number, pair in enumerate(pairs):
            sides = list(zip(words, pair, strict=True))
            values = [*chart_numbers(pair[-1]), source(pair[0]), verdicts(pair)]
            is_short = all(len(str(one["response"])) < SHORT for one in pair)
            yield macros().pair(sides, values, number < OPEN and is_short)

    fields = {name: FIELDS[name] for name in ("reward", "tokens", "source")}
    shown = Listing("Held-out problems", about, fields | {"verdict": "choice"}, moves=moves)
    shown.items = fitting(items())
    if len(shown.items) < len(pairs):
        shown.about += f" These are the first {len(shown.items):,} of {len(pairs):,}."
    return shown if pairs else None


def is_unjudged(one: dict[str, Any]) -> bool:
    """Whether the transcript of a response says that there is no verdict on it."""
    return bool(one.get("left_out")) or one.get("failure", "") not in ("", "response_limit")


def chart_numbers(one: dict[str, Any]) -> list[float | None]:
    """[reward, number of tokens] of the transcript of a response, None where unknown."""
    found = [None if one.get("left_out") else one.get("reward"), one.get("tokens")]
    return [
        value if isinstance(value, int | float) and abs(value) < 1e300 else None for value in found
    ]


def source(one: dict[str, Any]) -> str:
    """Name of the source of a prompt in a mixture, shortened; empty without a mixture."""
    return str(one.get("environment", ""))[:60]


def verdicts(pair: Sequence[dict[str, Any]]) -> str:
    """The verdicts of several responses to a problem in words, such as "wrong \N{RIGHTWARDS ARROW}
    right".
    """
    words = [
        "right" if one["correct"] else "not judged" if is_unjudged(one) else "wrong" for one in pair
    ]
    return " \N{RIGHTWARDS ARROW} ".join(words)


def when(one: Evaluation) -> str:
    """When the evaluation `one` took place, in words: "before training" or "after 1,000 steps"."""
    plural = "" if one.step == 1 else "s"
    return f"after {one.step:,} step{plural}" if one.step else "before training"


def same_problems(first: list[dict[str, Any]], last: list[dict[str, Any]]) -> list[tuple]:
    """Pairs (transcript in `first`, transcript in `last`) of the same prompt in two evaluations, in
    the order of `first`. A prompt that occurs several times is matched in order; one that only one
    list has is left out.
    """
    waiting: dict[str, list[dict[str, Any]]] = {}
    for one in last:
        waiting.setdefault(one["prompt"], []).append(one)
    return [(one, waiting[one["prompt"]].pop(0)) for one in first if waiting.get(one["prompt"])]


# ------------------------------------------------------------------------------------ rollouts


def rollout_listing(run: Run) -> Listing | None:
    """The list of rollouts of training, by step. Where not all have room: of steps that lie evenly
    over the run. None for a run without transcripts.
    """
    if not run.groups:
        return None
    order = evenly([list(group) for _, group in groupby(run.groups, lambda one: one["step"])])
    inside = [(group, one) for step in order for group in step for one in shown_of(group)]

    def items() -> Iterator[str]:
        for group, one in inside:
            values = [group["step"], *chart_numbers(one), source(group), verdicts([one])]
            yield macros().rollout(group, one, values)

    chosen = fitting(items())
    by_step = sorted(zip(inside, chosen, strict=False), key=lambda one: one[0][0]["step"])
    shown = Listing("Rollouts", "", FIELDS | {"verdict": "choice"})
    shown.items = [item for _, item in by_step]
    steps = len({group["step"] for (group, _), _ in by_step})
    spread = ", evenly over the run" if steps < len(run.metrics) else ""
    shown.about = (
        f"{len(chosen):,} rollouts of {steps:,} steps{spread}: the first {OF_A_GROUP} of a group."
        " transcripts.jsonl has all that were written down."
    )
    return shown if chosen else None


def shown_of(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The rollouts of a group, a record of transcripts.jsonl, that the page shows."""
    return group["rollouts"][:OF_A_GROUP]


def evenly(values: Sequence[Any]) -> list[Any]:
    """`values` in an order of which every beginning lies evenly over them: the first one, the last
    one, that in the middle, those at the quarters and so on.
    """
    bits = max(1, (len(values) - 1).bit_length())
    places = sorted(range(len(values)), key=lambda at: int(f"{at:0{bits}b}"[::-1], 2))
    ends = [0, len(values) - 1][: len(values)]
    return [values[at] for at in dict.fromkeys([*ends, *places])]


# ---------------------------------------------------------------------------------- histograms


def histograms(run: Run) -> dict[str, Any] | None:
    """Histograms of the rewards of the run's written rollouts, for the page's template: a dict with
    `about` (words), `low` and `high` (edges of the axis) and `panels`: for each of at most eight
    parts of the run a dict with `title` (its steps), `rollouts` (their number), `mean` and `bars`,
    the shares of the 20 bins relative to the highest bar of all. None without rewards.
    """
    found: dict[int, list[float]] = {}
    for group in run.groups:
        for one in group.get("rollouts") or ():
            reward = chart_numbers(one)[0] if isinstance(one, dict) else None
            if isinstance(reward, int | float) and math.isfinite(reward):
                found.setdefault(group["step"], []).append(float(reward))
    rewards = [one for of_step in found.values() for one in of_step]
    if not rewards:
        return None
    low, high = min(rewards), max(rewards)
    edges = (low, high) if low < high else (low - 0.5, high + 0.5)
    panels = []
    for steps in np.array_split(sorted(found), min(PANELS, len(found))):
        inside = np.array([one for step in steps for one in found[int(step)]])
        first, last = int(steps[0]), int(steps[-1])
        title = f"steps {first:,} to {last:,}" if first < last else f"step {first:,}"
        bars = np.histogram(inside, BINS, edges)[0] / len(inside)
        panels.append(
            {"title": title, "rollouts": len(inside), "mean": inside.mean(), "bars": bars}
        )
    most = max(panel["bars"].max() for panel in panels)
    for panel in panels:
        panel["bars"] = [round(float(one), 4) for one in panel["bars"] / most]
    return {"low": edges[0], "high": edges[1], "most": most, "panels": panels}
