"""A Ray of a run's own on this machine, whose files are in a folder that only the run's user can
read and that is removed at the end: /tmp/megarl-PROCESS-RANDOM.

Ray's own choice, /tmp/ray, is one folder for all users of the machine. The sockets of vLLM's
processes are in the folder too.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import ray

from megarl.console import say

RAY_ATTEMPTS = 3
"""Times that Ray is started before its failure ends the run."""
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

    def __init__(self) -> None:
        for left in PLACE.glob(f"megarl-*/{LOCK}"):
            if NAME.fullmatch(left.parent.name):
                _remove_unowned(left)
        self.path = PLACE / f"megarl-{os.getpid()}-{secrets.token_hex(4)}"
        self.path.mkdir(mode=0o700)
        self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Under this name it is looked for, and it is locked already.
        os.rename(self.path / ".lock", self.path / LOCK)

    def remove(self) -> None:
        """Remove the folder with its files."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def start_ray(**options: Any) -> PrivateFolder:
    """Start a Ray of its own on this machine with the options of `ray.init`; returns the folder
    with its files, which is to be removed once Ray has ended. Ray gives itself 30 s, which cannot
    be set and which a busy machine exceeds: then it is started again.
    """
    folder = PrivateFolder()
    try:
        for attempt in range(1, RAY_ATTEMPTS + 1):
            try:
                # Without "local", Ray joins whatever `ray start` last started on this machine.
                ray.init(address="local", _temp_dir=str(folder.path), **options)
                return folder
            except Exception as error:
                if "timed out during startup" not in str(error) or attempt == RAY_ATTEMPTS:
                    raise
                say("megarl: warning: Ray did not start within 30 s; starting it again")
                ray.shutdown()
        raise AssertionError("unreachable")
    except BaseException:
        folder.remove()
        raise


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
