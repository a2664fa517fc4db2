"""The parts of a report that show what the model writes: held-out problems before and after, and
rollouts to browse.

    transcripts --Listing: items as HTML, fields to choose by--> report_rollouts.html.j2

A list takes at most 1 MiB of the page, however long the run and its responses are.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from megarl.observe.summary import Evaluation, Run

LIST_BYTES, MOST_ITEMS = 2**20, 400
"""Most bytes of HTML, and items, of one list."""
OF_A_GROUP = 8
"""Most rollouts that are shown of a group."""
OPEN, SHORT = 3, 1000
"""Number of problems that are open when the page is opened, if the responses have fewer characters.
"""
OUTCOME = {"reward": "range", "tokens": "range", "source": "choice", "verdict": "choice"}


@functools.cache
def pages() -> jinja2.Environment:
    """The templates of report pages, loaded once in a process. Every value that a template is given
    is escaped as HTML, with control characters, which HTML forbids, as visible symbols.
    """
    controls = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}

    def visible(value: Any) -> Any:
        if type(value) is not str:  # HTML of the template is a class of its own
            return value
        return value.replace("\r\n", "\n").translate(controls | {127: 0x2421})

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["count"] = "{:,}".format
    environment.filters["sha256"] = lambda text: base64.b64encode(
        hashlib.sha256(text.encode()).digest()
    ).decode()
    return environment


@dataclass
class Listing:
    """A list of the page whose items a reader can choose by their fields."""

    title: str
    about: str
    """What is shown, in words."""
    fields: dict[str, str]
    """{name of a field: "range" for numbers, "choice" for one of several}"""
    items: list[str]
    """HTML of each item, safe to be put in a page."""
    moves: Counter[tuple[bool, bool]] | None = None
    """{(right at the first, right at the last evaluation): number of problems}; None without two
    evaluations."""


def listings(run: Run) -> list[Listing]:
    """The lists of rollouts that the report of `run` shows: held-out problems at the first and the
    last evaluation, and rollouts of training; without what the run lacks.
    """
    return [*problem_listing(run), *rollout_listing(run)]


@functools.cache
def macros() -> Any:
    """The macros of report_rollouts.html.j2, functions that return HTML."""
    return pages().get_template("report_rollouts.html.j2").module


def thinned(write: Callable[..., str], inside: Sequence[tuple[Any, ...]]) -> list[str]:
    """The HTML of the items of a list, `write(*one)` of each in `inside`, or of as many of them,
    evenly, as a list has room for.
    """
    items = [write(*item) for item in inside[:: -(-len(inside) // MOST_ITEMS) or 1]]
    while len(items) > 1 and sum(len(item.encode(errors="replace")) for item in items) > LIST_BYTES:
        items = items[::2]
    return items


def problem_listing(run: Run) -> list[Listing]:
    """The list of held-out problems with a response of the first and one of the last evaluation, in
    the order of the file; none for a run without evaluations.
    """
    written = [evaluation for evaluation in run.evaluations if evaluation.transcripts]
    if not written:
        return []
    moves, words = None, [when(written[0])]
    pairs: list[tuple[Any, ...]] = [(transcript,) for transcript in written[0].transcripts]
    note = "Held-out problems, in their order; none was picked."
    if len(written) > 1:
        pairs, words = same_problems(written[0], written[-1]), [*words, when(written[-1])]
        note = "The same held-out problems at the first and the last evaluation, in their order."
        moves = Counter((bool(old["correct"]), bool(new["correct"])) for old, new in pairs)

    def write(number: int, pair: Sequence[dict[str, Any]]) -> str:
        is_short = all(len(str(transcript["response"])) < SHORT for transcript in pair)
        values = outcome(pair[0], pair)
        sides = list(zip(words, pair, strict=True))
        return macros().pair(sides, values, number < OPEN and is_short)

    items = thinned(write, list(enumerate(pairs)))
    if len(items) < len(pairs):
        note += f" These are {len(items):,} of {len(pairs):,}, evenly chosen."
    return [Listing("Held-out problems", note, OUTCOME, items, moves)] if items else []


def outcome(record: dict[str, Any], pair: Sequence[dict[str, Any]]) -> list[Any]:
    """What a list shows of a problem: [reward, tokens, source of the prompt in a mixture, verdicts],
    the fields `OUTCOME`. `pair`: transcripts of responses to it, in order; reward and tokens are
    those of the last. `record`: the record with the prompt's source.
    """
    words = [
        "right" if transcript["correct"] else "not judged" if is_unjudged(transcript) else "wrong"
        for transcript in pair
    ]
    verdicts = " \N{RIGHTWARDS ARROW} ".join(words)
    source = str(record.get("environment", ""))[:60]
    return [reward_of(pair[-1]), pair[-1].get("tokens"), source, verdicts]


def is_unjudged(record: dict[str, Any]) -> bool:
    """Whether the transcript of a response says that there is no verdict on it."""
    return bool(record.get("left_out")) or record.get("failure", "") not in ("", "response_limit")


def reward_of(record: dict[str, Any]) -> float | None:
    """The reward in the transcript of a response; None where there is none."""
    return None if record.get("left_out") else record.get("reward")


def when(evaluation: Evaluation) -> str:
    """When `evaluation` took place, in words: "before training" or "after 1,000 steps"."""
    plural = "" if evaluation.step == 1 else "s"
    return f"after {evaluation.step:,} step{plural}" if evaluation.step else "before training"


def same_problems(first: Evaluation, last: Evaluation) -> list[tuple[Any, ...]]:
    """For each prompt that both evaluations have: (its transcript in `first`, its transcript in
    `last`), in the order of `first`. Where a prompt occurs several times, the first occurrences
    form a pair, then the second ones, and so on.
    """
    waiting: dict[str, list[dict[str, Any]]] = {}
    for transcript in last.transcripts:
        waiting.setdefault(transcript["prompt"], []).append(transcript)
    return [
        (transcript, waiting[transcript["prompt"]].pop(0))
        for transcript in first.transcripts
        if waiting.get(transcript["prompt"])
    ]


def rollout_listing(run: Run) -> list[Listing]:
    """The list of rollouts of training, by step; none for a run without transcripts."""

    def write(group: dict[str, Any], one: dict[str, Any]) -> str:
        return macros().rollout(group, one, [group["step"], *outcome(group, [one])])

    inside = [
        (group, rollout) for group in run.groups for rollout in group["rollouts"][:OF_A_GROUP]
    ]
    if not inside:
        return []
    items = thinned(write, inside)
    note = (
        f"{len(items):,} rollouts, evenly over the run: of the first {OF_A_GROUP} of a group."
        " transcripts.jsonl has all that were written down."
    )
    return [Listing("Rollouts", note, {"step": "range"} | OUTCOME, items)]
