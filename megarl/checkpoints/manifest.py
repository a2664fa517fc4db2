"""Digests of a folder's files, by which damage is found later; and bringing files to the disk.

`digests.json` holds {"algorithm": "xxh3_128", "files": {path within the folder: digest}}. The
digests find damage (a torn write, a flipped bit, a missing file), not forgery.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import xxhash

from megarl.files import read_json

DIGESTS = "digests.json"
ALGORITHM = "xxh3_128"
CHUNK_BYTES = 4 * 2**20


def digest_files(folder: Path, paths: Iterable[Path]) -> dict[str, str]:
    """Sync files to disk and return {path within `folder`: digest}."""
    digests = {}
    for path in sorted(paths):
        sync(path)
        digests[str(path.relative_to(folder))] = file_digest(path)
    return digests


def write_manifest(folder: Path, digests: Mapping[str, str]) -> None:
    """Write `digests.json`, then sync it and all folders within `folder` to disk.

    Raises `OSError` if a file in the folder has no digest. A file with a digest may be missing
    here: on a network file system a file of another node can appear later.
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
    """Write the digests of all files of a folder that a single process has written, and sync the
    folder to disk.
    """
    write_manifest(folder, digest_files(folder, _files(folder)))


def damage(folder: Path) -> str:
    """Compare a folder with its `digests.json`: a message that names a missing, changed or
    unexpected file, or an empty string.
    """
    try:
        found = read_json(folder / DIGESTS)
    except (OSError, ValueError) as error:
        return f"its {DIGESTS} cannot be read ({error})"
    if not isinstance(found, dict) or found.get("algorithm") != ALGORITHM:
        return f"its {DIGESTS} has no {ALGORITHM} digests: another version of megarl wrote it"
    expected = found.get("files")
    if not isinstance(expected, dict):
        return f"its {DIGESTS} names no files"
    present = {str(path.relative_to(folder)) for path in _files(folder)} - {DIGESTS}
    if present != set(expected):
        return f"files are missing or foreign: {sorted(present ^ set(expected))[:3]}"
    for name, wanted in expected.items():
        try:
            if file_digest(folder / name) != wanted:
                return f"{name} is damaged (its digest differs)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return ""


def has_other_digests(folder: Path) -> bool:
    """Whether `digests.json` of a folder can be read and has no digests that this version knows."""
    try:
        found = read_json(folder / DIGESTS)
    except (OSError, ValueError):
        return False
    return not isinstance(found, dict) or found.get("algorithm") != ALGORITHM


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def file_digest(path: Path) -> str:
    """XXH3-128 digest of a file, in hexadecimal."""
    hasher, chunk = xxhash.xxh3_128(), bytearray(CHUNK_BYTES)
    view = memoryview(chunk)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):
            hasher.update(view[:count])
    return hasher.hexdigest()


def sync(path: Path) -> None:
    """Sync a file or folder to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
