"""A run folder has one owner: the lease of a run on its folder, kept in a file in the folder.

    with held(folder, patience_s=60) as lease:   # raises ValueError if another run lives there
        ...
        lease.problem()                          # "" while this run is still the owner

The leases of a folder are numbered: `.owner.000001.json`, `.owner.000002.json`. The file with the
highest number names the owner. A run takes the folder by creating the next number with O_EXCL,
which the file system grants to one process only, so that of several runs that start at once one
wins. The owner renews its lease by writing to its own file, never to another's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megarl.activity.process import machine, start_of
from megarl.console import say
from megarl.files import parse_json

RENEW_S = 5.0
"""Seconds between two renewals of a lease."""
POLL_S = 0.25
"""Seconds between two looks at the lease of another run."""
INCOMPLETE_S = 2.0
"""Seconds that a lease file may be empty: it is created first and then written."""
ENDING_S = 3.0
"""Seconds given to an owner on this machine to end, since a killed process takes a moment."""
RECORD_BYTES = 1024
"""Size of a lease file, the same at every renewal, so that each is one write in place."""
NAME = re.compile(r"\.owner\.(\d{6,})\.json")
RUNS, ENDED = "runs", "ended"
FORMAT = 1
"""Version of a lease file's content, in its field `format`. The field is left out in this first
version; a file of a newer version is no `Record` for this one. Fields that are added in the same
format are passed over."""


@dataclass(frozen=True)
class Record:
    """Content of a lease file."""

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

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"

    def encode(self) -> bytes:
        """The file's content: one JSON object, padded to `RECORD_BYTES`."""
        text = json.dumps(asdict(self)).encode()
        return text.ljust(RECORD_BYTES - 1) + b"\n"


def decode_lease(content: bytes) -> Record | None:
    """The record in a lease file; None if the content is incomplete, of a newer format or no
    record.
    """
    try:
        found: Any = parse_json(content)
        if found.pop("format", FORMAT) != FORMAT:
            return None
        known = {one.name for one in fields(Record)}
        return Record(**{name: value for name, value in found.items() if name in known})
    except (AttributeError, TypeError, ValueError):
        return None


