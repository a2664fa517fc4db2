"""`megarl watch RUN [--once]`: a live view of a run in the terminal, from its run folder alone.

    metrics.jsonl, evaluations.jsonl, transcripts.jsonl, activity/ --RunView.view--> rows of text

Nothing is written. Of each file only lines that are new since the last look are read. In text from
files control characters are shown as escapes, and what looks like rich's markup is plain text.
"""

from __future__ import annotations

import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Column, Table
from rich.text import Text

from megarl.activity.files import (
    FOLDER,
    Appended,
    LatestLives,
    Life,
    of_run,
    seconds,
    waits_on,
)
from megarl.apps.runs.status import owner_state
from megarl.checkpoints.lease import read_owner
from megarl.checks.folder_checks import RECIPE
from megarl.console import Arguments, in_terminal, printable, result
from megarl.errors import UserError, shortened
from megarl.files import parse_json
from megarl.observe.observer import EVALUATIONS, METRICS, TRANSCRIPTS
from megarl.observe.rotated import PART_BYTES
from megarl.observe.summary import Run, usual_bounds
from megarl.recipe_file import read_tree
from megarl.signals import ending

KEPT = 64
"""Newest lines of each file that are kept."""
RECENT = 20
"""Means and sparklines are over this many steps, and a change is against so many steps before."""
BLOCKS = " ▁▂▃▄▅▆▇█"
ROWS = {
    "reward/mean": ("reward", ".3f"),
    "accuracy": ("accuracy", ".1%"),
    "loss": ("loss", ".4f"),
    "length/mean": ("response tokens", ",.1f"),
    "tokens/generated_per_s": ("generated tokens/s", ",.0f"),
    "tokens/trained_per_s": ("trained tokens/s", ",.0f"),
    "staleness/max": ("staleness, max", ".3g"),
    "mismatch/mean_abs": ("mismatch, mean", ".2g"),
}
"""{metric: (its name in the view, format)}"""


def main(arguments: list[str]) -> int:
    """Run `megarl watch`: show the run in the terminal, again each second, until the run has
    ended or Ctrl-C; with `--once`, or where standard output is no terminal, print the view once.
    `arguments`: the words after `megarl watch`. Returns the exit code 0. Raises `UserError` for a
    folder that is not one of a run, or that cannot be read.
    """
    usage = "it needs one run folder: megarl watch RUN [--once]"
    parser = Arguments("megarl watch", usage)
    parser.add_argument("run", type=Path)
    parser.add_argument("--once", action="store_true")
    wanted = parser.parse_args(arguments)
    if not any((wanted.run / name).exists() for name in (METRICS, RECIPE, FOLDER)):
        names = f"{METRICS}, {RECIPE} or {FOLDER}"
        raise UserError(f"{wanted.run} holds no {names}; name the folder of a run")
    run_view, screen = RunView(wanted.run), Console()
    is_live = not (wanted.once or screen.is_dumb_terminal) and in_terminal()
    try:
        if is_live:
            follow(run_view, screen, time.sleep)
        with screen.capture() as printed:
            screen.print(run_view.view(screen.size))
        result("\n".join(line.rstrip() for line in printed.get().splitlines()))
    except OSError as error:
        what = error.filename or wanted.run
        raise UserError(f"{what} cannot be read: {error.strerror or error}") from error
    except KeyboardInterrupt as caught:
        if not is_live or ending(caught).number != signal.SIGINT:
            raise
    return 0


def follow(run_view: RunView, screen: Console, wait: Callable[[float], object]) -> None:
    """Show the view of `run_view` on the terminal `screen`, in place of what was there, until the
    run has ended; then what was there comes back. `wait`: function that blocks for a number of
    seconds, as `time.sleep` does. Raises `OSError` if a file cannot be read.
    """
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            live.update(run_view.view(screen.size), refresh=True)
            if run_view.has_ended:
                return
            wait(max(1.0, 10 * (time.monotonic() - began)))  # at most a tenth of a core


class Tail:
    """The newest records of the JSON-lines file `path`, to which another process appends, as dicts
    with `step`, without transcripts of evaluations. `read` takes what is new; a file in the place
    of the one before, as of a resumed run, is read anew. Of a large file only the last 64 MiB are
    looked at.
    """

    def __init__(self, path: Path) -> None:
        self._file = Appended(path, PART_BYTES)
        self._records: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def read(self) -> list[dict[str, Any]]:
        """The newest records, at most `KEPT`, the newest last; empty while there is no file. Lines
        that are not whole, or no object with a `step`, are passed over. Raises `OSError`.
        """
        with suppress(FileNotFoundError):
            is_other, new = self._file.read()
            if is_other:
                self._records.clear()
            for line in new.split(b"\n")[:-1][-KEPT:]:
                with suppress(ValueError):
                    record = parse_json(line)
                    if isinstance(record, dict) and type(record.get("step")) is int:
                        record.pop("transcripts", None)
                        self._records.append(record)
        return list(self._records)


