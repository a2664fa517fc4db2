"""`megarl report RUN [RUN ...] [--out FILE]`: runs on one page that opens from disk and loads
nothing.

    run folders --read--> groups of runs --> charts, numbers, tables --report.html.j2--> page

The page's own script draws the charts from JSON in the page. To add a chart, add it to
report_charts.yaml. A chart is left out if the runs lack its metrics.

A page of one run also shows its rollouts. On a page of several, each line of a plot is a chart of
its own, on which every group of runs, which differ in nothing but the seed, has a curve: their
mean, in a band from the lowest to the highest."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import yaml

from megarl.apps.runs.report_compare import (
    Groups,
    end_numbers,
    grouped,
    makers,
    read_settings,
    settings_of,
)
from megarl.apps.runs.report_rollouts import listings, pages
from megarl.errors import UserError
from megarl.observe.summary import Run, read_run, read_starts, usual_bounds
from megarl.system.console import Arguments, result
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
FILE, TOGETHER = "report.html", "compare.html"
"""Names of the page of one run, in its folder, and of that of several, in the current folder."""
CHARTS = Path(__file__).with_name("report_charts.yaml")
WARNINGS = Path(__file__).with_name("report_warnings.yaml")
MOST_OWN = 40
"""Most charts of metrics of the user's own functions and environments."""


def main(arguments: list[str]) -> int:
    """Run `megarl report RUN [RUN ...] [--out FILE]`: write the page of these run folders, and
    print its path. `arguments`: the words after `report`. Returns the exit code 0. Raises
    `UserError` for other words, for a folder that is none of a run, and if the file cannot be
    written.
    """
    usage = "it needs one run folder: megarl report RUN [--out FILE], or several"
    parser = Arguments("megarl report", usage)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    options = parser.parse_intermixed_args(arguments)
    runs: list[Path] = options.runs
    if len({run.resolve() for run in runs}) < len(runs):
        parser.error("a run folder is named twice")
    target = options.out or (runs[0] / FILE if len(runs) == 1 else Path(TOGETHER))
    if target.is_dir():
        target /= FILE if len(runs) == 1 else TOGETHER
    title = runs[0].resolve().name if len(runs) == 1 else f"Comparison of {len(runs)} runs"
    try:
        result(str(write_report(*runs, title=title, target=target)))
    except ValueError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        if error.filename and not str(error.filename).endswith(UNFINISHED):
            raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
        problem = f"{target} cannot be written: {error.strerror}"
        raise UserError(f"{problem}; name another file with --out FILE") from error
    return 0


def write_report(*folders: Path, title: str, target: Path | None = None) -> Path:
    """Write the page of one or several run folders as one HTML file, replaced in one atomic rename;
    returns the file's path.

    Args:
        folders: run folders with `metrics.jsonl` and, if there are several, `recipe.yaml`.
        title: heading of the page.
        target: path of the file to write; None for `report.html` in the first run folder.

    Raises:
        ValueError: a folder is not that of a run, or a file is damaged before its last line.
    """
    page = pages().get_template("report.html.j2").render(title=title, **page_data(folders))
    target = target or folders[0] / FILE
    # Not synced: a run writes it again and again, and waits for no disk.
    being_written = target.with_name(f".report.{os.getpid()}{UNFINISHED}")
    # A lone surrogate in a transcript has no UTF-8; it is shown as a question mark.
    being_written.write_text(page, encoding="utf-8", errors="replace")
    being_written.replace(target)
    return target


def page_data(folders: Sequence[Path]) -> dict[str, Any]:
    """Everything that the template shows of the run folders `folders`, {name in the template:
    value}. Raises `ValueError` as `write_report` does.
    """
    runs = {folder: read_run(folder, transcripts=len(folders) == 1) for folder in folders}
    if len(folders) == 1:
        groups: Groups = {"": folders}
        rows, recipe = {}, folders[0] / "recipe.yaml"
        text = recipe.read_text("utf-8", errors="replace") if recipe.exists() else None
        made_by = makers(
            {f"from step {int(start['step']) + 1:,}": [start] for start in read_starts(folders[0])}
        )
        run = runs[folders[0]]
        only = {"listings": listings(run), "recipe": text}
    else:
        groups, rows = grouped({folder: settings_of(folder) for folder in folders})
        starts = {
            label: [start for folder in several for start in read_starts(folder)]
            for label, several in groups.items()
        }
        made_by = makers(starts, only_differing=True)
        only = {"listings": [], "recipe": None}
    drawn = {label: [runs[folder] for folder in several] for label, several in groups.items()}
    settings = {"groups": groups, "rows": rows, "are_compared": len(folders) > 1}
    return only | {
        "steps": steps_of([*runs.values()]),
        "warnings": [
            f"{folder}: {text}" if len(folders) > 1 else text
            for folder, run in runs.items()
            for text in warnings(run, read_settings(folder))
        ],
        "numbers": end_numbers(drawn),
        "settings": settings,
        "charts": {
            section: [chart for plot in drawn_plots for chart in charts_of(plot, drawn)]
            for section, drawn_plots in plots([*runs.values()]).items()
        },
        "made_by": made_by,
    }


