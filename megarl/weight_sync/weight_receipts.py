"""Receipts of weight versions: what the trainer has sent, and what each engine says it computes
with.

    trainer: digests of what it sent      --receipt_of_weights--> "9f31c0..." --+
    engine:  digests of what its ranks hold --receipt_of_weights--> "9f31c0..." +--> equal, or the
    sample is not trained on

An engine adds to each response the receipt of the weights that generated it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import xxhash


class VersionSpan(NamedTuple):
    """The weights that generated consecutive tokens of a response: their version, and their
    receipt, the digest as hex text by which the engine tells what it computed with ("" if it gave
    none).
    """

    version: int
    receipt: str


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


def refuse_unknown_weights(
    spans: Sequence[VersionSpan],
    known: Mapping[int, Sequence[str]],
    where: str,
    *,
    later: bool = False,
) -> None:
    """Raise `RuntimeError` if tokens were generated with other weights than the trainer has sent.
    `spans`: versions and receipts (digests of the weights) that the engine gave. `known`: {version:
    the receipts that are right for it}; if empty, nothing is checked. Versions older than all known
    ones pass. With `later`, versions newer than all known ones pass too: the trainer may not have
    told them yet. `where`: whose tokens, for the message.
    """
    for version, receipt in spans:
        if not known or version < min(known) or (later and version > max(known)):
            continue
        published = known.get(version, ())
        if receipt not in published:
            raise RuntimeError(
                f"{where} was generated with weights of version {version} and receipt"
                f" {receipt or 'none'}, but the trainer published version {version} with receipt"
                f" {' or '.join(published) or 'none'}; the sample is not trained on, resume the run"
                " from its newest checkpoint"
            )
