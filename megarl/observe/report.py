"""`report.html`: a run on one page that opens from disk and loads nothing.

To add a chart, add a line to `_learning`, `_systems` or `_optimisation`. A chart is left out if the
run lacks its metrics.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from megarl.observe.charts import chart
from megarl.observe.number_format import compact, duration, percent
from megarl.observe.page import page, safe_html
from megarl.observe.series import DRAWN_BARS, Series, gather, smooth
from megarl.observe.summary import Evaluation, Run, read_run, summarise

EXAMPLES = 8
"""Number of problems whose responses before and after training are shown."""
SHOWN_CHARACTERS = 12_000
"""Longest text shown in full; longer ones are cut and say how many characters are missing."""
_NONE = "\N{EN DASH}"


def write_report(folder: Path, *, title: str) -> Path:
    """Write `report.html` into a run folder, in one atomic rename; returns its path.

    Args:
        folder: run folder with `metrics.jsonl` and, if there, the other files of the run.
        title: heading of the page.

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
        _section("Optimisation", "", _charts(_optimisation(run))),
        _recipe(recipe.read_text(encoding="utf-8", errors="replace")) if recipe.exists() else "",
        "<footer>Written by megarl. One file; it loads nothing and sends nothing.</footer>",
    ]
    target = folder / "report.html"
    being_written = folder / f".report.{os.getpid()}.html"
    # A lone surrogate in a transcript has no UTF-8; it is shown as a question mark.
    being_written.write_text(
        page(title, f"<main>{''.join(sections)}</main>"), encoding="utf-8", errors="replace"
    )
    being_written.replace(target)
    return target


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
    """Steps that a smoothed line averages over: odd, about a twentieth of the run.

    It is 1 for short runs.
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
        learnt("Response length", "mean tokens", "length/mean", zero=True),
        (
            chart("Loss", "", _smoothed(run, "loss", "loss", 1), x_span=span, wide=True)
            if supervised
            else ""
        ),
    ]


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
    ages = [line("staleness/max", "oldest", 1, largest=True)]
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
            "steps behind, at most, when a rollout was trained on",
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


def _examples(run: Run) -> tuple[str, str]:
    """(note, HTML) of responses to the same problems at the first and the last evaluation.

    Without evaluations: rollouts of the first and the last step.
    """
    written = [one for one in run.evaluations if one.transcripts]
    if not written:
        return _groups(run)
    first, last = written[0], written[-1]
    if first is last:
        shown = "".join(
            _problem(one, [(_after(first), one)]) for one in first.transcripts[:EXAMPLES]
        )
        return (
            f"The first {min(EXAMPLES, len(first.transcripts))} held-out problems, in their order.",
            shown,
        )
    pairs = _pairs(first.transcripts, last.transcripts)
    count = min(EXAMPLES, len(pairs))
    note = (
        f"Held-out problems at the first and the last evaluation: the first {count}, in their"
        " order; none was picked."
    )
    shown = "".join(
        _problem(old, [(_after(first), old), (_after(last), new)]) for old, new in pairs[:EXAMPLES]
    )
    return note, _moves(pairs) + shown


def _after(one: Evaluation) -> str:
    """When an evaluation took place, as text: "before training" or "after 3 steps"."""
    return (
        "before training"
        if one.step == 0
        else f"after {one.step:,} step{'s' if one.step != 1 else ''}"
    )


def _pairs(
    first: list[dict[str, Any]], last: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Transcripts of the same prompt in two evaluations; repeated prompts are matched in order."""
    waiting: dict[str, list[dict[str, Any]]] = {}
    for one in last:
        waiting.setdefault(one["prompt"], []).append(one)
    return [(one, waiting[one["prompt"]].pop(0)) for one in first if waiting.get(one["prompt"])]


def _moves(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Table: how many problems went from wrong to right and from right to wrong."""
    if not pairs:
        return ""

    def count(old: bool, new: bool) -> str:
        return f"<td>{sum(bool(a['correct']) == old and bool(b['correct']) == new for a, b in pairs):,}</td>"

    return (
        f'<table class="moves"><tr><th>of {len(pairs):,} problems written out</th><th>right'
        " after</th><th>wrong after</th></tr><tr><th>right"
        f" before</th>{count(True, True)}{count(True, False)}</tr><tr><th>wrong"
        f" before</th>{count(False, True)}{count(False, False)}</tr></table>"
    )


def _groups(run: Run) -> tuple[str, str]:
    """(note, HTML) of rollouts at the first and the last step."""
    shown = [
        _problem(group, [(f"step {group['step']:,}", one) for one in group["rollouts"][:4]])
        for group in run.groups
    ]
    return (
        "Rollouts trained on at the first and the last step, at most four of each group.",
        "".join(shown),
    )


def _problem(problem: dict[str, Any], sides: list[tuple[str, dict[str, Any]]]) -> str:
    """HTML of a problem with its responses, each given as (when, transcript)."""
    return (
        f'<article class="problem"><header><pre>{_text(problem["prompt"])}</pre>'
        f'<span class="soft">answer {_text(problem["answer"])}</span></header><div class="pair">'
        + "".join(_side(when, one) for when, one in sides)
        + "</div></article>"
    )


def _side(when: str, one: dict[str, Any]) -> str:
    """HTML of one response to a problem, with its verdict and length."""
    mark = ("right", "\N{CHECK MARK} right") if one["correct"] else ("wrong", "\N{BALLOT X} wrong")
    about = [when]
    if one.get("tokens") is not None:
        about.append(f"{one['tokens']:,} tokens")
    if one.get("reward") is not None:
        about.append(f"reward {one['reward']:+.2f}".replace("-", "\N{MINUS SIGN}"))
    return (
        f'<div class="side"><div><span class="mark {mark[0]}">{mark[1]}</span>'
        + "".join(f"<span>{part}</span>" for part in about)
        + f"</div><pre>{_text(one['response'])}</pre></div>"
    )


def _text(text: object) -> str:
    """Untrusted text as safe HTML, shortened to `SHOWN_CHARACTERS`."""
    plain = str(text)
    missing = len(plain) - SHOWN_CHARACTERS
    if missing <= 0:
        return safe_html(plain)
    return (
        safe_html(plain[:SHOWN_CHARACTERS])
        + f'<span class="soft"> \N{HORIZONTAL ELLIPSIS} {missing:,} more characters</span>'
    )


def _recipe(text: str) -> str:
    """HTML of the recipe's text."""
    body = f"<details><summary>recipe.yaml</summary><pre>{safe_html(text)}</pre></details>"
    return _section("Recipe", "Every setting of the run, defaults included.", body)
