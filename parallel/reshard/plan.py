"""The reshard plan: which copies bring the tensors that sources own to the destinations.

    [Owned of each source rank], [Owned of each destination rank] -> [Copy, ...]

A pure function: each element of each destination is written once, and both sides compute the same
plan from the same arguments. Where several sources own the same box, the work is shared evenly; a
source in the destination's own memory is preferred.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megarl.parallel.reshard.boxes import ZEROS, Box, Owned, Piece, fills, tiles

GRAIN = 2**20
"""Regions below this number of elements are not split between several sources."""


class Copy(NamedTuple):
    """A region of a tensor to be copied from a source rank's buffer to a destination rank's."""

    source: int
    """Source rank, which sends the region."""
    taken: Piece
    """Where the region lies in the source rank's buffer."""
    destination: int
    """Destination rank, which receives the region."""
    put: Piece
    """Where the region goes in the destination rank's buffer."""

    @property
    def tensor(self) -> str:
        """Name of the tensor."""
        return self.taken.tensor

    @property
    def area(self) -> int:
        """Number of elements."""
        return self.taken.box.area


@dataclass(frozen=True)
class Plan:
    """All copies of a resharding, in the order of the destinations."""

    copies: list[Copy]
    sources: Sequence[Owned]
    destinations: Sequence[Owned]
    local: Mapping[int, int]
    """{destination rank: source rank in the same memory}, where there is one."""

    def is_local(self, copy: Copy) -> bool:
        """Whether source and destination are in the same memory."""
        return self.local.get(copy.destination) == copy.source

    def links(self, itemsize: int) -> Counter[tuple[int, int]]:
        """{(source rank, destination rank): bytes}, without local copies."""
        found: Counter[tuple[int, int]] = Counter()
        for copy in self.copies:
            if not self.is_local(copy):
                found[copy.source, copy.destination] += copy.area * itemsize
        return found

    def moved(self, itemsize: int) -> int:
        """Bytes copied between different memories."""
        return self.links(itemsize).total()

    def minimum(self, itemsize: int) -> int:
        """Lower bound on the bytes that any plan must move: what destinations need and do not have
        in their own memory.
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
        """Predicted seconds of the busiest rank, which sends and receives at `bytes_per_s` at
        once."""
        out: Counter[int] = Counter()
        into: Counter[int] = Counter()
        for (source, destination), count in self.links(itemsize).items():
            out[source] += count
            into[destination] += count
        return max([*out.values(), *into.values(), 0]) / bytes_per_s


def make_plan(
    sources: Sequence[Owned], destinations: Sequence[Owned], local: Mapping[int, int] | None = None
) -> Plan:
    """The copies that fill every destination from the sources, each element once.

    `local` is `Plan.local`. Raises `ValueError` with the tensor's name where no source owns what a
    destination needs, or where sources own overlapping boxes of a tensor.
    """
    local = local or {}
    elements = sum(sum(owned.sizes.values()) for owned in destinations)
    holders, grain = holders_of(sources), grain_of(elements)
    needs: list[_Need] = []
    # Engines need the same boxes; the regions of each are computed once.
    found: dict[tuple[str, Box, int | None], list[Region]] = {}
    for rank, owned in enumerate(destinations):
        broken = fills(owned)
        if broken:
            raise ValueError(
                f"the pieces of {broken} on destination rank {rank} do not fill it exactly once"
            )
        for piece in owned.pieces:
            if piece.tensor != ZEROS:
                key = piece.tensor, piece.box, local.get(rank)
                if key not in found:
                    found[key] = regions_of(
                        rank, piece, holders.get(piece.tensor, {}), local.get(rank), grain
                    )
                needs += [_Need(rank, piece, box, candidates) for box, candidates in found[key]]
    copies = _deal(needs, len(sources), local)
    return Plan(copies, sources, destinations, local)


Region = tuple[Box, list[tuple[int, Piece]]]
"""(region of a tensor, [(source rank, its piece)] that could send it)"""


class _Need(NamedTuple):
    """A region that a destination needs, and the pieces that could be its source."""

    destination: int
    piece: Piece
    box: Box
    candidates: list[tuple[int, Piece]]


def holders_of(sources: Sequence[Owned]) -> dict[str, dict[Box, list[tuple[int, Piece]]]]:
    """{tensor: {box: [(rank, piece)] that own exactly this box}}.

    Raises `ValueError` where different boxes of a tensor overlap or leave gaps.
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
    """Split a piece that a rank needs into regions, each with the sources that have it.

    `here` is the source rank in the same memory. Raises `ValueError` where sources do not cover the
    piece.
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


def grain_of(elements: int) -> int:
    """Size, in elements, of the regions into which shared tensors are split, where all destinations
    together need `elements`. It is small compared with the total, so that the load of the sources
    is even.
    """
    return max(GRAIN, elements // 1024)


def fixed_choice(candidates: Sequence[tuple[int, Piece]], here: int | None) -> int | None:
    """Index of the only possible source of a region: the one in the same memory, `here`, or the
    only one that there is. None where there is a choice.
    """
    for index, (source, _) in enumerate(candidates):
        if source == here:
            return index
    return 0 if len(candidates) == 1 else None


def deal(choices: Sequence[tuple[int, int, Sequence[int]]], load: list[int]) -> dict[int, int]:
    """Choose the least loaded source for each region, large regions first.

    `choices`: [(number of the region, its elements, source ranks that have it)]. `load`: elements
    that each source sends so far, to which the regions are added. Returns {number: index among the
    region's ranks}.
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


def apply(
    plan: Plan,
    sources: Sequence[Mapping[str, torch.Tensor]],
    destinations: Sequence[Mapping[str, torch.Tensor]],
) -> None:
    """Carry out a plan between flat buffers {name: tensor} of sources and destinations."""
    for copy in plan.copies:
        taken = copy.taken.view(sources[copy.source][copy.taken.buffer])
        copy.put.view(destinations[copy.destination][copy.put.buffer]).copy_(taken)
