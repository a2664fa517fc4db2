"""The folder of a run's temporary files, /tmp/megarl-PROCESS-RANDOM: closed to other users, and
removed at the end of the run with its remaining processes and shared memory. If the process that
made it is killed, the next run of the same user does that.

    run_folder --MEGARL_FOLDER, TMPDIR--> every process of the run --> files, sockets, shared memory

Any user may use any name in /tmp. Removed is only a folder, no link, of this user with mode 700,
whose lock no process holds.
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
from collections.abc import Iterator
from pathlib import Path

from megarl.errors import UserError
from megarl.system.files import remove_folder

PLACE = Path("/tmp")
"""Where the folders are made. Not TMPDIR: the path of a socket may have 107 characters."""
NAME = re.compile(r"megarl-\d+-[0-9a-f]{8}")
MARK = "MEGARL_FOLDER"
"""Environment variable with the folder's path, in every process of a run; in those of a verifier
with a further part behind it."""
SHARED_MEMORY = Path("/dev/shm")


class PrivateFolder:
    """A temporary folder with mode 700, locked as long as this process lives."""

    def __init__(self, path: Path | None = None) -> None:
        """Make the folder, and clean up after killed runs of this user. `path`: must not exist;
        None: a new name in `PLACE`. Raises `UserError` if the folder cannot be made.
        """
        self.path = path or PLACE / f"megarl-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            for name in filter(NAME.fullmatch, os.listdir(PLACE)):
                with contextlib.suppress(OSError, UserError):  # its process lives, or not ours
                    lock = _lock(PLACE / name, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    kill_marked(str(PLACE / name))
                    _remove(PLACE / name, lock)
            self._lock = -1
            while self._lock < 0:
                self.path.mkdir(mode=0o700)
                with contextlib.suppress(FileNotFoundError):  # removed before it was locked
                    self._lock = _lock(self.path, fcntl.LOCK_EX)
        except OSError as error:
            raise UserError(
                f"a run keeps its sockets and temporary files in {PLACE}, where {self.path} cannot"
                f" be made ({error.strerror}); make {PLACE} a folder in which you may write"
            ) from error

    def remove(self) -> None:
        """Remove the folder, and the run's shared memory on this machine."""
        _remove(self.path, self._lock)


def _lock(path: Path, operation: int) -> int:
    """A descriptor that holds the lock of the private folder `path`. Raises `OSError` if there is
    none or another process holds its lock, `UserError` as `refuse_open`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, operation)
        refuse_open(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove(path: Path, lock: int) -> None:
    for name in os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else ():
        if name.startswith(f"{path.name}-"):
            with contextlib.suppress(OSError):  # another user's, who has chosen the name
                (SHARED_MEMORY / name).unlink()
    remove_folder(path)
    os.close(lock)


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """A context manager that yields the path of the run's temporary folder, one for all its
    processes on this machine. Within the block, temporary files are made there.

    The first process of the run makes the folder; at the end of its block it kills the run's other
    processes here, and removes the folder. Raises `UserError` if it cannot be made or is open to
    other users.
    """
    folder, path = None, Path(os.environ.get(MARK) or "/none")
    if path.is_dir():
        refuse_open(path)
    else:
        folder = PrivateFolder()
        path = folder.path
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
        if folder is not None:
            kill_marked(str(path))
            folder.remove()


def use(path: Path) -> None:
    """Make this process, and those that it starts, part of the run whose folder is `path`."""
    tmp = path / "tmp"
    tmp.mkdir(mode=0o700, exist_ok=True)
    os.environ |= {MARK: str(path), "TMPDIR": str(tmp)}
    tempfile.tempdir = None  # Python remembers what TMPDIR was at its first temporary file


def shared_name() -> str:
    """A new name for shared memory (/dev/shm), which is removed with the run's folder."""
    return f"{Path(os.environ.get(MARK) or 'megarl').name}-{secrets.token_hex(8)}"


def refuse_open(path: Path) -> None:
    """Raise `UserError` if `path` is no folder, is a link, or belongs or is open to another user;
    `OSError` if it does not exist.
    """
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise UserError(
            f"{path} must be of user {os.geteuid()} with mode 700, and is of user {info.st_uid}"
            f" with mode {stat.S_IMODE(info.st_mode):o}: other users could read or replace what"
            " the run has there; end what changes it, and start again"
        )


def kill_marked(mark: str) -> None:
    """Kill (SIGKILL) the `marked_processes` until none is left or 2 seconds have passed."""
    deadline = time.monotonic() + 2.0  # a driver may hold some for longer
    while (pids := marked_processes(mark)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def marked_processes(folder: str) -> list[int]:
    """Sorted ids of the processes of the run with this folder: those whose MEGARL_FOLDER is
    `folder` or a path below, and their descendants; without this process and its ancestors.
    """
    import psutil

    pids: set[int] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # ended, or of another user
            is_marked = f"{process.environ().get(MARK)}/".startswith(f"{folder}/")
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                pids |= {process.pid, *(child.pid for child in process.children(recursive=True))}
    current = psutil.Process()
    return sorted(pids - {current.pid, *(parent.pid for parent in current.parents())})
