"""A file of JSON lines to which records are appended, in which damage shows.

    {"n":0,"event":"ledger","format":1,"run":"9f3c...","crc":"5d1a0c3e"}
    {"n":1,"event":"dispatched","ordinal":0,...,"crc":"08be11f2"}

`n` is the number of the line, from 0. `crc` is the CRC-32 of the line's text before `,"crc"`,
started from the `crc` of the line before: a line that is changed, missing or out of place does not
fit. CRC-32 finds accidents, not forgery.

Two processes must not append to one file. A process that opens a journal therefore puts a copy of
the file in its place: what another process appends later goes to the old file, which no longer has
a name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.files import parse_json

FILE = "ledger.jsonl"
"""Name of the ledger in the run folder."""

FORMAT = 1
"""Version of the file's format; a file of a newer version is refused."""

WRITE_WITHIN_S = 0.25
"""Seconds after which an appended record is written and synced, together with all that were
appended meanwhile."""

SYNC_TIMEOUT_S = 60.0
"""Seconds to wait for records to be on the disk."""

ASIDE = ".writing"
"""End of the name of a copy that is to take the place of a journal."""

ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
SEAL = re.compile(rb',"crc":"([0-9a-f]{8})"\}\n')
WHOLE = re.compile(rb'\{"n":(\d+),.*,"crc":"[0-9a-f]{8}"\}\n', re.DOTALL)
SEAL_BYTES = len(b',"crc":"00000000"}\n')


def sealed(number: int, record: Mapping[str, Any], before: int) -> tuple[bytes, int]:
    """(line number `number` with the content of `record`, its checksum). `before`: checksum of the
    line before, 0 for the first line.
    """
    body = ENCODER.encode({"n": number, **record})[:-1].encode()
    crc = zlib.crc32(body, before)
    return body + b',"crc":"%08x"}\n' % crc, crc


def checksum(line: bytes, number: int, before: int) -> int | None:
    """Checksum of a line that is whole, is number `number` and follows a line with checksum
    `before`; None for any other.
    """
    seal = SEAL.fullmatch(line[-SEAL_BYTES:])
    if seal is None or not line.startswith(b'{"n":%d,' % number):
        return None
    crc = zlib.crc32(line[:-SEAL_BYTES], before)
    return crc if seal[1] == b"%08x" % crc else None


class Reader:
    """Reads a journal from its first line. A torn tail, which a killed process leaves, is passed
    over.

    Args:
        path: the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no journal, or one of a newer format; and while it is read, a line
            is broken that others follow.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            first = file.readline()
        self.is_torn_at_start = not first.endswith(b"\n")
        """Whether not even the first line is whole: the file holds no record."""
        self.run = "" if self.is_torn_at_start else _run_id(path, first)
        """Random name that the run got when the file was made."""
        self.num_lines, self.num_bytes, self.checksum = 0, 0, 0
        """Lines and bytes read so far that are whole, and the checksum of the last line."""
        self.torn_bytes = 0
        """Bytes of the torn tail, once everything has been read."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The records in order, without the first line's; `n` and `crc` are left out."""
        for line in self.lines():
            if self.num_lines > 1:
                record = parse_json(line[:-SEAL_BYTES] + b"}")
                del record["n"]
                yield record

    def verify(self) -> int:
        """Read the whole file; returns the bytes of its torn tail."""
        if self.is_torn_at_start:
            self.torn_bytes = self.path.stat().st_size
        else:
            for _ in self.lines():
                pass
        return self.torn_bytes

    def lines(self) -> Iterator[bytes]:
        """The whole lines, the first one too."""
        self.num_lines, self.num_bytes, self.checksum, self.torn_bytes = 0, 0, 0, 0
        with self.path.open("rb") as file:
            for line in file:
                crc = checksum(line, self.num_lines, self.checksum)
                if crc is None:
                    rest = file.readlines()
                    if _is_damage(line, rest, self.num_lines, self.checksum):
                        raise ValueError(
                            f"{self.path}, line {self.num_lines + 1} is damaged (its number or"
                            " checksum does not fit the line before), and other lines follow; move"
                            " the file away"
                        )
                    self.torn_bytes = len(line) + sum(map(len, rest))
                    return
                self.num_lines, self.checksum = self.num_lines + 1, crc
                self.num_bytes += len(line)
                yield line


