"""`megarl status RUN [--json] [--stacks]`: what each process of a run does, and for which process
it waits.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.activity.files import FOLDER, Life, of_run, read_lives, waits_on
from megarl.activity.process import machine
from megarl.activity.report import described, last_report, stacks_of
from megarl.activity.spans import Event
from megarl.checkpoints.lease import ENDED, Record, is_held, read_owner
from megarl.checkpoints.listing import checkpoint_of, step_of
from megarl.checks.folder_checks import planned_steps
from megarl.console import Arguments, result
from megarl.errors import UserError
from megarl.observe.observer import METRICS
from megarl.observe.sinks import read_records


def main(arguments: list[str]) -> int:
    """Run `megarl status`: print what each process of a run does on standard output: a line for
    each process or, with `--json`, one JSON object; with `--stacks` also the stacks of all its
    threads. `arguments`: the words after `megarl status`. Returns the exit code 0. Raises
    `UserError` for a folder in which no run has recorded its activity (`observe.activity`).
    """
    usage = "it needs one run folder: megarl status RUN [--json] [--stacks]"
    parser = Arguments("megarl status", usage)
    parser.add_argument("run", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--stacks", action="store_true")
    wanted = parser.parse_args(arguments)
    run, folder = wanted.run, wanted.run / FOLDER
    if not folder.is_dir():
        raise UserError(
            f"{folder} does not exist; name the folder of a run, of which observe.activity is true"
        )
    try:
        found = of_run(read_lives(folder, only_last=True))
        if not found:
            raise UserError(f"{folder} holds no whole line; the run was killed as it started")
        stacks = stacks_of(folder, found) if wanted.stacks else {}
    except OSError as error:
        what = f"{folder} cannot be used: {error.strerror or error}"
        fix = "; the processes are asked by a file there: leave --stacks out"
        raise UserError(what + (fix if wanted.stacks else "")) from error
    owner = read_owner(run)
    told = status_summary(run, found, stacks, owner)
    if wanted.json:
        result(json.dumps(told))
        return 0
    step, version, done, steps = (told[key] for key in ("step", "version", "trained", "steps"))
    said = f"step {step}, weights {version}" if step else "no step has begun"
    if done is not None:
        said += f"; {done} of {steps} steps trained" if steps else f"; {done} steps trained"
        said += ": finished" if told["finished"] else ""
    if told["best"] is not None:
        said += f"; the best checkpoint is of step {told['best']}"
    owned = "none" if owner is None else f"{owner}, {owner_state(run, owner)}"
    lines = [f"{run}: {said}", f"owner: {owned}", *described(found, stacks, time.time())]
    result("\n".join(lines))
    return 0


def status_summary(
    run: Path, found: list[Life], stacks: dict[str, str], owner: Record | None
) -> dict[str, Any]:
    """What is known of the run folder `run`, as JSON data with keys such as `step`, `trained`,
    `finished`, `owner` and `processes`; times are seconds since the epoch. `found`: what each
    process has recorded, at least one; `stacks`: {process: text of its threads' stacks}, may be
    empty; `owner`: what the folder says of the process that owns it, or None.
    """
    begun = [life.steps[-1]["args"] for life in found if life.steps]
    last = max(begun, key=lambda one: (one["step"], one["version"]), default={})
    done, steps, best = trained(run), planned_steps(run), None
    with suppress(UserError, ValueError):  # the recipe asks for none, or none is evaluated yet
        best = step_of(checkpoint_of(run, best=True))[0]
    return {
        "folder": str(run),
        "run": found[0].run,
        "step": last.get("step", 0),
        "version": max(last.get("version", 0), done or 0),
        "trained": done,
        "steps": steps,
        "best": best,
        "finished": done is not None and steps is not None and done >= steps,
        "owner": owner and asdict(owner) | {"is": owner_state(run, owner)},
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
    """What the process `life` does in the activity `span`, as JSON data: `what` (name of the
    activity), `in` (names of the activities around it, innermost first), `kind`, `waits_on`,
    `since` (seconds since the epoch), `deadline_s`, and `open` and `done` (numbers of requests).
    """
    args = span["args"]
    counts = {name: args.get(name, 0) for name in ("open", "done")}
    return {
        **{"what": span["name"], "in": [one["name"] for one in life.around(span)]},
        **{"kind": span["cat"], "waits_on": waits_on(span), "since": span["ts"] / 1e6},
        **{"deadline_s": args.get("deadline_s"), **counts},
    }


def trained(run: Path) -> int | None:
    """Number of steps that the run folder `run` has trained, read from metrics.jsonl; None where
    this file has none or cannot be read. Steps that a resume has undone are not in the file.
    """
    with suppress(OSError, ValueError):
        return max((record["step"] for record in read_records(run / METRICS)), default=None)
    return None


def owner_state(run: Path, owner: Record) -> str:
    """Whether the process that owns the run folder `run` lives: "alive", "ended" (regularly: it
    gave the folder up), "gone" (it was killed) or "on HOST, not visible from here". `owner`: what
    the folder says of it.
    """
    if owner.state == ENDED:
        return "ended"
    if is_held(run):
        return "alive"
    return "gone" if owner.machine == machine() else f"on {owner.host}, not visible from here"