def numbered(folder: Path) -> dict[int, Path]:
    """{number: path} of the lease files in `folder`."""
    try:
        found = [(NAME.fullmatch(name), name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return {}
    return {int(match[1]): folder / name for match, name in found if match}


def newest(folder: Path) -> tuple[int, Path] | None:
    """(number, path) of the lease file with the highest number in `folder`, None without one."""
    return max(numbered(folder).items(), default=None)


@dataclass(frozen=True)
class Claim:
    """What a run says of itself: lease `number` on `folder` is of `run`. Any process of the run, on
    any host, can look up whether that still holds.
    """

    folder: Path
    number: int
    run: str

    def problem(self) -> str:
        """Why this run must not write to the folder: a sentence for the user, "" while the run owns
        the folder. Looks at the files each time.
        """
        try:
            return self.look()
        except OSError as error:
            return self.unread(error)

    def look(self) -> str:
        """As `problem`; raises `OSError` where the files cannot be read."""
        try:
            last = newest(self.folder)
            if last is None or last[0] < self.number:
                return self.gone()
            record = decode_lease(last[1].read_bytes())
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return self.gone()
        if last[0] == self.number and (record is None or record.run == self.run):
            return ""
        return (
            f"the run folder {self.folder} was taken over by {record or 'another run'}: this run"
            " ends and writes nothing more there (it had not renewed its lease in time: was it"
            " suspended, or did the disk not answer?)"
        )

    def unread(self, error: OSError) -> str:
        """The sentence for files that cannot be read."""
        return (
            f"whether this run still owns its folder {self.folder} cannot be read ({error}), so"
            " nothing more is written there; see to the disk and go on with --resume auto"
        )

    def gone(self) -> str:
        """The sentence for a lease file that was removed."""
        return (
            f"the file {path_of(self.folder, self.number)}, which says that this run owns the"
            " folder, is gone: this run ends and writes nothing more there; was the folder"
            " removed?"
        )


class Lease:
    """The lease of this process on a run folder, which a thread renews until `release`."""

    def __init__(self, folder: Path, number: int, descriptor: int, record: Record) -> None:
        """`descriptor`: the open lease file. `take` makes leases."""
        self.folder, self.run_id = folder, record.run
        self.claim = Claim(folder.absolute(), number, record.run)
        self._descriptor, self._record = descriptor, record
        self._path = path_of(folder, number)
        self._found = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def problem(self) -> str:
        """As `Claim.problem`; a lease that was lost once stays lost."""
        if not self._found:
            try:
                self._found = self.claim.look()
            except OSError as error:
                return self.claim.unread(error)
        return self._found

    def require(self) -> None:
        """Raise `OSError` if this run must not write to the folder."""
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
        """End the lease, so that the next run takes the folder at once. A folder that holds
        nothing else is removed.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(timeout=RENEW_S)
        with contextlib.suppress(OSError):
            if not self.problem():
                self._write(replace(self._record, state=ENDED))
                if os.listdir(self.folder) == [self._path.name]:
                    self._path.unlink()
                    self.folder.rmdir()
        os.close(self._descriptor)


def path_of(folder: Path, number: int) -> Path:
    """The lease file with `number`."""
    return folder / f".owner.{number:06d}.json"


@contextlib.contextmanager
def held(folder: Path, *, patience_s: float) -> Iterator[Lease]:
    """A context manager that takes `folder` and releases it at its end; see `take`."""
    lease = take(folder, patience_s=patience_s)
    try:
        yield lease
    finally:
        lease.release()


def take(folder: Path, *, patience_s: float) -> Lease:
    """Make this process the owner of the run folder `folder`, which is created if missing.

    An owner on this machine is looked up by its process; an owner on another one is watched for
    `patience_s` seconds. Raises `ValueError`, which names the owner, if it lives, and `OSError` if
    the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    here = Record(
        run=uuid.uuid4().hex[:16],
        host=os.uname().nodename,
        process=os.getpid(),
        started=start_of(os.getpid()),
        machine=machine(),
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
    )
    for _ in range(100):  # each time another process has taken the folder and ended
        last = newest(folder)
        before = read_lease(last[1], INCOMPLETE_S) if last else None
        if last is not None and not has_ended(last[1], before, patience_s):
            continue
        number = last[0] + 1 if last else 1
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
            descriptor = os.open(path_of(folder, number), flags, 0o644)
        except (FileExistsError, FileNotFoundError):  # another was faster; or removed the folder
            folder.mkdir(parents=True, exist_ok=True)
            continue
        try:
            os.pwrite(descriptor, here.encode(), 0)
            os.fsync(descriptor)
        except OSError:  # such as a full disk: an empty file would be watched as another run's
            path_of(folder, number).unlink(missing_ok=True)
            os.close(descriptor)
            raise
        before_it = {key: path for key, path in numbered(folder).items() if key != number}
        # Its number was free again if others took the folder since this process looked: each owner
        # removes the files before its own.
        if max(before_it, default=0) != number - 1:
            path_of(folder, number).unlink(missing_ok=True)
            os.close(descriptor)
            continue
        for path in before_it.values():
            path.unlink(missing_ok=True)
        if last is not None and (before is None or before.state == RUNS):
            say(
                f"megarl: folder {folder} is taken over from {before or 'another run'}, which has"
                " ended without releasing it"
            )
        return Lease(folder, number, descriptor, here)
    raise ValueError(f"folder {folder} is taken by one run after another; set folder to a new one")


def refuse_living(folder: Path) -> None:
    """Raise `ValueError` if the owner of `folder` is a living process of this machine. Writes
    nothing and does not wait.
    """
    record = None
    # A folder that cannot be read, or with no path for its name, is told by the check of folders.
    with contextlib.suppress(OSError, ValueError):
        last = newest(folder)
        record = read_lease(last[1], 0.0) if last else None
    if record is not None and record.state == RUNS and is_here(record) and lives(record):
        raise ValueError(owner_refusal(folder, record))


def is_here(record: Record) -> bool:
    """Whether the owner's process, if it is there, can be seen from this process."""
    return bool(record.machine) and record.machine == machine()


def lives(record: Record) -> bool:
    """Whether the owner's process, which is of this machine, is still there."""
    return start_of(record.process) == record.started


def read_lease(path: Path, within_s: float) -> Record | None:
    """The record of a lease file, which may be incomplete for `within_s` seconds; None for one
    that stays incomplete or is removed.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            record = decode_lease(path.read_bytes())
        except FileNotFoundError:
            return None
        if record is not None or time.monotonic() >= deadline:
            return record
        time.sleep(POLL_S / 5)


def has_ended(path: Path, record: Record | None, patience_s: float) -> bool:
    """Whether the owner in `record`, the content of the lease file `path`, has ended, or has not
    renewed the lease for `patience_s` seconds; False if the file is gone, so that the folder is to
    be looked at anew. Raises `ValueError` if the owner lives.
    """
    if record is not None and record.state == ENDED:
        return True
    if record is not None and is_here(record):
        deadline = time.monotonic() + ENDING_S
        while lives(record):
            if time.monotonic() >= deadline:
                raise ValueError(owner_refusal(path.parent, record))
            time.sleep(POLL_S)
            if (now := read_lease(path, 0.0)) is not None and now.state == ENDED:
                return True
        return path.exists()
    return is_silent(path, record, patience_s)


def is_silent(path: Path, record: Record | None, patience_s: float) -> bool:
    """Watch the lease file of a process that cannot be seen from here, or that this version cannot
    read: True if the file stays as it is for `patience_s` seconds, or says that the run has ended;
    False if it is removed. Raises `ValueError` as soon as it is renewed.

    Only changes count, not the times in the file, since the clocks of two machines differ.
    """
    owner = record or "another run"
    say(
        f"megarl: folder {path.parent} is owned by {owner}, which cannot be seen from this host:"
        f" waiting up to {patience_s:g} s for a sign of life"
        " (training.checkpoint.owner_timeout_s)"
    )
    deadline, now = time.monotonic() + patience_s, record
    before = stamp(path)
    while now == record and (record is not None or stamp(path) == before):
        if time.monotonic() >= deadline:
            return True
        time.sleep(POLL_S)
        if not path.exists():
            return False
        now = read_lease(path, INCOMPLETE_S if record else 0.0)
    if now is not None and now.state == ENDED:
        return True
    raise ValueError(owner_refusal(path.parent, now))


def stamp(path: Path) -> tuple[bytes, int]:
    """(content, time of the last change) of a lease file; empty where it is gone."""
    try:
        return path.read_bytes(), path.stat().st_mtime_ns
    except FileNotFoundError:
        return b"", 0


def owner_refusal(folder: Path, record: Record | None) -> str:
    """The message for a run whose folder has a living owner."""
    return (
        f"folder {folder} belongs to a run that is still going ({record or 'another run'}); end"
        " that run first, or set folder to another one"
    )
