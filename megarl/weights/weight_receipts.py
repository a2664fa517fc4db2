"""Receipts of weight versions: what the trainer has sent, and what each engine says it computes
with.

    trainer: digests of what it sent      --receipt_of_weights--> "9f31c0..." --+
    engine:  digests of what its ranks hold --receipt_of_weights--> "9f31c0..." +--> equal, or the
    run ends

The ledger has the receipt of each version.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import xxhash


def receipt_of_weights(digests: Sequence[Sequence[int]]) -> str:
    """Receipt of whole weights: an XXH3 digest as 16 hexadecimal digits. `digests`: for each
    tensor-parallel rank of an engine, the digests of the rank's tensors, as signed 64-bit integers
    in the order of the model's list of tensors, the parameter table.
    """
    hasher = xxhash.xxh3_64()
    for of_rank in digests:
        hasher.update(struct.pack(f"<q{len(of_rank)}q", len(of_rank), *of_rank))
    return hasher.hexdigest()


def receipt_of_adapter(files: Mapping[str, bytes]) -> str:
    """Receipt of LoRA adapters: an XXH3 digest, as 16 hexadecimal digits, of their files {name:
    content}, in whatever order.
    """
    hasher = xxhash.xxh3_64()
    for name, content in sorted(files.items()):
        hasher.update(struct.pack("<qq", len(name), len(content)) + name.encode() + content)
    return hasher.hexdigest()
