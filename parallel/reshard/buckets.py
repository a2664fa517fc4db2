"""Buckets of weight transfer: buffers of a destination rank that are received together, in one
block of memory, so that messages are few and large. A buffer larger than a bucket is split between
rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megarl.parallel.reshard.boxes import Owned, Piece
from megarl.parallel.reshard.plan import Copy

ALIGN = 64
"""Bytes to which each buffer in a bucket's block is aligned."""


@dataclass(frozen=True)
class Bucket:
    """Buffers of a receiving rank, or parts of them, in one block of memory."""

    number: int
    """From 0."""
    offsets: Mapping[str, int]
    """{buffer: its first byte in the block}"""
    sizes: Mapping[str, int]
    """{buffer: number of its elements in this bucket}"""
    starts: Mapping[str, int]
    """{buffer: index in the whole buffer of the first element in this bucket}"""
    itemsize: int

    @cached_property
    def num_bytes(self) -> int:
        return max(
            (
                self.offsets[name] + _aligned(size * self.itemsize)
                for name, size in self.sizes.items()
            ),
            default=0,
        )

    def buffers(self, block: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """{buffer: flat view} of the memory `block`, uint8 [num_bytes or more]."""
        return {
            name: block[start : start + self.sizes[name] * self.itemsize].view(dtype)
            for name, start in self.offsets.items()
        }

    def part(self, piece: Piece) -> Piece | None:
        """The rows of `piece`, a piece of a whole buffer, that lie in this bucket; its offset
        counts from the bucket's part of the buffer. None without any.
        """
        if piece.buffer not in self.sizes:
            return None
        start = self.starts[piece.buffer]
        if start == 0 and piece.end <= self.sizes[piece.buffer]:
            return piece  # the whole piece is in this bucket
        above, box = piece.offset // piece.stride, piece.box
        first = max(0, start // piece.stride - above)
        last = min(box.rows, (start + self.sizes[piece.buffer]) // piece.stride - above)
        if first >= last:
            return None
        cut = piece.part(box._replace(top=box.top + first, bottom=box.top + last))
        return cut._replace(offset=cut.offset - start)


def make_buckets(owned: Owned, itemsize: int, limit_bytes: int) -> list[Bucket]:
    """Group a destination rank's buffers, in order, into buckets of at most `limit_bytes`.

    Buffers of one module (`layer.weight`, `layer.bias`) stay together where they fit, because
    engines rebuild whole modules. A buffer without whole rows (a ZeRO slice) is not split and may
    exceed the limit, as may a single row.
    """
    widths = _widths(owned)
    modules: dict[str, list[str]] = {}
    for name in owned.sizes:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    filled: list[dict[str, tuple[int, int]]] = [{}]
    for names in modules.values():
        parts = [
            piece
            for name in names
            for piece in _parts(name, owned.sizes[name], widths[name], itemsize, limit_bytes)
        ]
        fits = sum(_aligned(size * itemsize) for _, _, size in parts) <= limit_bytes
        for number, (name, start, size) in enumerate(parts):
            together = parts[number:] if fits and number == 0 else [(name, start, size)]
            if (
                filled[-1]
                and (not fits or number == 0)
                and _bytes(filled[-1], itemsize, together) > limit_bytes
            ):
                filled.append({})
            filled[-1][name] = start, size
    return [_bucket(number, parts, itemsize) for number, parts in enumerate(filled) if parts]


def copies_of(copies: Sequence[Copy], buckets: list[Bucket]) -> list[list[Copy]]:
    """Assign a destination rank's copies to its buckets. Returns by bucket its copies, whose
    destination offsets count from the bucket's part of the buffer.
    """
    where: dict[str, list[Bucket]] = defaultdict(list)
    for bucket in buckets:
        for name in bucket.sizes:
            where[name].append(bucket)
    lists: list[list[Copy]] = [[] for _ in buckets]
    for copy in copies:
        for bucket in where[copy.put.buffer]:
            put = bucket.part(copy.put)
            if put is copy.put:
                lists[bucket.number].append(copy)
            elif put is not None:
                lists[bucket.number].append(copy._replace(taken=copy.taken.part(put.box), put=put))
    return lists


def _widths(owned: Owned) -> dict[str, int]:
    """{buffer: elements in a row}; 0 without whole rows of equal length, as in a ZeRO slice."""
    widths = dict.fromkeys(owned.sizes, -1)
    for piece in owned.pieces:
        fits = widths[piece.buffer] in (-1, piece.stride) and piece.offset % piece.stride == 0
        widths[piece.buffer] = piece.stride if fits and piece.stride == piece.box.columns else 0
    return widths


def _parts(
    name: str, size: int, width: int, itemsize: int, limit_bytes: int
) -> list[tuple[str, int, int]]:
    """[(name, first element, elements)]: buffer `name` in parts of whole rows of at most
    `limit_bytes`.
    """
    if size * itemsize <= limit_bytes or width <= 0:
        return [(name, 0, size)]
    step = max(1, limit_bytes // (width * itemsize)) * width
    return [(name, start, min(step, size - start)) for start in range(0, size, step)]


def _bytes(
    filled: Mapping[str, tuple[int, int]], itemsize: int, more: list[tuple[str, int, int]]
) -> int:
    """Bytes of a bucket with `more`; 2^63 if it has a part of the same buffer already."""
    if any(name in filled for name, _, _ in more):
        return 2**63
    sizes = [size for _, size in filled.values()] + [size for _, _, size in more]
    return sum(_aligned(size * itemsize) for size in sizes)


def _bucket(number: int, parts: Mapping[str, tuple[int, int]], itemsize: int) -> Bucket:
    """`parts`: {buffer: (first element, elements)}."""
    offsets, filled = {}, 0
    for name, (_, size) in parts.items():
        offsets[name] = filled
        filled += _aligned(size * itemsize)
    sizes = {name: size for name, (_, size) in parts.items()}
    return Bucket(
        number, offsets, sizes, {name: start for name, (start, _) in parts.items()}, itemsize
    )


def _aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN
