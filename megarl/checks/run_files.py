"""Checks that the files of a run folder are those with which its run can go on.

A resume reads, beside the checkpoint (whose digests tell damage): `recipe.yaml`, to tell changed
settings; `metrics.jsonl`, `evaluations.jsonl` and the newest part of `transcripts.jsonl`, to drop
what came after the checkpoint; `ledger.jsonl`, to go on with it.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.checkpoints.progress import Progress, read_progress
from megarl.checks.folder_checks import RECIPE
from megarl.ledger.journal import FILE, Reader, difference
from megarl.observe.observer import EVALUATIONS, METRICS, TRANSCRIPTS
from megarl.observe.rotated import read_again
from megarl.observe.sinks import read_records
from megarl.settings.config import AnyConfig, with_steps
from megarl.settings.recipe_file import read_tree
from megarl.settings.schema import require
from megarl.system.console import say

if TYPE_CHECKING:
    from megarl.trainer.context import RunInputs


def check_run_files(folder: Path, checkpoint: Path | None) -> None:
    """Raise `ValueError` if metrics, evaluations, transcripts or ledger (the record of what became
    of every prompt) in the run folder `folder` are damaged, so that a run cannot continue from the
    checkpoint folder `checkpoint` (None: from its beginning). The message names the file, the
    broken line, and how to repair it. A last line that a killed process has left half written is
    allowed. With a checkpoint, missing files and an unreadable recipe.yaml give a warning on
    standard error.
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
                said = str(error).partition(";")[0]
                warn = f"{said}: changed settings cannot be told, and the file is written anew"
                say(f"megarl: warning: {warn}")


def outlook(config: AnyConfig, inputs: RunInputs) -> str:
    """One line, without a newline, on the run in the folder `config.folder`: at which step it
    stands, and what starting the command would do with the run. "" if it would begin a new run.
    `inputs`: what the checks of `config` have returned on rank 0; only the checkpoint to resume
    from and the number of prompts are read.
    """
    if inputs.resume_from is None:
        return ""
    done, steps = read_progress(inputs.resume_from).step, with_steps(config, inputs.num_rows).steps
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
    """Raise `ValueError` if a run cannot append to the ledger `path`: a damaged one, one of a newer
    format, or not that of `checkpoint`. A torn tail is said. Without a ledger, a new one begins.
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
        cut = f"sed -i '{at},$d' {shlex.quote(str(path))}"
        raise ValueError(f"{error}, or remove it from line {at} on: {cut}{needs}") from None
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
    """Warn of files that the run has written and that are not there. A checkpoint without any of
    them was copied alone.
    """
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