LATE = 20
"""Number of last steps that the warnings of a report look at."""
SOLVED = 0.9
"""Accuracy from which on a run may reject most groups: it solves its problems, which is no fault.
"""


def warnings(run: Run, recipe: Mapping[str, Any]) -> list[str]:
    """Sentences about what is unusual, by report_warnings.yaml, in the last 20 steps of the run with
    this recipe, as data; empty if nothing is. Steps that lack a rule's metrics do not count for it.
    """
    texts, bounds = [], usual_bounds(recipe)
    for rule in yaml.safe_load(WARNINGS.read_text("utf-8")):
        metrics, divisor = rule["sum"], rule.get("of")
        late = [step for step in run.metrics[-LATE:] if any(name in step for name in metrics)]
        total = sum(step.get(name) or 0 for step in late for name in metrics)
        of = sum(record.get(divisor) or 0 for record in late) if divisor else len(late)
        accuracy = sum(record.get("accuracy") or 0 for record in late)
        is_solved = metrics == ["groups/rejected"] and accuracy >= SOLVED * len(late)
        if of and total > bounds.get(metrics[0], float("inf")) * of and not is_solved:
            shown = rule["text"].format(sum=f"{total:,.0f}", of=f"{of:,.0f}", mean=total / of)
            texts.append(f"In the last {len(run.metrics[-LATE:])} steps {shown}.")
    return texts


