"""A JSON-lines file of bounded size: a full part is renamed so that its name tells its steps.

    transcripts.jsonl                     the newest records
    transcripts.000001-000240.jsonl       a full part: steps 1 to 240
    transcripts.000241-000480.jsonl

A resumed run reads one part at most. Beyond the limit, the oldest parts but the first are removed.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megarl.observe.sinks import MetricsFile, read_records
from megarl.system.files import parse_json

PART_BYTES = 64 * 2**20
"""From which a part is full; the rest of the step still goes into it."""

NAME = re.compile(r".*\.(\d{6,})-(\d{6,})\.jsonl")


class RotatedPart(NamedTuple):
    """A full part, with records of steps `first` to `last`."""

    first: int
    last: int
    path: Path


def parts_of(path: Path) -> list[RotatedPart]:
    """The full parts of `path`, found by their names, in the order of their steps."""
    parts = []
    for file in path.parent.glob(f"{path.stem}.*-*.jsonl"):
        if match := NAME.fullmatch(file.name):
            parts.append(RotatedPart(int(match[1]), int(match[2]), file))
    return sorted(parts)


def read_again(path: Path, step: int) -> Path:
    """The file that a run resumed after `step` steps reads: the first part with later steps, or
    `path`.
    """
    return next((rotated.path for rotated in parts_of(path) if rotated.last > step), path)


class RotatedFile:
    """Writes records of ascending training steps.

    Args:
        path: the file of the newest records; created with its folder if missing.
        keep_until_step: later records, of an earlier process, are removed.
        most_bytes: of all parts, roughly; the first and the newest part always stay.
        part_bytes: from which a part is full.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep_until_step: int,
        most_bytes: int,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._path, self._most_bytes, self._part_bytes = path, most_bytes, part_bytes
        for rotated in reversed(parts_of(path)):
            if rotated.last > keep_until_step:  # newer records, also those of `path`, are void
                rotated.path.replace(path)
        self._file = MetricsFile(path, keep_until_step=keep_until_step)
        steps = [record["step"] for record in read_records(path)]
        self._first, self._last = (steps[0], steps[-1]) if steps else (0, 0)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Append `{"step": step, **record}`; NaN and infinities become null. Raises `OSError` with
        the path.
        """
        if step != self._last and self._path.stat().st_size >= self._part_bytes:
            self._put_away()
        self._file.write(step, record)
        self._first, self._last = self._first or step, step

    def _put_away(self) -> None:
        self._file.close()
        name = f"{self._path.stem}.{self._first:06d}-{self._last:06d}.jsonl"
        self._path.rename(self._path.with_name(name))
        self._file = MetricsFile(self._path)
        self._first = 0
        parts = parts_of(self._path)
        total = sum(rotated.path.stat().st_size for rotated in parts)
        for rotated in parts[1:-1]:
            if total > self._most_bytes:
                total -= rotated.path.stat().st_size
                rotated.path.unlink()

    def close(self) -> None:
        self._file.close()


READ_BYTES = 16 * 2**20
"""Up to which `spread` reads everything."""
PLACES = 32
"""Most steps of larger files that `spread` reads."""


def spread(path: Path, *, most_bytes: int = READ_BYTES) -> list[dict[str, Any]]:
    """Records of steps from the whole run: all if the files have at most `most_bytes`, else of the
    steps at evenly spaced places.
    """
    paths = [*(rotated.path for rotated in parts_of(path)), *([path] if path.exists() else [])]
    sizes = [file.stat().st_size for file in paths]
    total = sum(sizes)
    if total <= most_bytes:
        return [record for file in paths for record in read_records(file)]
    by_step: dict[int, list[dict[str, Any]]] = {}
    for number in range(PLACES):
        at = (total - 1) * number // (PLACES - 1)
        for file, size in zip(paths, sizes, strict=True):
            if at < size:
                break
            at -= size
        with suppress(ValueError, TypeError, LookupError):  # a damaged line
            records = _step_at(file, at)
            by_step.setdefault(records[0]["step"], records)
    return [record for step in sorted(by_step) for record in by_step[step]]


def _step_at(path: Path, at: int) -> list[dict[str, Any]]:
    """The records of the step of which the line at byte `at` is one."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
        last = lines.rfind(b"\n")  # what follows is half a line
        begin = lines.rfind(b"\n", 0, min(at, last)) + 1
        step = parse_json(lines[begin : lines.find(b"\n", begin)])["step"]
        while begin:
            before = lines.rfind(b"\n", 0, begin - 1) + 1
            if parse_json(lines[before:begin])["step"] != step:
                break
            begin = before
        records = list[dict[str, Any]]()
        while begin < last:
            end = lines.find(b"\n", begin) + 1
            record = parse_json(lines[begin:end])
            if record["step"] != step:
                break
            records.append(record)
            begin = end
        return records
