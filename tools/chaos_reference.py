"""Compares a run that was killed and resumed with one that was not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from megarl.ledger.journal import FILE as LEDGER
from megarl.ledger.journal import Reader

TIMES = ("time/", "publish/wait_s", "publish/digest_s", "publish/install_s", "memory/")
"""Beginnings of the names of metrics that no two runs have in common."""


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two run folders: weights of the newest checkpoint, metrics but times,
    and the groups that were trained or rejected.
    """
    found = []
    if weights(one) != weights(other):
        found.append(f"weights differ: {weights(one)} and {weights(other)}")
    for name, read in READERS.items():
        mine, theirs = read(one), read(other)
        wrong = [at for at in sorted({*mine, *theirs}) if mine.get(at) != theirs.get(at)]
        if wrong:
            at = wrong[0]
            pair = mine.get(at), theirs.get(at)
            found.append(f"{name} differ at {len(wrong)} places, first {at}: {pair}")
    return found


def weights(folder: Path) -> str:
    """Digest of the weights of the newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step_*/model"))
    found = hashlib.blake2b()
    for file in sorted(newest.glob("*.safetensors")):
        found.update(file.read_bytes())
    return f"{newest.parent.name} {found.hexdigest()[:16]}"


def values(folder: Path, name: str) -> dict[str, Any]:
    """{step and metric: value} of a file of metrics; a step that is there twice is an error."""
    found: dict[str, Any] = {}
    for row in map(json.loads, (folder / name).read_text().splitlines()):
        step = f"{row['step']:06d}"
        twice = f"{step} rows"
        found[twice] = found.get(twice, 0) + 1
        for metric, value in row.items():
            if not metric.startswith(TIMES) and not metric.endswith("_per_s"):
                found[f"{step} {metric}"] = value
    return found


READERS = {
    "metrics": lambda folder: values(folder, "metrics.jsonl"),
    "evaluations": lambda folder: values(folder, "evaluations.jsonl"),  # with transcripts
    "ledger": lambda folder: ledger(folder),
}


def ledger(folder: Path) -> dict[str, Any]:
    """{group or step: what became of it}, without groups that a resumed run has made void."""
    groups: dict[int, dict[str, Any]] = {}
    decided: dict[int, dict[int, dict[str, Any]]] = {}
    for record in Reader(folder / LEDGER):
        record.pop("crc", None)
        event, ordinal = record["event"], record.get("ordinal", -1)
        if event == "restored":
            groups.clear()
            for step in [step for step in decided if step > record["step"]]:
                del decided[step]
        elif event in ("dispatched", "finished"):
            group = groups.setdefault(ordinal, {})
            # Whether a group is dispatched before or after a resume, its tokens are the same.
            group[event] = {name: value for name, value in record.items() if name != "rollouts"}
            if event == "finished":
                group["rollouts"] = record["rollouts"]
        elif event in ("accepted", "rejected"):
            whole = groups.get(ordinal, {}) | {"decided": record}
            decided.setdefault(record["step"], {})[ordinal] = whole
    return {
        f"step {step:06d} group {ordinal}": group
        for step, ones in decided.items()
        for ordinal, group in ones.items()
    }
