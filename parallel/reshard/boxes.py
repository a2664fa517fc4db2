"""Who owns which part of a model: boxes of whole tensors and their places in flat buffers.

Every tensor is a matrix [rows, columns]: dimension 0, and all others flattened; a vector is [n, 1].
Boxes are stored row by row in flat buffers, one after the other (q, k and v of a fused layer) or
sliced (ZeRO 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

ZEROS = ""
"""`Piece.tensor` of elements that no tensor fills: zero rows that pad a vocabulary."""


class Box(NamedTuple):
    """Rows [top, bottom) and columns [left, right) of a matrix."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def rows(self) -> int:
        return self.bottom - self.top

    @property
    def columns(self) -> int:
        return self.right - self.left

    @property
    def area(self) -> int:
        return self.rows * self.columns

    def meet(self, other: Box) -> Box | None:
        top, bottom = max(self.top, other.top), min(self.bottom, other.bottom)
        left, right = max(self.left, other.left), min(self.right, other.right)
        return Box(top, bottom, left, right) if top < bottom and left < right else None

    def bands(self, rows: int) -> list[Box]:
        tops = range(self.top, self.bottom, rows)
        return [Box(top, min(top + rows, self.bottom), self.left, self.right) for top in tops]


def matrix(shape: Sequence[int]) -> Box:
    """The box of a whole tensor with this shape."""
    rows = shape[0] if shape else 1
    return Box(0, rows, 0, math.prod(shape[1:]))


class Piece(NamedTuple):
    """A box of a tensor, and where it lies in a rank's flat buffer: element (i, j) of the matrix is
    `buffer[offset + (i - box.top) * stride + (j - box.left)]`.
    """

    tensor: str
    """Name, or `ZEROS` for padding rows."""
    box: Box
    buffer: str
    offset: int
    stride: int

    @property
    def end(self) -> int:
        """Index in the buffer after the last element."""
        return self.offset + (self.box.rows - 1) * self.stride + self.box.columns

    def part(self, box: Box) -> Piece:
        """The piece of `box`, which must lie within this one; that is not checked."""
        skipped = (box.top - self.box.top) * self.stride + box.left - self.box.left
        return Piece(self.tensor, box, self.buffer, self.offset + skipped, self.stride)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        assert buffer.dim() == 1 and buffer.is_contiguous() and self.end <= len(buffer), (
            f"{self} in a buffer {tuple(buffer.shape)}"
        )
        return buffer.as_strided(
            (self.box.rows, self.box.columns),
            (self.stride, 1),
            buffer.storage_offset() + self.offset,
        )


@dataclass
class Owned:
    """The boxes of a model's tensors that one rank has."""

    pieces: list[Piece] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """{buffer: number of its elements}, in the rank's order."""

    def add(self, tensor: str, box: Box, buffer: str) -> None:
        """Append `box` of `tensor` to the end of `buffer`, which may be new."""
        offset = self.sizes.setdefault(buffer, 0)
        if box.area:
            self.pieces.append(Piece(tensor, box, buffer, offset, box.columns))
        self.sizes[buffer] = offset + box.area

    def slice(self, cuts: Mapping[str, tuple[int, int]]) -> Owned:
        """What a rank keeps under ZeRO 3. `cuts`: {buffer: (number, parts)}: it has part
        `number` of ceil(size / parts) elements, fewer at the end, where DeepSpeed's padding is left
        out.
        """
        sliced, lengths, firsts = Owned(), dict[str, int](), dict[str, int]()
        for buffer, size in self.sizes.items():
            number, parts = cuts[buffer]
            lengths[buffer] = -(-size // parts)
            firsts[buffer] = number * lengths[buffer]
            sliced.sizes[buffer] = max(0, min(size - firsts[buffer], lengths[buffer]))
        for piece in self.pieces:
            length, first = lengths[piece.buffer], firsts[piece.buffer]
            begin = first - piece.offset
            for box, start in flat_boxes(piece.box, begin, begin + length):
                sliced.pieces.append(
                    Piece(
                        piece.tensor, box, piece.buffer, start + piece.offset - first, piece.stride
                    )
                )
        return sliced


def flat_boxes(box: Box, start: int, stop: int) -> list[tuple[Box, int]]:
    """Elements `start` to `stop` - 1 of a box, counted row by row, as at most three boxes: [(box,
    number of its first element)].
    """
    start, stop, width = max(start, 0), min(stop, box.area), box.columns
    boxes = []
    while start < stop:
        row, column = divmod(start, width)
        rows = (stop - start) // width if column == 0 else 0
        count = rows * width if rows else min(stop - start, width - column)
        top, left = box.top + row, box.left + column
        boxes.append((Box(top, top + max(rows, 1), left, left + (width if rows else count)), start))
        start += count
    return boxes


def tiles(boxes: Iterable[Box], whole: Box) -> bool:
    """Whether `boxes` cover every element of `whole` exactly once, and nothing else."""
    bounds = np.array(list(boxes), dtype=np.int64).reshape(-1, 4)
    if len(bounds) == 0:
        return whole.area == 0
    if (bounds.min(0)[[0, 2]] < (whole.top, whole.left)).any() or (
        bounds.max(0)[[1, 3]] > (whole.bottom, whole.right)
    ).any():
        return False
    # On the grid of all box edges, so that the cost does not grow with the tensor.
    rows = np.unique(np.concatenate([bounds[:, 0], bounds[:, 1], [whole.top, whole.bottom]]))
    columns = np.unique(np.concatenate([bounds[:, 2], bounds[:, 3], [whole.left, whole.right]]))
    count = np.zeros((len(rows) - 1, len(columns) - 1), dtype=np.int32)
    corners = zip(
        np.searchsorted(rows, bounds[:, 0]),
        np.searchsorted(rows, bounds[:, 1]),
        np.searchsorted(columns, bounds[:, 2]),
        np.searchsorted(columns, bounds[:, 3]),
        strict=True,
    )
    for top, bottom, left, right in corners:
        count[top:bottom, left:right] += 1
    return bool((count == 1).all())


def fills(owned: Owned) -> str:
    """The name of a buffer that its boxes do not fill exactly, row by row; "" if there is none."""
    reached = dict.fromkeys(owned.sizes, 0)
    for piece in sorted(owned.pieces, key=lambda piece: piece.offset):
        if piece.box.rows > 1 and piece.stride != piece.box.columns:
            return piece.buffer
        if piece.offset != reached[piece.buffer]:
            return piece.buffer
        reached[piece.buffer] += piece.box.area
    return next((buffer for buffer, size in owned.sizes.items() if reached[buffer] != size), "")


def empty_buffers(owned: Owned, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """{buffer: zeros [size]} on the CPU."""
    return {name: torch.zeros(size, dtype=dtype) for name, size in owned.sizes.items()}


def scatter(owned: Owned, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut a rank's boxes out of whole tensors {name: tensor} of one dtype: {buffer: flat tensor} on
    the CPU, 0 where no piece lies.
    """
    dtype = next(iter(whole.values())).dtype
    buffers = empty_buffers(owned, dtype)
    for piece in owned.pieces:
        if piece.tensor != ZEROS:
            box, flat = piece.box, whole[piece.tensor]
            matrix_view = flat.reshape(flat.shape[0] if flat.dim() else 1, -1)
            piece.view(buffers[piece.buffer]).copy_(
                matrix_view[box.top : box.bottom, box.left : box.right]
            )
    return buffers
