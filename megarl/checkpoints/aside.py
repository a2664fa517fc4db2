"""Names of folders that are no checkpoint yet, or none any more."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

ASIDE = ".writing_"
"""Beginning of the names of checkpoints that are being written, and of those that are removed."""


def remove_unfinished(folder: Path) -> None:
    """Remove from `folder` the temporary folders of checkpoints that were never finished, or whose
    removal was not.
    """
    for left in [*folder.glob(f"{ASIDE}*"), *folder.glob(".converted_*")]:
        shutil.rmtree(left, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Give a checkpoint that is to be removed a name that no reader knows; returns its path."""
    aside = path.with_name(f"{ASIDE}removed_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    return aside


def identity(path: Path) -> tuple[int, int] | None:
    """What tells a folder from another one that gets its name; None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def put_in_place(finished: Path, final: Path, before: tuple[int, int] | None) -> list[Path]:
    """Give a finished checkpoint its final name. What had that name before is set aside, and its
    new path returned, to be removed.

    `before`: the `identity` of `final` when this run last owned the run folder. Raises `OSError`,
    and leaves `final` as it is, if another run has written there since, or removed `finished`.
    """
    removed = list[Path]()
    if before is not None:
        # Under another name first: a kill must not leave half of a checkpoint under its own.
        removed = [set_aside(final)]
    try:
        if removed and identity(removed[0]) != before:
            raise OSError(errno.EPERM, f"another run has written {final}")
        os.rename(finished, final)
    except OSError:
        if removed and not final.exists():
            os.rename(removed[0], final)
        raise
    return removed
