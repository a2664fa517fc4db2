"""The examples of `report.html`: responses to the same problems before and after training."""

from __future__ import annotations

from typing import Any

from megarl.apps.runs.page import safe_html
from megarl.observe.summary import Evaluation, Run

EXAMPLES = 10
"""Number of problems whose responses before and after training are shown."""
SHOWN_CHARACTERS = 12_000
"""Longest text shown in full; longer ones are cut and say how many characters are missing."""


def examples(run: Run) -> tuple[str, str]:
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
    if one.get("failure"):
        mark = ("wrong", f"\N{WARNING SIGN} not judged: verifier {safe_html(one['failure'])}")
        about += [_text(one["detail"])] if one.get("detail") else []
    if one.get("tokens") is not None:
        about.append(f"{one['tokens']:,} tokens")
    if one.get("reward") is not None:
        about.append(f"reward {one['reward']:+.2f}".replace("-", "\N{MINUS SIGN}"))
    return (
        f'<div class="side"><div><span class="mark {mark[0]}">{mark[1]}</span>'
        + "".join(f"<span>{part}</span>" for part in about)
        + f"</div>{_turns(one)}</div>"
    )


def _turns(one: dict[str, Any]) -> str:
    """HTML of a response: of a single turn its text; of several each turn, with who wrote it, its
    length and its reward. The model's turns, which are trained on, and the environment's have
    colours of their own.
    """
    if not one.get("turns"):
        return f"<pre>{_text(one['response'])}</pre>"
    parts = []
    for turn in one["turns"]:
        is_model = turn["by"] == "model"
        about = ["model, trained on" if is_model else "environment, read only"]
        about.append(f"{turn['tokens']:,} tokens")
        if turn.get("reward"):
            about.append(f"reward {turn['reward']:+.2f}".replace("-", "\N{MINUS SIGN}"))
        if turn.get("finish", "stop") != "stop":
            about.append(f"cut off: {safe_html(turn['finish'])}")
        parts.append(
            f'<div class="turn {"said" if is_model else "read"}">'
            f"<small>{' · '.join(about)}</small><pre>{_text(turn['text'])}</pre></div>"
        )
    return "".join(parts)


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
