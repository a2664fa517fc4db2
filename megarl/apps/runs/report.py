"""`report.html`: a run on one page that opens from disk and loads nothing.

To add a chart, add a line to `_learning`, `_systems` or `_optimisation`. A chart is left out if the
run lacks its metrics.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from megarl.apps.runs.charts import chart
from megarl.apps.runs.examples import examples
from megarl.apps.runs.lanes import last_steps
from megarl.apps.runs.number_format import compact, duration, percent
from megarl.apps.runs.page import page, safe_html
from megarl.apps.runs.series import DRAWN_BARS, Series, gather, smooth
from megarl.apps.runs.target import run_and_target, writing
from megarl.console import result
from megarl.errors import UserError
from megarl.observe.summary import Run, read_run, summarise

FILE = "report.html"
"""Name of the page in the run folder."""
_NONE = "\N{EN DASH}"


def write_report(folder: Path, *, title: str, target: Path | None = None) -> Path:
    """Write the report of a run folder, in one atomic rename; returns its path.

    Args:
        folder: run folder with `metrics.jsonl` and, if there, the other files of the run.
        title: heading of the page.
        target: the file; None for `report.html` in the run folder.

    Raises:
        ValueError: the folder is not one of a run, or a file is damaged before its last line.
    """
    folder = Path(folder)
    run = read_run(folder)
    recipe = folder / "recipe.yaml"
    sections = [
        _header(run, title),
        _section("Learning", "", _charts(_learning(run))),
        _section("Examples", *_examples(run)),
        _section("Time and agreement", "", _charts(_systems(run))),
        _section("Processes", "", last_steps(folder)),
        _section("Optimisation", "", _charts(_optimisation(run))),
        _recipe(recipe.read_text(encoding="utf-8", errors="replace")) if recipe.exists() else "",
        "<footer>Written by megarl. One file; it loads nothing and sends nothing.</footer>",
    ]
    target = target or folder / FILE
    being_written = target.with_name(f".report.{os.getpid()}.html")
    # A lone surrogate in a transcript has no UTF-8; it is shown as a question mark.
    being_written.write_text(
        page(title, f"<main>{''.join(sections)}</main>"), encoding="utf-8", errors="replace"
    )
    being_written.replace(target)
    return target


def main(arguments: list[str]) -> int:
    """The command `megarl report RUN [--out FILE]`: make RUN/report.html, or FILE, anew from the
    metrics and other files of the run folder RUN, and print its path. `arguments`: the words after
    `report`. Returns the exit code 0. Raises `UserError` for other words, if RUN is no run folder,
    and if the file cannot be written.
    """
    folder, target = run_and_target("report", arguments, FILE)
    try:
        with writing(target):
            result(str(write_report(folder, title=folder.resolve().name, target=target)))
    except ValueError as error:
        raise UserError(str(error)) from error
    return 0


def _examples(run: Run) -> tuple[str, str]:
    """As `examples`; transcripts that another program has changed end no run."""
    try:
        return examples(run)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return "", f"<p>The transcripts cannot be shown: {safe_html(repr(error))}</p>"


def _section(title: str, note: str, body: str) -> str:
    """HTML of a section with heading and note; empty if `body` is."""
    if not body:
        return ""
    return (
        f"<section><h2>{title}</h2>"
        + (f'<p class="soft">{note}</p>' if note else "")
        + body
        + "</section>"
    )


def _charts(drawn: list[str]) -> str:
    """HTML of charts in two columns; a last one without neighbour takes the whole width."""
    drawn = [one for one in drawn if one]
    if not drawn:
        return ""
    halves = [i for i, one in enumerate(drawn) if one.startswith('<figure class="chart">')]
    if len(halves) % 2:  # the one without a neighbour takes the row
        drawn[halves[-1]] = drawn[halves[-1]].replace('"chart"', '"chart last"', 1)
    return f'<div class="charts">{"".join(drawn)}</div>'


def _header(run: Run, title: str) -> str:
    """HTML of the title and the tiles with the main numbers."""
    found = summarise(run)
    greedy = found["measured_on"] == "evaluation"
    kind = "held-out problems, greedy" if greedy else "rollouts of the first and last steps"
    tiles = []
    if found["accuracy_before"] is not None or found["accuracy_after"] is not None:
        change = _change(found["accuracy_before"], found["accuracy_after"], "{:.1%}".format)
        tiles.append(_tile("Accuracy", change, kind, main=True))
    if found["length_before"] is not None or found["length_after"] is not None:
        change = _change(found["length_before"], found["length_after"], "{:,.1f}".format)
        tiles.append(_tile("Response length", f"{change} <small>tokens</small>", kind, main=True))
    if failed := sum(run.failures.values()):
        named = ", ".join(f"{count:,} {name}" for name, count in run.failures.items() if count)
        tiles.append(_tile("Verifier failures", f"{failed:,}", f"in rollouts: {named}"))
    tiles.append(_tile("Steps", f"{found['steps']:,}"))
    if found["seconds"] is not None:
        tiles.append(_tile("Time of the steps", duration(found["seconds"])))
    for name, label in (
        ("generated_tokens_per_s", "Generation"),
        ("trained_tokens_per_s", "Training"),
    ):
        if found[name] is not None:
            tiles.append(_tile(label, f"{compact(found[name])} <small>tokens/s</small>"))
    return f'<header><h1>{safe_html(title)}</h1></header><dl class="tiles">{"".join(tiles)}</dl>'


def _tile(label: str, value: str, note: str = "", *, main: bool = False) -> str:
    """HTML of a tile: label, value and a note below."""
    small = f'<dd class="note">{note}</dd>' if note else ""
    return (
        f'<div class="tile{" main" if main else ""}"><dt>{label}</dt><dd>{value}</dd>{small}</div>'
    )


def _change(before: float | None, after: float | None, as_text: Any) -> str:
    """HTML of a value before and after training."""
    first = _NONE if before is None else as_text(before)
    last = _NONE if after is None else as_text(after)
    return f'<span class="from">{first} \N{RIGHTWARDS ARROW}</span> {last}'


def _window(count: int) -> int:
    """Number of steps in the moving average of a chart's smoothed line, for a run of `count` steps:
    odd, about `count` / 20, and 1 below 40 steps.
    """
    return (count // 20) | 1


def _smoothed(run: Run, name: str, label: str, colour: int) -> list[Series]:
    """A metric of the steps as series: moving mean over raw values; for short runs raw values."""
    steps, values = run.series(name)
    window = _window(len(steps))
    if window == 1:
        return [Series(label, steps, values, colour)]
    return [
        Series(f"{label}, each step", steps, values, colour, "faint"),
        Series(f"{label}, mean of {window} steps", steps, smooth(values, window), colour),
    ]


def _evaluated(run: Run, name: str) -> list[Series]:
    """A metric of the evaluations as series, sampled and greedy."""
    return [
        Series("held out, sampled", *run.evaluated(f"eval_sampled/{name}"), 3, "rings"),
        Series("held out, greedy", *run.evaluated(f"eval/{name}"), 2, "points"),
    ]


def _learning(run: Run) -> list[str]:
    """Charts of what the model learns: accuracy, reward, length."""
    steps = [record["step"] for record in run.metrics] + [one.step for one in run.evaluations]
    span = (float(min(steps)), float(max(steps))) if steps else None

    def learnt(title: str, note: str, name: str, **how: Any) -> str:
        series = _smoothed(run, name, "rollouts", 1) + _evaluated(run, name)
        return chart(title, note, series, x_span=span, **how)

    supervised = not len(run.series("reward/mean")[0])
    return [
        learnt(
            "Accuracy",
            "share of responses judged right",
            "accuracy",
            as_text=percent,
            span=(0.0, 1.0),
            wide=True,
        ),
        learnt("Reward", "mean of a response, length penalty included", "reward/mean"),
        _failures(run),
        learnt("Response length", "mean tokens", "length/mean", zero=True),
        (
            chart("Loss", "", _smoothed(run, "loss", "loss", 1), x_span=span, wide=True)
            if supervised
            else ""
        ),
    ]


def _failures(run: Run) -> str:
    """Chart of the rollouts of a step that the verifier could not judge; empty without any."""
    if not any(run.failures.values()):
        return ""
    rows = [
        Series(name, *run.series(f"verifier/{name}"), colour)
        for colour, name in enumerate(run.failures, start=1)
    ]
    note = "rollouts without a verdict; they got the reward of a wrong answer"
    return chart("Verifier failures", note, rows, zero=True, whole=True)


def _systems(run: Run) -> list[str]:
    """Charts of the system: time, throughput, agreement of trainer and engine."""

    def line(name: str, label: str, colour: int, kind: Any = "line", **how: Any) -> Series:
        return gather(Series(label, *run.series(name), colour, kind), 2 * DRAWN_BARS, **how)

    rates = [
        line("tokens/trained_per_s", "training", 2),
        line("tokens/generated_per_s", "generation", 1),
    ]
    gaps = [
        line("mismatch/max_abs", "largest", 2, largest=True),
        line("mismatch/mean_abs", "mean", 1),
        line("probe/max_abs", "largest on the probe, same weights", 3, "dashed", largest=True),
    ]
    ages = [
        line("staleness/max", "oldest", 1, largest=True),
        line("staleness/token_mean", "mean of the trained tokens", 2),
    ]
    about_gaps = (
        "difference of their log-probs of the sampled tokens, logarithmic; exact zeros are not"
        " drawn"
    )
    return [
        _time(run),
        chart("Throughput", "tokens a second", rates, zero=True),
        chart("Do trainer and engine agree?", about_gaps, gaps, log=True),
        chart(
            "Age of the weights",
            "steps behind when a rollout was trained on",
            ages,
            zero=True,
            whole=True,
        ),
    ]


def _time(run: Run) -> str:
    """Chart of a step's seconds by phase of the trainer; rollouts run in parallel, as a line."""
    steps = np.array([record["step"] for record in run.metrics], dtype=float)

    def seconds(name: str) -> np.ndarray:
        return np.array(
            [np.nan if record.get(name) is None else record[name] for record in run.metrics],
            dtype=float,
        )

    phases = {
        "waiting for rollouts": seconds("time/wait_s"),
        "training": seconds("time/train_s"),
        "publishing weights": seconds("time/publish_s"),
    }
    rest = np.maximum(
        seconds("time/step_s") - np.sum([np.nan_to_num(one) for one in phases.values()], axis=0),
        0.0,
    )
    named = any(np.isfinite(one).any() for one in phases.values())
    layers = [
        Series(label, steps, values, colour, "bars")
        for (label, values), colour in zip(
            [*phases.items(), ("other" if named else "whole step", rest)], (1, 2, 3, 5), strict=True
        )
    ]
    rollouts = Series("rollouts, beside the trainer", steps, seconds("time/rollout_s"), 4, "line")
    return chart("Time of a step", "seconds, by phase", [*layers, rollouts], zero=True)


