"""The batches that a run has trained on, as files: what `megarl replay` trains on again.

    runs/x/batches/step_000012.rank_000.safetensors     the `StepBatch` of data rank 0 in step 12

A file has the arrays as safetensors and the rest as JSON in its header. Transcripts are left out.
"""

from __future__ import annotations

import json
import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from megarl.activity.spans import activity
from megarl.errors import UserError, disk_advice
from megarl.types import COLUMNS, Samples, StepBatch

FOLDER = "batches"
"""Name of the folder in the run folder."""

FORMAT = 1
"""Version of the files; a newer one is refused."""

OF_STEP = ("rewards", "groups", "response_tokens", "mini_batch_of")
"""The arrays of a `StepBatch` itself."""

OF_SAMPLES = ("ids", "offsets", "prompts", *COLUMNS)
"""The arrays of each of its `Samples`."""

ASIDE = ".writing"
"""End of the name of a file that is being written."""

WRITTEN_WITHIN_S = 300.0
"""Seconds to wait for a batch to be on the disk, beside the step in which it was written."""

NAME = re.compile(r"step_(\d{6,})\.rank_(\d{3,})\.safetensors")


def batch_file(folder: Path, step: int, data_rank: int) -> Path:
    """Path of the file with what `data_rank` trains on in `step`, in the run folder `folder`. Steps
    count from 0 here and from 1 in the file's name.
    """
    return folder / FOLDER / f"step_{step + 1:06d}.rank_{data_rank:03d}.safetensors"


def recorded(folder: Path) -> dict[int, set[int]]:
    """{step, from 0: numbers of the data ranks that have a batch file} of the run folder `folder`.
    The files are not opened.
    """
    found: dict[int, set[int]] = {}
    for path in (folder / FOLDER).glob("step_*"):
        if match := NAME.fullmatch(path.name):
            found.setdefault(int(match[1]) - 1, set()).add(int(match[2]))
    return found


def write_batch(
    path: Path, batch: StepBatch, num_data_ranks: int, lost: Callable[[], str] = str
) -> None:
    """Write a batch aside, bring it to the disk and give it its name. Raises `OSError`.

    `lost`: says in a sentence why the run must not write to its folder, "" while it may; the file
    gets no name then, and the sentence is raised as a `UserError`.
    """
    arrays = {name: getattr(batch, name) for name in OF_STEP}
    for number, samples in enumerate(batch.samples):
        arrays |= {f"samples.{number}.{name}": getattr(samples, name) for name in OF_SAMPLES}
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    about = {
        "format": FORMAT,
        "step": batch.step,
        "data_ranks": num_data_ranks,
        "mini_batches": len(batch.samples),
        "micro_batches": batch.micro_batches,
        "metrics": batch.metrics,
        "warning": batch.warning,
    }
    about["digest"] = _digest(about, arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: a run that was suspended may write beside the one that took its folder.
    aside = path.with_suffix(f".{uuid.uuid4().hex[:8]}{ASIDE}")
    try:
        with aside.open("wb") as file:
            file.write(save(arrays, {"megarl": json.dumps(about)}))
            file.flush()
            os.fsync(file.fileno())
        if problem := lost():
            raise UserError(problem)
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)


def batch_of(folder: Path, step: int, data_rank: int, num_data_ranks: int) -> StepBatch:
    """The batch of `step` (from 0) that `data_rank` of `num_data_ranks` has trained on in the run
    folder `folder`. Raises `ValueError` if its file is missing, damaged, of a newer version, or
    holds another batch.
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
    """(batch, number of data ranks of its run) of a file of `write_batch`, bit by bit as written.
    Raises `ValueError` for a file that is missing, damaged or of a newer version.
    """
    try:
        with safe_open(str(path), framework="np") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})["megarl"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        written, digest = about["format"], about.pop("digest")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"the batch {path} cannot be read ({error})") from None
    if written != FORMAT:
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
    found = {name: arrays.get(f"samples.{number}.{name}") for name in OF_SAMPLES}
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
    """Writes the batches of one data rank in a thread, one at a time, while the rank trains."""

    folder: Path
    """The run folder."""
    data_rank: int
    num_data_ranks: int
    lost: Callable[[], str] = str
    """Says in a sentence why the run must not write to its folder, "" while it may."""
    _thread: threading.Thread | None = None
    _problem: list[Exception] = field(default_factory=list)

    def start(self, first_step: int) -> None:
        """Remove this rank's files of steps from `first_step` on, which an earlier start of the run
        has written and which count no longer. Raises `UserError` if another run owns the folder.
        """

        def remove(path: Path) -> None:
            if problem := self.lost():
                raise UserError(problem)
            path.unlink(missing_ok=True)

        for left in (self.folder / FOLDER).glob(f"*.rank_{self.data_rank:03d}.*{ASIDE}"):
            remove(left)  # of a run that was killed here
        for step, ranks in recorded(self.folder).items():
            for rank in ranks:
                # With fewer ranks than before, rank 0 removes the files of those that are gone.
                is_orphan = self.data_rank == 0 and rank >= self.num_data_ranks
                if step >= first_step and (rank == self.data_rank or is_orphan):
                    remove(batch_file(self.folder, step, rank))

    def write(self, batch: StepBatch) -> None:
        """Begin to write a batch, once `flush` has returned."""
        assert self._thread is None
        # A daemon: a disk that does not answer must not keep the process.
        self._thread = threading.Thread(
            target=self._write, args=(batch,), name="batch writer", daemon=True
        )
        self._thread.start()

    def flush(self) -> str:
        """Wait until every batch so far is on the disk, for at most `WRITTEN_WITHIN_S`. Returns an
        error message if one could not be written, else "".
        """
        if self._thread is not None:
            what = "batch that is being written"
            with activity(what, kind="wait", deadline_s=WRITTEN_WITHIN_S):
                self._thread.join(WRITTEN_WITHIN_S)
            if self._thread.is_alive():
                return (
                    f"a batch was not on the disk of {self.folder / FOLDER} within"
                    f" {WRITTEN_WITHIN_S:g} s; see to the disk and resume the run, or set"
                    " observe.batches to false"
                )
            self._thread = None
        if not self._problem:
            return ""
        if isinstance(self._problem[0], UserError):
            return str(self._problem[0])
        said = str(self._problem[0])
        return (
            f"a batch could not be written to {self.folder / FOLDER} ({said}); {disk_advice(said)}"
            " and resume the run, or set observe.batches to false"
        )

    def _write(self, batch: StepBatch) -> None:
        try:
            path = batch_file(self.folder, batch.step, self.data_rank)
            write_batch(path, batch, self.num_data_ranks, self.lost)
        except Exception as error:  # told where the run waits for the thread
            self._problem.append(error)


def refuse_gaps(folder: Path, steps: int) -> int:
    """Raise `ValueError` unless the run folder `folder` has the batches of all data ranks for its
    first `steps` steps; returns the number of data ranks.
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
