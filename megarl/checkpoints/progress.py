"""`run.json` of a checkpoint: where a run stands, and whether another run can go on from there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path

import xxhash

from megarl.checkpoints.adapter_files import written_for
from megarl.checkpoints.listing import newest_first
from megarl.checkpoints.manifest import OTHER_VERSION, damage
from megarl.errors import UserError
from megarl.parallel.layout import Layout
from megarl.settings.training import TrainingConfig
from megarl.system.console import say
from megarl.types import Cursor

FORMAT = 3
"""Of checkpoints. Up to 2, `state/` had DeepSpeed's own files."""


@dataclass(frozen=True)
class Progress:
    """Content of `run.json`: where a run stands."""

    step: int
    """Finished steps, which is also the version of the weights."""
    next_ordinal: int
    """Position of the first prompt (or demonstration) not yet trained on."""
    seed: int
    layout: str
    """`written_under`"""
    model: str
    """Fingerprint of the names and shapes of the weights."""
    data: str
    """Fingerprint of the data and its order, to which `next_ordinal` refers."""
    roles: dict[str, str] = field(default_factory=dict)
    """{name: `written_under`} of the other models that are trained, such as a critic."""
    algorithm: dict[str, float] = field(default_factory=dict)
    """{name: number} that the algorithm has adapted, such as the KL coefficient."""
    used: list[int] = field(default_factory=list)
    """Positions above `next_ordinal` that are used, where `rollout.dispatch` is not in order."""
    ledger: dict[str, int | str] = field(default_factory=dict)
    """`megarl.ledger.journal.position`; empty without a ledger, and from earlier versions."""
    reference: str = ""
    """Digest of the adapter with which the reference computes; empty without one, and from earlier
    versions.
    """

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.next_ordinal, tuple(self.used))


def shapes_fingerprint(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Digest of the names and whole shapes of a model's weights."""
    text = "\n".join(sorted(f"{name} {shape}" for name, shape in shapes.items()))
    return xxhash.xxh3_64_hexdigest(text.encode())


def written_under(layout: Layout, training: TrainingConfig) -> str:
    """How a model is trained, such as "data 2 x sequence 1 x tensor 1, ZeRO 1, bfloat16", with
    tensor backend, optimizer and LoRA.
    """
    backend = " by autotp" if layout.tensor > 1 and training.tensor_backend == "autotp" else ""
    name = training.optimizer.kind
    optimizer = "" if name == "torch" else f", optimizer {name}"
    lora = training.lora
    targets = " ".join(lora.targets) or "all layers"
    adapters = f", LoRA of rank {lora.rank}, alpha {lora.alpha:g}, {targets}" if lora.is_on else ""
    return f"{layout}{backend}, ZeRO {training.zero_stage}, {training.dtype}{optimizer}{adapters}"


def write_progress(folder: Path, progress: Progress) -> Path:
    path = folder / "run.json"
    content = asdict(progress)
    for name in ("used", "ledger", "reference"):
        if not content[name]:
            del content[name]
    path.write_text(json.dumps({"format": FORMAT, **content}, indent=1))
    return path


def read_progress(folder: Path) -> Progress:
    """Raises `ValueError` for another format (`UserError` for a newer one) or a missing field.
    Unknown fields are ignored, with a warning.
    """
    path = folder / "run.json"
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; name a checkpoint that is whole")
    written = content.pop("format", 0)
    if written != FORMAT:
        error = UserError if isinstance(written, int) and written > FORMAT else ValueError
        raise error(
            f"{path} is of format {written}, and this version of megarl reads format {FORMAT};"
            " resume with the version that wrote it, or a newer one"
        )
    known = {f.name: f for f in fields(Progress)}
    if unknown := sorted(set(content) - set(known)):
        say(f"megarl: {path}: passing over {', '.join(unknown)}")
    needed = {n for n, f in known.items() if MISSING is f.default is f.default_factory}
    if missing := sorted(needed - set(content)):
        raise ValueError(f"{path} lacks {', '.join(missing)}; name a checkpoint that is whole")
    return Progress(**{name: content[name] for name in known if name in content})


LAYOUT = re.compile(r"data \d+ x sequence \d+ x tensor \d+(, expert \d+)?( by autotp)?, ZeRO \d")
"""What `written_under` begins with."""


def can_resume(layout: str, wanted: str) -> bool:
    """Whether two `written_under` differ in layout and ZeRO stage only."""
    return LAYOUT.sub("", layout, count=1) == LAYOUT.sub("", wanted, count=1)


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
    """The newest undamaged checkpoint in `folder` that this run can resume; None if there is none
    at all. Others are skipped with a message. Raises `ValueError` if all were skipped, `UserError`
    if one has a newer format.

    Args:
        layout: `written_under` of this run.
        model: digest of the weights' names and shapes.
        data: digest of the prompts and their order.
        roles: {name: `written_under`} of further trained models.
        base: with LoRA, the digest of the base model's weights.
        reference: digest of the adapter of a reference that is the base model, "" without one; None
            for another reference, or none.
    """

    def unfit(path: Path) -> str:
        """Why this run cannot resume a checkpoint. Raises `UserError` for a newer format."""
        try:
            progress = read_progress(path)
        except (OSError, ValueError) as error:
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
                "its reference is the adapter that the run started from, and training.lora.adapter"
                " is another one, its file has changed, or reference.lora is not start"
            )
        if not can_resume(progress.layout, layout):
            return (
                f"it was written under {progress.layout}, this run is {layout}, and only layout and"
                " ZeRO stage may differ"
            )
        if progress.seed != seed:
            return f"it is of a run with seed {progress.seed}, this one has {seed}"
        if progress.data != data:
            return "it is of a run on other data: its prompt cursor would point elsewhere"
        for name, settings in (roles or {}).items():
            if name not in progress.roles:
                return f"it has no {name}, which this run trains"
            if not can_resume(progress.roles[name], settings):
                return (
                    f"its {name} was written under {progress.roles[name]}, that of this run is"
                    f" {settings}, and only layout and ZeRO stage may differ"
                )
        return ""

    passed = []
    for path in newest_first(folder):
        reason = damage(path)
        # A newer one may have digests that are not known here.
        why = unfit(path) if reason in ("", OTHER_VERSION) else ""
        if not (reason := reason or why):
            return path
        passed.append(f"{path.name}: {reason}")
        say(f"megarl: passing over checkpoint {path}: {reason}")
    if passed:
        raise ValueError(
            f"no checkpoint in {folder} can be resumed ({'; '.join(passed)}); set resume to false"
            " and another folder"
        )
    return None
