"""Receipts: digests of a weight version by which trainer, engines and ledger name its bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import xxhash


def receipt_of_weights(digests: Sequence[Sequence[int]]) -> str:
    """XXH3 digest, 16 hexadecimal digits. `digests`: for each rank of an engine, those of its
    tensors, in the table's order.
    """
    hasher = xxhash.xxh3_64()
    for rank_digests in digests:
        hasher.update(struct.pack(f"<q{len(rank_digests)}q", len(rank_digests), *rank_digests))
    return hasher.hexdigest()


def receipt_of_adapter(files: Mapping[str, bytes]) -> str:
    """XXH3 digest, 16 hexadecimal digits, of {file name: content} in any order."""
    hasher = xxhash.xxh3_64()
    for name, content in sorted(files.items()):
        hasher.update(struct.pack("<qq", len(name), len(content)) + name.encode() + content)
    return hasher.hexdigest()
