"""The reshard plan: which copies bring weights from source ranks (of the trainer) to destination
ranks (of engines) with another layout. Both sides compute it alike.

Each element of each destination is written once. Sources that have the same share the work evenly;
one in the destination's own memory is preferred.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megarl.parallel.reshard.boxes import ZEROS, Box, Owned, Piece, fills, tiles

GRAIN = 2**20
"""Boxes of fewer elements than this are not split between several sources."""


class Copy(NamedTuple):
    """A box of a tensor that goes from one rank's flat buffer to another's."""

    source: int
    taken: Piece
    """Where the box lies in the source rank's buffer, as `put` in the destination's."""
    destination: int
    put: Piece

    @property
    def tensor(self) -> str:
        """Name of the tensor on the source rank."""
        return self.taken.tensor

    @property
    def area(self) -> int:
        return self.taken.box.area


@dataclass(frozen=True)
class Plan:
    """All copies of a resharding, by destination rank, and what they cost."""

    copies: list[Copy]
    sources: Sequence[Owned]
    destinations: Sequence[Owned]
    local: Mapping[int, int]
    """{destination rank: source rank in the same memory}, as on a GPU that both share."""

    def is_local(self, copy: Copy) -> bool:
        return self.local.get(copy.destination) == copy.source

    def links(self, itemsize: int) -> Counter[tuple[int, int]]:
        """{(source rank, destination rank): bytes} between different memories."""
        num_bytes: Counter[tuple[int, int]] = Counter()
        for copy in self.copies:
            if not self.is_local(copy):
                num_bytes[copy.source, copy.destination] += copy.area * itemsize
        return num_bytes

    def moved(self, itemsize: int) -> int:
        """Bytes between different memories, of all ranks."""
        return self.links(itemsize).total()

    def minimum(self, itemsize: int) -> int:
        """Bytes that any plan copies: what destinations need and have not in their memory."""
        elements = 0
        for rank, owned in enumerate(self.destinations):
            local = self.local.get(rank)
            have: dict[str, list[Box]] = defaultdict(list)
            for piece in self.sources[local].pieces if local is not None else ():
                have[piece.tensor].append(piece.box)
            for piece in owned.pieces:
                if piece.tensor != ZEROS:
                    elements += piece.box.area - sum(
                        met.area for box in have[piece.tensor] if (met := piece.box.meet(box))
                    )
        return elements * itemsize

    def seconds(self, itemsize: int, *, bytes_per_s: float) -> float:
        """Where each rank sends and receives at `bytes_per_s` at the same time."""
        out: Counter[int] = Counter()
        into: Counter[int] = Counter()
        for (source, destination), count in self.links(itemsize).items():
            out[source] += count
            into[destination] += count
        return max([*out.values(), *into.values(), 0]) / bytes_per_s


def make_plan(
    sources: Sequence[Owned], destinations: Sequence[Owned], local: Mapping[int, int] | None = None
) -> Plan:
    """The copies that fill every destination's buffers, each element once.

    `local`: {destination rank: source rank in the same memory}. Raises `ValueError`, with the
    tensor or buffer, where no source has what a destination needs, where the sources' boxes overlap
    or leave gaps, or where a destination's pieces do not fill its buffers exactly.
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
"""(box, [(source rank, its piece)] that contain it)"""


class _Need(NamedTuple):
    destination: int
    piece: Piece
    box: Box
    candidates: list[tuple[int, Piece]]


def holders_of(sources: Sequence[Owned]) -> dict[str, dict[Box, list[tuple[int, Piece]]]]:
    """{tensor: {box: [(source rank, its piece)]}}. Raises `ValueError` for overlaps and gaps."""
    holders: dict[str, dict[Box, list[tuple[int, Piece]]]] = defaultdict(lambda: defaultdict(list))
    for rank, owned in enumerate(sources):
        for piece in owned.pieces:
            if piece.tensor != ZEROS:
                holders[piece.tensor][piece.box].append((rank, piece))
    for tensor, boxes in holders.items():
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
    return {tensor: dict(sorted(boxes.items())) for tensor, boxes in holders.items()}


