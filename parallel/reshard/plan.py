"""The reshard plan: which copies bring weights from the ranks that have them (sources, such as
trainer ranks) to the ranks that need them in another layout (destinations, such as the ranks of
inference engines).

    [Owned of each source rank], [Owned of each destination rank] -> [Copy, ...]

A pure function: each element of each destination is written once, and both sides compute the same
plan from the same arguments. Where several sources have the same part of a tensor, the work is
shared evenly; a source in the destination's own memory is preferred.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megarl.parallel.reshard.boxes import ZEROS, Box, Owned, Piece, fills, tiles

GRAIN = 2**20
"""Rectangles of fewer elements than this are not split between several sources."""


class Copy(NamedTuple):
    """A rectangle of a tensor that is copied from the flat buffer of rank number `source` to that
    of rank number `destination`. `taken` is where it lies in the source's buffer, `put` where it
    goes in the destination's: tensor, rectangle, name of the buffer, offset and stride in elements.
    """

    source: int
    """Number of the source rank, which sends."""
    taken: Piece
    """Where the rectangle lies in the source rank's buffer."""
    destination: int
    """Number of the destination rank, which receives."""
    put: Piece
    """Where the rectangle goes in the destination rank's buffer."""

    @property
    def tensor(self) -> str:
        """Name of the tensor, as the source rank calls it."""
        return self.taken.tensor

    @property
    def area(self) -> int:
        """Number of elements that are copied."""
        return self.taken.box.area


@dataclass(frozen=True)
class Plan:
    """All copies of a resharding (`copies`, by destination rank), and methods for what they cost in
    bytes and seconds. `sources` and `destinations` say which rectangles of which tensors each rank
    has or needs. Made by `make_plan`.
    """

    copies: list[Copy]
    sources: Sequence[Owned]
    destinations: Sequence[Owned]
    local: Mapping[int, int]
    """{destination rank: source rank in the same memory}, where there is one, as on a GPU that
    trainer and engine share."""

    def is_local(self, copy: Copy) -> bool:
        """Whether source and destination rank of `copy` are in the same memory, as on a GPU that
        trainer and engine share; such a copy crosses no network.
        """
        return self.local.get(copy.destination) == copy.source

    def links(self, itemsize: int) -> Counter[tuple[int, int]]:
        """{(source rank, destination rank): bytes that are copied}, without copies within one
        memory. `itemsize`: bytes of an element.
        """
        found: Counter[tuple[int, int]] = Counter()
        for copy in self.copies:
            if not self.is_local(copy):
                found[copy.source, copy.destination] += copy.area * itemsize
        return found

    def moved(self, itemsize: int) -> int:
        """Bytes that are copied between different memories, of all ranks together. `itemsize`:
        bytes of an element.
        """
        return self.links(itemsize).total()

    def minimum(self, itemsize: int) -> int:
        """Lower bound on the bytes that any plan must copy between different memories: what
        destinations need and do not have in their own memory. `itemsize`: bytes of an element.
        """
        wanted = 0
        for rank, owned in enumerate(self.destinations):
            here = self.local.get(rank)
            have: dict[str, list[Box]] = defaultdict(list)
            for piece in self.sources[here].pieces if here is not None else ():
                have[piece.tensor].append(piece.box)
            for piece in owned.pieces:
                if piece.tensor != ZEROS:
                    wanted += piece.box.area - sum(
                        met.area for box in have[piece.tensor] if (met := piece.box.meet(box))
                    )
        return wanted * itemsize

    def seconds(self, itemsize: int, *, bytes_per_s: float) -> float:
        """Predicted seconds of the whole resharding: those of the busiest rank, where each rank
        sends at `bytes_per_s` and receives at `bytes_per_s` at the same time. `itemsize`: bytes of
        an element.
        """
        out: Counter[int] = Counter()
        into: Counter[int] = Counter()
        for (source, destination), count in self.links(itemsize).items():
            out[source] += count
            into[destination] += count
        return max([*out.values(), *into.values(), 0]) / bytes_per_s


def make_plan(
    sources: Sequence[Owned], destinations: Sequence[Owned], local: Mapping[int, int] | None = None
) -> Plan:
    """The copies that fill every destination rank's buffers from those of the source ranks, each
    element once.

    `sources` and `destinations`: by rank, which rectangles of which tensors lie where in the rank's
    buffers. `local`: {destination rank: source rank in the same memory}. Raises `ValueError`, with
    the name of the tensor or buffer, where no source has what a destination needs, where the
    sources' rectangles of a tensor overlap or leave gaps, or where a destination's pieces do not
    fill its buffers exactly.
    """
    local = local or {}
    elements = sum(sum(owned.sizes.values()) for owned in destinations)
    needs = [
        _Need(rank, piece, box, candidates)
        for rank, piece, regions in needed(sources, destinations, local, grain_of(elements))
        for box, candidates in regions
    ]
    copies = _deal(needs, len(sources), local)
    return Plan(copies, sources, destinations, local)


Region = tuple[Box, list[tuple[int, Piece]]]
"""(rectangle of a tensor, [(source rank, its piece)] that contain it)"""


class _Need(NamedTuple):
    """A region that a destination needs, and the pieces that could be its source."""

    destination: int
    piece: Piece
    box: Box
    candidates: list[tuple[int, Piece]]


