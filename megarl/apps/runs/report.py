"""`report.html`: a run on one page that opens from disk and loads nothing.

    run folder --read--> charts, rollouts, numbers --report.html.j2--> page

The page's own script draws the charts from JSON in the page. To add a chart, add a line to
`learning`, `systems` or `optimisation`. A chart is left out if the run lacks its metrics.
The size of the page is bounded: at most 500 values a line, 40 charts of own metrics, 1 MiB a list of
rollouts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.apps.runs.page import (
    TEMPLATE,
    Chart,
    Series,
    chart,
    farthest,
    pages,
    series,
    write_page,
)
from megarl.apps.runs.report_rollouts import histograms, listings
from megarl.observe.summary import (
    Run,
    read_run,
    read_starts,
    summarise_run,
    usual_bounds,
)
from megarl.recipe_file import read_tree

FILE = "report.html"
"""Name of the page in the run folder."""
MOST_OWN = 40
"""Most charts of metrics of the user's own functions and environments."""


def write_report(folder: Path, *, title: str, target: Path | None = None) -> Path:
    """Write the report of a run folder as one HTML file, replaced in one atomic rename; returns the
    file's path.

    Args:
        folder: run folder with `metrics.jsonl` and, if there, the other files of the run.
        title: heading of the page.
        target: path of the file to write; None for `report.html` in the run folder.

    Raises:
        ValueError: the folder is not that of a run, or a file is damaged before its last line.
    """
    folder = Path(folder)
    run, recipe = read_run(folder), folder / "recipe.yaml"
    settings: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # missing or damaged
        settings = read_tree(recipe)
    page = (
        pages()
        .get_template(TEMPLATE)
        .render(
            title=title,
            steps=steps_of([run]),
            tables=[],
            warnings=warnings(run, settings),
            made_by=provenance(read_starts(folder)),
            numbers=summarise_run(run),
            failures=run.failures,
            own=[own_chart(run, name) for name in own_names([run])],
            learning=learning(run),
            histograms=histograms(run),
            listings=listings(run),
            systems=systems(run),
            optimisation=optimisation(run),
            recipe=recipe.read_text(encoding="utf-8", errors="replace")
            if recipe.exists()
            else None,
        )
    )
    return write_page(target or folder / FILE, page)


LATE = 20
"""Number of last steps that the warnings of a report look at."""
SOLVED = 0.9
"""Accuracy from which on a run may reject most groups: it solves its problems, which is no fault."""
AGREE = "see docs/metrics.md, Do trainer and engines agree?"
RULES: tuple[tuple[str, str, str], ...] = (
    ("groups/rejected", "groups/drawn",
     "{sum} of {of} groups were rejected: the problems are too easy or too hard"),
    ("length/truncated_share", "",
     "{mean:.0%} of the responses were cut off: raise the limit that cut them off"),
    ("verifier/errors verifier/timeouts verifier/nans", "",
     "{sum} rollouts could not be judged and got the reward of a wrong answer: mend the verifier"),
    ("skipped_steps", "",
     "{sum} optimizer steps were skipped, since a value was not finite"),
    ("clip_share", "",
     "{mean:.0%} of the tokens were clipped: see docs/metrics.md, Is the optimizer well?"),
    ("mismatch/mean_abs", "",
     f"log-probs of trainer and engines differ by {{mean:.2g}} in the mean: {AGREE}"),
    ("mismatch/outside_share", "",
     f"engines gave {{mean:.0%}} of the tokens another probability: {AGREE}"),
    ("staleness/max", "",
     f"the oldest rollouts were {{mean:.3g}} versions old in the mean: {AGREE}"),
    ("correction/dropped_share correction/clipped_share", "",
     f"algorithm.correction dropped or clipped {{mean:.0%}} of the weights: {AGREE}"),
)  # fmt: skip
"""The rules of docs/metrics.md as (metrics, which are added up; metric that the sum is divided by,
"" for the number of steps; text). The text is shown above the bound that `usual_bounds` has for the
first metric, if there is one."""


def warnings(run: Run, recipe: Mapping[str, Any]) -> list[str]:
    """Sentences for the top of a report about what is unusual in the last 20 steps of the run with
    this recipe, as data, by `RULES`; empty if nothing is. Steps that lack a rule's metrics do not
    count for it.
    """
    told, bounds = [], usual_bounds(recipe)
    for names, divisor, text in RULES:
        late = [one for one in run.metrics[-LATE:] if any(name in one for name in names.split())]
        summed = sum(one.get(name) or 0 for one in late for name in names.split())
        of = sum(one.get(divisor) or 0 for one in late) if divisor else len(late)
        accuracy = sum(one.get("accuracy") or 0 for one in late)
        most = bounds.get(names.split()[0], float("inf"))
        is_solved = names == "groups/rejected" and accuracy >= SOLVED * len(late)
        if of and summed > most * of and not is_solved:
            shown = text.format(sum=f"{summed:,.0f}", of=f"{of:,.0f}", mean=summed / of)
            told.append(f"In the last {len(run.metrics[-LATE:])} steps {shown}.")
    return told


