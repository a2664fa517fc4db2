"""Temporary folders /tmp/megarl-PROCESS-RANDOM, which only their user can read, and which are
removed at the end of their process; those of killed processes are removed by the next one.

/tmp is everybody's, so a name proves nothing: what is removed is a folder itself, no link, of this
user, that no other user may write to, and that no process holds locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
from pathlib import Path

from megarl.errors import UserError

PLACE = Path("/tmp")
"""Where the folders are made. Not TMPDIR: the path of a socket may have 107 characters."""
NAME = re.compile(r"megarl-\d+-[0-9a-f]{8}")
"""Names of the folders."""
KEPT = "kept"
"""File in a folder that is its user's to remove."""


class PrivateFolder:
    """A temporary folder of this process, which holds it locked as long as it lives. Folders of
    processes that were killed are removed when the next one is made.
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path`: where to make it; by default a new name in `PLACE`."""
        for name in filter(NAME.fullmatch, os.listdir(PLACE)):
            _remove_unowned(PLACE / name)
        self.path = path or PLACE / f"megarl-{os.getpid()}-{secrets.token_hex(4)}"
        while True:
            self.path.mkdir(mode=0o700)
            with contextlib.suppress(FileNotFoundError):  # removed, as it was not locked yet
                self._lock = _open(self.path)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                refuse_open(self.path)
                return

    def remove(self) -> None:
        """Remove the folder with its files."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def keep(self) -> None:
        """Leave the folder to its user: no later process removes it."""
        (self.path / KEPT).touch()
        os.close(self._lock)


def refuse_open(path: Path) -> None:
    """Raise `UserError` if another user may look into the folder `path`, `OSError` if it is gone
    or a link.
    """
    descriptor = _open(path)
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not _is_private(found):
        raise UserError(
            f"{path} must be of user {os.geteuid()} with mode 700, and is of user {found.st_uid}"
            f" with mode {stat.S_IMODE(found.st_mode):o}: other users could read or replace what"
            " the run has there; end what changes it, and start again"
        )


def _open(path: Path) -> int:
    """A descriptor of the folder `path`; raises `OSError` if it is no folder, or a link."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _is_private(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _remove_unowned(path: Path) -> None:
    """Remove the folder `path` if it is a private one of this user that no process holds locked."""
    try:
        descriptor = _open(path)
    except OSError:  # another user's, or somebody else has removed it
        return
    try:
        if _is_private(os.fstat(descriptor)):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (path / KEPT).exists():
                shutil.rmtree(path, ignore_errors=True)
    except OSError:  # its process lives
        pass
    finally:
        os.close(descriptor)
