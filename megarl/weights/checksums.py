"""Digests that detect lost or misplaced bytes; fast, and not secure against deliberate changes.

A region's digest is seeded with its position in the whole tensor, and digests add up modulo 2^64.
So the digests of a tensor's regions can be summed in any order and over any number of ranks, and
the sum still changes where two regions are swapped. On the CPU the digest is XXH3, about twice as
fast as a copy; on a GPU it is a weighted sum of 64-bit integers in tensor operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash

from megarl.parallel.reshard.boxes import Box

CHUNK_BYTES = 2**18
"""Bytes that are copied and digested together, so that the digest reads them from the CPU's
cache."""

DEVICE_CHUNK_BYTES = 2**26
"""Bytes of a chunk copied from a GPU, where each copy waits for the device."""

NUM_WORDS = 2**22
"""64-bit integers that a GPU digests at once; bounds the temporary memory."""


Digest = int | torch.Tensor
"""A 64-bit digest of bytes, or a sum of digests modulo 2^64. That of a region on a GPU is a tensor
there, int64 and without dimensions, because reading each one would wait for the GPU; `signed` makes
an int of it."""


Key = TypeVar("Key")


def carried(
    regions: Iterable[tuple[Key, torch.Tensor, torch.Tensor, Box]],
) -> Iterator[tuple[Key, Digest]]:
    """Copy many regions of tensors and digest the bytes of each copy; yields (key, digest) for each
    region, in any order. A digest is a 64-bit int, or a tensor if the target is on a GPU.

    `regions`: (key, source, target, box) of each region. `key` names the region for the caller.
    `source` and `target`: views [rows, columns] of the region alone, of any devices and dtypes; the
    copy has the device and dtype of `target`. `box`: (top, bottom, left, right) of the region in
    the whole tensor, rows [top, bottom) and columns [left, right); part of the digest. Copies from
    a GPU to the host are all started first and then waited for together, so that they overlap.
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
    """Copy a region of a tensor and return the digest of the copied bytes: a 64-bit int, or a
    tensor if `target` is on a GPU. `source` and `target`: views [rows, columns] of the region
    alone; the copy has the dtype and device of `target`. `box`: (top, bottom, left, right) of the
    region in the whole tensor, rows [top, bottom) and columns [left, right); part of the digest.
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
            part = source[first:last].to(target.device, target.dtype).contiguous()
            target[first:last].copy_(part)
            hasher.update(_bytes_of(part))
        return signed(hasher.intdigest())
    # In numpy: one torch call costs as much as copying 100 KB.
    read, written = _bytes_of(source), _bytes_of(target)
    if source.is_contiguous() and target.is_contiguous():
        read, written = read.reshape(-1, 1), written.reshape(-1, 1)
    rows = max(1, CHUNK_BYTES // read.shape[1])
    for top in range(0, len(read), rows):
        part = np.ascontiguousarray(read[top : top + rows])
        written[top : top + rows] = part
        hasher.update(part)  # pyright: ignore[reportArgumentType]
    return signed(hasher.intdigest())


def digest(stored: torch.Tensor, box: Box) -> Digest:
    """Digest of the bytes of a region `stored` [rows, columns]: a 64-bit int or, for a region on a
    GPU, an int64 tensor there, computed in another way and so not equal to the CPU's. Digests of
    regions add up modulo 2^64 to one of the tensor.

    `box`: (top, bottom, left, right) of the region in the whole tensor, rows [top, bottom) and
    columns [left, right); part of the digest.
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
    """(first row, last row + 1) of pieces of at most `num_bytes`, at least one row each."""
    rows = max(1, num_bytes // (view.shape[1] * view.dtype.itemsize))
    return [(first, min(first + rows, view.shape[0])) for first in range(0, view.shape[0], rows)]


def _bytes_of(region: torch.Tensor) -> Any:
    """The bytes of a CPU tensor [rows, columns] as a numpy view, uint8 [rows, columns x
    itemsize]."""
    return region.detach().view(torch.uint8).numpy()


def _seed(box: Box) -> int:
    """Seed of the digest of the region `box`."""
    return xxhash.xxh3_64_intdigest(",".join(map(str, box)).encode())


def signed(value: Digest) -> int:
    """Convert a digest, or a sum of digests modulo 2^64, to a Python int in the range of a signed
    64-bit integer. Of a tensor on a GPU this waits for the GPU.
    """
    return (int(value) + 2**63) % 2**64 - 2**63


def _on_device(view: torch.Tensor, seed: int) -> torch.Tensor:
    """Digest of a tensor on a GPU: the sum of its 64-bit integers times odd pseudo-random weights,
    on the GPU too. A weight depends on the integer's index and on `seed`.
    """
    flat = view.contiguous().reshape(-1).view(torch.uint8)
    total = torch.full((), signed(seed), dtype=torch.int64, device=flat.device)
    rest = flat.numel() % 8
    if rest or flat.storage_offset() % 8:  # int64 views need alignment
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 8)])
    integers = flat.view(torch.int64)
    for first in range(0, len(integers), NUM_WORDS):
        part = integers[first : first + NUM_WORDS]
        weight = torch.arange(
            first, first + len(part), dtype=torch.int64, device=part.device
        ) + signed(seed)
        # The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), here with arithmetic shifts.
        weight = (weight ^ (weight >> 30)) * signed(0xBF58476D1CE4E5B9)
        weight = (weight ^ (weight >> 27)) * signed(0x94D049BB133111EB)
        total = total + (part * ((weight ^ (weight >> 31)) | 1)).sum()
    return total
