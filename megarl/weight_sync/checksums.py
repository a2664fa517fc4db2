"""Content digests that tell whether bytes arrived where they should; made for speed and accidents,
not against an adversary.

A region's digest is seeded with its place in the whole tensor, and digests of regions add up
(modulo 2^64): the sum over a tensor's regions can be made in any order, on any number of ranks, and
still changes where two regions are swapped. On the CPU it is XXH3 (about twice the speed of a
copy); on a GPU a weighted sum of 64-bit words, in tensor operations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash

from megarl.parallel.reshard.boxes import Box

CHUNK_BYTES = 2**18
"""Copied and digested together, so that the digest reads from the processor's cache."""

DEVICE_CHUNK_BYTES = 2**26
"""The same from a GPU to the CPU, where each copy costs a wait."""

WORDS = 2**22
"""64-bit words that a GPU digests at once."""


def carry(source: torch.Tensor, target: torch.Tensor, box: Box) -> int:
    """Copy `source` [rows, columns] to `target` in the target's dtype; the digest of what was
    copied, as an int64.
    """
    if target.device.type != "cpu":
        target.copy_(source)
        return _on_device(target, _seed(box))
    hasher = xxhash.xxh3_64(seed=_seed(box))
    if source.dtype != target.dtype or source.device != target.device:
        for first, last in _chunks(
            target, CHUNK_BYTES if source.device == target.device else DEVICE_CHUNK_BYTES
        ):
            part = source[first:last].to(target.device, target.dtype).contiguous()
            target[first:last].copy_(part)
            hasher.update(_bytes_of(part))
        return signed(hasher.intdigest())
    # By numpy: a call of torch costs as much as copying 100 KB.
    taken, put = _bytes_of(source), _bytes_of(target)
    if source.is_contiguous() and target.is_contiguous():
        taken, put = taken.reshape(-1, 1), put.reshape(-1, 1)
    rows = max(1, CHUNK_BYTES // taken.shape[1])
    for top in range(0, len(taken), rows):
        part = np.ascontiguousarray(taken[top : top + rows])
        put[top : top + rows] = part
        hasher.update(part)  # pyright: ignore[reportArgumentType]
    return signed(hasher.intdigest())


def digest(owned: torch.Tensor, box: Box) -> int:
    """The digest of a region [rows, columns] where it lies."""
    if owned.device.type != "cpu":
        return _on_device(owned, _seed(box))
    hasher = xxhash.xxh3_64(seed=_seed(box))
    for first, last in [(0, len(owned))] if owned.is_contiguous() else _chunks(owned):
        hasher.update(_bytes_of(owned[first:last].contiguous()))
    return signed(hasher.intdigest())


def _chunks(view: torch.Tensor, num_bytes: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    rows = max(1, num_bytes // (view.shape[1] * view.dtype.itemsize))
    return [(first, min(first + rows, view.shape[0])) for first in range(0, view.shape[0], rows)]


def _bytes_of(region: torch.Tensor) -> Any:
    """A CPU region's bytes [rows, columns x itemsize], uncopied, as a numpy array."""
    return region.detach().view(torch.uint8).numpy()


def _seed(box: Box) -> int:
    return xxhash.xxh3_64_intdigest(",".join(map(str, box)).encode())


def signed(value: int) -> int:
    """`value` modulo 2^64 as a signed number: what sums of digests come to."""
    return (value + 2**63) % 2**64 - 2**63


def _on_device(view: torch.Tensor, seed: int) -> int:
    """Sum over 64-bit words of word x odd weight, whose weights are a mix of the word's number and
    the seed.
    """
    flat = view.contiguous().reshape(-1).view(torch.uint8)
    total, rest = signed(seed), flat.numel() % 8
    if rest or flat.storage_offset() % 8:  # words begin where memory does
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 8)])
    words = flat.view(torch.int64)
    for first in range(0, len(words), WORDS):
        part = words[first : first + WORDS]
        place = torch.arange(
            first, first + len(part), dtype=torch.int64, device=part.device
        ) + signed(seed)
        # The finaliser of SplitMix64 (Steele, Lea and Flood, 2014); shifts of negative numbers keep
        # the sign, which does no harm.
        place = (place ^ (place >> 30)) * signed(0xBF58476D1CE4E5B9)
        place = (place ^ (place >> 27)) * signed(0x94D049BB133111EB)
        total += int((part * ((place ^ (place >> 31)) | 1)).sum())
    return signed(total)
