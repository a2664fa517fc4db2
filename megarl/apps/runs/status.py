"""`megarl status RUN [--json] [--stacks]`: what each process of a run does, on whom it waits."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.activity import stacks
from megarl.activity.files import FOLDER, Life, SpanRecord, of_run, read
from megarl.activity.overdue import below, last_report, table
from megarl.activity.state import condition
from megarl.checkpoints.lease import RUNS, Record, decode, is_here, lives, newest
from megarl.checks.folder_checks import planned_steps
from megarl.console import result
from megarl.errors import UserError
from megarl.files import parse_json
from megarl.ledger.journal import FILE as LEDGER
from megarl.observe.observer import METRICS

FLAGS = {"--json", "--stacks"}
TAIL_BYTES = 2**18
"""Bytes at the end of a file in which the newest trained step is looked for."""
SAYS_STEP = tuple(f'"event":"{name}"'.encode() for name in ("trained", "restored"))
"""How lines of the ledger that tell the number of trained steps name their event. A run that was
resumed has trained those of its checkpoint; what it had trained beyond counts no longer."""


def main(arguments: list[str]) -> int:
    """Print a line for each process, or with `--json` one object; with `--stacks` also the stacks
    of all threads. Raises `UserError` for a folder without a record.
    """
    folders = [word for word in arguments if not word.startswith("-")]
    if len(folders) != 1 or set(arguments) - {*folders, *FLAGS}:
        raise UserError("megarl status needs one run folder: megarl status RUN [--json] [--stacks]")
    run = Path(folders[0])
    folder = run / FOLDER
    if not folder.is_dir():
        raise UserError(
            f"{folder} does not exist; name the folder of a run, of which observe.activity is true"
        )
    try:
        found = of_run(read(folder, only_last=True))
        if not found:
            raise UserError(f"{folder} holds no whole line; the run was killed as it started")
        wanted = "--stacks" in arguments
        traces = stacks.collect(folder / stacks.FOLDER, found) if wanted else {}
    except OSError as error:
        what = f"{folder} cannot be used: {error.strerror or error}"
        fix = "; the processes are asked by a file there: leave --stacks out"
        raise UserError(what + (fix if "--stacks" in arguments else "")) from error
    if "--json" in arguments:
        result(json.dumps(summary(run, found, traces)))
    else:
        result("\n".join([*heading(run, found), *lines(found, traces)]))
    return 0


def heading(run: Path, found: list[Life]) -> list[str]:
    """The lines about the run as a whole."""
    step, version = place(found)
    done, owner = trained(run), owner_of(run)
    version = max(version, done or 0)
    said = f"{run}: "
    said += f"step {step}, weights {version}" if step else "no step has begun"
    if done is not None:
        steps = planned_steps(run)
        said += f"; {done} of {steps} steps trained" if steps else f"; {done} steps trained"
        said += ": finished" if is_finished(done, steps) else ""
    if owner is None:
        return [said, "owner: none"]
    return [said, f"owner: {owner}, {owner_state(owner)}"]


def lines(found: list[Life], traces: dict[str, str]) -> list[str]:
    """The lines about the processes, and their stacks."""
    now, printed = time.time(), []
    for life in found:
        printed += table(life, now)
    if traces:
        known = frozenset(life.pid for life in found)
        for life in found:
            printed += ["", f"==== {life.process} (process {life.pid} on {life.host})"]
            printed += below(life, known) if life.is_alive else []
            printed += [traces.get(life.process, "").rstrip()]
    return printed


def summary(run: Path, found: list[Life], traces: dict[str, str]) -> dict[str, Any]:
    """The same as JSON data. Times are seconds since the epoch."""
    step, version = place(found)
    done, steps = trained(run), planned_steps(run)
    owner, report = owner_of(run), last_report(run / FOLDER)
    owned = asdict(owner) | {"is": owner_state(owner)} if owner is not None else None
    return {
        "folder": str(run),
        "run": found[0].run,
        "step": step,
        "version": max(version, done or 0),
        "trained": done,
        "steps": steps,
        "finished": is_finished(done, steps),
        "owner": owned,
        "last_report": report[1] if report is not None else "",
        "processes": [
            {
                "process": life.process,
                "host": life.host,
                "pid": life.pid,
                "condition": condition(life),
                "alive": life.is_alive,
                "last": life.last,
                "does": [as_data(life, span) for span in life.open],
            }
            | ({"stacks": traces[life.process]} if life.process in traces else {})
            for life in found
        ],
    }


def as_data(life: Life, span: SpanRecord) -> dict[str, Any]:
    """A span as JSON data."""
    return {
        "what": span.what,
        "in": [one.what for one in life.around(span)],
        "kind": span.kind,
        "waits_on": list(span.of),
        "since": span.begin,
        "deadline_s": span.deadline_s or None,
        "open": span.open,
        "done": span.done,
    }


def place(found: list[Life]) -> tuple[int, int]:
    """(step that the run is in, from 1, weights version at its beginning); zeros before a step."""
    steps = [life.steps[-1] for life in found if life.steps]
    return max(((step, version) for _, step, version in steps), default=(0, 0))


def is_finished(done: int | None, steps: int | None) -> bool:
    """Whether a run has trained all `steps` of its recipe; False where either is not known."""
    return done is not None and steps is not None and done >= steps


def trained(run: Path) -> int | None:
    """Steps trained, as the end of the ledger tells, or of the metrics where there is no ledger, as
    of fine-tuning; None where they tell none.
    """
    for name, says_step in ((LEDGER, SAYS_STEP), (METRICS, (b'{"step": ',))):
        try:
            with (run / name).open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
                tail = file.read().split(b"\n")
        except OSError:
            continue
        for line in reversed(tail):
            if line.endswith(b"}") and any(one in line for one in says_step):
                try:
                    return int(parse_json(line)["step"])
                except (ValueError, KeyError, TypeError):
                    continue
    return None


def owner_of(run: Path) -> Record | None:
    """What the newest lease of the run folder says; None without one."""
    last = newest(run)
    return decode(last[1].read_bytes()) if last is not None else None


def owner_state(owner: Record) -> str:
    """Whether the owner of a run folder lives."""
    if owner.state != RUNS:
        return "ended"
    if not is_here(owner):
        return f"on {owner.host}, not visible from here"
    return "alive" if lives(owner) else "gone"
