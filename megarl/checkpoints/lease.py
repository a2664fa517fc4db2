"""A run folder has one owner: the lease of a run on its folder, kept in a file in the folder.

    lease = take(folder, patience_s=60)   # raises ValueError if another run lives there
    lease.problem()                       # "" while this run is still the owner
    lease.release()

The leases of a folder are numbered: `.owner.000001.json`, `.owner.000002.json`. The file with the
highest number names the owner. A run takes the folder by creating the next number with O_EXCL,
which the file system grants to one process only, so that of several runs that start at once one
wins. The owner renews its lease by writing to its own file, never to another's.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from megarl.activity.process import machine, start_of
from megarl.console import say

RENEW_S = 5.0
"""Seconds between two renewals of a lease."""
POLL_S = 0.25
"""Seconds between two looks at the lease of another run."""
MOST_ATTEMPTS = 100
"""Times that a folder is tried to be taken while others take it and end."""
ENDING_S = 3.0
"""Seconds given to an owner on this machine to end, since a killed process takes a moment."""
RECORD_BYTES = 1024
"""Size of a lease file, the same at every renewal, so that each is one write in place."""
NAME = re.compile(r"\.owner\.(\d{6,})\.json")
RUNS, ENDED = "runs", "ended"


@dataclass(frozen=True)
class Record:
    """Content of a lease file, FOLDER/.owner.NNNNNN.json, which says which run owns the run folder
    FOLDER. It has the run's id, its host and process, whether the run has ended, and how often it
    has renewed the lease. `encode` makes the file's bytes, `decode_lease` reads them.
    """

    run: str
    """Random id of the run, in hexadecimal."""
    host: str
    process: int
    """Process id of rank 0."""
    started: str
    """Start of that process in the kernel's clock ticks: process ids are used again."""
    machine: str
    """Id of the boot of the machine and of the process namespace; process ids can be compared
    where it is the same."""
    since: str
    """Date and time at which the run took the folder, for people."""
    state: str = RUNS
    renewals: int = 0
    format: Literal[1] = 1
    """Version of the content. A file of a newer one is no `Record` here; fields that are added in
    the same version are passed over."""

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"

    def encode(self) -> bytes:
        """The whole content of a lease file, FOLDER/.owner.NNNNNN.json in the run folder FOLDER:
        one JSON object with the fields of this record, then spaces, then a newline. That is 1024
        bytes in all, so that each renewal of the lease overwrites the whole file. JSON of more than
        1023 bytes is neither cut nor refused: it is followed by the newline alone, and the content
        is longer than 1024 bytes.
        """
        text = json.dumps(asdict(self)).encode()
        return text.ljust(RECORD_BYTES - 1) + b"\n"


@functools.cache
def _reader() -> TypeAdapter[Record]:
    """Reads records; made once, since that takes milliseconds."""
    return TypeAdapter(Record)


def decode_lease(content: bytes | None) -> Record | None:
    """Read `content`, the bytes of a lease file (FOLDER/.owner.NNNNNN.json), as the `Record` of the
    run that owns the run folder FOLDER. Spaces and a newline after the JSON are passed over. None
    if the JSON is incomplete, of a newer format, or no lease, and if `content` is None.
    """
    try:
        return _reader().validate_json(content or b"")
    except ValueError:
        return None


