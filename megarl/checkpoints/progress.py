"""`run.json` of a checkpoint: where a run stands, and whether another run can go on from there."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import xxhash

from megarl.checkpoints.manifest import damage
from megarl.parallel.layout import Layout
from megarl.trainer.config import TrainingConfig

FORMAT = 1
"""Version of a checkpoint's files; a reader refuses newer ones."""


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
    """Fingerprint of the data and its order, in which `next_ordinal` is a position."""


def fingerprint(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A digest over names and whole shapes of a model's weights, whatever their values."""
    text = "\n".join(sorted(f"{name} {shape}" for name, shape in shapes.items()))
    return xxhash.xxh3_64_hexdigest(text.encode())


def written_under(layout: Layout, training: TrainingConfig) -> str:
    """The layout, its tensor backend, ZeRO stage, precision and optimizer, which must all be the
    same to resume.
    """
    backend = " by autotp" if layout.tensor > 1 and training.tensor_backend == "autotp" else ""
    kind = training.optimizer.kind
    optimizer = "" if kind == "torch" else f", optimizer {kind}"
    return f"{layout}{backend}, ZeRO {training.zero_stage}, {training.precision}{optimizer}"


def write_progress(folder: Path, progress: Progress) -> Path:
    """Write `run.json`; returns its path."""
    path = folder / "run.json"
    path.write_text(json.dumps({"format": FORMAT, **asdict(progress)}, indent=1))
    return path


def read_progress(folder: Path) -> Progress:
    """`run.json` of a checkpoint. Raises `ValueError` for a newer format, and where a field is
    missing; unknown fields are passed over with a line on standard error.
    """
    path = folder / "run.json"
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; name a checkpoint that is whole")
    written = found.pop("format", 0)
    if not isinstance(written, int) or written > FORMAT:
        raise ValueError(
            f"{path} is of format {written}, and this version of megarl reads formats up to"
            f" {FORMAT}; use the version that wrote it, or a newer one"
        )
    known = [field.name for field in fields(Progress)]
    if unknown := sorted(set(found) - set(known)):
        print(f"megarl: {path}: passing over {', '.join(unknown)}", file=sys.stderr, flush=True)
    if missing := sorted(set(known) - set(found)):
        raise ValueError(f"{path} lacks {', '.join(missing)}; name a checkpoint that is whole")
    return Progress(**{name: found[name] for name in known})


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in `folder`."""
    return sorted(folder.glob("step_*"), reverse=True) if folder.is_dir() else []


def choose(folder: Path, *, layout: str, model: str, seed: int, data: str) -> Path | None:
    """The newest whole checkpoint in `folder` that this run can resume, or None where there is none
    at all.

    A damaged or foreign one is passed over with a line on standard error; if none is left, raises
    `ValueError`.
    """
    passed = []
    for path in newest_first(folder):
        reason = damage(path) or _foreign(path, layout=layout, model=model, seed=seed, data=data)
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


def _foreign(path: Path, *, layout: str, model: str, seed: int, data: str) -> str:
    """Why a whole checkpoint cannot be resumed by this run, or an empty string."""
    try:
        progress = read_progress(path)
    except ValueError as error:
        return str(error)
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
