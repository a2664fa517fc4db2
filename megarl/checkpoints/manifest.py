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

DIGESTS = "digests.json"
ALGORITHM = "xxh3_128"
CHUNK_BYTES = 4 * 2**20


def digest_files(folder: Path, paths: Iterable[Path]) -> dict[str, str]:
    """Bring files to the disk; returns {path within `folder`: digest}."""
    digests = {}
    for path in sorted(paths):
        sync(path)
        digests[str(path.relative_to(folder))] = digest(path)
    return digests


def write_manifest(folder: Path, digests: Mapping[str, str]) -> None:
    """Write `digests.json`, and bring it and every folder within `folder` to the disk.

    Raises `OSError` for a file without a digest. A file that is not seen here was reported by the
    rank that wrote it: on a network file system another node may see it only later.
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
    """Digest every file of a folder that one process has written, and bring all of it to the
    disk.
    """
    write_manifest(folder, digest_files(folder, _files(folder)))


def damage(folder: Path) -> str:
    """What is wrong with a sealed folder, or an empty string: a missing, changed or unexpected
    file.
    """
    try:
        found = json.loads((folder / DIGESTS).read_text())
    except (OSError, ValueError) as error:
        return f"its {DIGESTS} cannot be read ({error})"
    if not isinstance(found, dict) or found.get("algorithm") != ALGORITHM:
        return f"its {DIGESTS} has no {ALGORITHM} digests: another version of megarl wrote it"
    expected = found["files"]
    present = {str(path.relative_to(folder)) for path in _files(folder)} - {DIGESTS}
    if present != set(expected):
        return f"files are missing or foreign: {sorted(present ^ set(expected))[:3]}"
    for name, wanted in expected.items():
        if digest(folder / name) != wanted:
            return f"{name} is damaged (its digest differs)"
    return ""


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def digest(path: Path) -> str:
    """XXH3-128 of a file, in hexadecimal."""
    hasher, chunk = xxhash.xxh3_128(), bytearray(CHUNK_BYTES)
    view = memoryview(chunk)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):
            hasher.update(view[:count])
    return hasher.hexdigest()


def sync(path: Path) -> None:
    """Bring a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
