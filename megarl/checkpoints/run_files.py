"""Checks that the files of a run folder are those with which its run can go on.

Beside the checkpoint, whose digests tell damage, a resume reads `recipe.yaml`, to report changed
settings; `metrics.jsonl`, `evaluations.jsonl` and the newest part of `transcripts.jsonl`, to drop
what came after the checkpoint; `ledger.jsonl`, to go on with it.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from megarl.checkpoints.progress import Progress, read_progress
from megarl.checkpoints.run_folder import RECIPE
from megarl.ledger.journal import FILE, Reader, difference
from megarl.observe.observer import EVALUATIONS, METRICS, TRANSCRIPTS
from megarl.observe.rotated import read_again
from megarl.observe.sinks import read_records
from megarl.settings.config import AnyConfig, with_steps
from megarl.settings.recipe_file import read_tree
from megarl.settings.schema import require
from megarl.system.console import say


def check_run_files(folder: Path, checkpoint: Path | None) -> None:
    """Raise `ValueError`, with file, line and repair, if metrics, evaluations, transcripts or
    ledger are damaged, so that no run can go on from `checkpoint` (None: from the beginning). A
    half-written last line is allowed. Missing files and an unreadable recipe.yaml give a warning.
    """
    progress = read_progress(checkpoint) if checkpoint is not None else None
    step = progress.step if progress is not None else 0
    files = (folder / name for name in (METRICS, EVALUATIONS))
    for path in (*files, read_again(folder / TRANSCRIPTS, step)):
        try:
            for _ in read_records(path, numbers=path.name in (METRICS, EVALUATIONS)):
                pass
        except OSError as error:
            raise _unreadable(path, error) from None
    _check_ledger(folder / FILE, checkpoint, progress)
    recipe = folder / RECIPE
    if progress is not None:
        _tell_lost(folder, progress)
        if recipe.exists():
            try:
                read_tree(recipe)
            except ValueError as error:
                problem = str(error).partition(";")[0]
                warn = f"{problem}: changed settings cannot be told, and the file is written anew"
                say(f"megarl: warning: {warn}")


def outlook(config: AnyConfig, checkpoint: Path | None, num_rows: int) -> str:
    """At which step the folder's run stands, and what a start from `checkpoint` would do with it,
    in a line; "" for a new run. `num_rows`: of the data.
    """
    if checkpoint is None:
        return ""
    done, steps = read_progress(checkpoint).step, with_steps(config, num_rows).steps
    if done >= steps:
        return (
            f"{config.folder} holds a run that is finished, at step {done} of {steps}: a start"
            " trains nothing; raise steps to go on"
        )
    return (
        f"{config.folder} holds a run at step {done} of {steps}: a start continues it (resume is"
        f" {str(config.resume).lower()})"
    )


def _check_ledger(path: Path, checkpoint: Path | None, progress: Progress | None) -> None:
    """Raise `ValueError` if a run cannot append to the ledger: damaged, of a newer format, or not
    the checkpoint's. A torn tail is reported.
    """
    if not path.exists():
        return
    reader = None
    try:
        reader = Reader(path)
        torn = reader.verify()
    except OSError as error:
        raise _unreadable(path, error) from None
    except ValueError as error:
        at = reader.num_lines + 1 if reader is not None else 1
        held = progress.ledger.get("bytes") if progress is not None else 0
        if reader is None or held is None or reader.num_bytes < int(held) or at == 1:
            raise
        needs = f" ({checkpoint.name} was written before)" if checkpoint is not None else ""
        command = f"sed -i '{at},$d' {shlex.quote(str(path))}"
        raise ValueError(f"{error}, or remove it from line {at} on: {command}{needs}") from None
    if torn:
        say(f"megarl: {path}: cutting off a torn tail of {torn} bytes")
    if checkpoint is not None and progress is not None:
        why = difference(path, progress.ledger)
        require(
            not why,
            f"{path} is not the ledger of checkpoint {checkpoint.name}: {why}; put the run's ledger"
            " back, or move the file away to go on with a new one",
        )


def _tell_lost(folder: Path, progress: Progress) -> None:
    """Warn of lost files of the run. A checkpoint without any of them was copied alone."""
    written = [RECIPE, METRICS, EVALUATIONS, TRANSCRIPTS, *([FILE] if progress.ledger else [])]
    lost = [name for name in written if not (folder / name).exists()]
    if lost and len(lost) < len(written):
        names = " and ".join(filter(None, [", ".join(lost[:-1]), lost[-1]]))
        them, it = ("one", "it") if len(lost) == 1 else ("ones", "them")
        say(
            f"megarl: warning: {folder} has no {names}: new {them} will tell only of what comes"
            f" after step {progress.step}; put {it} back before the run goes on, if you have {it}"
        )


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"{path} cannot be read ({error.strerror or error}); move it away")
