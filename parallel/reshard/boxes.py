"""Who owns which part of a model: boxes of whole tensors and their places in flat buffers.

Every tensor is seen as a matrix [rows, columns]: a vector is [n, 1], and all dimensions after the
first are flattened to columns. A rank owns boxes of such matrices, each stored row by row in a flat
buffer. Several boxes may follow each other in one buffer (q, k and v of a fused layer), and a
buffer may be a slice of a larger one (ZeRO 3).
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
    """A rectangle of a tensor, as indices of elements: rows [top, bottom) and columns [left, right)
    of the tensor as a matrix. Rows are dimension 0, columns all other dimensions flattened; a
    vector of n is a matrix n x 1.
    """

    top: int
    bottom: int
    left: int
    right: int

    @property
    def rows(self) -> int:
        """Number of rows of the rectangle."""
        return self.bottom - self.top

    @property
    def columns(self) -> int:
        """Number of columns of the rectangle."""
        return self.right - self.left

    @property
    def area(self) -> int:
        """Number of elements of the rectangle, rows x columns."""
        return self.rows * self.columns

    def meet(self, other: Box) -> Box | None:
        """The rectangle of the elements that are in this box and in `other`, or None if there are
        none.
        """
        top, bottom = max(self.top, other.top), min(self.bottom, other.bottom)
        left, right = max(self.left, other.left), min(self.right, other.right)
        return Box(top, bottom, left, right) if top < bottom and left < right else None

    def bands(self, rows: int) -> list[Box]:
        """The box split from top to bottom into boxes of at most `rows` rows."""
        tops = range(self.top, self.bottom, rows)
        return [Box(top, min(top + rows, self.bottom), self.left, self.right) for top in tops]


def matrix(shape: Sequence[int]) -> Box:
    """The box of a whole tensor with this shape: rows are dimension 0, columns all other dimensions
    flattened; a vector of n is n x 1.
    """
    rows = shape[0] if shape else 1
    return Box(0, rows, 0, math.prod(shape[1:]))


class Piece(NamedTuple):
    """A rectangle (box) of a tensor, and where it lies in a rank's flat buffer, row by row.

    Element (i, j) of the tensor as a matrix is `buffer[offset + (i - box.top) * stride + (j -
    box.left)]`; offset and stride are in elements.
    """

    tensor: str
    """Name of the tensor, or `ZEROS` for padding rows."""
    box: Box
    buffer: str
    """Name of the flat buffer in which the piece lies."""
    offset: int
    stride: int

    @property
    def end(self) -> int:
        """Index in the flat buffer, in elements, after the last element of this piece (a rectangle
        of a tensor): the buffer has at least so many elements.
        """
        return self.offset + (self.box.rows - 1) * self.stride + self.box.columns

    def part(self, box: Box) -> Piece:
        """The elements of the rectangle `box` of the tensor, as a piece of the same buffer. `box`
        must lie within this piece's own rectangle, which is not checked.
        """
        skipped = (box.top - self.box.top) * self.stride + box.left - self.box.left
        return Piece(self.tensor, box, self.buffer, self.offset + skipped, self.stride)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """This piece, a rectangle of a tensor, as a view [rows, columns] of the rank's flat,
        contiguous `buffer` in which it lies; writing to the view writes to the buffer.
        """
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
    """Which rectangles of a model's tensors one rank has, and where they lie in the rank's flat
    buffers: `pieces` lists rectangle, buffer and offset, `sizes` is {buffer: number of its
    elements}. Both sides of a reshard plan are lists of these objects, one for each rank.
    """

    pieces: list[Piece] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """{buffer: number of its elements}, in the order in which the rank has its buffers."""

    def add(self, tensor: str, box: Box, buffer: str) -> None:
        """Append `box` of the tensor named `tensor` to the end of the buffer named `buffer`, which
        is made if it does not exist yet and grows by the box.
        """
        offset = self.sizes.setdefault(buffer, 0)
        if box.area:
            self.pieces.append(Piece(tensor, box, buffer, offset, box.columns))
        self.sizes[buffer] = offset + box.area

    def slice(self, part: int, parts: int) -> Owned:
        """What rank number `part` of `parts` keeps under ZeRO 3, as a new `Owned`: of every buffer
        one slice of ceil(size / parts) elements, fewer in the last slices.

        DeepSpeed's padding at the end of the last slice is not included.
        """
        cut = Owned()
        for buffer, size in self.sizes.items():
            length = -(-size // parts)
            cut.sizes[buffer] = max(0, min(size, (part + 1) * length) - part * length)
        for piece in self.pieces:
            length = -(-self.sizes[piece.buffer] // parts)
            first = part * length
            begin = first - piece.offset
            for box, start in flat_boxes(piece.box, begin, begin + length):
                cut.pieces.append(
                    Piece(
                        piece.tensor, box, piece.buffer, start + piece.offset - first, piece.stride
                    )
                )
        return cut


def flat_boxes(box: Box, start: int, stop: int) -> list[tuple[Box, int]]:
    """Elements number `start` to `stop` - 1 of a box, counted row by row from 0, as at most three
    rectangles: [(rectangle, number of its first element)].
    """
    start, stop, width = max(start, 0), min(stop, box.area), box.columns
    made = []
    while start < stop:
        row, column = divmod(start, width)
        rows = (stop - start) // width if column == 0 else 0
        taken = rows * width if rows else min(stop - start, width - column)
        top, left = box.top + row, box.left + column
        made.append((Box(top, top + max(rows, 1), left, left + (width if rows else taken)), start))
        start += taken
    return made


def tiles(boxes: Iterable[Box], whole: Box) -> bool:
    """Whether the rectangles `boxes` cover every element of the rectangle `whole` exactly once, and
    nothing else.
    """
    found = np.array(list(boxes), dtype=np.int64).reshape(-1, 4)
    if len(found) == 0:
        return whole.area == 0
    if (found.min(0)[[0, 2]] < (whole.top, whole.left)).any() or (
        found.max(0)[[1, 3]] > (whole.bottom, whole.right)
    ).any():
        return False
    # On the grid of all box edges, so that the cost does not grow with the tensor.
    rows = np.unique(np.concatenate([found[:, 0], found[:, 1], [whole.top, whole.bottom]]))
    columns = np.unique(np.concatenate([found[:, 2], found[:, 3], [whole.left, whole.right]]))
    count = np.zeros((len(rows) - 1, len(columns) - 1), dtype=np.int32)
    corners = zip(
        np.searchsorted(rows, found[:, 0]),
        np.searchsorted(rows, found[:, 1]),
        np.searchsorted(columns, found[:, 2]),
        np.searchsorted(columns, found[:, 3]),
        strict=True,
    )
    for top, bottom, left, right in corners:
        count[top:bottom, left:right] += 1
    return bool((count == 1).all())


def fills(owned: Owned) -> str:
    """Check that the rectangles in each buffer of a rank lie one after the other, row by row, and
    fill the buffer exactly. Returns the name of a buffer where they do not; "" if there is none.
    `owned`: the rank's rectangles and sizes of its buffers.
    """
    reached = dict.fromkeys(owned.sizes, 0)
    for piece in sorted(owned.pieces, key=lambda piece: piece.offset):
        if piece.box.rows > 1 and piece.stride != piece.box.columns:
            return piece.buffer
        if piece.offset != reached[piece.buffer]:
            return piece.buffer
        reached[piece.buffer] += piece.box.area
    return next((buffer for buffer, size in owned.sizes.items() if reached[buffer] != size), "")


def empty_buffers(owned: Owned, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A rank's flat buffers, {name: zeros [size]} of `dtype` on the CPU, with the names and sizes
    in `owned`.
    """
    return {name: torch.zeros(size, dtype=dtype) for name, size in owned.sizes.items()}


def scatter(owned: Owned, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Cut one rank's rectangles, which `owned` lists, out of whole tensors {name: tensor} of one
    dtype. Returns the rank's buffers {name: flat tensor} on the CPU, which are 0 where no piece
    lies.
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
