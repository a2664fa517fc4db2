"""The batches that a run has trained on, as files, which `megarl replay` trains on again.

    runs/x/batches/step_000012.rank_000.safetensors     the `StepBatch` of data rank 0 in step 12

A file has the arrays as safetensors and the rest as JSON in its header. Transcripts are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from megarl.errors import UserError, disk_advice
from megarl.system.files import in_thread, new_file
from megarl.system.spans import activity
from megarl.types import COLUMNS, Samples, StepBatch

FOLDER = "batches"
"""Name of the folder in the run folder."""

FORMAT = 2
"""Version of the files; a newer one is refused. Files without `branches` are of version 1."""

OF_STEP = ("rewards", "groups", "response_tokens", "mini_batch_of")
"""The arrays of a `StepBatch` itself."""

OF_SAMPLES = ("ids", "offsets", "prompts", *COLUMNS)
"""The arrays of each of its `Samples`."""

WRITTEN_WITHIN_S = 300.0
"""Seconds to wait for a batch to be on the disk, beside the step in which it was written."""

NAME = re.compile(r"step_(\d{6,})\.rank_(\d{3,})\.safetensors(.*)")
"""Step, data rank and, of a file that is not finished, an end."""


def batch_file(folder: Path, step: int, data_rank: int) -> Path:
    """Path of the file, in the run folder `folder`, with the batch that the data-parallel rank
    `data_rank` trains on in `step`. Steps count from 0 here and from 1 in the file's name. The file
    need not exist.
    """
    return folder / FOLDER / f"step_{step + 1:06d}.rank_{data_rank:03d}.safetensors"


def recorded(folder: Path) -> dict[int, set[int]]:
    """Which batches the run folder `folder` has: {step, from 0: numbers of the data-parallel ranks
    with a file for it}. The files are not opened.
    """
    found: dict[int, set[int]] = {}
    for path in (folder / FOLDER).glob("step_*"):
        if (match := NAME.fullmatch(path.name)) and not match[3]:
            found.setdefault(int(match[1]) - 1, set()).add(int(match[2]))
    return found


def write_batch(
    path: Path, batch: StepBatch, num_data_ranks: int, lost: Callable[[], str] = str
) -> None:
    """Write a batch to the safetensors file `path`, without its transcripts, and make the file's
    folder. The file is written under a temporary name, and renamed to `path` once it is on the
    disk. `num_data_ranks`: of the run, noted in the file. Raises `OSError` if the file cannot be
    written.

    `lost`: returns in a sentence why the run must not write to its folder, "" while it may. If it
    returns a sentence, no file is left, and the sentence is raised as a `UserError`.
    """
    arrays = {name: getattr(batch, name) for name in OF_STEP}
    for number, samples in enumerate(batch.samples):
        arrays |= {f"samples.{number}.{name}": getattr(samples, name) for name in OF_SAMPLES}
    has_trees = any(len(samples.branches) for samples in batch.samples)
    if has_trees:
        arrays |= {f"samples.{n}.branches": one.branches for n, one in enumerate(batch.samples)}
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    about = {
        "format": FORMAT if has_trees else 1,
        "step": batch.step,
        "data_ranks": num_data_ranks,
        "mini_batches": len(batch.samples),
        "micro_batches": batch.micro_batches,
        "metrics": batch.metrics,
        "warning": batch.warning,
    }
    about["digest"] = _digest(about, arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path, lambda: _refuse_lost(lost)) as file:
        file.write(save(arrays, {"megarl": json.dumps(about)}))


def _refuse_lost(lost: Callable[[], str]) -> None:
    """Raise `UserError` with the sentence of `lost`, if it is not empty."""
    if problem := lost():
        raise UserError(problem)


def batch_of(folder: Path, step: int, data_rank: int, num_data_ranks: int) -> StepBatch:
    """Read, from the run folder `folder`, the batch of `step` (from 0) that `data_rank` of
    `num_data_ranks` data-parallel ranks has trained on. Raises `ValueError` if its file is missing,
    damaged or of a newer version, or holds another batch.
    """
    path = batch_file(folder, step, data_rank)
    batch, data_ranks = read_batch(path)
    if (batch.step, data_ranks) != (step, num_data_ranks):
        raise ValueError(
            f"the batch {path} is of step {batch.step + 1} and of {data_ranks} data ranks, and not"
            f" of {num_data_ranks}"
        )
    return batch


def read_batch(path: Path) -> tuple[StepBatch, int]:
    """Read a safetensors file that `write_batch` has written: (the batch, with bit-identical token
    ids, log-probs and rewards, number of data-parallel ranks of its run). Transcripts are empty.
    Raises `ValueError` for a file that is missing, damaged or of a newer version.
    """
    try:
        with safe_open(str(path), framework="np") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})["megarl"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        written, digest = about["format"], about.pop("digest")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"the batch {path} cannot be read ({error})") from None
    if written not in (1, FORMAT):
        raise ValueError(
            f"{path} is of format {written}, and this version of megarl reads formats up"
            f" to {FORMAT}; use the version that wrote it, or a newer one"
        )
    if digest != _digest(about, arrays):
        raise ValueError(f"the batch {path} is damaged: its digest differs")
    batch = StepBatch(
        step=about["step"],
        samples=[_samples(arrays, number) for number in range(about["mini_batches"])],
        micro_batches=about["micro_batches"],
        metrics=about["metrics"],
        warning=about["warning"],
        **{name: arrays[name] for name in OF_STEP},
    )
    return batch, about["data_ranks"]


def _samples(arrays: Mapping[str, np.ndarray], number: int) -> Samples:
    """The samples of a mini-batch, from the arrays of a file."""
    names = (*OF_SAMPLES, "branches")
    found = {name: arrays.get(f"samples.{number}.{name}") for name in names}
    if found["prompts"] is None:  # a file of a version that did not tell
        found["prompts"] = np.full(len(arrays[f"samples.{number}.ids"]), -1)
    return Samples(**{name: array for name, array in found.items() if array is not None})


def _digest(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """xxh3-128 digest of `about` and of the arrays' names, dtypes, shapes and contents."""
    hasher = xxhash.xxh3_128(json.dumps(about, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        hasher.update(f"{name} {array.dtype} {array.shape}".encode())
        hasher.update(array.tobytes())
    return hasher.hexdigest()


@dataclass
class BatchWriter:
    """Writes the batches of one data-parallel rank to safetensors files in the run folder, in a
    thread, one at a time, while the rank trains: for each batch call `flush`, then `write`; at the
    end `flush`.
    """

    folder: Path
    """The run folder."""
    data_rank: int
    num_data_ranks: int
    lost: Callable[[], str] = str
    """Returns in a sentence why the run must not write to its folder, "" while it may."""
    _writing: Future[None] | None = None

    def start(self, first_step: int) -> None:
        """Remove this rank's files of steps from `first_step` (from 0) on, which an earlier start
        of the run has written and which count no longer. Raises `UserError` if another run owns the
        folder.
        """
        for path in (self.folder / FOLDER).glob("step_*"):
            if not (match := NAME.fullmatch(path.name)):
                continue
            step, rank, unfinished = int(match[1]) - 1, int(match[2]), match[3]
            # With fewer ranks than before, rank 0 removes the files of those that are gone.
            is_orphan = self.data_rank == 0 and rank >= self.num_data_ranks
            if (rank == self.data_rank or is_orphan) and (step >= first_step or unfinished):
                _refuse_lost(self.lost)
                path.unlink(missing_ok=True)

    def write(self, batch: StepBatch) -> None:
        """Begin to write a batch in a thread, and return at once. `flush` must have been called
        since the batch before; `batch` must not change until the next `flush`.
        """
        path = batch_file(self.folder, batch.step, self.data_rank)
        self._writing = in_thread(
            "batch writer", lambda: write_batch(path, batch, self.num_data_ranks, self.lost)
        )

    def flush(self) -> str:
        """Block until the last batch is on the disk, at most 300 seconds. Returns an
        error message if it is not there by then or could not be written, else "".
        """
        if self._writing is None:
            return ""
        with activity("batch that is being written", kind="wait", deadline_s=WRITTEN_WITHIN_S):
            done, _ = wait([self._writing], WRITTEN_WITHIN_S)
        if not done:
            return (
                f"a batch was not on the disk of {self.folder / FOLDER} within"
                f" {WRITTEN_WITHIN_S:g} s; see to the disk and resume the run, or set"
                " observe.batches to false"
            )
        error = self._writing.exception()
        if error is None or isinstance(error, UserError):
            return str(error or "")
        return (
            f"a batch could not be written to {self.folder / FOLDER} ({error});"
            f" {disk_advice(error)} and resume the run, or set observe.batches to false"
        )


def refuse_gaps(folder: Path, steps: int) -> int:
    """Raise `ValueError` unless the run folder `folder` has a batch file of every data-parallel
    rank for each of its first `steps` steps; returns the number of these ranks.
    """
    found = recorded(folder)
    if 0 not in found:
        raise ValueError(
            f"{folder} has no recorded batches from its first step on; run it with"
            " observe.batches set to true"
        )
    _, data_ranks = read_batch(batch_file(folder, 0, min(found[0])))
    for step in range(steps):
        ranks = found.get(step, set())
        if ranks != set(range(data_ranks)):
            path = batch_file(folder, step, min(ranks ^ set(range(data_ranks))))
            why = "is of a data rank more" if path.exists() else "is missing"
            raise ValueError(
                f"{path} {why}, so the run cannot be trained again beyond step {step}; set"
                f" replay.steps to {step}, or replay a run whose batches are all there, of"
                " unchanged data ranks"
            )
    return data_ranks