class RunView:
    """A run folder that is looked at again and again. `view` reads what is new and returns the rows
    to show; `has_ended` then says whether the run has ended. A run that was killed counts as ended
    only if it had done its last step.
    """

    def __init__(self, run: Path) -> None:
        self._run, self.has_ended = run, False
        self._tails = [Tail(run / name) for name in (METRICS, EVALUATIONS, TRANSCRIPTS)]
        self._lives = LatestLives(run / FOLDER)
        self._recipe: tuple[Any, dict[str, Any]] = None, {}

    def view(self, size: ConsoleDimensions) -> Group:
        """Read the folder and return what to show, as rows of a line each, for a terminal of `size`
        (columns and lines): of many processes only so many are shown. Raises `OSError` if a file
        cannot be read.
        """
        metrics, evaluations, groups = (tail.read() for tail in self._tails)
        found = ({name: one[name] for name in one if _is_small(one[name])} for one in metrics)
        steps = {one["step"]: one for one in found if "step" in one}
        run, done = Run([steps[step] for step in sorted(steps)], [], []), max(steps, default=0)
        recipe = self._read_recipe()
        owner, total = read_owner(self._run), recipe.get("steps")
        state = owner_state(self._run, owner) if owner else "ended"
        total = total if isinstance(total, int) and 0 < total < 2**63 else None
        is_over = state in ("ended", "gone")
        finished = is_over and total is not None and done >= total
        self.has_ended = finished or (owner is not None and state == "ended")
        name, state = self._run.resolve().name, "finished" if finished else state
        head = Text("  ").join([_cell(name, "bold"), _cell(state, _colour(state))])
        rows: list[RenderableType] = [head]
        rows += _progress(run, done, total, is_over=is_over)
        rows += _metrics(run, recipe) if steps else []
        rows += _evaluation(evaluations)
        last = [answer for one in groups[-1:] for answer in _answers(one, size.width)]
        lives = of_run(self._lives.read())
        room = 0 if finished else max(4, size.height - len(rows) - len(ROWS) - 5)
        return Group(*rows, *_processes(lives, room, self._run), *last)

    def _read_recipe(self) -> dict[str, Any]:
        """The recipe as data, parsed only where it is another file; empty if there is none yet."""
        path, stamp = self._run / RECIPE, None
        with suppress(OSError):
            found = path.stat()
            stamp = found.st_ino, found.st_mtime_ns, found.st_size
        if stamp is None or stamp != self._recipe[0]:
            self._recipe = stamp, {}
            with suppress(ValueError):  # not written yet
                self._recipe = stamp, read_tree(path)
        return self._recipe[1]


