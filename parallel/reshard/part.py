"""One rank's part of a reshard plan, without making the rest of it.

A model repeats its layers, so most tensors lie alike on every rank. Regions are computed for one
tensor of each kind, which stands for the others. What depends on all tensors, the even load of the
sources, is decided by numbers; copies are made only for the rank that asks. The result equals that
rank's copies of `make_plan` for the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megarl.parallel.reshard.boxes import Box, Owned, Piece
from megarl.parallel.reshard.plan import Copy, deal, fixed_choice, grain_of, needed


@dataclass(frozen=True)
class Kinds:
    """Which tensors of a model are split in the same way over the source and the destination ranks
    of a resharding, as the same weight of each layer is, so that the plan for one of them, their
    representative, holds for all. `like` is {tensor: its representative}, `buffers` {tensor: its
    buffer on the destination ranks}.
    """

    like: Mapping[str, str]
    """{tensor: the tensor that stands for it; itself for one that stands for others}, all tensors
    of the model in their order."""
    buffers: Mapping[str, str]
    """{tensor: name of the buffer on the destinations in which it lies}; on the sources a tensor's
    buffer has the tensor's name."""


@dataclass(frozen=True)
class _Template:
    """The regions of one tensor that one destination needs, for all tensors of a kind."""

    regions: list[tuple[Piece, Box, list[tuple[int, Piece]]]]
    """[(piece that the destination needs, region of it, [(source rank, its piece)])]"""
    fixed: list[int | None]
    """By region, the index of the only possible source; None where there is a choice."""
    local: int | None
    """Source rank in the destination's memory."""

    @cached_property
    def open(self) -> list[tuple[int, int, list[int]]]:
        """The rectangles of one tensor for one destination rank that more than one source rank
        could send: [(index of the rectangle in `regions`, its elements, source ranks that have
        it)].
        """
        return [
            (number, box.area, [source for source, _ in candidates])
            for number, (_, box, candidates) in enumerate(self.regions)
            if self.fixed[number] is None
        ]

    @cached_property
    def by_source(self) -> dict[int, list[tuple[int, int]]]:
        """The rectangles of one tensor for one destination rank whose source is certain: the only
        source rank that has it, or the one that shares the destination's memory. {source rank:
        [(index of the rectangle in `regions`, index of the source among the ranks that have it)]}.
        """
        found: dict[int, list[tuple[int, int]]] = {}
        for number, index in enumerate(self.fixed):
            if index is not None:
                source = self.regions[number][2][index][0]
                found.setdefault(source, []).append((number, index))
        return found

    @cached_property
    def load(self) -> dict[int, int]:
        """{source rank: number of elements} of one tensor that a destination rank can get from this
        source alone. A source that shares the destination's memory is left out.
        """
        return {
            source: sum(self.regions[number][1].area for number, _ in found)
            for source, found in self.by_source.items()
            if source != self.local
        }


class PlanPart:
    """The copies that one rank sends (`of_source`) or receives (`of_destination`) in a resharding,
    computed without making those of the other ranks. They equal that rank's copies of `make_plan`
    for the whole model. Made from the rectangles that source ranks have and destination ranks need
    of some tensors, and from `Kinds`, which names the tensors that each of these represents.
    """

    def __init__(
        self,
        sources: Sequence[Owned],
        destinations: Sequence[Owned],
        kinds: Kinds,
        local: Mapping[int, int] | None = None,
    ) -> None:
        """Compute who sends what, without making copies.

        Args:
            sources: by source rank, which rectangles it has of the tensors that stand for others.
            destinations: by destination rank, which rectangles of these tensors it needs.
            kinds: which tensors of the model they stand for.
            local: {destination rank: source rank in the same memory}.

        Raises:
            ValueError: no source has what a destination needs, sources own overlapping rectangles
                of a tensor, or a destination's pieces do not fill its buffers exactly.
        """
        self._kinds, self._destinations, local = kinds, len(destinations), local or {}
        count: dict[str, int] = dict.fromkeys(kinds.like.values(), 0)
        for tensor in kinds.like.values():
            count[tensor] += 1
        self._templates = _templates(sources, destinations, count, kinds.buffers, local)
        load, choices, number = [0] * len(sources), [], 0
        self.moved = 0
        """Elements copied between different memories, of all ranks."""
        for rank in range(len(destinations)):
            for tensor, times in count.items():
                template = self._templates[rank, tensor]
                for source, area in template.load.items():
                    load[source] += times * area
                self.moved += times * sum(template.load.values())
            for tensor in kinds.like.values():
                template = self._templates[rank, tensor]
                choices += [(number + place, area, of) for place, area, of in template.open]
                number += len(template.regions)
        self.moved += sum(area for _, area, _ in choices)
        self._dealt = deal(choices, load)

    def of_source(self, source: int) -> list[Copy]:
        """The copies that source rank `source` sends, ascending by destination rank: each a
        rectangle of a tensor with its places in the source's and the destination's flat buffer.
        """
        return [
            copy for rank in range(self._destinations) for copy in self._copies(rank, source=source)
        ]

    def of_destination(self, rank: int) -> list[Copy]:
        """The copies that destination rank `rank` receives, in the order of the model's tensors:
        each a rectangle of a tensor with its places in the source's and the destination's flat
        buffer.
        """
        return list(self._copies(rank))

    def _copies(self, rank: int, source: int | None = None) -> Iterator[Copy]:
        """The copies to a destination rank; only those of `source` where it is given."""
        like = self._kinds.like
        number = sum(
            len(self._templates[before, tensor].regions)
            for before in range(rank)
            for tensor in like.values()
        )
        parts: dict[tuple[str, int, int], tuple[Piece, Piece]] = {}
        for name, tensor in like.items():
            template = self._templates[rank, tensor]
            chosen = (
                [pair for pairs in template.by_source.values() for pair in pairs]
                if source is None
                else list(template.by_source.get(source, ()))
            )
            for place, _, ranks in template.open:
                index = self._dealt[number + place]
                if source in (None, ranks[index]):
                    chosen.append((place, index))
            for place, index in sorted(chosen):
                piece, box, candidates = template.regions[place]
                key = tensor, place, index
                if key not in parts:
                    parts[key] = candidates[index][1].part(box), piece.part(box)
                taken, put = parts[key]
                yield Copy(
                    candidates[index][0],
                    taken._replace(tensor=name, buffer=name),
                    rank,
                    put._replace(tensor=name, buffer=self._kinds.buffers[name]),
                )
            number += len(template.regions)


def _templates(
    sources: Sequence[Owned],
    destinations: Sequence[Owned],
    count: Mapping[str, int],
    buffers: Mapping[str, str],
    local: Mapping[int, int],
) -> dict[tuple[int, str], _Template]:
    """{(destination rank, tensor): its regions} for the tensors that stand for a kind.

    `count`: {tensor: how many it stands for}. Raises `ValueError` as `make_plan`.
    """
    # A buffer of several tensors is repeated as often as each of them.
    times = {buffers[tensor]: number for tensor, number in count.items()}
    grain = grain_of(
        sum(times[name] * size for owned in destinations for name, size in owned.sizes.items())
    )
    made = {
        (rank, tensor): _Template([], [], local.get(rank))
        for rank in range(len(destinations))
        for tensor in count
    }
    for rank, piece, regions in needed(sources, destinations, local, grain):
        template = made[rank, piece.tensor]
        for box, candidates in regions:
            template.regions.append((piece, box, candidates))
            template.fixed.append(fixed_choice(candidates, template.local))
    return made
