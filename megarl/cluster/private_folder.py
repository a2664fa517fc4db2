"""Temporary folders /tmp/megarl-PROCESS-RANDOM, which only their user can read, and which are
removed at the end of their process; those of killed processes are removed by the next one.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path

PLACE = Path("/tmp")
"""Where the folders are made. Not TMPDIR: the path of a socket may have 107 characters."""
NAME = re.compile(r"megarl-\d+-[0-9a-f]{8}")
"""Names of the folders."""
LOCK = "lock"
"""File in a folder that the process of the folder holds locked as long as it lives."""


class PrivateFolder:
    """A temporary folder of this process. Folders of processes that were killed are removed when
    the next one is made.
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path`: where to make it; by default a new name in `PLACE`."""
        for left in PLACE.glob(f"megarl-*/{LOCK}"):
            if NAME.fullmatch(left.parent.name):
                _remove_unowned(left)
        self.path = path or PLACE / f"megarl-{os.getpid()}-{secrets.token_hex(4)}"
        self.path.mkdir(mode=0o700)
        self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Under this name it is looked for, and it is locked already.
        os.rename(self.path / ".lock", self.path / LOCK)

    def remove(self) -> None:
        """Remove the folder with its files."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def keep(self) -> None:
        """Leave the folder to its user: no later process removes it."""
        (self.path / LOCK).unlink(missing_ok=True)
        os.close(self._lock)


def _remove_unowned(lock: Path) -> None:
    """Remove the folder of the file `lock` if it is of this user and no process holds it locked."""
    try:
        if lock.parent.stat().st_uid != os.getuid():
            return
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:  # somebody else has removed it
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent, ignore_errors=True)
    except OSError:  # its process lives
        pass
    finally:
        os.close(descriptor)
