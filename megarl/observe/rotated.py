"""A JSON-lines file of bounded size: it is cut into parts, and a full part is renamed so that its
name tells its steps.

    transcripts.jsonl                     the newest records
    transcripts.000001-000240.jsonl       a full part: steps 1 to 240
    transcripts.000241-000480.jsonl

A resumed run reads one part at most. If the parts exceed the limit, the oldest ones but the first
are removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from megarl.observe.sinks import MetricsFile, read_records

PART_BYTES = 64 * 2**20
"""Bytes from which a part is full; the records of the step that is being written still go into
it."""

NAME = re.compile(r".*\.(\d{6,})-(\d{6,})\.jsonl")


class RotatedPart(NamedTuple):
    """One full part of a JSON-lines file that is cut into parts by size: the first and last
    training step of which it has lines, and its path.
    """

    first: int
    """First step of which the part has records."""
    last: int
    path: Path


def parts_of(path: Path) -> list[RotatedPart]:
    """The full parts of the JSON-lines file `path` (`transcripts.jsonl`) that was cut into parts by
    size, such as transcripts.000001-000240.jsonl for steps 1 to 240, found by their names in its
    folder, in the order of their steps. `path` itself, with the newest lines, is none of them.
    """
    found = []
    for part in path.parent.glob(f"{path.stem}.*-*.jsonl"):
        if match := NAME.fullmatch(part.name):
            found.append(RotatedPart(int(match[1]), int(match[2]), part))
    return sorted(found)


def read_again(path: Path, step: int) -> Path:
    """The only file of a rotated JSON-lines file that a run resumed after `step` steps reads, to
    remove the lines of later steps: the first full part of `path` that has such lines, or `path`
    itself if no full part has. Earlier parts stay as they are, later ones are discarded unread.
    """
    return next((part.path for part in parts_of(path) if part.last > step), path)


class RotatedFile:
    """Writes records of ascending training steps, a line of JSON each, to a file that is cut into
    parts: a full one is renamed to NAME.FIRST-LAST.jsonl by its steps.

    Args:
        path: the file of the newest records; created with its folder if missing.
        keep_until_step: records of later steps, of an earlier process, are removed.
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
        """Append `{"step": step, **record}` as a line of JSON; NaN and infinities become null.
        Raises `OSError`, with the path, if the file cannot be written.
        """
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
    """The records of the first step and of the last step in the rotated file `path`, its full parts
    included, each as a dict with `step`. Of the full parts, only the first and the newest are read.
    Empty without records.
    """
    places = [*(part.path for part in parts_of(path)), path]
    by_step = itemgetter("step")
    first = next((list(group) for _, group in groupby(_records(places), by_step)), [])
    last = first
    for _, group in groupby(_records(places[-2:]), by_step):  # a new part may have no record yet
        last = list(group)
    if not first or by_step(first[0]) == by_step(last[0]):
        return first
    return first + last


def _records(paths: list[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        yield from read_records(path)