def _content_of(path: Path) -> bytes | None:
    """What the lease file `path` holds; None if it is gone."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def path_of(folder: Path, number: int) -> Path:
    """Path of the lease file with this number in the run folder `folder`:
    FOLDER/.owner.NNNNNN.json.
    """
    return folder / f".owner.{number:06d}.json"


def numbered(folder: Path) -> dict[int, Path]:
    """{number: path} of the lease files .owner.NNNNNN.json in the run folder `folder`, each of
    which names a run that took the folder; empty if the folder does not exist.
    """
    try:
        found = [(NAME.fullmatch(name), name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return {}
    return {int(match[1]): folder / name for match, name in found if match}


def newest(folder: Path) -> tuple[int, Record | None]:
    """(number, content) of the lease file with the highest number in the run folder `folder`, which
    names its owner. The number is 0 without one, the content None if it cannot be read as a lease.
    """
    number = max(numbered(folder), default=0)
    return number, decode_lease(_content_of(path_of(folder, number)))


@dataclass(frozen=True)
class Claim:
    """The statement that the run with the id `run` owns the run folder `folder`, by its lease file
    number `number`. Any process of the run, on any host, can ask by `problem` whether this still
    holds.
    """

    folder: Path
    number: int
    run: str

    def problem(self) -> str:
        """Why this run must not write to the folder, as a sentence for the user, such as that
        another run has taken it over; "" while the run owns the folder. Reads the lease files at
        each call.
        """
        last, record = 0, None
        try:
            last, record = newest(self.folder)
        except OSError as error:
            if error.errno != errno.ESTALE:
                return (
                    f"whether this run still owns its folder {self.folder} cannot be read"
                    f" ({error}), so nothing more is written there; see to the disk and go on with"
                    " --resume auto"
                )
        if last < self.number:
            return (
                f"the file {path_of(self.folder, self.number)}, which says that this run owns the"
                " folder, is gone: this run ends and writes nothing more there; was the folder"
                " removed?"
            )
        if last == self.number and (record is None or record.run == self.run):
            return ""
        return (
            f"the run folder {self.folder} was taken over by {record or 'another run'}: this run"
            " ends and writes nothing more there (it had not renewed its lease in time: was it"
            " suspended, or did the disk not answer?)"
        )


class Lease:
    """The ownership of this process over a run folder, so that no other run writes there; made by
    `take`, and renewed by a thread until `release`. `problem()` gives "" or why the folder is lost;
    `require()` raises `OSError` if it is lost.
    """

    def __init__(self, claim: Claim, descriptor: int, record: Record) -> None:
        """`descriptor`: the open lease file. `take` makes leases."""
        self.claim, self.run_id, self.problem = claim, claim.run, claim.problem
        self._descriptor, self._record = descriptor, record
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Raise `OSError` if this run does not own its folder any more, and so must not write
        there.
        """
        if problem := self.problem():
            raise OSError(errno.EPERM, problem)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            # An error is not the end: `problem` says whether the folder is lost.
            with contextlib.suppress(OSError):
                self._write(replace(self._record, renewals=self._record.renewals + 1))

    def _write(self, record: Record) -> None:
        """Write `record` to this run's file, which may have lost its name to another run."""
        os.pwrite(self._descriptor, record.encode(), 0)
        os.fsync(self._descriptor)
        self._record = record

    def release(self) -> None:
        """End the ownership, so that the next run can take the folder at once; a second call does
        nothing. If the folder holds nothing else, it is removed.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(timeout=RENEW_S)
        with contextlib.suppress(OSError):
            if not self.problem():
                self._write(replace(self._record, state=ENDED))
                own = path_of(self.claim.folder, self.claim.number)
                if os.listdir(own.parent) == [own.name]:
                    own.unlink()
                    own.parent.rmdir()
        os.close(self._descriptor)


def take(folder: Path, *, patience_s: float) -> Lease:
    """Make this process the owner of the run folder `folder`, which is created if missing; returns
    the lease, to be released at the end.

    For an owner on this machine it looks whether the owner's process runs. An owner on another
    machine is watched for `patience_s` seconds, for which the call blocks. Raises `ValueError`,
    which names the owner, if the owner lives, and `OSError` if the folder cannot be written.
    """
    here = Record(
        run=uuid.uuid4().hex[:16],
        host=os.uname().nodename,
        process=os.getpid(),
        started=start_of(os.getpid()),
        machine=machine(),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
    )
    for attempt in range(MOST_ATTEMPTS):  # again where another process was faster
        time.sleep(POLL_S if attempt else 0.0)
        folder.mkdir(parents=True, exist_ok=True)
        number, before = newest(folder)
        if number and not has_ended(path_of(folder, number), patience_s):
            continue
        own = path_of(folder, number + 1)
        try:
            descriptor = os.open(own, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except (FileExistsError, FileNotFoundError):  # taken; or removed with the folder
            continue
        # Undone on a full disk: an empty file would be watched as another run's.
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            undo.callback(own.unlink, missing_ok=True)
            os.pwrite(descriptor, here.encode(), 0)
            os.fsync(descriptor)
            others = {key: path for key, path in numbered(folder).items() if path != own}
            # The number was free again if others took the folder since this process looked: each
            # owner removes the files before its own.
            if max(others, default=0) != number:
                continue
            undo.pop_all()
        for path in others.values():
            path.unlink(missing_ok=True)
        if number and (before is None or before.state == RUNS):
            say(
                f"megarl: folder {folder} is taken over from {before or 'another run'}, which has"
                " ended without releasing it"
            )
        return Lease(Claim(folder.absolute(), number + 1, here.run), descriptor, here)
    raise ValueError(f"folder {folder} is taken by one run after another; set folder to a new one")


def refuse_living(folder: Path) -> None:
    """Raise `ValueError` if the run that owns the run folder `folder` is a living process of this
    machine. An owner on another machine is let through. Writes nothing and does not wait.
    """
    record = None
    # A folder that cannot be read, or with no path for its name, is told by the check of folders.
    with contextlib.suppress(OSError, ValueError):
        _, record = newest(folder)
    if record is not None and record.state == RUNS and is_here(record) and lives(record):
        raise ValueError(owner_refusal(folder, record))


def is_here(record: Record) -> bool:
    """Whether the process that `record` names runs, or ran, on this boot of this machine and in
    this process namespace, so that it can be looked up from here.
    """
    return bool(record.machine) and record.machine == machine()


def lives(record: Record) -> bool:
    """Whether the process that `record` names is still running. Only right for a process of this
    machine, for which `is_here` is True.
    """
    return start_of(record.process) == record.started


def has_ended(path: Path, patience_s: float) -> bool:
    """Whether the run that the lease file `path` names as owner has ended: the file says so, its
    process on this machine does not exist, or, if the process cannot be looked up from here, the
    file stays unchanged for `patience_s` seconds, for which the call blocks. False if the file
    disappears, so that the caller looks at the folder anew. Raises `ValueError` if the owner lives.

    The times in the file of another machine are not used, since its clock may differ: only a change
    of the file shows that the owner lives.
    """
    before = now = _content_of(path)
    owner = decode_lease(before)
    is_seen = owner is not None and is_here(owner)
    deadline = time.monotonic() + (ENDING_S if is_seen else patience_s)
    if not is_seen and (owner is None or owner.state == RUNS):
        say(
            f"megarl: folder {path.parent} is owned by {owner or 'another run'}, which cannot be"
            f" seen from this host: waiting up to {patience_s:g} s for a sign of life"
            " (training.checkpoint.owner_timeout_s)"
        )
    while now is not None:
        found = decode_lease(now)
        if found is not None and found.state == ENDED:
            return True
        if owner is None and found is not None:
            return False  # it was being written
        if owner is not None and is_seen and not lives(owner):
            return path.exists()
        is_late = time.monotonic() >= deadline
        if is_late if is_seen else now != before:
            raise ValueError(owner_refusal(path.parent, found or owner))
        if is_late:
            return True
        time.sleep(POLL_S)
        now = _content_of(path)
    return False


def owner_refusal(folder: Path, record: Record | None) -> str:
    """The message, without a newline, for a run whose folder has a living owner. `record`: what the
    owner's lease file says; None if it cannot be read.
    """
    return (
        f"folder {folder} belongs to a run that is still going ({record or 'another run'}); end"
        " that run first, or set folder to another one"
    )
