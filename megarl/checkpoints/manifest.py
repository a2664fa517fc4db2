"""Folders that are whole or absent: digests of their files, and putting a finished checkpoint in
its place.

`digests.json` holds {"algorithm": "xxh3_128", "files": {path within the folder: digest}}, to find
damage (a torn write, a flipped bit, a missing file), not forgery.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import xxhash

from megarl.system.files import read_json, sync

DIGESTS = "digests.json"
ALGORITHM = "xxh3_128"
OTHER_VERSION = f"its {DIGESTS} has no {ALGORITHM} digests: another version of megarl wrote it"


def digest_files(folder: Path, paths: Iterable[Path]) -> dict[str, str]:
    """Sync `paths` to the disk and return {path relative to `folder`: digest}."""
    digests = {}
    for path in sorted(paths):
        sync(path)
        digests[str(path.relative_to(folder))] = file_digest(path)
    return digests


def write_manifest(folder: Path, digests: Mapping[str, str]) -> None:
    """Write `digests` to `digests.json`, and sync it and all folders. Raises `OSError` if a file
    has no digest. A digest may lack its file: on a network file system one of another node can
    appear later.
    """
    present = {str(path.relative_to(folder)) for path in _files(folder)} - {DIGESTS}
    if unknown := sorted(present - set(digests)):
        raise OSError(f"files that no rank has reported: {unknown[:3]}")
    text = json.dumps({"algorithm": ALGORITHM, "files": dict(sorted(digests.items()))}, indent=1)
    (folder / DIGESTS).write_text(text)
    sync(folder / DIGESTS)
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync(path)


def seal(folder: Path) -> None:
    """Digest and sync a folder that a single process has written."""
    write_manifest(folder, digest_files(folder, _files(folder)))


def damage(folder: Path) -> str:
    """What differs from `digests.json`, "" if nothing. Reads all files; raises nothing."""
    try:
        manifest = read_json(folder / DIGESTS)
    except (OSError, ValueError) as error:
        return f"its {DIGESTS} cannot be read ({error})"
    if not isinstance(manifest, dict) or manifest.get("algorithm") != ALGORITHM:
        return OTHER_VERSION
    expected = manifest.get("files")
    if not isinstance(expected, dict):
        return f"its {DIGESTS} names no files"
    present = {str(path.relative_to(folder)) for path in _files(folder)} - {DIGESTS}
    if present != set(expected):
        return f"files are missing or foreign: {sorted(present ^ set(expected))[:3]}"
    for name, digest in expected.items():
        try:
            if file_digest(folder / name) != digest:
                return f"{name} is damaged (its digest differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return ""


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def file_digest(path: Path) -> str:
    """XXH3-128 in hexadecimal."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


ASIDE = ".writing_"
"""Beginning of the names of checkpoints that are being written or removed."""


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary folders, without errors."""
    for left in folder.glob(f"{ASIDE}*"):
        shutil.rmtree(left, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that is to be removed to a name that readers ignore; the caller removes
    it. Raises `OSError`.
    """
    aside = path.with_name(f"{ASIDE}removed_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    return aside


def put_in_place(finished: Path, final: Path) -> list[Path]:
    """Rename a complete checkpoint to `final`; an older one is set aside, and returned for removal.

    Raises `OSError`, and leaves `final` as it was, if the rename fails or `finished` is missing:
    another run that has taken over removes unfinished checkpoints.
    """
    removed = list[Path]()
    if final.exists():
        if not finished.exists():
            raise OSError(errno.EPERM, f"another run has removed {finished}")
        # Under another name first: a kill must not leave half of a checkpoint under its own.
        removed = [set_aside(final)]
    try:
        os.rename(finished, final)
    except OSError:
        if removed and not final.exists():
            os.rename(removed[0], final)
        raise
    return removed