def holders_of(sources: Sequence[Owned]) -> dict[str, dict[Box, list[tuple[int, Piece]]]]:
    """Which source ranks have which rectangles of each tensor: {tensor: {rectangle: [(source rank,
    where it lies in the rank's buffer)]}}, rectangles ascending. `sources`: by rank, its rectangles
    and their places in its flat buffers.

    Raises `ValueError` where different rectangles of a tensor overlap or leave gaps.
    """
    found: dict[str, dict[Box, list[tuple[int, Piece]]]] = defaultdict(lambda: defaultdict(list))
    for rank, owned in enumerate(sources):
        for piece in owned.pieces:
            if piece.tensor != ZEROS:
                found[piece.tensor][piece.box].append((rank, piece))
    for tensor, boxes in found.items():
        whole = Box(
            min(box.top for box in boxes),
            max(box.bottom for box in boxes),
            min(box.left for box in boxes),
            max(box.right for box in boxes),
        )
        if not tiles(boxes, whole):
            raise ValueError(
                f"the sources' pieces of {tensor} overlap or leave gaps; give those of one layout"
            )
    return {tensor: dict(sorted(boxes.items())) for tensor, boxes in found.items()}


def regions_of(
    rank: int,
    piece: Piece,
    boxes: Mapping[Box, list[tuple[int, Piece]]],
    here: int | None,
    grain: int,
) -> list[Region]:
    """Split `piece`, a rectangle of a tensor that destination rank `rank` needs, into rectangles
    that a single source can send. Returns [(rectangle, [(source rank, the source's larger rectangle
    that contains it, with its place in the buffer)])].

    `boxes`: what sources own of this tensor, one entry of `holders_of`. `here`: the source rank in
    the destination's memory, or None. `grain`: elements above which a rectangle that several
    sources have, but not `here`, is split into bands of rows. Raises `ValueError` where sources do
    not cover the piece.
    """
    made: list[Region] = []
    for box, candidates in boxes.items():
        region = piece.box.meet(box)
        if region is None:
            continue
        # A large region that several sources have is shared between them, unless it is local.
        is_shared = len(candidates) > 1 and all(source != here for source, _ in candidates)
        rows = max(1, grain // region.columns) if is_shared else region.rows
        made += [(band, candidates) for band in region.bands(rows)]
    if not tiles([box for box, _ in made], piece.box):
        raise ValueError(
            f"no source owns all of {piece.tensor} rows {piece.box.top}:{piece.box.bottom} that"
            f" rank {rank} needs"
        )
    return made


def needed(
    sources: Sequence[Owned],
    destinations: Sequence[Owned],
    local: Mapping[int, int],
    grain: int,
) -> Iterator[tuple[int, Piece, list[Region]]]:
    """What the destinations need, piece by piece: (destination rank; its piece, a rectangle of a
    tensor with its place in a buffer; the piece split by `regions_of` into rectangles with the
    sources that have each). Padding is left out. `local`: {destination rank: source rank in the
    same memory}; `grain` as in `regions_of`. Raises `ValueError` where the sources' rectangles of a
    tensor overlap or leave gaps, where no source has a piece, or where pieces do not fill a
    destination's buffers exactly.
    """
    holders = holders_of(sources)
    # Engines need the same boxes; the regions of each are computed once.
    found: dict[tuple[str, Box, int | None], list[Region]] = {}
    for rank, owned in enumerate(destinations):
        broken, here = fills(owned), local.get(rank)
        if broken:
            raise ValueError(
                f"the pieces of {broken} on destination rank {rank} do not fill it exactly once"
            )
        for piece in owned.pieces:
            if piece.tensor == ZEROS:
                continue
            key = piece.tensor, piece.box, here
            if key not in found:
                found[key] = regions_of(rank, piece, holders.get(piece.tensor, {}), here, grain)
            yield rank, piece, found[key]


def grain_of(elements: int) -> int:
    """Number of elements above which a rectangle that several sources have is split between them,
    where all destinations together need `elements` elements. It is small compared with the total,
    so that the load of the sources is even.
    """
    return max(GRAIN, elements // 1024)


def fixed_choice(candidates: Sequence[tuple[int, Piece]], here: int | None) -> int | None:
    """Which source must send a rectangle, as an index into `candidates` [(source rank, its piece)]:
    the one in the destination's memory (`here`, a source rank or None), or the only one there is.
    None where there is a choice.
    """
    for index, (source, _) in enumerate(candidates):
        if source == here:
            return index
    return 0 if len(candidates) == 1 else None


def deal(choices: Sequence[tuple[int, int, Sequence[int]]], load: list[int]) -> dict[int, int]:
    """Choose for each rectangle the source rank that sends the least so far, large rectangles
    first.

    `choices`: [(number of the rectangle, its elements, source ranks that have it)]. `load`:
    elements that each source sends so far, to which the rectangles are added in place. Returns
    {number: index among the rectangle's source ranks}.
    """
    found = {}
    for number, area, ranks in sorted(choices, key=lambda choice: (-choice[1], choice[0])):
        rank = min(ranks, key=lambda rank: (load[rank], rank))
        found[number] = ranks.index(rank)
        load[rank] += area
    return found


def _deal(needs: Sequence[_Need], num_sources: int, local: Mapping[int, int]) -> list[Copy]:
    """Choose a source for each need: the same memory, else the only one, else the least loaded."""
    load, chosen, choices = [0] * num_sources, {}, []
    for number, need in enumerate(needs):
        here = local.get(need.destination)
        index = fixed_choice(need.candidates, here)
        if index is None:
            ranks = [source for source, _ in need.candidates]
            choices.append((number, need.box.area, ranks))
        else:
            chosen[number] = index
            source = need.candidates[index][0]
            load[source] += need.box.area if source != here else 0
    chosen |= deal(choices, load)
    made = []
    for number, need in enumerate(needs):
        source, piece = need.candidates[chosen[number]]
        made.append(Copy(source, piece.part(need.box), need.destination, need.piece.part(need.box)))
    return made
