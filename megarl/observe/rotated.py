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
from collections.abc import Mapping
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from megarl.observe.sinks import MetricsFile, read_records
from megarl.system.files import parse_json

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


READ_BYTES = 16 * 2**20
"""Bytes up to which `spread` reads everything."""
PLACES = 32
"""Steps of larger files that `spread` reads, at most."""


def spread(path: Path, *, most_bytes: int = READ_BYTES) -> list[dict[str, Any]]:
    """Records of steps from the whole run, each a dict with `step`, read from the rotated file
    `path` and its full parts: all of them if the files have at most `most_bytes`. Of larger files
    about so many bytes are read, at places that lie evenly over the files: records of the first
    step, of the last one and of at most 30 between, and of a step with very many records not all.
    """
    places = [*(part.path for part in parts_of(path)), *([path] if path.exists() else [])]
    sizes = [place.stat().st_size for place in places]
    total, around = sum(sizes), most_bytes // PLACES
    if total <= most_bytes:
        return [record for place in places for record in read_records(place)]
    found: dict[int, list[dict[str, Any]]] = {}
    for number in range(PLACES):
        at, is_last = (total - 1) * number // (PLACES - 1), number == PLACES - 1
        for place, size in zip(places, sizes, strict=True):
            if at < size:
                break
            at -= size
        steps = _window(place, max(0, at - around) if is_last else at, around)
        # Of the first step in a window the beginning may be missing.
        chosen = steps[-1:] if is_last else steps[1:2] if number and len(steps) > 1 else steps[:1]
        for step in chosen:
            found.setdefault(step[0]["step"], step)
    return [record for step in sorted(found) for record in found[step]]


def _window(place: Path, begin: int, length: int) -> list[list[dict[str, Any]]]:
    """The records, by step, of the whole lines from byte `begin` of a file on, until `length` bytes
    are read, but at least of one line; of the last whole line if there is none after `begin`.
    """
    found = []
    with place.open("rb") as file:
        file.seek(begin)
        if begin:
            file.readline()
        while file.tell() < begin + length or not found:
            line = file.readline()
            if not line.endswith(b"\n"):
                break
            with suppress(ValueError):
                record = parse_json(line)
                found += [record] if isinstance(record, dict) and "step" in record else []
    if not found and begin:
        longer = 4 * length + 4096
        return _window(place, max(0, begin - longer), length + longer)[-1:]
    return [list(group) for _, group in groupby(found, itemgetter("step"))]
