"""Buckets of weight transfer: groups of a destination rank's flat buffers that are received
together, in one block of memory, so that few large messages are sent.

Small buffers share a bucket; a buffer larger than a bucket is split between rows into buckets of
its own.
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
"""Bytes to which each buffer in a bucket's memory block is aligned."""


@dataclass(frozen=True)
class Bucket:
    """Flat buffers of a receiving rank, or parts of them, that are received together in one block
    of memory: for each buffer its first byte in the block (`offsets`), its number of elements here
    (`sizes`) and the index in the whole buffer of the first of them (`starts`). `number` is the
    bucket's place in the order of transfer, from 0. Made by `make_buckets`.
    """

    number: int
    """Position of the bucket in the order of transfer, from 0."""
    offsets: Mapping[str, int]
    """{buffer: its first byte in the bucket's memory block}"""
    sizes: Mapping[str, int]
    """{buffer: number of its elements in this bucket}"""
    starts: Mapping[str, int]
    """{buffer: index in the whole buffer of the first element that is in this bucket}"""
    itemsize: int
    """Bytes of one element of the buffers."""

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the bucket's memory block, with the alignment of each buffer."""
        return max(
            (
                self.offsets[name] + _aligned(size * self.itemsize)
                for name, size in self.sizes.items()
            ),
            default=0,
        )

    def buffers(self, block: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """{buffer: flat view of `dtype`} of the bucket's memory `block`, a uint8 tensor
        [num_bytes or more]; writing to a view writes to the block.
        """
        return {
            name: block[start : start + self.sizes[name] * self.itemsize].view(dtype)
            for name, start in self.offsets.items()
        }

    def part(self, piece: Piece) -> Piece | None:
        """Cut `piece`, a rectangle of a tensor that lies in one of the rank's whole buffers, to the
        rows that lie in this bucket. The offset of the result counts elements from the beginning of
        the bucket's part of the buffer. None if no row of it lies here.
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
        part = piece.part(box._replace(top=box.top + first, bottom=box.top + last))
        return part._replace(offset=part.offset - start)


def make_buckets(owned: Owned, itemsize: int, limit_bytes: int) -> list[Bucket]:
    """Group a destination rank's buffers, in order, into buckets of at most `limit_bytes` bytes.
    `owned`: what lies in the buffers; `itemsize`: bytes of an element.

    Buffers of one module (`layer.weight`, `layer.bias`) stay together where they fit, because
    engines rebuild whole modules. A larger buffer is split between rows, into parts of at least one
    row; one that holds no whole rows of equal length (a ZeRO slice) is not split and exceeds the
    limit.
    """
    widths = _widths(owned)
    modules: dict[str, list[str]] = {}
    for name in owned.sizes:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    made: list[dict[str, tuple[int, int]]] = [{}]
    for names in modules.values():
        parts = [
            part
            for name in names
            for part in _parts(name, owned.sizes[name], widths[name], itemsize, limit_bytes)
        ]
        fits = sum(_aligned(size * itemsize) for _, _, size in parts) <= limit_bytes
        for number, (name, start, size) in enumerate(parts):
            together = parts[number:] if fits and number == 0 else [(name, start, size)]
            if (
                made[-1]
                and (not fits or number == 0)
                and _bytes(made[-1], itemsize, together) > limit_bytes
            ):
                made.append({})
            made[-1][name] = start, size
    return [_bucket(number, parts, itemsize) for number, parts in enumerate(made) if parts]


def copies_of(copies: Sequence[Copy], buckets: list[Bucket]) -> list[list[Copy]]:
    """Assign the copies to one destination rank to the rank's buckets, which are parts of its
    buffers that are received together; a copy into a buffer that spans buckets is split. `copies`:
    rectangles of tensors with their places in the source's and the destination's buffer.

    Returns for each bucket the list of its copies. Their destination offsets count elements from
    the beginning of the bucket's part of the buffer.
    """
    where: dict[str, list[Bucket]] = defaultdict(list)
    for bucket in buckets:
        for name in bucket.sizes:
            where[name].append(bucket)
    made: list[list[Copy]] = [[] for _ in buckets]
    for copy in copies:
        for bucket in where[copy.put.buffer]:
            put = bucket.part(copy.put)
            if put is copy.put:
                made[bucket.number].append(copy)
            elif put is not None:
                made[bucket.number].append(copy._replace(taken=copy.taken.part(put.box), put=put))
    return made


def _widths(owned: Owned) -> dict[str, int]:
    """{buffer: number of elements in a row}; 0 for a buffer that does not hold whole rows of equal
    length, such as a ZeRO slice.
    """
    found = dict.fromkeys(owned.sizes, -1)
    for piece in owned.pieces:
        fits = found[piece.buffer] in (-1, piece.stride) and piece.offset % piece.stride == 0
        found[piece.buffer] = piece.stride if fits and piece.stride == piece.box.columns else 0
    return found


def _parts(
    name: str, size: int, width: int, itemsize: int, limit_bytes: int
) -> list[tuple[str, int, int]]:
    """Split buffer `name` of `size` elements into parts of whole rows of at most `limit_bytes`:
    [(name, first element, number of elements)]. A buffer without equal rows is not split.
    """
    if size * itemsize <= limit_bytes or width <= 0:
        return [(name, 0, size)]
    step = max(1, limit_bytes // (width * itemsize)) * width
    return [(name, start, min(step, size - start)) for start in range(0, size, step)]


def _bytes(
    filled: Mapping[str, tuple[int, int]], itemsize: int, more: list[tuple[str, int, int]]
) -> int:
    """Bytes of a bucket after adding `more`; 2^63 if it has a part of the same buffer already."""
    if any(name in filled for name, _, _ in more):
        return 2**63
    sizes = [size for _, size in filled.values()] + [size for _, _, size in more]
    return sum(_aligned(size * itemsize) for size in sizes)


def _bucket(number: int, parts: Mapping[str, tuple[int, int]], itemsize: int) -> Bucket:
    """The bucket of these parts {buffer: (first element, elements)}."""
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
