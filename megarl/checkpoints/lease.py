"""A run folder has one owner: the run that holds a lock (`flock`) on the file `.owner.json` in it.

    lease = take(folder, patience_s=60)   # raises ValueError if another run lives there
    lease.problem()                       # "" while this run is still the owner
    lease.release()

The kernel gives the lock up when its process ends, however it ends. A network file system may keep
locks to one host: there the owner's heartbeat, a number in the file, shows that it lives.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
import time
import uuid
from concurrent.futures import wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megarl.settings.limits import POLL_S
from megarl.system.console import say
from megarl.system.files import in_thread
from megarl.system.process_state import machine

NAME = ".owner.json"
RENEW_S = 5.0
"""Between two heartbeats."""
ENDING_S = 3.0
"""Given to an owner to end, since a killed process takes a moment."""
RECORD_BYTES = 1024
"""Of the file at every heartbeat, so that each is one write in place."""
RUNS, ENDED = "runs", "ended"


@dataclass(frozen=True)
class Record:
    """Content of `.owner.json`: which run owns the folder."""

    run: str
    """Random id in hexadecimal."""
    host: str
    process: int
    """Of rank 0."""
    since: str
    """When the run took the folder, for people."""
    machine: str = ""
    """Boot of the machine and process namespace."""
    state: str = RUNS
    heartbeats: int = 0

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode().ljust(RECORD_BYTES - 1) + b"\n"


def read_owner(folder: Path) -> Record | None:
    """None if the folder says nothing that can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        return Record(**json.loads((folder / NAME).read_bytes()))
    return None


def is_held(folder: Path) -> bool:
    """Whether a living process holds the folder's lock, as far as this host can tell."""
    with contextlib.suppress(OSError, ValueError), (folder / NAME).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@dataclass(frozen=True)
class Claim:
    """That the run with id `run` owns `folder`; any process of the run can check it."""

    folder: Path
    run: str

    def problem(self) -> str:
        """Why this run must not write to the folder; "" while it may. Reads the file."""
        path, more = self.folder / NAME, "this run ends and writes nothing more there"
        try:
            if f'"run": "{self.run}"'.encode() in path.read_bytes():
                return ""
        except FileNotFoundError:
            return f"the file {path}, by which this run owns its folder, is gone: {more}"
        except OSError as error:
            return (
                f"whether this run still owns its folder {self.folder} cannot be read ({error}), so"
                " nothing more is written there; see to the disk and go on with --resume auto"
            )
        owner = read_owner(self.folder) or "another run"
        return (
            f"the run folder {self.folder} was taken over by {owner}: {more} (no heartbeat was seen"
            " in time: was this run suspended, or did the disk not answer?)"
        )


class Lease:
    """Ownership of a run folder, made by `take`."""

    def __init__(self, claim: Claim, descriptor: int, record: Record) -> None:
        """`descriptor`: of the file `.owner.json`, locked."""
        self.claim, self.run_id, self.problem = claim, claim.run, claim.problem
        self._descriptor, self._record = descriptor, record
        self._ended = threading.Event()
        self._renewing = in_thread("lease", self._renew)

    def require(self) -> None:
        """Raise `OSError` if this run does not own its folder any more."""
        if problem := self.problem():
            raise OSError(errno.EPERM, problem)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            self._record = replace(self._record, heartbeats=self._record.heartbeats + 1)
            # An error is not the end: `problem` says whether the folder is lost.
            with contextlib.suppress(OSError):
                self._write()

    def _write(self) -> None:
        os.pwrite(self._descriptor, self._record.encode(), 0)
        os.fsync(self._descriptor)

    def release(self) -> None:
        """Let the next run take the folder; an otherwise empty one is removed. May be called
        twice.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        wait([self._renewing], RENEW_S)
        with contextlib.suppress(OSError):
            self._record = replace(self._record, state=ENDED)
            self._write()
            folder = self.claim.folder
            if not self.problem() and os.listdir(folder) == [NAME]:
                (folder / NAME).unlink()
                folder.rmdir()
        with contextlib.suppress(OSError):  # a forked child may have the descriptor too
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def take(folder: Path, *, patience_s: float) -> Lease:
    """Own the run folder `folder`, created if missing. If the last owner was on another host and
    has not ended regularly, watch its heartbeat for `patience_s` seconds. Raises `ValueError` if it
    lives, and `OSError` if the folder cannot be written.
    """
    host, since = os.uname().nodename, time.strftime("%Y-%m-%d %H:%M:%S")
    record = Record(uuid.uuid4().hex[:16], host, os.getpid(), since, machine())
    path, aside = folder / NAME, folder / f"{NAME}.{record.run}"
    with contextlib.ExitStack() as stack:
        locked, is_locked = _lock(folder)
        stack.callback(os.close, locked)
        before, content = read_owner(folder), path.read_bytes()
        has_ended = not content or (before is not None and before.state == ENDED)
        is_seen = is_locked and before is not None and before.machine == record.machine
        if not (has_ended or is_seen):
            _watch(folder, content, patience_s)
        # A file of its own: the last owner, if it was only suspended, goes on writing to the old.
        with contextlib.ExitStack() as undo:
            descriptor = os.open(aside, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
            undo.callback(os.close, descriptor)
            undo.callback(aside.unlink, missing_ok=True)
            _try_lock(descriptor)
            os.pwrite(descriptor, record.encode(), 0)
            os.fsync(descriptor)
            aside.rename(path)
            undo.pop_all()
    if not has_ended:
        last = before or "another run"
        say(f"megarl: folder {folder} is taken over from {last}, which ended without releasing it")
    return Lease(Claim(folder.absolute(), record.run), descriptor, record)


def _lock(folder: Path) -> tuple[int, bool]:
    """(descriptor of `.owner.json`; whether its file system has locks, and this process this one).
    Raises `ValueError` if another process keeps the lock.
    """
    path, deadline = folder / NAME, time.monotonic() + ENDING_S
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another run has removed the folder
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
            is_locked = _try_lock(descriptor)
            if is_locked is not False:
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), path.stat()):
                        return descriptor, is_locked is True
            os.close(descriptor)
        if time.monotonic() >= deadline:
            raise ValueError(owner_refusal(folder))
        time.sleep(POLL_S)


def _try_lock(descriptor: int) -> bool | None:
    """False if another process has the lock, None if the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # Lustre that is mounted without `flock`, NFS without lockd
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
            raise
        return None
    return True


def _watch(folder: Path, content: bytes, patience_s: float) -> None:
    """Raise `ValueError` if `.owner.json` changes within `patience_s` seconds: its owner lives.
    Only a change shows that, since clocks differ.
    """
    say(
        f"megarl: folder {folder} is owned by {read_owner(folder) or 'another run'}, which cannot"
        f" be seen from this host: waiting up to {patience_s:g} s for a sign of life"
        " (training.checkpoint.owner_timeout_s)"
    )
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        owner = read_owner(folder)
        if not (folder / NAME).exists() or (owner is not None and owner.state == ENDED):
            break
        if (folder / NAME).read_bytes() != content:
            raise ValueError(owner_refusal(folder))
    folder.mkdir(parents=True, exist_ok=True)  # which its owner may have removed at its end


def refuse_living(folder: Path) -> None:
    """Raise `ValueError` if a living process holds the lock. Does not wait."""
    if is_held(folder):
        raise ValueError(owner_refusal(folder))


def owner_refusal(folder: Path) -> str:
    return (
        f"folder {folder} belongs to a run that is still going"
        f" ({read_owner(folder) or 'another run'}); end that run first, or set folder to another"
        " one"
    )
