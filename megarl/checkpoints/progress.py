"""`run.json` of a checkpoint: where a run stands, and whether another run can go on from there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash

from megarl.checkpoints.adapter_files import written_for
from megarl.checkpoints.manifest import damage, has_other_digests
from megarl.console import say
from megarl.parallel.layout import Layout
from megarl.trainer.config import DtypeName, TrainingConfig
from megarl.types import Cursor

FORMAT = 2
"""Version of the checkpoint format; a checkpoint of a newer version is refused."""

FORMAT_IN_ORDER = 1
"""Version that is written where `Progress.used` is empty, so that versions of megarl without such a
field can read the checkpoint."""


class NewerError(ValueError):
    """A checkpoint of a newer format than this version reads."""


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
    roles: dict[str, str] = field(default_factory=dict)
    """{name: layout, as `written_under` says it} of the other roles that are trained."""
    algorithm: dict[str, float] = field(default_factory=dict)
    """{name: number} that the algorithm has adapted in the run, such as the KL coefficient."""
    used: list[int] = field(default_factory=list)
    """Positions above `next_ordinal` whose prompts are used as well; not empty only under a
    `rollout.dispatch` that does not use groups in order."""
    ledger: dict[str, int | str] = field(default_factory=dict)
    """How far the ledger went, as `megarl.ledger.journal.position` returns it; empty in a run
    without a ledger, and in checkpoints of earlier versions."""
    reference: str = ""
    """Digest of the adapter with which the reference computes, which is the one that the run
    started from; empty for a reference without adapter, and in checkpoints of earlier versions."""

    @property
    def cursor(self) -> Cursor:
        """The groups that the steps done have used."""
        return Cursor(self.next_ordinal, tuple(self.used))


def shapes_fingerprint(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Digest of the names and whole shapes of a model's weights; their values are not included."""
    text = "\n".join(sorted(f"{name} {shape}" for name, shape in shapes.items()))
    return xxhash.xxh3_64_hexdigest(text.encode())


def written_under(layout: Layout, training: TrainingConfig) -> str:
    """Text with layout, tensor backend, ZeRO stage, precision, optimizer and adapters. A run can
    resume a checkpoint with the same text, or one that `convertible` allows.
    """
    backend = " by autotp" if layout.tensor > 1 and training.tensor_backend == "autotp" else ""
    kind = training.optimizer.kind
    optimizer = "" if kind == "torch" else f", optimizer {kind}"
    lora = training.lora
    targets = " ".join(lora.targets) or "all layers"
    adapters = f", LoRA of rank {lora.rank}, alpha {lora.alpha:g}, {targets}" if lora.is_on else ""
    return f"{layout}{backend}, ZeRO {training.zero_stage}, {training.dtype}{optimizer}{adapters}"


def write_progress(folder: Path, progress: Progress) -> Path:
    """Write `run.json`; returns its path."""
    path = folder / "run.json"
    content = asdict(progress)
    for name in ("used", "ledger", "reference"):
        if not content[name]:
            del content[name]
    written = FORMAT if progress.used else FORMAT_IN_ORDER
    path.write_text(json.dumps({"format": written, **content}, indent=1))
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
        kind = NewerError if isinstance(written, int) else ValueError
        raise kind(
            f"{path} is of format {written}, and this version of megarl reads formats up to"
            f" {FORMAT}; use the version that wrote it, or a newer one"
        )
    known = {one.name: one for one in fields(Progress)}
    if unknown := sorted(set(found) - set(known)):
        say(f"megarl: {path}: passing over {', '.join(unknown)}")
    needed = {n for n, one in known.items() if MISSING is one.default is one.default_factory}
    if missing := sorted(needed - set(found)):
        raise ValueError(f"{path} lacks {', '.join(missing)}; name a checkpoint that is whole")
    return Progress(**{name: found[name] for name in known if name in found})


def newest_first(folder: Path) -> list[Path]:
    """Paths of the checkpoints in `folder`, newest first."""
    return sorted(folder.glob("step_*"), key=step_of, reverse=True) if folder.is_dir() else []


def step_of(checkpoint: Path) -> tuple[int, str]:
    """(step, name) of a checkpoint's path, by which paths are in the order of their steps; -1 for a
    name without a number. Names alone are not in that order: step 1,000,000 has a digit more than
    those before.
    """
    number = checkpoint.name.removeprefix("step_")
    return (int(number) if number.isdecimal() else -1), checkpoint.name


