"""A JSON-lines file of bounded size: full parts are put away under names that tell their steps.

    transcripts.jsonl                     the newest records
    transcripts.000001-000240.jsonl       a full part: steps 1 to 240
    transcripts.000241-000480.jsonl

A resumed run reads one part at most, and of more parts than are kept the oldest but the first go.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megarl.observe.sinks import MetricsFile, read_records

PART_BYTES = 64 * 2**20
"""Bytes from which a part is full; it ends with the step that it is in."""

NAME = re.compile(r".*\.(\d{6,})-(\d{6,})\.jsonl")


class RotatedPart(NamedTuple):
    """A full part."""

    first: int
    """Its first step."""
    last: int
    path: Path


def parts_of(path: Path) -> list[RotatedPart]:
    """The full parts of the file `path`, by step."""
    found = []
    for part in path.parent.glob(f"{path.stem}.*-*.jsonl"):
        if match := NAME.fullmatch(part.name):
            found.append(RotatedPart(int(match[1]), int(match[2]), part))
    return sorted(found)


def read_again(path: Path, step: int) -> Path:
    """The file that a run reads which goes on after `step` steps: the full part of the file `path`
    that has later steps, or `path`.
    """
    return next((part.path for part in parts_of(path) if part.last > step), path)


class RotatedFile:
    """Writes records of ascending steps.

    Args:
        path: the file of the newest records; created with its folder if missing.
        keep_until_step: records of later steps are dropped.
        most_bytes: bytes of all parts that are kept, roughly; the first and the newest part stay
            however small the number is.
        part_bytes: bytes from which a part is full.
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
        for part in reversed(parts_of(path)):
            if part.last > keep_until_step:  # newer records, also those of `path`, are void
                part.path.replace(path)
        self._file = MetricsFile(path, keep_until_step=keep_until_step)
        steps = [record["step"] for record in read_records(path)]
        self._first, self._last = (steps[0], steps[-1]) if steps else (0, 0)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Append `{"step": step, **record}`; see `MetricsFile.write`."""
        if step != self._last and self._path.stat().st_size >= self._part_bytes:
            self._put_away()
        self._file.write(step, record)
        self._first, self._last = self._first or step, step

    def _put_away(self) -> None:
        """Give the full part its name, begin another, and remove parts that are too many."""
        self._file.close()
        name = f"{self._path.stem}.{self._first:06d}-{self._last:06d}.jsonl"
        self._path.rename(self._path.with_name(name))
        self._file = MetricsFile(self._path)
        self._first = 0
        parts = parts_of(self._path)
        total = sum(part.path.stat().st_size for part in parts)
        for part in parts[1:-1]:
            if total > self._most_bytes:
                total -= part.path.stat().st_size
                part.path.unlink()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def ends(path: Path) -> list[dict[str, Any]]:
    """The records of the first step and of the last step in the file `path` and its parts. Of the
    parts, only the first and the newest are read.
    """
    places = [*(part.path for part in parts_of(path)), path]
    first: list[dict[str, Any]] = []
    for record in _records(places):
        if first and record["step"] != first[0]["step"]:
            break
        first.append(record)
    last: list[dict[str, Any]] = []
    for record in _records(places[-2:]):  # a new part may have no record yet
        if not first or record["step"] != first[0]["step"]:
            last = [kept for kept in last if kept["step"] == record["step"]] + [record]
    return first + last


def _records(paths: list[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        yield from read_records(path)
