"""`megarl status RUN [--json] [--stacks]`: what each process of a run does, on whom it waits."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.activity.files import FOLDER, Life, of_run, read_lives, waits_on
from megarl.activity.report import described, last_report, stacks_of
from megarl.activity.spans import Event
from megarl.checkpoints.lease import RUNS, Record, decode_lease, is_here, lives, newest
from megarl.checks.folder_checks import planned_steps
from megarl.console import result
from megarl.errors import UserError
from megarl.ledger.journal import FILE as LEDGER
from megarl.observe.observer import METRICS

FLAGS = {"--json", "--stacks"}
TAIL_BYTES = 2**18
"""Bytes at the end of a file in which the newest trained step is looked for."""
SAYS_STEP = {
    LEDGER: rb'"event":"(?:trained|restored)",.*?"step":(\d+).*\}$',
    METRICS: rb'^\{"step": (\d+).*\}$',
}
"""{file: pattern of lines that tell the number of trained steps}. A run that was resumed has trained
those of its checkpoint; what it had trained beyond counts no longer."""


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
        found = of_run(read_lives(folder, only_last=True))
        if not found:
            raise UserError(f"{folder} holds no whole line; the run was killed as it started")
        stacks = stacks_of(folder, found) if "--stacks" in arguments else {}
    except OSError as error:
        what = f"{folder} cannot be used: {error.strerror or error}"
        fix = "; the processes are asked by a file there: leave --stacks out"
        raise UserError(what + (fix if "--stacks" in arguments else "")) from error
    last = newest(run)
    owner = decode_lease(last[1].read_bytes()) if last is not None else None
    told = status_summary(run, found, stacks, owner)
    if "--json" in arguments:
        result(json.dumps(told))
        return 0
    step, version, done, steps = (told[key] for key in ("step", "version", "trained", "steps"))
    said = f"step {step}, weights {version}" if step else "no step has begun"
    if done is not None:
        said += f"; {done} of {steps} steps trained" if steps else f"; {done} steps trained"
        said += ": finished" if told["finished"] else ""
    owned = "none" if owner is None else f"{owner}, {owner_state(owner)}"
    lines = [f"{run}: {said}", f"owner: {owned}", *described(found, stacks, time.time())]
    result("\n".join(lines))
    return 0


def status_summary(
    run: Path, found: list[Life], stacks: dict[str, str], owner: Record | None
) -> dict[str, Any]:
    """What is known of a run as JSON data. Times are seconds since the epoch."""
    begun = [life.steps[-1]["args"] for life in found if life.steps]
    last = max(begun, key=lambda one: (one["step"], one["version"]), default={})
    done, steps = trained(run), planned_steps(run)
    return {
        "folder": str(run),
        "run": found[0].run,
        "step": last.get("step", 0),
        "version": max(last.get("version", 0), done or 0),
        "trained": done,
        "steps": steps,
        "finished": done is not None and steps is not None and done >= steps,
        "owner": owner and asdict(owner) | {"is": owner_state(owner)},
        "last_report": last_report(run / FOLDER).line,
        "processes": [
            {
                **{name: getattr(life, name) for name in ("process", "host", "pid", "condition")},
                **{"alive": life.is_alive, "last": life.last},
                "does": [as_data(life, span) for span in life.open],
            }
            | ({"stacks": stacks[life.process]} if stacks else {})
            for life in found
        ],
    }


def as_data(life: Life, span: Event) -> dict[str, Any]:
    """What a process does as JSON data."""
    args = span["args"]
    counts = {name: args.get(name, 0) for name in ("open", "done")}
    return {
        **{"what": span["name"], "in": [one["name"] for one in life.around(span)]},
        **{"kind": span["cat"], "waits_on": waits_on(span), "since": span["ts"] / 1e6},
        **{"deadline_s": args.get("deadline_s"), **counts},
    }


def trained(run: Path) -> int | None:
    """Steps trained, as the end of the ledger tells, or of the metrics where there is no ledger, as
    of fine-tuning; None where they tell none.
    """
    for name, says_step in SAYS_STEP.items():
        with suppress(OSError), (run / name).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            if found := re.findall(says_step, file.read(), re.MULTILINE):
                return int(found[-1])
    return None


def owner_state(owner: Record) -> str:
    """Whether the owner of a run folder lives."""
    if owner.state != RUNS:
        return "ended"
    if not is_here(owner):
        return f"on {owner.host}, not visible from here"
    return "alive" if lives(owner) else "gone"