def _middle_out(text: object, most: int) -> str:
    """The beginning and the end of a text in about `most` visible characters."""
    text, half = printable(text, ""), max(8, most // 2 - 2)
    return text if len(text) <= most else f"{text[:half]} … {text[-half:]}"


def _cell(text: object, style: str = "") -> Text:
    """A cell of a table with `text` on one line, cut with an ellipsis where the column is too narrow;
    `style` is a style of rich.
    """
    return Text(printable(text, ""), style, no_wrap=True, overflow="ellipsis")


def _grid(rows: Sequence[Sequence[RenderableType]], wide: int = -1) -> Table:
    """Rows of cells in columns; the column number `wide` takes the room that is left."""
    ratios = [1 if number == wide else None for number in range(len(rows[0]))]
    columns = [Column(no_wrap=True, overflow="ellipsis", ratio=ratio) for ratio in ratios]
    table = Table.grid(*columns, padding=(0, 2, 0, 0), expand=wide >= 0)
    for row in rows:
        table.add_row(*row)
    return table


def _colour(state: str) -> str:
    """The colour, as rich's name of a style, for the state of a run or process, such as "alive"."""
    words = {"alive": "green", "finished": "green", "ended": "yellow", "gone": "red"}
    return "red" if state.startswith("stopped") else words.get(state, "dim")


def _is_small(value: Any) -> bool:
    """Whether the value of a metric is None (as NaN is written) or a number of size below 2^63, which
    numpy can hold.
    """
    return value is None or (isinstance(value, int | float) and abs(value) < 2**63)


def _mean(run: Run, name: str) -> float:
    """Mean of the metric `name` over those of the last 20 steps that have a value; 0 if none has."""
    found = [one[name] for one in run.metrics[-RECENT:] if one.get(name) is not None]
    return fmean(found or [0.0])


def _progress(run: Run, done: int, total: int | None, *, is_over: bool) -> Iterator[RenderableType]:
    """The rows with steps, a bar, the time left (without evaluations) unless the run is over, and
    seconds a step where they are known.
    """
    step_s = _mean(run, "time/step_s")
    cells: list[RenderableType] = [_cell(f"step {done}" + (f" of {total}" if total else ""))]
    if total:
        cells += [Bar(total, done, 24), _cell(f"{done / total:.0%}")]
        left_s = 0.0 if is_over else step_s * (total - done)
        cells += [_cell(f"{seconds(left_s)} left")] if left_s > 0 else []
    yield _grid([cells])
    parts = {name: _mean(run, f"time/{name}_s") for name in ("rollout", "train")}
    longer = max(parts, key=lambda name: parts[name])
    said = f"; longer part: {longer} {seconds(parts[longer])}" if min(parts.values()) else ""
    if step_s or not done:
        waits = f"no line in {METRICS} yet: waiting"
        yield _cell(f"{seconds(step_s)} a step{said}" if done else waits)


def _metrics(run: Run, recipe: dict[str, Any]) -> Iterator[RenderableType]:
    """The rows of metrics, and one of those that are above what is usual."""
    last, rows = run.metrics[-1], []
    worries = _worries(last, recipe)
    for name, (label, spec) in ROWS.items():
        steps, values = run.series(name)
        if len(values) and not (name == "loss" and "reward/mean" in last):
            before = values[steps == steps[-1] - RECENT]
            change = f"{values[-1] - before[0]:+{spec}}" if len(before) else ""
            texts = (label, f"{values[-1]:{spec}}", change, _sparkline(values[-RECENT:]))
            mark = f"! usual: {worries.pop(name):g}" if name in worries else ""
            rows.append([*map(_cell, texts), _cell(mark, "bold red")])
    heads = ("", "last", f"in {RECENT} steps", f"last {RECENT} steps", "")
    yield _grid([[_cell(head, "dim") for head in heads], *rows])
    if worries:
        said = (f"{name} {last[name]:.3g} (usual: {most:g})" for name, most in worries.items())
        yield _cell(f"! {', '.join(said)}", "bold red")


def _worries(last: dict[str, Any], recipe: dict[str, Any]) -> dict[str, float]:
    """{metric of the last step that is above what docs/metrics.md calls usual: that bound}."""
    bounds = usual_bounds(recipe)
    bounds["groups/rejected"] *= last.get("groups/drawn") or 0
    return {name: most for name, most in bounds.items() if (last.get(name) or 0) > most}


def _sparkline(values: np.ndarray) -> str:
    """Numbers as blocks of eight heights; a blank for one that is not finite."""
    known = values[np.isfinite(values)]
    low, span = (known.min(), np.ptp(known)) if len(known) else (0.0, 0.0)
    heights = np.rint(1 + 7 * (values - low) / (span or 1.0))
    return "".join(BLOCKS[int(one)] for one in np.nan_to_num(heights, posinf=0.0, neginf=0.0))


def _evaluation(records: Sequence[dict[str, Any]]) -> Iterator[RenderableType]:
    """The row of the last evaluation, if there is one."""
    for step in [record["step"] for record in records[-1:]]:
        found = {name: one[name] for one in records if one["step"] == step for name in one}
        numbers = [
            f"{name.removeprefix('eval/')} {found[name]:.4g}"
            for name in sorted(found)  # greedy ones first
            if name.startswith("eval") and isinstance(found[name], int | float)
        ]
        yield _cell(f"evaluation after {step} steps: {', '.join(numbers)}")


def _processes(lives: Sequence[Life], room: int, run: Path) -> Iterator[RenderableType]:
    """The rows of processes, at most `room` and two more; those in trouble first."""
    states = {one.process: one.condition for one in lives}
    counts = ", ".join(f"{count} {state}" for state, count in Counter(states.values()).items())
    yield _cell(f"processes: {counts or 'none has recorded what it does'}", "dim")
    left = [one for one in lives if states[one.process] != "ended"]
    left.sort(key=lambda one: (_colour(states[one.process]) != "red", not one.open))
    rows = []
    for one in left[:room]:
        state, what, whom, age = states[one.process], "idle", "", ""
        for span in one.open[-1:]:
            until = one.last if one.is_alive is False else time.time()
            age = seconds(until - span["ts"] / 1e6)
            what = ", in ".join(part["name"] for part in [span, *one.around(span)])
            whom = shortened(", ".join(waits_on(span)), 18)
            whom = whom and f"{'waits on' if span['cat'] == 'wait' else 'with'} {whom}"
        cells = [_cell(one.process), _cell(state, _colour(state)), _cell(age), _cell(what)]
        rows.append([*cells, _cell(whom, "yellow")])
    if rows:
        yield _grid(rows, wide=3)
    if len(left) > room > 0:
        yield _cell(f"and {len(left) - room} more: megarl status {run}", "dim")


def _answers(group: dict[str, Any], width: int) -> Iterator[RenderableType]:
    """The rows of the newest prompt and of the last two responses to it."""
    asked = printable(group.get("prompt", ""), "")[20 - width :]  # a template begins with much else
    yield _cell(f"step {group['step']}: {asked}", "dim")
    rows = []
    with suppress(LookupError, TypeError, ValueError):  # transcripts of another program
        for one in group["rollouts"][-2:]:
            mark = ("right", "green") if one["correct"] else ("wrong", "red")
            if one.get("left_out"):
                mark = ("not judged", "dim")
            texts = f"{one['reward']:+.3g}", _middle_out(one["response"], width - 16)
            rows.append([_cell(*mark), *map(_cell, texts)])
    if rows:
        yield _grid(rows, wide=2)
