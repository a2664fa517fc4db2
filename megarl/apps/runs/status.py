"""`megarl status RUN [--json] [--stacks] [--watch]`: how far a run is, and what each of its
processes does: the spans that have begun and not ended, with whom they wait for and their deadline.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.checkpoints.lease import ENDED, Record, is_held, read_owner
from megarl.checkpoints.listing import checkpoint_of, step_of
from megarl.checkpoints.run_folder import planned_steps
from megarl.errors import UserError
from megarl.observe.observer import METRICS
from megarl.observe.sinks import read_records
from megarl.system.console import Arguments, in_terminal, printable, result
from megarl.system.process_state import machine
from megarl.system.spans import FOLDER, SIGNAL, STACKS
from megarl.system.trace_files import ProcessTrace, newest_traces, read_traces

SHOWN = ("reward/mean", "accuracy", "loss", "length/mean", "time/step_s")
"""Metrics of the last step that are shown."""
CLEAR = "\x1b[H\x1b[2J"
"""Clears the terminal."""


def main(arguments: list[str]) -> int:
    """Run `megarl status` with the words after it: print text, or JSON with `--json`; `--stacks`
    adds the Python stacks of this machine's processes; `--watch` prints again each second until the
    run has ended. Returns the exit code 0. Raises `UserError` for a folder without traces.
    """
    usage = "it needs one run folder: megarl status RUN [--json] [--stacks] [--watch]"
    parser = Arguments("megarl status", usage)
    parser.add_argument("run", type=Path)
    for flag in ("--json", "--stacks", "--watch"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args(arguments)
    while True:
        summary = status_summary(options.run, with_stacks=options.stacks)
        lines = [json.dumps(summary)] if options.json else list(_lines(summary))
        clears = options.watch and in_terminal() and not options.json
        result(CLEAR * clears + printable("\n".join(lines)), colours=True)
        if not options.watch or (summary["owner"] or {}).get("is") in (None, "ended", "gone"):
            return 0
        time.sleep(1.0)


def status_summary(run: Path, *, with_stacks: bool = False) -> dict[str, Any]:
    """What is known of the run folder `run`, as JSON data with keys such as `step`, `trained`,
    `finished`, `owner` and `processes`; times are seconds since the epoch. Raises `UserError`.
    """
    traces = newest_traces(read_traces(run / FOLDER))
    if not traces:
        raise UserError(
            f"{run / FOLDER} holds no trace; name the folder of a run, of which observe.activity"
            " is true"
        )
    stacks = stacks_of(run / FOLDER / STACKS, traces) if with_stacks else {}
    begun = [trace.steps[-1]["args"] for trace in traces if trace.steps]
    last = max(begun, key=lambda step: (step["step"], step["version"]), default={})
    metrics, steps, best = _last_metrics(run), planned_steps(run), None
    done, owner = metrics.get("step"), read_owner(run)
    with suppress(UserError, ValueError):  # the recipe asks for none, or none is evaluated yet
        best = step_of(checkpoint_of(run, best=True))[0]
    return {
        "folder": str(run),
        "run": traces[0].run,
        "step": last.get("step", 0),
        "version": max(last.get("version", 0), done or 0),
        "trained": done,
        "steps": steps,
        "best": best,
        "finished": done is not None and steps is not None and done >= steps,
        "metrics": {name: metrics[name] for name in SHOWN if metrics.get(name) is not None},
        "owner": owner and asdict(owner) | {"text": str(owner), "is": owner_state(run, owner)},
        "processes": [
            {
                **{name: getattr(trace, name) for name in ("name", "host", "pid", "condition")},
                **{"alive": trace.is_alive, "last": trace.last},
                "does": [
                    {"what": span["name"], "kind": span["cat"], "since": span["ts"] / 1e6}
                    | {key.replace(" ", "_"): value for key, value in span["args"].items()}
                    for span in trace.open
                ],
            }
            | ({"stacks": stacks[trace.name]} if stacks else {})
            for trace in traces
        ],
    }


def _lines(summary: dict[str, Any]) -> Iterator[str]:
    """The lines to print of what `status_summary` returns."""
    step, version, done, steps = (summary[key] for key in ("step", "version", "trained", "steps"))
    text = f"step {step}, weights {version}" if step else "no step has begun"
    if done is not None:
        text += f"; {done} of {steps} steps trained" if steps else f"; {done} steps trained"
        text += ": finished" if summary["finished"] else ""
    if summary["best"] is not None:
        text += f"; the best checkpoint is of step {summary['best']}"
    owner = summary["owner"]
    yield f"{summary['folder']}: {text}"
    yield f"owner: {owner['text']}, {owner['is']}" if owner else "owner: none"
    if metrics := summary["metrics"]:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        yield f"step {done}: {numbers}"
    for process in summary["processes"]:
        head = f"  {process['name']:12} {process['condition']:20} "
        until = process["last"] if process["alive"] is False else time.time()
        for span in process["does"]:
            text = f"{span['what']}, for {duration(until - span['since'])}"
            text += f" of {duration(span['deadline_s'])}" if span["deadline_s"] else ""
            text += f", waits on {', '.join(span['waits_on'])}" if span["waits_on"] else ""
            yield head + text
            head = " " * len(head)
        if not process["does"]:
            yield f"{head}idle, last line {duration(time.time() - process['last'])} ago"
    for process in summary["processes"]:
        if "stacks" in process:
            yield f"\n==== {process['name']} (process {process['pid']} on {process['host']})"
            yield process["stacks"].rstrip()


def stacks_of(folder: Path, traces: list[ProcessTrace]) -> dict[str, str]:
    """{name of a process: the Python stacks of its threads, or why there are none}. Sends `SIGNAL`
    to this machine's processes and waits until each has written to its file in `folder`, at most 5
    seconds.
    """
    alive = [trace for trace in traces if trace.condition == "alive"]
    files = {trace.name: folder / f"{trace.name}.txt" for trace in alive}
    files = {name: file for name, file in files.items() if file.exists()}
    before = {name: file.stat().st_size for name, file in files.items()}
    for trace in alive:
        with suppress(OSError):
            os.kill(trace.pid, SIGNAL)
    until, texts = time.monotonic() + 5.0, dict[str, str]()
    while time.monotonic() < until:
        time.sleep(0.3)  # in which a process that is writing goes on
        last, texts = texts, {n: file.read_text()[before[n] :] for n, file in files.items()}
        if texts == last and all(texts.values()):
            break
    return {
        trace.name: f"none: the process is {trace.condition}"
        if trace.name not in files
        else texts[trace.name] or "none: the process did not answer"
        for trace in traces
    }


def _last_metrics(run: Path) -> dict[str, Any]:
    """The newest line of the run's metrics.jsonl; {} where it has none or cannot be read. Steps
    that a resume has undone are not in the file.
    """
    with suppress(OSError, ValueError):
        return max(read_records(run / METRICS), key=lambda record: record["step"], default={})
    return {}


def duration(seconds: float) -> str:
    """Seconds in words, such as "12.3 s", "4 min 05 s" or "2 h 07 min"."""
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def owner_state(run: Path, owner: Record) -> str:
    """State of the process that owns the run folder `run`: "alive", "ended" (it released the
    folder), "gone" (killed) or "on HOST, not visible from here". `owner`: the folder's record of
    that process.
    """
    if owner.state == ENDED:
        return "ended"
    if is_held(run):
        return "alive"
    return "gone" if owner.machine == machine() else f"on {owner.host}, not visible from here"
