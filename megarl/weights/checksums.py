"""Digests that detect lost or misplaced bytes, not deliberate changes.

A region's digest is seeded with its position in the tensor, and digests add up modulo 2^64. Sums
over regions and ranks have no order, yet change where two regions are swapped. On the CPU the
digest is XXH3, on a GPU a weighted sum of 64-bit integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash

from megarl.parallel.reshard.boxes import Box

CHUNK_BYTES = 2**18
"""Bytes copied and digested together, so that the digest reads from the CPU's cache."""

DEVICE_CHUNK_BYTES = 2**26
"""As `CHUNK_BYTES`, for copies from a GPU, each of which waits for the device."""

NUM_WORDS = 2**22
"""64-bit integers that a GPU digests at once; bounds the temporary memory."""


Digest = int | torch.Tensor
"""A 64-bit digest or a sum of digests; an int64 scalar on the GPU for regions there, as reading it
would wait.
"""


Key = TypeVar("Key")


def carried(
    regions: Iterable[tuple[Key, torch.Tensor, torch.Tensor, Box]],
) -> Iterator[tuple[Key, Digest]]:
    """Copy regions (key, source, target, box), as `carry`; yields (key, digest), in any order.
    Copies from GPU to host overlap.
    """
    started = []
    for key, source, target, box in regions:
        # Torch would copy a strided target through memory that it does not wait for.
        if _on_gpu(source) and not _on_gpu(target) and target.is_contiguous():
            target.copy_(source.to(target.dtype).contiguous(), non_blocking=True)
            started.append((key, source.device, target, box))
        else:
            yield key, carry(source, target, box)
    for device in {device for _, device, _, _ in started}:
        torch.cuda.current_stream(device).synchronize()
    for key, _, target, box in started:
        yield key, digest(target, box)


def carry(source: torch.Tensor, target: torch.Tensor, box: Box) -> Digest:
    """Copy a region and return the digest of the copied bytes.

    `source`, `target`: views [rows, columns] of the region; the copy has the target's dtype and
    device. `box`: (top, bottom, left, right) of the region in the whole tensor, a part of the
    digest.
    """
    if target.device.type != "cpu":
        target.copy_(source)
        # Computed on the GPU of this rank: that of `target` may be full of an engine's cache.
        copied = target if source.device.type == "cpu" else source.to(target.dtype)
        return _on_device(copied, _seed(box))
    hasher = xxhash.xxh3_64(seed=_seed(box))
    if source.dtype != target.dtype or source.device != target.device:
        for first, last in _chunks(
            target, CHUNK_BYTES if source.device == target.device else DEVICE_CHUNK_BYTES
        ):
            chunk = source[first:last].to(target.device, target.dtype).contiguous()
            target[first:last].copy_(chunk)
            hasher.update(_bytes_of(chunk))
        return signed(hasher.intdigest())
    # In numpy: one torch call costs as much as copying 100 KB.
    read, written = _bytes_of(source), _bytes_of(target)
    if source.is_contiguous() and target.is_contiguous():
        read, written = read.reshape(-1, 1), written.reshape(-1, 1)
    rows = max(1, CHUNK_BYTES // read.shape[1])
    for top in range(0, len(read), rows):
        chunk = np.ascontiguousarray(read[top : top + rows])
        written[top : top + rows] = chunk
        hasher.update(chunk)  # pyright: ignore[reportArgumentType]
    return signed(hasher.intdigest())


def digest(stored: torch.Tensor, box: Box) -> Digest:
    """Digest of a region `stored` [rows, columns] with `box` as in `carry`. A GPU's differs from a
    CPU's.
    """
    if stored.device.type != "cpu":
        return _on_device(stored, _seed(box))
    hasher = xxhash.xxh3_64(seed=_seed(box))
    for first, last in [(0, len(stored))] if stored.is_contiguous() else _chunks(stored):
        hasher.update(_bytes_of(stored[first:last].contiguous()))
    return signed(hasher.intdigest())


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def _chunks(view: torch.Tensor, num_bytes: int = CHUNK_BYTES) -> list[tuple[int, int]]:
    """(first row, last row + 1) of chunks of at most `num_bytes`, or one row."""
    rows = max(1, num_bytes // (view.shape[1] * view.dtype.itemsize))
    return [(first, min(first + rows, view.shape[0])) for first in range(0, view.shape[0], rows)]


def _bytes_of(region: torch.Tensor) -> Any:
    """uint8 [rows, columns x itemsize], a view."""
    return region.detach().view(torch.uint8).numpy()


def _seed(box: Box) -> int:
    return xxhash.xxh3_64_intdigest(",".join(map(str, box)).encode())


def signed(value: Digest) -> int:
    """A digest as a signed 64-bit Python int; waits for the GPU."""
    return (int(value) + 2**63) % 2**64 - 2**63


def _on_device(view: torch.Tensor, seed: int) -> torch.Tensor:
    """Sum of the tensor's 64-bit integers times odd pseudo-random weights of (index, seed)."""
    flat = view.contiguous().reshape(-1).view(torch.uint8)
    total = torch.full((), signed(seed), dtype=torch.int64, device=flat.device)
    rest = flat.numel() % 8
    if rest or flat.storage_offset() % 8:  # int64 views need alignment
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 8)])
    integers = flat.view(torch.int64)
    for first in range(0, len(integers), NUM_WORDS):
        chunk = integers[first : first + NUM_WORDS]
        weight = torch.arange(
            first, first + len(chunk), dtype=torch.int64, device=chunk.device
        ) + signed(seed)
        # The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), here with arithmetic shifts.
        weight = (weight ^ (weight >> 30)) * signed(0xBF58476D1CE4E5B9)
        weight = (weight ^ (weight >> 27)) * signed(0x94D049BB133111EB)
        total = total + (chunk * ((weight ^ (weight >> 31)) | 1)).sum()
    return total
