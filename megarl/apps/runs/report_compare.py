"""`megarl report RUN [RUN ...] [--out FILE]`: the report of a run again, or a page that compares
several runs.

    run folders --read--> groups, which differ in more than the seed --> charts, tables --> page

A group's curve is the mean of its runs, in a band from the lowest to the highest. To add a chart,
add a line to `LEARNT` or `SYSTEMS`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.apps.runs import report
from megarl.apps.runs.page import (
    DRAWN,
    TEMPLATE,
    Chart,
    Series,
    chart,
    pages,
    series,
    write_page,
)
from megarl.apps.runs.report import OWN, ZERO
from megarl.apps.runs.target import runs_and_target, writing
from megarl.console import result
from megarl.errors import UserError, shortened
from megarl.files import refuse_unfit
from megarl.observe.summary import (
    Run,
    evaluated_ends,
    read_run,
    read_starts,
    rollout_ends,
    summarise_run,
)
from megarl.recipe_file import read_tree
from megarl.schema import leaves

TOGETHER = "compare.html"
"""Name of the page about several runs."""
OF_ONE_RUN = {"seed", "folder", "resume"}
"""Settings in which the runs of a group may differ."""
COLOURS = (1, 2, 3, 4, 6, 8, 9, 7, 10, 5)
"""Colours of the page's palette in the order of the groups; later groups are dashed."""
UNKNOWN = "\N{EN DASH}"
VALUES = 6000
"""Most values of a chart in the page, of all runs together."""
NOTHING = Run([], [], [])
"""Stands in a chart for a run that is left out."""

LEARNT: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("eval/accuracy", "Held-out accuracy", "share of problems answered right", {"percent": True}),
    ("eval/loss", "Held-out loss", "", {}),
    ("reward/mean", "Reward", "mean of a response, length penalty included", {}),
    ("accuracy", "Accuracy in training", "share judged right", {"percent": True}),
    ("length/mean", "Response length", "mean tokens", ZERO),
)
SYSTEMS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("time/step_s", "Time of a step", "seconds", ZERO),
    ("tokens/generated_per_s", "Generation", "tokens a second", ZERO),
    ("tokens/trained_per_s", "Training", "tokens a second", ZERO),
    ("mismatch/mean_abs", "Do trainer and engine agree?", "mean difference of log-probs", ZERO),
)
"""(metric, title and note of its chart, further arguments of `chart`) of each chart."""

Groups = Mapping[str, Sequence[Path]]
"""{label on the page: folders of runs that differ in nothing but `OF_ONE_RUN`}"""


def main(arguments: list[str]) -> int:
    """The command `megarl report RUN [RUN ...] [--out FILE]`: make RUN/report.html, or FILE, anew
    from the metrics and other files of the run folder RUN, or of several run folders compare.html
    in the current folder, or FILE; print the path of the page. `arguments`: the words after
    `report`. Returns the exit code 0. Raises `UserError` for other words, if RUN is no run folder,
    and if the file cannot be written.
    """
    folders, target = runs_and_target("report", arguments, report.FILE, TOGETHER)
    try:
        with writing(target):
            if len(folders) == 1:
                title = folders[0].resolve().name
                report.write_report(folders[0], title=title, target=target)
            else:
                write_comparison(folders, target)
    except ValueError as error:
        raise UserError(str(error)) from error
    result(str(target))
    return 0


