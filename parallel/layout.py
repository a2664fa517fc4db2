"""Degrees of parallelism, and which rank has which coordinates. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


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

    def __post_init__(self) -> None:
        for name in self.AXES:
            if getattr(self, name) < 1:
                raise ValueError(
                    f"training.layout.{name} is {getattr(self, name)}; set it to 1 or more"
                )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(getattr(self, name) for name in self.AXES)

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

    def __str__(self) -> str:
        return " x ".join(f"{name} {getattr(self, name)}" for name in self.AXES)


def resolve(*, data: int, sequence: int, tensor: int, num_ranks: int) -> Layout:
    """The layout of a model on `num_ranks` ranks. `data` 0 becomes num_ranks / (sequence x tensor).
    Raises `ValueError`, with what to set, where the degrees do not multiply to `num_ranks`.
    """
    rest = sequence * tensor
    if data == 0:
        if num_ranks % rest:
            raise ValueError(
                f"training.layout is sequence {sequence} x tensor {tensor}, which does not divide"
                f" {num_ranks} ranks; start a multiple of {rest} ranks (torchrun --nproc-per-node)"
                " or change the layout"
            )
        data = num_ranks // rest
    layout = Layout(data, sequence, tensor)
    if layout.size != num_ranks:
        fix = (
            f"set training.layout.data to {num_ranks // rest}"
            if num_ranks % rest == 0
            else "change the layout"
        )
        raise ValueError(
            f"training.layout is {layout} = {layout.size} ranks, but this run has {num_ranks}; "
            f"{fix}, or start {layout.size} ranks (torchrun --nproc-per-node)"
        )
    return layout
