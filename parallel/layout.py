"""Degrees of parallelism, and which rank has which coordinates. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from megarl.parallel.launcher import ranks_option


@dataclass(frozen=True)
class Layout:
    """Rank = (data * sequence degree + sequence) * tensor degree + tensor, with coordinates from 0.
    Raises `ValueError` for a degree below 1.
    """

    AXES: ClassVar[tuple[str, ...]] = ("data", "sequence", "tensor")
    """Slowest first: tensor-parallel neighbours have consecutive ranks, so that they share a
    node.
    """

    data: int = 1
    sequence: int = 1
    tensor: int = 1
    expert: int = 1
    """Neighbours along data x sequence that divide each layer's experts; needs no ranks of its
    own.
    """

    def __post_init__(self) -> None:
        for name in (*self.AXES, "expert"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"training.layout.{name} is {getattr(self, name)}; set it to 1 or more"
                )
        if self.replicas % self.expert:
            raise ValueError(
                f"training.layout.expert is {self.expert}, which does not divide data x sequence ="
                f" {self.replicas} ranks; set it to a divisor, or start more ranks"
                f" ({ranks_option()})"
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(getattr(self, name) for name in self.AXES)

    @property
    def replicas(self) -> int:
        """Ranks with the same dense weights: data x sequence."""
        return self.data * self.sequence

    def coordinates(self, rank: int) -> dict[str, int]:
        """{"data": d, "sequence": s, "tensor": t}"""
        coordinates = {}
        for name in reversed(self.AXES):
            rank, coordinates[name] = divmod(rank, getattr(self, name))
        return coordinates

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates, 0 by default."""
        rank = 0
        for name in self.AXES:
            rank = rank * getattr(self, name) + coordinates.get(name, 0)
        return rank

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All ranks, grouped by those that differ only along `axes`; the same on every rank."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            coordinates = self.coordinates(rank)
            others = tuple(coordinates[name] for name in self.AXES if name not in axes)
            groups.setdefault(others, []).append(rank)
        return [tuple(ranks) for ranks in groups.values()]

    def expert_groups(self) -> list[tuple[int, ...]]:
        """All ranks, grouped by those that together have each expert of a layer once."""
        count = self.expert * self.tensor
        return [tuple(range(first, first + count)) for first in range(0, self.size, count)]

    def expert_groups_by(self, *, replicas: bool) -> list[tuple[int, ...]]:
        """All ranks, grouped by those that exchange tokens: those of an expert group with the same
        tensor coordinate. `replicas`: by those that have the same experts.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        for rank in range(self.size):
            replica, tensor = divmod(rank, self.tensor)
            group, expert = divmod(replica, self.expert)
            groups.setdefault((expert if replicas else group, tensor), []).append(rank)
        return [tuple(ranks) for ranks in groups.values()]

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {getattr(self, name)}" for name in self.AXES)
        return axes if self.expert == 1 else f"{axes}, expert {self.expert}"


def resolve(*, data: int, sequence: int, tensor: int, expert: int = 1, num_ranks: int) -> Layout:
    """The layout of a model on `num_ranks` ranks. `data` 0 becomes num_ranks / (sequence x tensor).
    Raises `ValueError`, with what to set, where the degrees do not multiply to `num_ranks`.
    """
    rest = sequence * tensor
    if data == 0:
        if num_ranks % rest:
            raise ValueError(
                f"training.layout is sequence {sequence} x tensor {tensor}, which does not divide"
                f" {num_ranks} ranks; start a multiple of {rest} ranks ({ranks_option()})"
                " or change the layout"
            )
        data = num_ranks // rest
    layout = Layout(data, sequence, tensor, expert)
    if layout.size != num_ranks:
        fix = (
            f"set training.layout.data to {num_ranks // rest}"
            if num_ranks % rest == 0
            else "change the layout"
        )
        raise ValueError(
            f"training.layout is {layout} = {layout.size} ranks, but this run has {num_ranks}; "
            f"{fix}, or start {layout.size} ranks ({ranks_option()})"
        )
    return layout
