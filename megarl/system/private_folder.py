"""The folder of a run's temporary files, /tmp/megarl-PROCESS-RANDOM: closed to other users, and
removed at the end of the run, with the processes and the shared memory of the run that are left. If
the process that made it is killed, the next run of the same user does that.

    run_folder --MEGARL_FOLDER, TMPDIR--> every process of the run --> files, sockets, shared memory

/tmp is everybody's, so a name proves nothing: what is removed is a folder itself, no link, of this
user, that no other user may look into, and that no process holds locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import signal
import stat
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import UserError
from megarl.system.files import remove_folder

if TYPE_CHECKING:
    import psutil

PLACE = Path("/tmp")
"""Where the folders are made. Not TMPDIR: the path of a socket may have 107 characters."""
NAME = re.compile(r"megarl-\d+-[0-9a-f]{8}")
"""Names of the folders."""
MARK = "MEGARL_FOLDER"
"""Name of the environment variable, in every process of a run, with the path of the run's temporary
folder: a process is known by it as the run's, whoever its parent is. What a verifier starts has a
further part behind the path, by which it is known as that verifier's."""
SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.02
KILLED_WITHIN_S = 2.0
"""Seconds for killed processes to disappear; those that a driver holds are left after it."""


class PrivateFolder:
    """A temporary folder of this process, /tmp/megarl-PID-RANDOM with mode 700, locked as long as
    the process lives; `remove` deletes it. Making one also cleans up after runs of the same user
    whose process was killed: kills their remaining processes, and removes their folders and shared
    memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Make the folder. `path`: the folder, which must not exist; None: one with a new name in
        `PLACE`. Raises `UserError` if the folder cannot be made.
        """
        self.path = path or PLACE / f"megarl-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            for name in filter(NAME.fullmatch, os.listdir(PLACE)):
                _remove_unowned(PLACE / name)
            self._make()
        except OSError as error:
            raise UserError(
                f"a run keeps its sockets and temporary files in {PLACE}, where {self.path} cannot"
                f" be made ({error.strerror}); make {PLACE} a folder in which you may write"
            ) from error

    def _make(self) -> None:
        while True:
            self.path.mkdir(mode=0o700)
            with contextlib.suppress(FileNotFoundError):  # removed, as it was not locked yet
                self._lock = _open(self.path)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                refuse_open(self.path)
                return

    def remove(self) -> None:
        """Remove this temporary folder with its files, and the run's shared memory on this machine:
        the files in /dev/shm whose names begin with the folder's name.
        """
        _remove_files(self.path)
        os.close(self._lock)


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A context manager that yields the path of the temporary folder of the run, which all its
    processes on this machine share. Until the end of the block, temporary files of this process,
    and of those that it starts, are made in the folder's `tmp` (TMPDIR is set).

    The first process of the run makes the folder; its child processes find it by MEGARL_FOLDER in
    the environment. At the end of its block, the process that made the folder kills all other
    processes of the run on this machine, and removes the folder. Raises `UserError` if the folder
    cannot be made or other users could look into it.
    """
    made, path = None, Path(os.environ.get(MARK) or "/none")
    if path.is_dir():
        refuse_open(path)
    else:
        made = PrivateFolder()
        path = made.path
    before = {name: os.environ.get(name) for name in (MARK, "TMPDIR")}
    try:
        use(path)
        yield path
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        tempfile.tempdir = None
        if made is not None:
            kill_marked(str(path))
            made.remove()


def use(path: Path) -> None:
    """Make this process, and those that it starts, belong to the run whose temporary folder is
    `path`: sets MEGARL_FOLDER and TMPDIR in the environment, and makes the folder `tmp` in it.
    """
    place = path / "tmp"
    place.mkdir(mode=0o700, exist_ok=True)
    os.environ |= {MARK: str(path), "TMPDIR": str(place)}
    tempfile.tempdir = None  # Python remembers what TMPDIR was at its first temporary file


def shared_name() -> str:
    """A new name for a piece of shared memory (/dev/shm) of the run. It begins with the name of the
    run's temporary folder, by which the piece is found and removed at the end of the run.
    """
    return f"{Path(os.environ.get(MARK) or 'megarl').name}-{secrets.token_hex(8)}"


def refuse_open(path: Path) -> None:
    """Raise `UserError` if `path` is no folder, is a link, or belongs or is open to another user;
    `OSError` if it does not exist.
    """
    found = path.lstat()
    if not (stat.S_ISDIR(found.st_mode) and _is_private(found)):
        raise UserError(
            f"{path} must be of user {os.geteuid()} with mode 700, and is of user {found.st_uid}"
            f" with mode {stat.S_IMODE(found.st_mode):o}: other users could read or replace what"
            " the run has there; end what changes it, and start again"
        )


def kill_marked(mark: str, leaders: Collection[int] = ()) -> list[int]:
    """Kill (SIGKILL) every process of a run on this node, until none is left or 2 seconds have
    passed; returns the ids of those that still run. Not killed are this process and its ancestors.

    A process belongs to the run if its environment variable MEGARL_FOLDER is `mark`, the path of
    the run's temporary folder, or a path below `mark`, if it is in the session of a process whose
    id is in `leaders`, or if it descends from such a process.
    """
    deadline = time.monotonic() + KILLED_WITHIN_S
    while left := marked_processes(mark, leaders):
        if time.monotonic() > deadline:
            break
        for number in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        time.sleep(POLL_S)
    return left


def marked_processes(mark: str, leaders: Collection[int] = ()) -> list[int]:
    """Ids, sorted, of the running processes of a run on this node, with all their descendants:
    processes whose environment variable MEGARL_FOLDER is `mark`, the path of the run's temporary
    folder, or begins with `mark` and a slash; and processes in the session of a process whose id is
    in `leaders`. This process and its ancestors are left out.
    """
    import psutil

    found: set[int] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            marked = f"{process.environ().get(MARK)}/".startswith(f"{mark}/")
            if not marked and os.getsid(process.pid) not in leaders:
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                found |= {process.pid, *(child.pid for child in process.children(recursive=True))}
    own = psutil.Process()
    return sorted(found - {own.pid, *(one.pid for one in own.parents())})


def is_of_this_run(process: psutil.Process) -> bool:
    """Whether `process` belongs to the same run as this process: its environment variable
    MEGARL_FOLDER, the run's temporary folder, is the same, or the same torchrun has started it.
    False for a process whose environment cannot be read.
    """
    import psutil

    # The process that made the run's folder, of which the mark has the id, is not marked itself.
    if process.pid == os.getpid() or f"/megarl-{process.pid}-" in os.environ.get(MARK, ""):
        return True
    with contextlib.suppress(psutil.Error, OSError):
        found = process.environ()
        names = ((MARK,), ("TORCHELASTIC_RUN_ID", "MASTER_PORT"))
        return any(
            all(os.environ.get(name) and found.get(name) == os.environ[name] for name in part)
            for part in names
        )
    return False


def _open(path: Path) -> int:
    """A descriptor of the folder `path`; raises `OSError` if it is no folder, or a link."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _is_private(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _remove_files(path: Path) -> None:
    for name in os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else ():
        if name.startswith(f"{path.name}-"):
            with contextlib.suppress(OSError):  # another user's, who has chosen the name
                (SHARED_MEMORY / name).unlink()
    remove_folder(path)


def _remove_unowned(path: Path) -> None:
    """Remove the folder `path`, and what is left of its run, if it is a private folder of this user
    that no process holds locked.
    """
    try:
        descriptor = _open(path)
    except OSError:  # another user's, or somebody else has removed it
        return
    try:
        if _is_private(os.fstat(descriptor)):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kill_marked(str(path))
            _remove_files(path)
    except OSError:  # its process lives
        pass
    finally:
        os.close(descriptor)