def _run_id(path: Path, line: bytes) -> str:
    """The run's name in the first line; raises `ValueError` unless that is one of this format."""
    try:
        record = parse_json(line)
    except ValueError:  # of JSON or of UTF-8
        record = None
    if not isinstance(record, dict) or record.get("event") != "ledger":
        raise ValueError(f"{path}, line 1 is not the first line of a ledger; move the file away")
    written = record.get("format")
    if not isinstance(written, int) or written > FORMAT:
        raise ValueError(
            f"{path} is of format {written}, and this version of megarl reads formats up to"
            f" {FORMAT}; use the version that wrote it, or a newer one"
        )
    if checksum(line, 0, 0) is None:
        raise ValueError(f"{path}, line 1 is damaged (its checksum differs); move the file away")
    return str(record.get("run"))


def _is_damage(line: bytes, rest: list[bytes], number: int, before: int) -> bool:
    """Whether a broken line is damage, and not the end that a killed process has left half
    written.

    That end is broken to its last byte. Damage is told by a whole line behind it that fits, or by a
    whole line of another number, as where a line was removed.
    """
    # The checksum by which the next line would follow: what the broken line says, or what it would
    # say if only its own checksum were broken.
    fitting = [zlib.crc32(line[:-SEAL_BYTES], before)]
    for place, one in enumerate([line, *rest], start=number):
        if any(checksum(one, place, crc) is not None for crc in fitting) and place > number:
            return True
        whole = WHOLE.fullmatch(one)
        if whole is not None and int(whole[1]) != place:
            return True
        if place > number:
            fitting = []
        seal = SEAL.fullmatch(one[-SEAL_BYTES:])
        fitting += [int(seal[1], 16)] if seal is not None else []
    return False


class LostError(OSError):
    """Another run owns the journal. The text is a sentence for the user."""


