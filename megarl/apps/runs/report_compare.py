"""What a report says of several runs in tables: which are one group, the settings in which groups
differ, who made them, and their numbers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.apps.runs.status import duration
from megarl.errors import shortened
from megarl.observe.summary import Run, evaluated_ends, rollout_ends, summarise_run
from megarl.settings.recipe_file import read_tree
from megarl.settings.schema import leaves

OF_ONE_RUN = {"seed", "folder", "resume"}
"""Settings in which the runs of a group may differ."""
UNKNOWN, ARROW = "\N{EN DASH}", " \N{RIGHTWARDS ARROW} "

Groups = Mapping[str, Sequence[Path]]
"""{label on the page: folders of runs that differ in nothing but `OF_ONE_RUN`}"""


def read_settings(folder: Path) -> dict[str, Any]:
    """The recipe in the run folder `folder` as data; {} where it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        return read_tree(folder / "recipe.yaml")
    return {}


def settings_of(folder: Path) -> dict[str, str]:
    """{dotted key: value as text} of the recipe in the run folder `folder`, with "FOLDER" in place
    of the folder in paths below it, also inside lists and keys. Raises `ValueError` for a recipe
    that is missing or cannot be read.
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
    either = "|".join(map(re.escape, sorted(forms, key=len, reverse=True)))
    own = re.compile(rf"(?<![\w/~-])({either})/")
    return {own.sub("FOLDER/", key): own.sub("FOLDER/", str(one)) for key, one in leaves(tree)}


def grouped(settings: Mapping[Path, Mapping[str, str]]) -> tuple[Groups, dict[str, list[str]]]:
    """Divide runs into groups that differ in nothing but seed, folder and resume. Returns the
    groups and {dotted key: its value in each group} of the settings in which the groups differ.
    `settings`: {run folder: its settings as texts}. Up to three short settings are a group's label;
    else the folder of its first run is.
    """
    alike: dict[frozenset[tuple[str, str]], list[Path]] = {}
    for folder, texts in settings.items():
        key = frozenset((name, text) for name, text in texts.items() if name not in OF_ONE_RUN)
        alike.setdefault(key, []).append(folder)
    rows = differing_rows([dict(key) for key in alike])
    groups: dict[str, list[Path]] = {}
    for number, folders in enumerate(alike.values()):
        count = f" ({len(folders)} runs)" if len(folders) > 1 else ""
        label = ", ".join(f"{key.rpartition('.')[2]} {rows[key][number]}" for key in rows)
        if not 0 < len(rows) <= 3 or len(label) > 60 or label + count in groups:
            label = str(folders[0])
        groups[label + count] = folders
    return groups, rows


def differing_rows(
    columns: Sequence[Mapping[str, str]], always: set[str] | frozenset[str] = frozenset()
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


Table = tuple[list[str], dict[str, list[str]]]
"""(heads of the columns, {name of a row: its texts})"""


def makers(
    starts: Mapping[str, Sequence[dict[str, str]]], *, only_differing: bool = False
) -> Table:
    """A table of who made runs: commit, host, versions and so on, with a column for each of
    `starts`, {head: starts of runs, {fact: text}, as `read_starts` returns them}. `only_differing`:
    without the facts that are the same everywhere, and without command and time.
    """
    columns, always = [], {"damaged"}
    hidden = {"step", "started", "command"} if only_differing else {"step"}
    for several in starts.values():
        names = {name for start in several for name in start} - hidden
        texts = {name: sorted({run[name] for run in several if name in run}) for name in names}
        columns.append({name: ", ".join(each) for name, each in texts.items()})
        always |= {name for name, each in texts.items() if len(each) > 1 or not only_differing}
    return [*starts], differing_rows(columns, always)


def end_numbers(groups: Mapping[str, Sequence[Run]]) -> dict[str, list[str]]:
    """{name of a number: its text for each of `groups`, {label: runs}}: the first and the last
    value, each the mean of the group's runs (lowest to highest), such as "99.3% (98.6% to 100.0%)".
    Numbers that no run has are left out.
    """
    columns = [[run_numbers(run) for run in runs] for runs in groups.values()]
    names = dict.fromkeys(name for runs in columns for run in runs for name in run)
    return {
        name: [ends_text([run[name] for run in runs if name in run]) for runs in columns]
        for name in names
    }


Number = tuple[Callable[[float], str], str, Sequence[float | None]]
"""(how a value is written; unit behind it; the value, or the first and the last one of a run)"""


def run_numbers(run: Run) -> dict[str, Number]:
    """{name of a number: number} of what is known of a run."""
    facts = summarise_run(run)
    source = "Held-out" if facts["measured_on"] == "evaluation" else "Training"
    ends = {
        name: (facts[f"{name}_before"], facts[f"{name}_after"]) for name in ("accuracy", "length")
    }
    seconds = facts["seconds"]
    per_step = seconds and round(seconds / facts["steps"], 6)
    rates = facts["generated_tokens_per_s"], facts["trained_tokens_per_s"]
    rows: dict[str, Number] = {
        f"{source} accuracy": ("{:.1%}".format, "", ends["accuracy"]),
        f"{source} length": ("{:,.1f}".format, "tokens", ends["length"]),
        "Held-out loss": ("{:.4f}".format, "", evaluated_ends(run, "loss")),
        "Reward": ("{:.3f}".format, "", rollout_ends(run, "reward/mean")),
        **{
            f"Verifier {name.replace('_', ' ')}": ("{:,.6g}".format, "rollouts", (count or None,))
            for name, count in run.failures.items()
        },
        "Steps": ("{:,.6g}".format, "", (facts["steps"],)),
        "Time of the steps": (duration, "", (seconds,)),
        "Time of a step": ("{:.3g}".format, "s", (per_step,)),
        "Generation": ("{:,.0f}".format, "tokens/s", (rates[0],)),
        "Training": ("{:,.0f}".format, "tokens/s", (rates[1],)),
    }
    return {name: row for name, row in rows.items() if any(value is not None for value in row[2])}


def ends_text(numbers: Sequence[Number]) -> str:
    """One number of several runs as text; a dash where no run has it."""
    texts = []
    for ends in zip(*(values for _, _, values in numbers), strict=True):
        known = [value for value in ends if value is not None]
        texts.append(UNKNOWN)
        if known:
            write = numbers[0][0]
            mean, low, high = map(write, (sum(known) / len(known), min(known), max(known)))
            texts[-1] = mean if low == high else f"{mean} ({low} to {high})"
    return f"{ARROW.join(texts)} {numbers[0][1]}".strip() if texts else UNKNOWN