@dataclass(frozen=True)
class Written:
    """What `written_under` says, as far as a checkpoint can be converted: to another layout and
    ZeRO stage, in the same precision.
    """

    layout: Layout
    zero_stage: int
    precision: DtypeName


WRITTEN = re.compile(
    r"data (\d+) x sequence (\d+) x tensor (\d+), ZeRO ([0-3]), (float32|bfloat16|float16)"
)


def parse_written(text: str) -> Written | None:
    """What a text of `written_under` says; None for another tensor backend or optimizer than
    megarl's and torch's, whose checkpoints cannot be converted.
    """
    found = WRITTEN.fullmatch(text)
    if found is None:
        return None
    data, sequence, tensor, stage = map(int, found.groups()[:4])
    precision: Any = found.group(5)
    return Written(Layout(data, sequence, tensor), stage, precision)


def convertible(layout: str, wanted: str) -> bool:
    """Whether a checkpoint written under `layout` can be converted for a run under `wanted`."""
    old, new = parse_written(layout), parse_written(wanted)
    return old is not None and new is not None and old.precision == new.precision


def choose(
    folder: Path,
    *,
    layout: str,
    model: str,
    seed: int,
    data: str,
    roles: Mapping[str, str] | None = None,
    base: str = "",
    reference: str | None = None,
) -> Path | None:
    """Path of the newest undamaged checkpoint in `folder` that this run can resume, perhaps after
    its conversion to this run's layout; None if the folder has no checkpoint.

    `base`: with LoRA, the digest of the base model's weights. `reference`: the digest of the
    adapter with which the reference computes, "" for the base model alone; None where the reference
    is another model, or there is none.

    Other checkpoints are skipped with a message on standard error. Raises `ValueError` if all were
    skipped, and for a checkpoint of a newer format than this version reads: to go on from an older
    one would lose the steps between.
    """
    passed = []
    for path in newest_first(folder):
        reason = damage(path)
        if reason and has_other_digests(path):
            _refuse_newer(path)
        reason = reason or _foreign(
            path,
            layout=layout,
            model=model,
            seed=seed,
            data=data,
            roles=roles or {},
            base=base,
            reference=reference,
        )
        if not reason:
            return path
        passed.append(f"{path.name}: {reason}")
        say(f"megarl: passing over checkpoint {path}: {reason}")
    if passed:
        raise ValueError(
            f"no checkpoint in {folder} can be resumed ({'; '.join(passed)}); set resume to false"
            " and another folder"
        )
    return None


def _refuse_newer(path: Path) -> None:
    """Raise `NewerError` if a checkpoint says that it is of a newer format. Nothing else is looked
    at: its files cannot be compared with their digests.
    """
    try:
        read_progress(path)
    except NewerError:
        raise
    except (OSError, ValueError):
        return


def _foreign(
    path: Path,
    *,
    layout: str,
    model: str,
    seed: int,
    data: str,
    roles: Mapping[str, str],
    base: str,
    reference: str | None,
) -> str:
    """Why this run cannot resume an undamaged checkpoint (another model, layout, seed, data or
    critic), or an empty string. Raises `NewerError` for a newer format.
    """
    try:
        progress = read_progress(path)
    except NewerError:
        raise
    except ValueError as error:
        return str(error)
    if progress.model != model:
        return "it is of another model (names or shapes of the weights differ)"
    written = written_for(path / "adapter") if base else ""
    if written and written != base:
        return "its adapters were trained on another base model than model.path"
    if reference is not None and progress.reference != reference:
        if not progress.reference:
            return "its reference has no adapter; set reference.lora to base"
        return (
            "its reference is the adapter that the run started from, and training.lora.adapter is"
            " another one, its file has changed, or reference.lora is not start"
        )
    if progress.layout != layout and not convertible(progress.layout, layout):
        return (
            f"it was written under {progress.layout}, this run is {layout}, and only layout and"
            " ZeRO stage can be converted"
        )
    if progress.seed != seed:
        return f"it is of a run with seed {progress.seed}, this one has {seed}"
    if progress.data != data:
        return "it is of a run on other data: its prompt cursor would point elsewhere"
    for name, wanted in roles.items():
        if name not in progress.roles:
            return f"it has no {name}, which this run trains"
        if progress.roles[name] != wanted:
            return (
                f"its {name} was written under {progress.roles[name]}, that of this run is"
                f" {wanted}, and only the policy's layout and ZeRO stage can be converted"
            )
    return ""
