"""`megarl ledger RUN [--json]`: what became of every group of rollouts of a run, and whether that
adds up.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megarl.apps.runs.audit import Audit, audit
from megarl.checkpoints.listing import newest_first
from megarl.checkpoints.progress import read_progress
from megarl.errors import UserError
from megarl.ledger.events import Event, from_record
from megarl.ledger.journal import FILE, Reader, difference
from megarl.observe.observer import METRICS
from megarl.observe.sinks import read_records
from megarl.system.console import Arguments, result, say


def main(arguments: list[str]) -> int:
    """Print the sums of a run's ledger as YAML or, with `--json`, one JSON object; contradictions go
    to standard error. `arguments`: the words after `megarl ledger`. Returns the exit code, 1 if the
    ledger contradicts itself or lacks events. Raises `UserError` for a folder without a readable
    ledger.
    """
    usage = "it needs one run folder: megarl ledger RUN [--json]"
    parser = Arguments("megarl ledger", usage)
    parser.add_argument("run", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    path = options.run / FILE
    if not path.is_file():
        raise UserError(f"{path} does not exist; name the folder of a run of train or distill")
    try:
        reader = Reader(path)
        if reader.is_torn_at_start:
            raise ValueError(f"{path} holds no whole line; the run was killed as it started")
        sums = audit(ledger_events(reader))
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    if reader.torn_bytes:
        say(f"{path}: passing over a torn tail of {reader.torn_bytes} bytes")
    summary = ledger_summary(reader, sums)
    missing = summary["missing"] = list(missing_parts(options.run, sums))
    as_yaml = yaml.safe_dump(summary, sort_keys=False, default_flow_style=None).rstrip()
    result(json.dumps(summary) if options.json else as_yaml)
    for problem in [*missing, *sums.contradictions]:
        say(f"megarl: {path}: {problem}")
    if (more := sums.num_contradictions - len(sums.contradictions)) > 0:
        say(f"megarl: {path}: {more} more contradictions")
    return 1 if sums.num_contradictions or missing else 0


def missing_parts(run: Path, sums: Audit) -> Iterator[str]:
    """What of the ledger in the folder `run` is gone, in words, by the newest checkpoint and by
    metrics.jsonl: a ledger that ends with a whole line contradicts nothing. `sums`: its audit.
    """
    for checkpoint in newest_first(run / "checkpoints")[:1]:
        # Of a checkpoint that is damaged or newer, resuming tells.
        with contextlib.suppress(OSError, ValueError, UserError):
            progress = read_progress(checkpoint)
            if why := difference(run / FILE, progress.ledger):
                yield f"events before {checkpoint.name} are missing: {why}"
    with contextlib.suppress(OSError, ValueError):
        step = max((record["step"] for record in read_records(run / METRICS)), default=0)
        # The events of the last quarter of a second are lost with a process that is killed.
        if step > sums.done + 1:
            yield f"{METRICS} goes to step {step}, and the events after step {sums.done} are missing"


def ledger_events(reader: Reader) -> Iterator[Event]:
    """Yield the events of a run's ledger, which tell what happened to its groups of rollouts (such
    as dispatched, finished, trained), oldest first, as one object each. `reader`: the open ledger
    file. Raises `ValueError`, with file and line, at a line that is damaged or that another version
    of megarl has written.
    """
    for record in reader:
        try:
            yield from_record(record)
        except ValueError as error:
            # The line fits its checksum, so it is as it was written.
            raise ValueError(
                f"{reader.path}, line {reader.num_lines}: {error}; another version of megarl wrote"
                " it: use that one, or a newer one"
            ) from None


def ledger_summary(reader: Reader, sums: Audit) -> dict[str, Any]:
    """What `megarl ledger` prints, as a dict: how many groups (the rollouts of one prompt)
    were dispatched, trained on, rejected or lost, their ages in weight versions, and the
    contradictions of the audit `sums`. `reader`: the ledger file, read to its end.
    """
    ages = sums.ages
    return {
        "run": reader.run,
        "first_step": sums.first_step,
        "steps": sums.done,
        "cursor": sums.cursor.first,
        "used_beyond_cursor": list(sums.cursor.beyond),
        "dispatched": sums.dispatched,
        "trained": sums.trained,
        "rejected": dict(sums.rejected),
        "void": sums.void,
        "in_flight": sums.in_flight,
        "age_mean": sum(age * count for age, count in ages.items()) / max(1, ages.total()),
        "age_max": max(ages, default=0),
        "restores": sums.restores,
        "torn_bytes": sums.cut_bytes + reader.torn_bytes,
        "ended": sums.ended is not None,
        "failure": sums.ended.failure if sums.ended is not None else "",
        "contradictions": sums.contradictions,
        "num_contradictions": sums.num_contradictions,
    }
