"""Names of folders that are no checkpoint yet, or none any more."""

from __future__ import annotations

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
