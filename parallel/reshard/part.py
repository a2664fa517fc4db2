"""One rank's part of a reshard plan, without making the rest of it.

Most tensors of a model lie alike on every rank. Regions are computed for one tensor of each kind,
and numbers decide the even load of sources; copies are made only for the rank that asks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megarl.parallel.reshard.boxes import Box, Owned, Piece
from megarl.parallel.reshard.plan import Copy, deal, fixed_choice, grain_of, needed


@dataclass(frozen=True)
class Kinds:
    """Tensors that all ranks split alike, as the same weight of each layer: the plan of one holds
    for all.
    """

    like: Mapping[str, str]
    """{tensor: the one that stands for it, maybe itself}, in the model's order."""
    buffers: Mapping[str, str]
    """{tensor: its buffer on the destinations}; sources call it as the tensor."""


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
        """[(index in `regions`, elements, source ranks)] that several sources could send."""
        return [
            (number, box.area, [source for source, _ in candidates])
            for number, (_, box, candidates) in enumerate(self.regions)
            if self.fixed[number] is None
        ]

    @cached_property
    def by_source(self) -> dict[int, list[tuple[int, int]]]:
        """{source rank: [(index in `regions`, index of the source there)]} where it is certain."""
        regions: dict[int, list[tuple[int, int]]] = {}
        for number, index in enumerate(self.fixed):
            if index is not None:
                source = self.regions[number][2][index][0]
                regions.setdefault(source, []).append((number, index))
        return regions

    @cached_property
    def load(self) -> dict[int, int]:
        """{source rank: elements} that it alone can send from another memory."""
        return {
            source: sum(self.regions[number][1].area for number, _ in pairs)
            for source, pairs in self.by_source.items()
            if source != self.local
        }


class PlanPart:
    """The copies that one rank sends or receives in a resharding."""

    def __init__(
        self,
        sources: Sequence[Owned],
        destinations: Sequence[Owned],
        kinds: Kinds,
        local: Mapping[int, int] | None = None,
    ) -> None:
        """Compute who sends what. Raises as `make_plan`.

        Args:
            sources: by source rank, what it has of the tensors that stand for others.
            destinations: by destination rank, what it needs of them.
            kinds: the tensors of the model that they stand for.
            local: {destination rank: source rank in the same memory}.
        """
        self._kinds, self._destinations, local = kinds, len(destinations), local or {}
        count: dict[str, int] = dict.fromkeys(kinds.like.values(), 0)
        for tensor in kinds.like.values():
            count[tensor] += 1
        self._templates = _templates(sources, destinations, count, kinds.buffers, local)
        load, choices, number = [0] * len(sources), [], 0
        self.moved = 0
        """Elements that all ranks copy between different memories."""
        for rank in range(len(destinations)):
            for tensor, times in count.items():
                template = self._templates[rank, tensor]
                for source, area in template.load.items():
                    load[source] += times * area
                self.moved += times * sum(template.load.values())
            for tensor in kinds.like.values():
                template = self._templates[rank, tensor]
                choices += [(number + index, area, of) for index, area, of in template.open]
                number += len(template.regions)
        self.moved += sum(area for _, area, _ in choices)
        self._dealt = deal(choices, load)

    def of_source(self, source: int) -> list[Copy]:
        """The copies that rank `source` sends, ascending by destination rank."""
        return [
            copy for rank in range(self._destinations) for copy in self._copies(rank, source=source)
        ]

    def of_destination(self, rank: int) -> list[Copy]:
        """The copies that rank `rank` receives, in the order of the model's tensors."""
        return list(self._copies(rank))

    def _copies(self, rank: int, source: int | None = None) -> Iterator[Copy]:
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
            for index, _, ranks in template.open:
                source_index = self._dealt[number + index]
                if source in (None, ranks[source_index]):
                    chosen.append((index, source_index))
            for index, source_index in sorted(chosen):
                piece, box, candidates = template.regions[index]
                key = tensor, index, source_index
                if key not in parts:
                    parts[key] = candidates[source_index][1].part(box), piece.part(box)
                source_piece, put = parts[key]
                yield Copy(
                    candidates[source_index][0],
                    source_piece._replace(tensor=name, buffer=name),
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
    """{(destination rank, tensor): its regions}; `count`: tensors that a tensor stands for."""
    # A buffer of several tensors is repeated as often as each of them.
    times = {buffers[tensor]: number for tensor, number in count.items()}
    grain = grain_of(
        sum(times[name] * size for owned in destinations for name, size in owned.sizes.items())
    )
    templates = {
        (rank, tensor): _Template([], [], local.get(rank))
        for rank in range(len(destinations))
        for tensor in count
    }
    for rank, piece, regions in needed(sources, destinations, local, grain):
        template = templates[rank, piece.tensor]
        for box, candidates in regions:
            template.regions.append((piece, box, candidates))
            template.fixed.append(fixed_choice(candidates, template.local))
    return templates