def _optimisation(run: Run) -> list[str]:
    """Charts of the optimizer: loss, entropy, gradient norm and so on."""
    known: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
        ("loss", "Loss", "policy gradient: its level says nothing about progress", {}),
        ("entropy", "Entropy", "nats a token", {"zero": True}),
        ("grad_norm", "Gradient norm", "before clipping", {"zero": True}),
        (
            "clip_share",
            "Clipped",
            "share of tokens outside the clip range",
            {"zero": True, "as_text": percent},
        ),
        (
            "length/truncated_share",
            "Cut off",
            "share of responses at the token limit",
            {"zero": True, "as_text": percent},
        ),
        (
            "groups/rejected",
            "Groups rejected",
            "by dynamic sampling",
            {"zero": True, "whole": True},
        ),
        ("kl", "KL to the reference", "nats a token", {}),
        (
            "critic/loss",
            "Critic's loss",
            "half a squared error, in rewards squared",
            {"zero": True},
        ),
        ("critic/explained_variance", "Explained variance", "of the returns, by the critic", {}),
        ("learning_rate", "Learning rate", "", {"zero": True}),
    )
    supervised = not len(run.series("reward/mean")[0])

    def drawn(name: str, label: str) -> list[Series]:
        if name == "learning_rate":  # noise-free
            return [Series(label, *run.series(name), 1)]
        return _smoothed(run, name, label, 1)

    return [
        chart(title, note, drawn(name, title.lower()), **how)
        for name, title, note, how in known
        if not (name == "loss" and supervised)
    ]


def _recipe(text: str) -> str:
    """HTML of the recipe's text."""
    body = f"<details><summary>recipe.yaml</summary><pre>{safe_html(text)}</pre></details>"
    return _section("Recipe", "Every setting of the run, defaults included.", body)