def provenance(
    starts: Sequence[dict[str, str]],
) -> tuple[str, str, list[str], dict[str, list[str]]]:
    """A table of the page that says who made a run: (title, note, heads, rows), with a column for
    each of `starts`, {fact: text}, as `read_starts` returns them.
    """
    heads = [f"from step {int(one['step']) + 1:,}" for one in starts]
    names = dict.fromkeys(name for one in starts for name in one if name != "step")
    rows = {name: [one.get(name, "") for one in starts] for name in names}
    return "Made by", "A + after the commit: files differed from it.", heads, rows


def steps_of(runs: Sequence[Run]) -> tuple[int, int, int]:
    """(first, last) step of which any of `runs` has metrics or an evaluation, (0, 0) without, and
    the number, odd, of steps over which the page takes moving means at first: a twentieth of the
    longest run.
    """
    steps = [record["step"] for run in runs for record in run.metrics]
    steps += [one.step for run in runs for one in run.evaluations]
    longest = max((len(run.metrics) for run in runs), default=0)
    return min(steps, default=0), max(steps, default=0), (longest // 20) | 1


# ----------------------------------------------------------------------------------------- charts


def smoothed(run: Run, name: str, label: str) -> list[Series]:
    """The series of the metric `name` over the run's steps, as JSON data, of which the page draws a
    moving mean over the faint raw values. `label`: the metric's name on the page.
    """
    steps, values = run.series(name)
    found = series(label, steps, values, 1) | {"smooth": True, "raw": True}
    if found["each"] > 1:  # a mean would hide single steps that are far off
        found["spikes"] = series(label, steps, values, 1, "line", farthest)["rows"][0]
    return [found]


def line(run: Run, name: str, label: str, colour: int, *how: Any) -> Series:
    """The series of the metric `name` over the run's steps, as a dict for JSON, unsmoothed.
    `label`: the name on the page; `colour`: 1 to 10, of the page's palette; `how`: the kind of line
    ("line", "dashed", "points", ...) and a function that makes one value of several, as `series`
    takes them.
    """
    return series(label, *run.series(name), colour, *how)


def learning(run: Run) -> list[Chart | None]:
    """Charts, as JSON data for the page, of what the model learns: accuracy, reward, length, or the
    loss of supervised training. None stands for a chart whose metrics the run lacks.
    """
    failed = [
        line(run, f"verifier/{name}", name, colour, "line", np.ma.max)
        for colour, name in enumerate(run.failures, start=1)
        if any(run.failures.values())
    ]
    loss = smoothed(run, "loss", "loss")
    loss.append(series("held out", *run.evaluated("eval/loss"), 2, "points"))
    names = sorted({name for record in run.metrics for name in record if SOURCE.fullmatch(name)})
    sources = [
        line(run, name, name.split("/")[1], 1 + number % 10) | {"smooth": True}
        for number, name in enumerate(names)
    ]
    accuracy = {"percent": True, "span": (0, 1), "wide": True}
    without_verdict = "rollouts without a verdict; they got the reward of a wrong answer"
    return [
        learnt(run, "Accuracy", "share of responses judged right", "accuracy", **accuracy),
        learnt(run, "Reward", "mean of a response, length penalty included", "reward/mean"),
        chart("Accuracy by source", "share of rollouts judged right", sources, percent=True),
        chart("Verifier failures", without_verdict, failed, zero=True, whole=True),
        learnt(run, "Response length", "mean tokens", "length/mean", zero=True),
        None if is_rl(run) else chart("Loss", "", loss, wide=True),
    ]


SOURCE = re.compile("source/.+/accuracy")


def learnt(run: Run, title: str, note: str, name: str, **how: Any) -> Chart | None:
    """The chart, as JSON data, of the metric `name` in training and in evaluations; None where the
    run lacks it. `title`, `note` and `how`: as `chart` takes them.
    """
    evaluated = [
        series("held out, sampled", *run.evaluated(f"eval_sampled/{name}"), 3, "rings"),
        series("held out, greedy", *run.evaluated(f"eval/{name}"), 2, "points"),
    ]
    label = "training" if name.startswith("own/") else "rollouts"
    return chart(title, note, smoothed(run, name, label) + evaluated, **how)


OWN = {"own/": "of your own function", "environment/": "mean, of the environment"}
"""{beginning of the names of metrics that a user's functions and environments return: note of their
charts}"""


def own_names(runs: Iterable[Run]) -> list[str]:
    """Names of the metrics that the user's own functions and environments return in `runs`, those of
    functions first; at most 40.
    """
    names = {name for run in runs for record in run.metrics for name in record}
    return [name for begin in OWN for name in sorted(names) if name.startswith(begin)][:MOST_OWN]


def own_chart(run: Run, name: str) -> Chart | None:
    """The chart, as JSON data, of the user's own metric `name`."""
    begin, _, title = name.partition("/")
    return learnt(run, title, OWN[begin + "/"], name)


def is_rl(run: Run) -> bool:
    """Whether a run learns by reward, so that it has the metric `reward/mean`. Only in a run without
    rewards does the loss say how well the model learns.
    """
    return len(run.series("reward/mean")[0]) > 0


def systems(run: Run) -> list[Chart | None]:
    """Charts, as JSON data for the page, of the system: time, throughput, agreement of trainer and
    engine, age of rollouts. None stands for a chart whose metrics the run lacks.
    """
    rates = [
        line(run, "tokens/trained_per_s", "training", 2),
        line(run, "tokens/generated_per_s", "generation", 1),
    ]
    gaps = [
        line(run, "mismatch/max_abs", "largest", 2, "line", np.ma.max),
        line(run, "mismatch/mean_abs", "mean", 1),
        line(run, "probe/max_abs", "largest on the probe, same weights", 3, "dashed", np.ma.max),
    ]
    ages = [
        line(run, "staleness/max", "oldest", 1, "line", np.ma.max),
        line(run, "staleness/token_mean", "mean of the trained tokens", 2),
    ]
    about_gaps = "difference of their log-probs of the sampled tokens, logarithmic; no exact zeros"
    about_ages = "steps behind when a rollout was trained on"
    return [
        chart("Time of a step", "seconds, by phase", times(run), zero=True),
        chart("Throughput", "tokens a second", rates, zero=True),
        chart("Do trainer and engine agree?", about_gaps, gaps, log=True),
        chart("Age of the weights", about_ages, ages, zero=True, whole=True),
    ]


def times(run: Run) -> list[Series]:
    """The series of a chart of each step's seconds: stacked bars for the phases of the trainer, and
    a line for the generation of rollouts, which runs in parallel.
    """

    def of(name: str) -> np.ndarray:
        return np.array([record.get(name) for record in run.metrics], dtype=float)

    phases = {
        "waiting for rollouts": of("time/wait_s"),
        "training": of("time/train_s"),
        "publishing weights": of("time/publish_s"),
    }
    known = np.nan_to_num(list(phases.values()))
    phases["other" if known.any() else "whole step"] = np.maximum(
        of("time/step_s") - known.sum(axis=0), 0
    )
    bars = [
        series(label, of("step"), values, colour, "bars")
        for (label, values), colour in zip(phases.items(), (1, 2, 3, 5), strict=True)
    ]
    return [*bars, series("rollouts, beside the trainer", of("step"), of("time/rollout_s"), 4)]


ZERO, SHARE, COUNT = {"zero": True}, {"percent": True, "zero": True}, {"whole": True, "zero": True}
OPTIMISATION: tuple[tuple[str, str, str, dict[str, bool]], ...] = (
    ("loss", "Loss", "policy gradient: its level says nothing about progress", {}),
    ("entropy", "Entropy", "nats a token", ZERO),
    ("grad_norm", "Gradient norm", "before clipping", ZERO),
    ("clip_share", "Clipped", "share of tokens outside the clip range", SHARE),
    ("length/truncated_share", "Cut off", "share of responses at the token limit", SHARE),
    ("groups/rejected", "Groups rejected", "by dynamic sampling", COUNT),
    ("kl", "KL to the reference", "nats a token", {}),
    ("critic/loss", "Critic's loss", "half a squared error, in rewards squared", ZERO),
    ("critic/explained_variance", "Explained variance", "of the returns, by the critic", {}),
    ("learning_rate", "Learning rate", "", ZERO),
)
"""(name of the metric, title and note of its chart, further arguments of `chart`) of each chart."""


def optimisation(run: Run) -> list[Chart | None]:
    """Charts, as JSON data for the page, of the optimizer: loss, entropy, gradient norm and so on.
    None stands for a chart whose metric the run lacks.
    """

    def drawn(name: str, title: str, note: str, how: dict[str, bool]) -> Chart | None:
        label = title.lower()
        is_exact = name == "learning_rate"
        shown = [line(run, name, label, 1)] if is_exact else smoothed(run, name, label)
        return chart(title, note, shown, **how)

    names = {name for record in run.metrics for name in record if name.startswith("critics.")}
    of_critics = [
        (name.replace("critic", section, 1), f"{title} ({section})", note, how)
        for section in sorted({name.partition("/")[0] for name in names})
        for name, title, note, how in OPTIMISATION
        if name.startswith("critic/")
    ]
    # The loss of a run without rewards is a chart of `learning`.
    wanted = [one for one in OPTIMISATION if one[0] != "loss" or is_rl(run)]
    return [drawn(*one) for one in (*wanted, *of_critics)]