def steps_of(runs: Sequence[Run]) -> tuple[int, int, int]:
    """(first, last) step of which any of `runs` has metrics or an evaluation, (0, 0) without, and
    the number, odd, of steps over which the page takes moving means at first: a twentieth of the
    longest run.
    """
    steps = [record["step"] for run in runs for record in run.metrics]
    steps += [evaluation.step for run in runs for evaluation in run.evaluations]
    longest = max((len(run.metrics) for run in runs), default=0)
    return min(steps, default=0), max(steps, default=0), (longest // 20) | 1


# ------------------------------------------------------------------------------------------ plots


class Line(NamedTuple):
    """A metric of a plot. `reduce`: how several values become one in a long run."""

    metric: str
    label: str
    kind: Kind = "line"
    reduce: Callable[..., np.ndarray] = np.ma.mean


class Plot(NamedTuple):
    """What a chart shows: `note` says the unit of its vertical axis; `how`: as `chart` takes it."""

    title: str
    note: str
    lines: Sequence[Line]
    how: Mapping[str, Any]
    of_rewards: bool | None = None
    """For runs that learn by reward alone (True), for others alone (False), or for all (None)."""


def make_plot(
    title: str,
    note: str = "",
    *,
    lines: Mapping[str, str] | None = None,
    learnt: str = "",
    label: str = "rollouts",
    kinds: Mapping[str, Kind] | None = None,
    most: Sequence[str] = (),
    of_rewards: bool | None = None,
    **how: Any,
) -> Plot:
    """A plot of report_charts.yaml, which says what the arguments are. `label`: of the metric
    `learnt` in training.
    """
    drawn = dict(lines or {})
    drawn_as: dict[str, Kind] = dict(kinds or {})
    if learnt:
        greedy, sampled = f"eval/{learnt}", f"eval_sampled/{learnt}"
        drawn = {learnt: label, greedy: "held out, greedy", sampled: "held out, sampled"}
        drawn_as = {greedy: "points", sampled: "rings"}
    curves = [
        Line(
            metric,
            text,
            drawn_as.get(metric) or "line",
            np.ma.max if metric in most else np.ma.mean,
        )
        for metric, text in drawn.items()
    ]
    return Plot(title, note, curves, how, of_rewards)


OWN = {"own/": ("training", "of your own function"),
       "environment/": ("rollouts", "mean, of the environment")}  # fmt: skip
"""{beginning of the names of metrics that a user's functions and environments return: (label of
their line, note of their charts)}"""


def plots(runs: Sequence[Run]) -> dict[str, list[Plot]]:
    """{section of the page: its plots}, with those of metrics whose names only `runs` know."""
    names = sorted({name for run in runs for record in run.metrics for name in record})
    trees = yaml.safe_load(CHARTS.read_text("utf-8"))
    found = {section: [make_plot(**tree) for tree in each] for section, each in trees.items()}
    user_plots = [
        make_plot(name.partition("/")[2], note, learnt=name, label=label)
        for begin, (label, note) in OWN.items()
        for name in names
        if name.startswith(begin)
    ]
    sources = {n: n.split("/")[1] for n in names if re.fullmatch("source/.+/accuracy", n)}
    note = "share judged right"
    found["Learning"].append(make_plot("Accuracy by source", note, lines=sources, percent=True))
    for critic in sorted({n.partition("/")[0] for n in names if n.startswith("critics.")}):
        for tree in trees["Optimisation"]:
            lines = {
                metric.replace("critic", critic, 1): text
                for metric, text in tree["lines"].items()
                if metric.startswith("critic/")
            }
            if lines:
                title = f"{tree['title']} ({critic})"
                found["Optimisation"].append(make_plot(**tree | {"title": title, "lines": lines}))
    return {"Own metrics": user_plots[:MOST_OWN], **found}


# ----------------------------------------------------------------------------------------- charts


def charts_of(plot: Plot, groups: Mapping[str, Sequence[Run]]) -> list[Chart]:
    """The charts of a plot, as JSON data for the page: one with all its lines for a single run,
    else one for each line with a curve for each of `groups`, {label: runs}.
    """
    drawn = {
        label: [run for run in runs if plot.of_rewards in (None, has_rewards(run))]
        for label, runs in groups.items()
    }
    if sum(map(len, groups.values())) == 1:
        (runs,) = drawn.values()
        has_raw = sum(line.kind == "line" for line in plot.lines) == 1
        curves = [
            group_curve(line.label, runs, line, number, with_raw=has_raw)
            for number, line in enumerate(plot.lines)
        ]
        charts = [chart(plot.title, plot.note, curves, **plot.how)]
    else:
        charts = []
        for line in plot.lines:
            is_evaluated = line.metric.startswith("eval")
            as_line = line._replace(kind="points" if is_evaluated else "line")
            curves = [group_curve(name, drawn[name], as_line, n) for n, name in enumerate(drawn)]
            title = plot.title if len(plot.lines) == 1 else f"{plot.title}: {line.label}"
            charts.append(chart(title, plot.note, curves, **plot.how))
    return [chart for chart in charts if chart is not None]


def has_rewards(run: Run) -> bool:
    """Whether a run learns by reward. Only in one that does not, the loss says how well it learns."""
    return len(run.series("reward/mean")[0]) > 0


def group_curve(
    label: str, runs: Sequence[Run], line: Line, number: int, *, with_raw: bool = False
) -> Series:
    """The values of a plot's line in several runs, as a dict for JSON, with a row for each run that
    has the metric. At a step that a run lacks, its value is None; the rows end at the last step
    that all of them have. `number`: position in its chart, by which it has its colour. `with_raw`:
    a moving mean is drawn over the values, which stay visible.
    """
    measured = [
        run.evaluated(line.metric) if line.metric.startswith("eval") else run.series(line.metric)
        for run in runs
    ]
    measured = [pair for pair in measured if len(pair[0])] or [(np.empty(0), np.empty(0))]
    steps = functools.reduce(np.union1d, [at for at, _ in measured])
    rows = np.full((len(measured), len(steps)), np.nan)
    for row, (at, values) in zip(rows, measured, strict=True):
        row[np.searchsorted(steps, at)] = values
    shared = functools.reduce(np.intersect1d, [at for at, _ in measured])
    if len(shared):
        steps, rows = steps[steps <= shared[-1]], rows[:, steps <= shared[-1]]
    colour = 1 + number % 10
    drawn = series(label, steps, rows, colour, line.kind, line.reduce)
    is_mean = line.reduce is np.ma.mean and line.metric != "learning_rate"
    drawn["smooth"] = line.kind == "line" and is_mean
    drawn["raw"] = with_raw and drawn["smooth"]
    if drawn["raw"] and drawn["each"] > 1:  # a mean would hide single steps that are far off
        drawn["spikes"] = series(label, steps, rows, colour, line.kind, farthest)["rows"][0]
    return drawn


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
