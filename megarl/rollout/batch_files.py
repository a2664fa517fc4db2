"""The batches that a run has trained on, as files, which `megarl replay` trains on again.

    runs/x/batches/step_000012.rank_000.safetensors     the `StepBatch` of data rank 0 in step 12

Arrays are safetensors, the rest JSON in the header; transcripts are left out.
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

FORMAT = 3
"""A newer one is refused; 2 has no `experts`, and 1 no `branches`."""

OF_STEP = ("rewards", "groups", "response_tokens", "mini_batch_of")
"""Arrays of a `StepBatch`."""

OF_SAMPLES = ("ids", "offsets", "prompts", *COLUMNS)
"""Arrays of its `Samples`."""

MAYBE_OF_SAMPLES = ("branches", "experts")
"""Further ones, which a file may lack."""

WRITTEN_WITHIN_S = 300.0
"""Until a batch is on the disk, beside the step in which it was written."""

NAME = re.compile(r"step_(\d{6,})\.rank_(\d{3,})\.safetensors(.*)")
"""Step, data rank and, of an unfinished file, an end."""


def batch_file(folder: Path, step: int, data_rank: int) -> Path:
    """`step` counts from 0, in the file's name from 1."""
    return folder / FOLDER / f"step_{step + 1:06d}.rank_{data_rank:03d}.safetensors"


def recorded(folder: Path) -> dict[int, set[int]]:
    """{step: data ranks with a file for it}."""
    ranks: dict[int, set[int]] = {}
    for path in (folder / FOLDER).glob("step_*"):
        if (match := NAME.fullmatch(path.name)) and not match[3]:
            ranks.setdefault(int(match[1]) - 1, set()).add(int(match[2]))
    return ranks


def write_batch(
    path: Path, batch: StepBatch, num_data_ranks: int, lost: Callable[[], str] = str
) -> None:
    """Write a batch to `path`, which appears once it is on the disk. Raises `OSError`.

    `lost`: says why the run must not write to its folder, or ""; raised as a `UserError`.
    """
    arrays = {name: getattr(batch, name) for name in OF_STEP}
    for number, samples in enumerate(batch.samples):
        columns = {name: getattr(samples, name) for name in (*OF_SAMPLES, *MAYBE_OF_SAMPLES)}
        arrays |= {f"samples.{number}.{name}": column for name, column in columns.items()}
    arrays = {
        name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None
    }
    header = {
        "format": FORMAT,
        "step": batch.step,
        "data_ranks": num_data_ranks,
        "mini_batches": len(batch.samples),
        "micro_batches": batch.micro_batches,
        "metrics": batch.metrics,
        "warning": batch.warning,
    }
    header["digest"] = _digest(header, arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path, lambda: _refuse_lost(lost)) as file:
        file.write(save(arrays, {"megarl": json.dumps(header)}))


def _refuse_lost(lost: Callable[[], str]) -> None:
    if problem := lost():
        raise UserError(problem)


def batch_of(folder: Path, step: int, data_rank: int, num_data_ranks: int) -> StepBatch:
    """Read the batch of data rank `data_rank` in `step`, from 0. Raises `ValueError` if its
    file is missing, damaged, of a newer format, or of another step or number of data ranks.
    """
    path = batch_file(folder, step, data_rank)
    batch, file_ranks = read_batch(path)
    if (batch.step, file_ranks) != (step, num_data_ranks):
        raise ValueError(
            f"the batch {path} is of step {batch.step + 1} and of {file_ranks} data ranks, and not"
            f" of {num_data_ranks}"
        )
    return batch


def read_batch(path: Path) -> tuple[StepBatch, int]:
    """(batch, number of data ranks), bit-identical, without transcripts. Raises `ValueError`."""
    try:
        with safe_open(str(path), framework="np") as file:
            header: dict[str, Any] = json.loads((file.metadata() or {})["megarl"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        written, digest = header["format"], header.pop("digest")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"the batch {path} cannot be read ({error})") from None
    if not 1 <= written <= FORMAT:
        raise ValueError(
            f"{path} is of format {written}, and this version of megarl reads formats up"
            f" to {FORMAT}; use the version that wrote it, or a newer one"
        )
    if digest != _digest(header, arrays):
        raise ValueError(f"the batch {path} is damaged: its digest differs")
    batch = StepBatch(
        step=header["step"],
        samples=[_samples(arrays, number) for number in range(header["mini_batches"])],
        micro_batches=header["micro_batches"],
        metrics=header["metrics"],
        warning=header["warning"],
        **{name: arrays[name] for name in OF_STEP},
    )
    return batch, header["data_ranks"]


def _samples(arrays: Mapping[str, np.ndarray], number: int) -> Samples:
    names = (*OF_SAMPLES, *MAYBE_OF_SAMPLES)
    columns = {name: arrays.get(f"samples.{number}.{name}") for name in names}
    if columns["prompts"] is None:  # a file of a version that did not tell
        columns["prompts"] = np.full(len(arrays[f"samples.{number}.ids"]), -1)
    return Samples(**{name: array for name, array in columns.items() if array is not None})


def _digest(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    hasher = xxhash.xxh3_128(json.dumps(header, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        hasher.update(f"{name} {array.dtype} {array.shape}".encode())
        hasher.update(array.tobytes())
    return hasher.hexdigest()


@dataclass
class BatchWriter:
    """Writes one rank's batches in a thread: for each batch `flush`, then `write`; at the end
    `flush`.
    """

    folder: Path
    """The run folder."""
    data_rank: int
    num_data_ranks: int
    lost: Callable[[], str] = str
    """As in `write_batch`."""
    _writing: Future[None] | None = None

    def start(self, first_step: int) -> None:
        """Remove this rank's files from `first_step` on, of an earlier start. Raises `UserError` if
        another run owns the folder.
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
        """Begin to write; `batch` must not change until the next `flush`."""
        path = batch_file(self.folder, batch.step, self.data_rank)
        self._writing = in_thread(
            "batch writer", lambda: write_batch(path, batch, self.num_data_ranks, self.lost)
        )

    def flush(self) -> str:
        """Block until the last batch is on the disk, or return an error message."""
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
    """The number of data ranks. Raises `ValueError` unless each has a file for the first `steps`
    steps.
    """
    files = recorded(folder)
    if 0 not in files:
        raise ValueError(
            f"{folder} has no recorded batches from its first step on; run it with"
            " observe.batches set to true"
        )
    _, data_ranks = read_batch(batch_file(folder, 0, min(files[0])))
    for step in range(steps):
        ranks = files.get(step, set())
        if ranks != set(range(data_ranks)):
            path = batch_file(folder, step, min(ranks ^ set(range(data_ranks))))
            why = "is of a data rank more" if path.exists() else "is missing"
            raise ValueError(
                f"{path} {why}, so the run cannot be trained again beyond step {step}; set"
                f" replay.steps to {step}, or replay a run whose batches are all there, of"
                " unchanged data ranks"
            )
    return data_ranks
