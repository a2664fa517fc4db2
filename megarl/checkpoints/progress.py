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
"""Version of the checkpoint format; a checkpoint of a newer version is refused."""


@dataclass(frozen=True)
class Progress:
    """Content of `run.json`: the state of a run without its tensors."""

    step: int
    """Number of finished steps, which is also the version of the weights."""
    next_ordinal: int
    """Position of the first prompt (or demonstration) not yet trained on."""
    seed: int
    layout: str
    """Parallel layout, ZeRO stage, precision and optimizer of the run, as `written_under` returns
    them."""
    model: str
    """Fingerprint of the names and shapes of the weights."""
    data: str
    """Fingerprint of the data and its order, to which `next_ordinal` refers."""


def fingerprint(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Digest of the names and whole shapes of a model's weights; their values are not included."""
    text = "\n".join(sorted(f"{name} {shape}" for name, shape in shapes.items()))
    return xxhash.xxh3_64_hexdigest(text.encode())


def written_under(layout: Layout, training: TrainingConfig) -> str:
    """Text with layout, tensor backend, ZeRO stage, precision and optimizer. A run can only resume
    a checkpoint with the same text.
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
    """Read `run.json` of a checkpoint. Raises `ValueError` for a newer format version or a missing
    field. Unknown fields are ignored, with a warning on standard error.
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
    """Paths of the checkpoints in `folder`, newest first."""
    return sorted(folder.glob("step_*"), reverse=True) if folder.is_dir() else []


def choose(folder: Path, *, layout: str, model: str, seed: int, data: str) -> Path | None:
    """Path of the newest undamaged checkpoint in `folder` that this run can resume; None if the
    folder has no checkpoint.

    Other checkpoints are skipped with a message on standard error. Raises `ValueError` if all were
    skipped.
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
    """Why this run cannot resume an undamaged checkpoint (another model, layout, seed or data), or
    an empty string.
    """
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