def write_comparison(folders: Sequence[Path], target: Path) -> Path:
    """Write a page that compares the runs in the run folders `folders` to the file `target`, in
    one atomic rename: curves of all runs in one chart for each metric, and tables of numbers and of
    settings that differ. Returns `target`. Raises `ValueError` for a folder without metrics.jsonl
    or recipe.yaml, or with a damaged one.
    """
    for folder in folders:
        refuse_unfit(folder)
    runs = {folder: read_run(folder, transcripts=False) for folder in folders}
    settings = {folder: settings_of(folder) for folder in folders}
    groups, rows = grouped(settings)
    drawn = {label: [runs[folder] for folder in folders] for label, folders in groups.items()}
    # The loss of a policy gradient and of supervised training are not the same number.
    losses = {
        is_rl: {
            label: [run if report.is_rl(run) == is_rl else NOTHING for run in several]
            for label, several in drawn.items()
        }
        for is_rl in (True, False)
    }

    def charts(*wanted: tuple[str, str, str, dict[str, Any]]) -> list[Chart | None]:
        return [compared(losses[True] if one[0] == "loss" else drawn, *one) for one in wanted]

    own = [
        (name, name.partition("/")[2], OWN[name.partition("/")[0] + "/"], {})
        for name in report.own_names(runs.values())
    ]
    rows_of_numbers = end_numbers(drawn)
    rows_of_numbers["runs"] = ["\n".join(map(str, one)) for one in groups.values()]
    spread = "The mean of a group's runs; with several runs (lowest to highest)."
    differ = "Settings in which the recipes differ. FOLDER is the run's own folder."
    alike = "Beside the seed, the recipes have the same settings."
    heads = list(groups)
    tables = [
        ("Numbers", spread, heads, rows_of_numbers),
        ("Settings", differ if rows else alike, heads, rows),
    ]
    page = (
        pages()
        .get_template(TEMPLATE)
        .render(
            title=f"Comparison of {len(folders)} runs",
            steps=report.steps_of(list(runs.values())),
            tables=tables,
            warnings=[],
            numbers=None,
            own=charts(*own),
            learning=[*charts(*LEARNT), compared(losses[False], "loss", "Training loss", "", {})],
            histograms=None,
            listings=[],
            systems=charts(*SYSTEMS),
            processes=None,
            optimisation=charts(*report.OPTIMISATION),
            recipe=None,
            made_by=("Made by", "What differs in code and machine.", heads, makers(groups)),
        )
    )
    return write_page(target, page)


def settings_of(folder: Path) -> dict[str, str]:
    """{dotted key: value as text} of the recipe in the run folder `folder`, with "FOLDER" in
    place of the folder in paths below it, as the recipe names the folder and as an absolute path,
    also inside lists and keys. Raises `ValueError` for a recipe that is missing or
    cannot be read.
    """
    path = folder / "recipe.yaml"
    if not path.exists():
        raise ValueError(
            f"{path} does not exist, and runs are compared by their recipes; put the file back, or"
            f" leave {folder} out"
        )
    tree = read_tree(path)
    typed = str(tree.get("folder") or folder)
    forms = {typed, str(Path(typed).absolute()), str(folder.absolute()), str(folder.resolve())}
    whole = "|".join(map(re.escape, sorted(forms, key=len, reverse=True)))
    # `Trainer` names its folder inputs/ by an absolute path, which may be of another machine.
    own = re.compile(rf"(?<![\w/~-])({whole}|/[^'\",]*/{re.escape(typed)}(?=/inputs/))/")
    return {own.sub("FOLDER/", key): own.sub("FOLDER/", str(one)) for key, one in leaves(tree)}


def grouped(settings: Mapping[Path, Mapping[str, str]]) -> tuple[Groups, dict[str, list[str]]]:
    """Divide runs into groups that differ in nothing but seed, folder and resume. Returns the
    groups and {dotted key: its value in each group} of the settings in which the groups differ.
    `settings`: {run folder: its settings as texts}. Up to three short settings are a group's
    label; else the folder of its first run is.
    """
    found: dict[frozenset[tuple[str, str]], list[Path]] = {}
    for folder, one in settings.items():
        key = frozenset((name, text) for name, text in one.items() if name not in OF_ONE_RUN)
        found.setdefault(key, []).append(folder)
    rows = differing_rows([dict(key) for key in found])
    groups = {}
    for number, (key, folders) in enumerate(found.items()):
        label = ", ".join(f"{one.rpartition('.')[2]} {rows[one][number]}" for one in rows)
        if not 0 < len(rows) <= 3 or len(label) > 60:
            label = str(folders[0])
        count = f" ({len(folders)} runs)" if len(folders) > 1 else ""
        if label + count in groups:  # the values differ in white space, which the label has not
            label = str(folders[0])
        groups[label + count] = folders
    return groups, rows


def differing_rows(
    columns: Sequence[Mapping[str, str]], always: Collection[str] = ()
) -> dict[str, list[str]]:
    """{key: its text in each of `columns`, shortened, a dash where a column lacks the key} of the
    keys whose texts differ and of the keys `always`, in order of their names.
    """
    keys = sorted({key for column in columns for key in column})
    rows = {key: [column.get(key, UNKNOWN) for column in columns] for key in keys}
    return {
        key: [shortened(text, 200) for text in row]
        for key, row in rows.items()
        if len(set(row)) > 1 or key in always
    }


