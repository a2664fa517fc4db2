"""A file of JSON lines to which records are appended, and in which damage can be found.

    {"n":0,"event":"ledger","format":1,"run":"9f3c...","crc":"5d1a0c3e"}
    {"n":1,"event":"dispatched","ordinal":0,...,"crc":"08be11f2"}

`crc` is the CRC-32 of the line's text before `,"crc"`, started from the `crc` of the line before: a
changed, missing or misplaced line does not fit. It finds accidents, not forgery.

A process that opens a journal puts a copy in its place: what another process appends later goes to
the old file, which no longer has a name.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import re
import shutil
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.system.files import UNFINISHED, in_thread, new_file, parse_json

FILE = "ledger.jsonl"
"""In the run folder."""

FORMAT = 1

ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
SEAL = re.compile(rb',"crc":"([0-9a-f]{8})"\}\n')
WHOLE = re.compile(rb'\{"n":(\d+),.*,"crc":"[0-9a-f]{8}"\}\n', re.DOTALL)
SEAL_BYTES = len(b',"crc":"00000000"}\n')


def sealed(number: int, record: Mapping[str, Any], previous_crc: int) -> tuple[bytes, int]:
    """(line number `number` with `record`, CRC-32 of this and all earlier lines). `previous_crc`:
    that of the line before, 0 for none.
    """
    body = ENCODER.encode({"n": number, **record})[:-1].encode()  # "}" follows the checksum
    crc = zlib.crc32(body, previous_crc)
    return body + b',"crc":"%08x"}\n' % crc, crc


def checksum(line: bytes, number: int, before: int) -> int | None:
    """The CRC-32 of a whole line of this number that follows `before`; otherwise None."""
    seal = SEAL.fullmatch(line[-SEAL_BYTES:])
    if seal is None or not line.startswith(b'{"n":%d,' % number):
        return None
    crc = zlib.crc32(line[:-SEAL_BYTES], before)
    return crc if seal[1] == b"%08x" % crc else None


class Reader:
    """Iterating gives the records of a journal, without the incomplete end that a killed process
    leaves.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no journal, or of a newer format; later, a damaged line that others
            follow.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            first = file.readline()
        self.is_torn_at_start = not first.endswith(b"\n")
        self.run = "" if self.is_torn_at_start else _run_id(path, first)
        """Random id that the run got when the file was made."""
        self.num_lines, self.num_bytes, self.checksum = 0, 0, 0
        """Of whole lines read so far, and of the last one."""
        self.torn_bytes = 0
        """Of the incomplete end, once everything has been read."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self.lines():
            if self.num_lines > 1:
                record = parse_json(line[:-SEAL_BYTES] + b"}")
                del record["n"]
                yield record

    def verify(self) -> int:
        """Check every line. Returns the bytes of the incomplete end."""
        for _ in self.lines():
            pass
        return self.torn_bytes

    def lines(self) -> Iterator[bytes]:
        """With their newline, the first one included."""
        self.num_lines, self.num_bytes, self.checksum, self.torn_bytes = 0, 0, 0, 0
        with self.path.open("rb") as file:
            for line in file:
                crc = checksum(line, self.num_lines, self.checksum)
                if crc is None:
                    rest, whole = file.readlines(), WHOLE.fullmatch(line)
                    # The end that a killed process leaves half written is broken to its last byte.
                    is_other = whole is not None and int(whole[1]) != self.num_lines
                    if is_other or any(map(WHOLE.fullmatch, rest)):
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


class Journal:
    """Appended records are on the disk within a quarter of a second.

    Args:
        path: made with its folder if missing; otherwise a copy takes its place, without an
            incomplete last line.
        lost: called before each write; returns why this process must not write, "" while it may.

    Raises:
        OSError: the file cannot be written.
        UserError: this process must not write.
        ValueError: the file is damaged before its end, or is no journal of a known format.
    """

    def __init__(self, path: Path, lost: Callable[[], str] = str) -> None:
        """Copy the valid lines to a new file: a process that still has the old file open cannot add
        to this journal. `lost`: why this process lost the right to write, or "".
        """
        self.path, self._lost = path, lost
        self._refuse_lost()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._number, self._checksum, self.cut_bytes, size = 0, 0, 0, 0
        if path.exists():
            reader = Reader(path)
            self.cut_bytes, size = reader.verify(), reader.num_bytes
            self._number, self._checksum = reader.num_lines, reader.checksum
        self.is_new = self._number <= 1  # no line after the header
        for unfinished in path.parent.glob(f"{path.name}.*{UNFINISHED}"):
            unfinished.unlink(missing_ok=True)  # of a process that was killed here
        with new_file(path, self._refuse_lost) as file:
            if size:
                with path.open("rb") as old:
                    shutil.copyfileobj(old, file)
                file.truncate(size)
            else:
                header = {"event": "ledger", "format": FORMAT, "run": uuid.uuid4().hex}
                file.write(self._sealed(header))
            file.seek(0, os.SEEK_END)
            descriptor = os.dup(file.fileno())
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        self._waiting: list[Callable[[], Mapping[str, Any]]] = []
        self._changing, self._writing = threading.Lock(), threading.Lock()
        self._failure: Exception | None = None
        self._is_urgent = threading.Event()
        self._batch = Future[None]()
        """The newest batch of records; done once all records are on the disk."""
        self._batch.set_result(None)

    def _refuse_lost(self) -> None:
        if problem := self._lost():
            raise UserError(problem)

    def _sealed(self, record: Mapping[str, Any]) -> bytes:
        line, self._checksum = sealed(self._number, record, self._checksum)
        self._number += 1
        return line

    def append(self, record: Callable[[], Mapping[str, Any]]) -> None:
        """The writing thread calls `record` later. Raises `UserError` if it has failed before."""
        with self._changing:
            if self._failure is not None:
                raise self._failure
            if not self._waiting:
                is_urgent = threading.Event()
                self._batch = in_thread("ledger", functools.partial(self._write, is_urgent))
                self._is_urgent = is_urgent
            self._waiting.append(record)

    def sync(self, timeout_s: float = 60.0) -> None:
        """Block until everything is on the disk. Raises `UserError` if that fails or takes too
        long.
        """
        self._is_urgent.set()
        done, _ = wait([self._batch], timeout_s)
        if not done:
            raise _unwritten(f"{self.path} was not on the disk within {timeout_s:g} s")
        self._batch.result()

    def close(self) -> None:
        with contextlib.suppress(UserError):
            self.sync()
            self._file.close()

    def _write(self, is_urgent: threading.Event) -> None:
        is_urgent.wait(0.25)  # seconds, in which records come together
        with self._writing:
            with self._changing:
                batch, self._waiting = self._waiting, []
            try:
                if self._failure is not None:
                    raise self._failure
                self._refuse_lost()
                left = memoryview(b"".join(self._sealed(record()) for record in batch))
                while left:
                    left = left[self._file.write(left) :]
                os.fsync(self._file.fileno())
            except Exception as error:  # raised again from the next call
                is_disk = isinstance(error, OSError)
                self._failure = _unwritten(f"{error}: {self.path}") if is_disk else error
                raise self._failure from None


def _unwritten(why: str) -> UserError:
    return UserError(
        f"the run's ledger cannot be written ({why}); free space on its disk, and resume the run"
    )


def position(path: Path) -> dict[str, int | str]:
    """{"bytes": size of the complete lines, "crc": of the last one}, synced to disk; {} without
    one.
    """
    if not path.exists() or not path.stat().st_size:
        return {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        size = content.rfind(b"\n") + 1
        os.fsync(file.fileno())
    crc = _crc(path, size)
    return {"bytes": size, "crc": crc} if crc else {}


def difference(path: Path, before: Mapping[str, int | str]) -> str:
    """Why the lines at position `before` are gone; "" if they are not."""
    if not before:
        return ""
    size = int(before["bytes"])
    num_bytes = path.stat().st_size if path.exists() else 0
    if num_bytes < size:
        return f"it has {num_bytes} bytes, and had {size} when the checkpoint was written"
    if _crc(path, size) != before["crc"]:
        return f"its line that ends at byte {size} is another one than when it was written"
    return ""


def _crc(path: Path, size: int) -> str:
    """Of the line that ends at byte `size`; "" if no line ends there."""
    with path.open("rb") as file:
        file.seek(max(0, size - SEAL_BYTES))
        seal = SEAL.fullmatch(file.read(min(size, SEAL_BYTES)))
    return seal[1].decode() if seal is not None else ""
