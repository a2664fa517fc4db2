"""Checkpoints that are whole or absent: written aside, digested, synced, renamed; older ones
removed only after that.

runs/x/checkpoints/step_000010/
    run.json      step, prompt cursor, layout, what the model looks like
    state/        model, optimizer: DeepSpeed's files, one set a rank
    random/       random states, one file a rank
    model/        the weights as a Hugging Face model, with its tokenizer
    digests.json  BLAKE3 of every file above
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from megarl.parallel.collectives import barrier, gather_objects
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.parallel.tensor import whole_shapes
from megarl.trainer.config import TrainingConfig

if TYPE_CHECKING:
    from megarl.trainer.zero import TrainEngine

DIGESTS = "digests.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands: what a checkpoint needs besides tensors."""

    step: int
    """Steps done, and the version of the weights."""
    next_ordinal: int
    """First prompt (or demonstration) not yet trained."""
    seed: int
    layout: str
    """Layout and ZeRO stage that wrote it."""
    model: str
    """Fingerprint of names and shapes of the weights."""
    data: str
    """Fingerprint of the data and its order, of which `next_ordinal` is a place."""


def fingerprint(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What a model looks like: a digest over names and whole shapes of its weights, whatever their
    values.
    """
    return blake3(
        "\n".join(sorted(f"{name} {shape}" for name, shape in shapes.items())).encode()
    ).hexdigest(8)


def written_under(layout: Layout, training: TrainingConfig) -> str:
    """The layout, its tensor backend, ZeRO stage, precision and optimizer that must be the same to
    resume.
    """
    backend = " by autotp" if layout.tensor > 1 and training.tensor_backend == "autotp" else ""
    kind = training.optimizer.kind
    optimizer = "" if kind == "torch" else f", optimizer {kind}"
    return f"{layout}{backend}, ZeRO {training.zero_stage}, {training.precision}{optimizer}"


def choose(folder: Path, *, layout: str, model: str, seed: int, data: str) -> Path | None:
    """The newest whole checkpoint in `folder` that this run can resume, or None where there is none
    at all.

    A damaged or foreign one is passed over with a word on standard error; if none is left, raises
    `ValueError`.
    """
    passed = []
    for path in newest_first(folder):
        reason = damage(path) or _foreign(
            read_progress(path), layout=layout, model=model, seed=seed, data=data
        )
        if not reason:
            return path
        passed.append(f"{path.name}: {reason}")
        print(f"megarl: passing over checkpoint {path}: {reason}", file=sys.stderr, flush=True)
    if passed:
        raise ValueError(
            f"no checkpoint in {folder} can be resumed ({'; '.join(passed)}); set resume to false"
            " and another folder"
        )
    return None


def _foreign(progress: Progress, *, layout: str, model: str, seed: int, data: str) -> str:
    """Why a whole checkpoint is not this run's, or nothing."""
    if progress.model != model:
        return "it is of another model (names or shapes of the weights differ)"
    if progress.layout != layout:
        return (
            f"it was written under {progress.layout}, this run is {layout} (tools/reshard.py"
            " checkpoint converts it)"
        )
    if progress.seed != seed:
        return f"it is of a run with seed {progress.seed}, this one has {seed}"
    if progress.data != data:
        return "it is of a run on other data: its prompt cursor would point elsewhere"
    return ""


class Checkpoints:
    """The checkpoints of one run folder; all ranks call every method together."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        engine: TrainEngine,
        tokenizer: PreTrainedTokenizerBase,
        mesh: ProcessMesh,
        seed: int,
        data: str,
    ) -> None:
        self.folder, self.keep, self.engine, self.tokenizer = folder, keep, engine, tokenizer
        self.mesh, self.seed, self.data = mesh, seed, data

    def save(self, *, step: int, next_ordinal: int) -> Path:
        """Write the checkpoint of `step`; afterwards at most `keep` remain. Raises `OSError` with
        the fix on a full disk.
        """
        final, aside = self.folder / f"step_{step:06d}", self.folder / f".writing_{step:06d}"
        main, world = self.mesh.world.rank == 0, self.mesh.world
        self._everybody(self._attempt(lambda: self._make_room(aside)) if main else "", step)
        self._everybody(self._attempt(lambda: self._write_state(aside)), step)
        whole = {}
        for name, tensor in self.engine.weights():
            if main:
                whole[name] = tensor.detach().to("cpu", copy=True)
        self._everybody(
            (
                self._attempt(lambda: self._finish(aside, final, whole, step, next_ordinal))
                if main
                else ""
            ),
            step,
        )
        barrier(world)
        return final

    def _make_room(self, aside: Path) -> None:
        """An empty folder beside the final one; what a killed run left unfinished goes."""
        for left in self.folder.glob(".writing_*"):
            shutil.rmtree(left, ignore_errors=True)
        for part in ("state", "random", "model"):
            (aside / part).mkdir(parents=True)

    def _write_state(self, aside: Path) -> None:
        """This rank's part."""
        self.engine.save(str(aside / "state"))
        save_file(
            {"torch": torch.get_rng_state()},
            str(aside / "random" / f"rank_{self.mesh.rank:05d}.safetensors"),
        )

    def _finish(
        self,
        aside: Path,
        final: Path,
        weights: dict[str, torch.Tensor],
        step: int,
        next_ordinal: int,
    ) -> None:
        """Rank 0, once every rank has written: export, digest, sync, rename, and only then remove
        older ones.
        """
        self._export(aside / "model", weights)
        (aside / "run.json").write_text(
            json.dumps(asdict(self._progress(step, next_ordinal)), indent=1)
        )
        seal(aside)
        if final.exists():
            shutil.rmtree(final)
        os.rename(aside, final)
        _sync(self.folder)
        for old in [path for path in newest_first(self.folder) if path.name <= final.name][
            self.keep :
        ]:
            shutil.rmtree(old, ignore_errors=True)

    def _attempt(self, write: Callable[[], None]) -> str:
        """Why `write` failed, or nothing: a full disk must be told to every rank, not raised on
        one.
        """
        try:
            write()
        except (OSError, RuntimeError, SafetensorError) as error:
            return str(error) or repr(error)
        return ""

    def _everybody(self, problem: str, step: int) -> None:
        """Raise on every rank if any has a problem; the unfinished folder goes, earlier checkpoints
        stay.
        """
        found = [
            f"rank {rank}: {said}"
            for rank, said in enumerate(gather_objects(problem, self.mesh.world))
            if said
        ]
        if not found:
            return
        if self.mesh.world.rank == 0:
            shutil.rmtree(self.folder / f".writing_{step:06d}", ignore_errors=True)
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free / 2**30
        raise OSError(
            errno.EIO,
            f"the checkpoint of step {step} could not be written to {self.folder} ({free:.2f} GiB"
            f" free): {'; '.join(found)}; earlier checkpoints are whole: free some space and go on"
            " with --resume True",
        )

    def load(self, path: Path) -> Progress:
        """Restore the checkpoint at `path`, which `choose` has found whole."""
        self.engine.load(str(path / "state"))
        torch.set_rng_state(
            load_file(str(path / "random" / f"rank_{self.mesh.rank:05d}.safetensors"))["torch"]
        )
        return read_progress(path)

    def _progress(self, step: int, next_ordinal: int) -> Progress:
        layout = written_under(self.mesh.layout, self.engine.config)
        return Progress(
            step,
            next_ordinal,
            self.seed,
            layout,
            fingerprint(whole_shapes(self.engine.module.model, self.engine.module.shards)),
            self.data,
        )

    def _export(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        """The weights as a Hugging Face model folder that `from_pretrained` and vLLM load."""
        model = self.engine.module.model
        save_torch_state_dict(weights, folder)
        model.config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        self.tokenizer.save_pretrained(str(folder))


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in `folder`."""
    return sorted(folder.glob("step_*"), reverse=True) if folder.is_dir() else []


def read_progress(path: Path) -> Progress:
    """`run.json` of a checkpoint."""
    return Progress(**json.loads((path / "run.json").read_text()))


def seal(folder: Path) -> None:
    """Digest every file, write the digests, and bring all of it to the disk."""
    digests = {str(path.relative_to(folder)): _digest(path) for path in sorted(_files(folder))}
    (folder / DIGESTS).write_text(json.dumps(digests, indent=1))
    for path in _files(folder):
        _sync(path)
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        _sync(path)


def damage(folder: Path) -> str:
    """What is wrong with a sealed folder, or nothing: a missing, changed or unexpected file."""
    try:
        expected = json.loads((folder / DIGESTS).read_text())
    except (OSError, ValueError) as error:
        return f"its {DIGESTS} cannot be read ({error})"
    present = {str(path.relative_to(folder)) for path in _files(folder)} - {DIGESTS}
    if present != set(expected):
        return f"files are missing or foreign: {sorted(present ^ set(expected))[:3]}"
    for name, digest in expected.items():
        if _digest(folder / name) != digest:
            return f"{name} is damaged (its digest differs)"
    return ""


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    hasher = blake3()
    hasher.update_mmap(path)
    return hasher.hexdigest(16)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