def regions_of(
    rank: int,
    piece: Piece,
    boxes: Mapping[Box, list[tuple[int, Piece]]],
    here: int | None,
    grain: int,
) -> list[Region]:
    """Split `piece`, which destination `rank` needs, into boxes that a single source can send.

    `boxes`: an entry of `holders_of`. `here`: source rank in the destination's memory. `grain`:
    elements above which other sources share a box. Raises `ValueError` where sources do not cover
    the piece.
    """
    regions: list[Region] = []
    for box, candidates in boxes.items():
        region = piece.box.meet(box)
        if region is None:
            continue
        # A large region that several sources have is shared between them, unless it is local.
        is_shared = len(candidates) > 1 and all(source != here for source, _ in candidates)
        rows = max(1, grain // region.columns) if is_shared else region.rows
        regions += [(band, candidates) for band in region.bands(rows)]
    if not tiles([box for box, _ in regions], piece.box):
        raise ValueError(
            f"no source owns all of {piece.tensor} rows {piece.box.top}:{piece.box.bottom} that"
            f" rank {rank} needs"
        )
    return regions


def needed(
    sources: Sequence[Owned],
    destinations: Sequence[Owned],
    local: Mapping[int, int],
    grain: int,
) -> Iterator[tuple[int, Piece, list[Region]]]:
    """(destination rank, its piece, regions of it) of all pieces but padding. Raises as
    `make_plan`.
    """
    holders = holders_of(sources)
    # Engines need the same boxes; the regions of each are computed once.
    regions: dict[tuple[str, Box, int | None], list[Region]] = {}
    for rank, owned in enumerate(destinations):
        unfilled, peer = fills(owned), local.get(rank)
        if unfilled:
            raise ValueError(
                f"the pieces of {unfilled} on destination rank {rank} do not fill it exactly once"
            )
        for piece in owned.pieces:
            if piece.tensor == ZEROS:
                continue
            key = piece.tensor, piece.box, peer
            if key not in regions:
                regions[key] = regions_of(rank, piece, holders.get(piece.tensor, {}), peer, grain)
            yield rank, piece, regions[key]


def grain_of(elements: int) -> int:
    """Few enough elements that the load of the sources is even."""
    return max(GRAIN, elements // 1024)


def fixed_choice(candidates: Sequence[tuple[int, Piece]], here: int | None) -> int | None:
    """Index of the source that must send: the one in the destination's memory (`here`), or the only
    one. None where there is a choice.
    """
    for index, (source, _) in enumerate(candidates):
        if source == here:
            return index
    return 0 if len(candidates) == 1 else None


def deal(choices: Sequence[tuple[int, int, Sequence[int]]], load: list[int]) -> dict[int, int]:
    """Choose for each box the source that sends the least so far, large boxes first.

    `choices`: [(number, elements, source ranks)]. `load`: elements by source, updated in place.
    Returns {number: index among its source ranks}.
    """
    choice_of = {}
    for number, area, ranks in sorted(choices, key=lambda choice: (-choice[1], choice[0])):
        rank = min(ranks, key=lambda rank: (load[rank], rank))
        choice_of[number] = ranks.index(rank)
        load[rank] += area
    return choice_of


def _deal(needs: Sequence[_Need], num_sources: int, local: Mapping[int, int]) -> list[Copy]:
    load, chosen, choices = [0] * num_sources, {}, []
    for number, need in enumerate(needs):
        peer = local.get(need.destination)
        i = fixed_choice(need.candidates, peer)
        if i is None:
            ranks = [source for source, _ in need.candidates]
            choices.append((number, need.box.area, ranks))
        else:
            chosen[number] = i
            source = need.candidates[i][0]
            load[source] += need.box.area if source != peer else 0
    chosen |= deal(choices, load)
    sent = []
    for number, need in enumerate(needs):
        source, piece = need.candidates[chosen[number]]
        sent.append(Copy(source, piece.part(need.box), need.destination, need.piece.part(need.box)))
    return sent