def makers(groups: Groups) -> dict[str, list[str]]:
    """{fact, such as "commit" or "host": its texts in each group} of the facts about code and
    machine in which the groups, or the starts and runs of one group, differ, read from the run
    folders.
    """
    columns, several = [], {"damaged"}
    for folders in groups.values():
        starts = [start for folder in folders for start in read_starts(folder)]
        names = {name for start in starts for name in start} - {"step", "started", "command"}
        found = {name: sorted({start[name] for start in starts if name in start}) for name in names}
        columns.append({name: ", ".join(texts) for name, texts in found.items()})
        several |= {name for name, texts in found.items() if len(texts) > 1}
    return differing_rows(columns, several)


def end_numbers(groups: Mapping[str, Sequence[Run]]) -> dict[str, list[str]]:
    """{name of a number, in words: its text for each of `groups`}, such as "99.3% (98.6% to
    100.0%)", the mean of the group's runs (lowest to highest). Numbers that no run has are left
    out.
    """

    def of(run: Run) -> dict[str, tuple[str, float | None]]:
        told = summarise_run(run)
        accuracy, reward = evaluated_ends(run, "accuracy"), rollout_ends(run, "reward/mean")
        loss, seconds = evaluated_ends(run, "loss"), told["seconds"]
        return {
            "steps": ("{:,.6g}", told["steps"]),
            "held-out accuracy, first": ("{:.1%}", accuracy[0]),
            "held-out accuracy, last": ("{:.1%}", accuracy[1]),
            "held-out loss, first": ("{:.4f}", loss[0]),
            "held-out loss, last": ("{:.4f}", loss[1]),
            "reward, first steps": ("{:.3f}", reward[0]),
            "reward, last steps": ("{:.3f}", reward[1]),
            "seconds a step": ("{:.3g}", seconds and seconds / told["steps"]),
            "generated tokens/s": ("{:,.0f}", told["generated_tokens_per_s"]),
            "trained tokens/s": ("{:,.0f}", told["trained_tokens_per_s"]),
        }

    def text(found: Sequence[tuple[str, float | None]]) -> str:
        known = [value for _, value in found if value is not None]
        if not known:
            return UNKNOWN
        mean, low, high = map(found[0][0].format, (sum(known) / len(known), min(known), max(known)))
        return mean if low == high else f"{mean} ({low} to {high})"

    columns = [[of(run) for run in runs] for runs in groups.values()]
    rows = {name: [text([one[name] for one in told]) for told in columns] for name in columns[0][0]}
    return {name: row for name, row in rows.items() if set(row) != {UNKNOWN}}


def compared(
    groups: Mapping[str, Sequence[Run]], name: str, title: str, note: str, how: Mapping[str, Any]
) -> Chart | None:
    """Data, for JSON, of a chart of the metric `name` over the steps, with a line for each of
    `groups`, {label: runs}. None where no run has the metric. The page takes moving means of the
    metrics of steps; not of evaluations and the learning rate. `title`, `note`, `how`: as `chart`
    takes them.
    """
    evaluated = name.startswith("eval")
    most = max(50, min(DRAWN, VALUES // sum(map(len, groups.values()))))
    drawn = []
    for number, (label, runs) in enumerate(groups.items()):
        found = [run.evaluated(name) if evaluated else run.series(name) for run in runs]
        kind = "points" if evaluated else "line" if number < 10 else "dashed"
        one = band(label, found, COLOURS[number % 10], kind, most)
        drawn.append(one | {"smooth": not evaluated and name != "learning_rate"})
    return chart(title, note, drawn, **how)


def band(
    label: str, found: Sequence[tuple[np.ndarray, np.ndarray]], colour: int, kind: Any, most: int
) -> Series:
    """The series, as a dict for JSON, of several runs over their steps, with a row of values for
    each run. `found`: ([n] steps, [n] values) of each run; at a step that a run lacks, its value is
    None, and the series ends at the last step that all runs have (runs without any step left out).
    `label`, `colour`, `kind`, `most`: as `series` takes them.
    """
    found = [one for one in found if len(one[0])] or found[:1]
    shared = functools.reduce(np.intersect1d, [at for at, _ in found])
    steps = np.unique(np.concatenate([at for at, _ in found]))
    rows = np.full((len(found), len(steps)), np.nan)
    for row, (at, values) in zip(rows, found, strict=True):
        row[np.searchsorted(steps, at)] = values
    if len(shared):
        steps, rows = steps[steps <= shared[-1]], rows[:, steps <= shared[-1]]
    return series(label, steps, rows, colour, kind, most=most)
