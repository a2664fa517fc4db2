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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megarl.system.console import say
from megarl.system.process_state import machine

NAME = ".owner.json"
RENEW_S = 5.0
"""Seconds between two heartbeats."""
POLL_S = 0.25
"""Seconds between two looks at the file of another run."""
ENDING_S = 3.0
"""Seconds given to an owner to end, since a killed process takes a moment."""
RECORD_BYTES = 1024
"""Size of the file, the same at every heartbeat, so that each is one write in place."""
RUNS, ENDED = "runs", "ended"


@dataclass(frozen=True)
class Record:
    """Content of the file `.owner.json` of a run folder: which run owns the folder."""

    run: str
    """Random id of the run, in hexadecimal."""
    host: str
    process: int
    """Process id of rank 0."""
    since: str
    """Date and time at which the run took the folder, for people."""
    machine: str = ""
    """Id of the boot of the machine and of the process namespace."""
    state: str = RUNS
    heartbeats: int = 0

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"

    def encode(self) -> bytes:
        """The file's 1024 bytes: a JSON object, spaces and a newline."""
        return json.dumps(asdict(self)).encode().ljust(RECORD_BYTES - 1) + b"\n"


def read_owner(folder: Path) -> Record | None:
    """What the run folder `folder` says of its owner; None if it says nothing that can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        return Record(**json.loads((folder / NAME).read_bytes()))
    return None


def is_held(folder: Path) -> bool:
    """Whether a living process holds the lock of the run folder `folder`, as far as this host can
    tell.
    """
    with contextlib.suppress(OSError, ValueError), (folder / NAME).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@dataclass(frozen=True)
class Claim:
    """The statement that the run with the id `run` owns the run folder `folder`, which any process
    of the run, on any host, can check by `problem`.
    """

    folder: Path
    run: str

    def problem(self) -> str:
        """Why this run must not write to the folder, as a sentence for the user; "" while the run
        owns the folder. Reads the file at each call.
        """
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
    """The ownership of this process over a run folder, made by `take` and kept until `release`.
    `problem()` gives "" or why the folder is lost.
    """

    def __init__(self, claim: Claim, descriptor: int, record: Record) -> None:
        """`descriptor`: of the file `.owner.json`, locked."""
        self.claim, self.run_id, self.problem = claim, claim.run, claim.problem
        self._descriptor, self._record = descriptor, record
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

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
        """End the ownership, so that the next run can take the folder at once; a second call does
        nothing. If the folder holds nothing else, it is removed.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(timeout=RENEW_S)
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
    """Make this process the owner of the run folder `folder`, which is created if missing; returns
    the lease, to be released at the end. If the last owner was on another host and has not ended
    regularly, its heartbeat is watched for `patience_s` seconds, for which the call blocks. Raises
    `ValueError`, which names the owner, if the owner lives, and `OSError` if the folder cannot be
    written.
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
        say(f"megarl: folder {folder} is taken over from {last}, which has ended without a word")
    return Lease(Claim(folder.absolute(), record.run), descriptor, record)


def _lock(folder: Path) -> tuple[int, bool]:
    """(a descriptor of the file `.owner.json`, which is made if missing; whether its file system
    has locks, and this process this one). Raises `ValueError` if another process keeps the lock.
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
    """Lock an open file for this process; False if another one has the lock, None if its file
    system has no locks.
    """
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
    """Raise `ValueError` if the file `.owner.json`, which has `content`, changes within
    `patience_s` seconds: its owner lives. Only a change shows that, since clocks differ.
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
    """Raise `ValueError` if a living process holds the lock of the run folder `folder`. Writes
    nothing and does not wait.
    """
    if is_held(folder):
        raise ValueError(owner_refusal(folder))


def owner_refusal(folder: Path) -> str:
    """The message for a run whose folder has a living owner."""
    return (
        f"folder {folder} belongs to a run that is still going"
        f" ({read_owner(folder) or 'another run'}); end that run first, or set folder to another"
        " one"
    )
