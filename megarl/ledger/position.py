"""How far a ledger goes that belongs to a checkpoint: a resume on another one, or on one that ends
earlier, would count groups twice or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megarl.ledger.journal import SEAL, SEAL_BYTES

BLOCK_BYTES = 1 << 16
"""Bytes in which the end of the last line is looked for at a time."""


def position(path: Path) -> dict[str, int | str]:
    """{"bytes": whole lines of the ledger `path`, "crc": checksum of the last one}; {} if the file
    is missing or has no whole line. What the position covers is on the disk afterwards.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return {}
    with file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - BLOCK_BYTES)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                size = begin + newline + 1
                crc = _crc(path, size)
                os.fsync(file.fileno())
                return {"bytes": size, "crc": crc} if crc else {}
            end = begin
    return {}


def difference(path: Path, before: Mapping[str, int | str]) -> str:
    """Why the ledger `path` does not go on from `before`, what `position` returned for it; "" if it
    does, or if `before` is empty.
    """
    if not before:
        return ""
    size = int(before["bytes"])
    found = path.stat().st_size if path.exists() else 0
    if found < size:
        return f"it has {found} bytes, and had {size} when the checkpoint was written"
    if _crc(path, size) != before["crc"]:
        return f"its line that ends at byte {size} is another one than when it was written"
    return ""


def _crc(path: Path, size: int) -> str:
    """Checksum, in hexadecimal, of the line that ends at byte `size`; "" if no line ends there."""
    with path.open("rb") as file:
        file.seek(max(0, size - SEAL_BYTES))
        seal = SEAL.fullmatch(file.read(min(size, SEAL_BYTES)))
    return seal[1].decode() if seal is not None else ""
