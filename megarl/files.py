"""Files in a folder that others may change: what stands there may be none, and JSON may be damaged.

A FIFO or a device hangs whoever opens it, and a folder where a file belongs, or the reverse, fails
late. `refuse_unfit` looks at a run folder before anything in it is opened.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

LOOKED_AT = ("", "activity", "activity/stacks", "batches", "reference")
"""The folders within a run folder whose entries are looked at, as megarl opens them by name."""
FOLDERS = {"activity", "batches", "checkpoints", "eval", "logs", "reference", "replay", "rollout"}
FOLDERS |= {"stacks", "tensorboard"}
"""Names that a run gives to folders."""
FILES = {".html", ".json", ".jsonl", ".log", ".npy", ".safetensors", ".txt", ".yaml"}
"""Ends of the names that a run gives to files."""


def refuse_unfit(folder: Path) -> None:
    """Raise `ValueError` for an entry of the run folder `folder` that is neither a regular file nor
    a folder, links followed, or is one of the two where a run keeps the other. What cannot be
    looked at, and entries that disappear meanwhile, are passed over.
    """
    for place in (folder / name for name in LOOKED_AT):
        entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError, ValueError):  # none there; no path has such a name
            entries = list(os.scandir(place))
        for entry in entries:
            found, kept = _kind(entry), ""
            if entry.name in FOLDERS:
                kept = "a folder"
            elif Path(entry.name).suffix in FILES:
                kept = "a file"
            if found and found != kept and (kept or found not in ("a file", "a folder")):
                raise ValueError(
                    f"{place / entry.name} is {found}, where a run keeps"
                    f" {kept or 'files and folders'}; move it away"
                )


def _kind(entry: os.DirEntry[str]) -> str:
    """What an entry is, in words; "" where that cannot be seen. Of most, the list of the folder
    tells it already.
    """
    try:
        if entry.is_file():
            return "a file"
        if entry.is_dir():
            return "a folder"
        mode = stat.S_IFMT(entry.stat().st_mode)
    except FileNotFoundError:
        return "a symbolic link to nothing" if entry.is_symlink() else ""
    except OSError as error:
        return "a loop of symbolic links" if error.errno == errno.ELOOP else ""
    return {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}.get(mode, "a device")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises `ValueError` for any text that is not JSON, also for one
    nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def read_json(path: Path) -> Any:
    """The value of the JSON in the file `path`. Raises `OSError` if there is no regular file that
    can be read, and `ValueError` if its content is not JSON or is nested too deeply.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return parse_json(path.read_bytes())