class Journal:
    """A journal that is being written, by a thread of its own: appending costs the caller no input
    or output.

    Args:
        path: the file; made with its folder if missing. Records are appended to a copy of an
            existing one, which takes its place, without the torn tail.
        lost: says in a sentence why this process must not write, "" while it may. Asked before
            each write.

    Raises:
        OSError: the file cannot be written; `LostError` for what `lost` says.
        ValueError: the file is damaged before its end, or is no journal of a known format.
    """

    def __init__(self, path: Path, lost: Callable[[], str] = str) -> None:
        self.path, self._lost = path, lost
        self._refuse_lost()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._number, self._checksum, self.cut_bytes, size = 0, 0, 0, 0
        if path.exists():
            reader = Reader(path)
            self.cut_bytes, size = reader.verify(), reader.num_bytes
            self._number, self._checksum = reader.num_lines, reader.checksum
        self.is_new = self._number <= 1
        """Whether the file held no record."""
        self._file = self._take_place(size)
        self._waiting: list[Callable[[], Mapping[str, Any]]] = []
        self._appended = self._synced = 0
        self._is_closed, self._is_urgent = False, False
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    def _refuse_lost(self) -> None:
        if problem := self._lost():
            raise LostError(problem)

    def _take_place(self, size: int) -> int:
        """Put a copy of the first `size` bytes of the file in its place, with a first line if they
        are none. Returns the descriptor of the new file, at its end.
        """
        for left in self.path.parent.glob(f".{self.path.name}.*{ASIDE}"):
            self._refuse_lost()
            left.unlink(missing_ok=True)  # of a process that was killed here
        aside = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}{ASIDE}")
        with contextlib.ExitStack() as undo:
            undo.callback(aside.unlink, missing_ok=True)
            new = os.open(aside, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
            undo.callback(os.close, new)
            if size:
                with self.path.open("rb") as old, open(new, "wb", closefd=False) as file:
                    shutil.copyfileobj(old, file)
                os.ftruncate(new, size)
            else:
                first = {"event": "ledger", "format": FORMAT, "run": uuid.uuid4().hex}
                line, self._checksum = sealed(0, first, 0)
                self._number = 1
                os.write(new, line)
            os.fsync(new)
            self._refuse_lost()
            aside.rename(self.path)
            undo.pop_all()
        _sync_folder(self.path.parent)
        return new

    def append(self, record: Callable[[], Mapping[str, Any]]) -> None:
        """Append what `record` returns; the writing thread calls it. Returns at once. Raises
        `OSError` if writing has failed before.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            assert not self._is_closed
            self._waiting.append(record)
            self._appended += 1
            if len(self._waiting) == 1:
                self._changed.notify_all()

    def sync(self, timeout_s: float = SYNC_TIMEOUT_S) -> None:
        """Wait until everything that was appended is on the disk. Raises `OSError` if it cannot be
        written, or is not there within `timeout_s`.
        """
        with self._changed:
            wanted, self._is_urgent = self._appended, True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._synced >= wanted or self._failure is not None, timeout_s
            )
            if self._failure is not None:
                raise self._failure
            if self._synced < wanted:
                raise TimeoutError(f"{self.path} was not on the disk within {timeout_s:g} s")

    def close(self, timeout_s: float = SYNC_TIMEOUT_S) -> None:
        """Write what is left, and close the file. A second call does nothing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        """What the thread does: write and sync, in batches, until the journal is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                due = time.monotonic() + WRITE_WITHIN_S
                while not (self._is_closed or self._is_urgent) and time.monotonic() < due:
                    self._changed.wait(due - time.monotonic())
                batch, self._waiting, self._is_urgent = self._waiting, [], False
                is_last, upto = self._is_closed, self._appended
            try:
                self._refuse_lost()
                self._write([record() for record in batch])
                os.fsync(self._file)
            except Exception as error:  # raised again from the next call
                with self._changed:
                    self._failure = error
                    if isinstance(error, OSError) and not isinstance(error, LostError):
                        self._failure = OSError(error.errno, error.strerror, str(self.path))
                    self._changed.notify_all()
                return
            with self._changed:
                self._synced = upto
                self._changed.notify_all()
            if is_last:
                os.close(self._file)
                return

    def _write(self, records: list[Mapping[str, Any]]) -> None:
        """Write records as lines; the whole batch in one call where the system takes it."""
        lines = []
        for record in records:
            line, self._checksum = sealed(self._number, record, self._checksum)
            self._number += 1
            lines.append(line)
        left = memoryview(b"".join(lines))
        while left:
            left = left[os.write(self._file, left) :]


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that a new file in it is found after a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


BLOCK_BYTES = 1 << 16
"""Bytes in which the end of the last line is looked for at a time."""


def position(path: Path) -> dict[str, int | str]:
    """{"bytes": whole lines of the ledger `path`, "crc": checksum of the last one}; {} if the file
    is missing or has no whole line. What the position covers is on the disk afterwards.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return {}
    with file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - BLOCK_BYTES)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                size = begin + newline + 1
                crc = _crc(path, size)
                os.fsync(file.fileno())
                return {"bytes": size, "crc": crc} if crc else {}
            end = begin
    return {}


def difference(path: Path, before: Mapping[str, int | str]) -> str:
    """Why the ledger `path` does not go on from `before`, what `position` returned for it; "" if it
    does, or if `before` is empty.
    """
    if not before:
        return ""
    size = int(before["bytes"])
    found = path.stat().st_size if path.exists() else 0
    if found < size:
        return f"it has {found} bytes, and had {size} when the checkpoint was written"
    if _crc(path, size) != before["crc"]:
        return f"its line that ends at byte {size} is another one than when it was written"
    return ""


def _crc(path: Path, size: int) -> str:
    """Checksum, in hexadecimal, of the line that ends at byte `size`; "" if no line ends there."""
    with path.open("rb") as file:
        file.seek(max(0, size - SEAL_BYTES))
        seal = SEAL.fullmatch(file.read(min(size, SEAL_BYTES)))
    return seal[1].decode() if seal is not None else ""
