"""A model's parameter table: what every engine rank stores of each tensor of the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from megarl.parallel.reshard.boxes import ZEROS, Box, Owned, matrix
from megarl.parallel.reshard.part import Kinds
from megarl.parallel.tensor import Shard


@dataclass(frozen=True)
class ParameterSpec:
    """One tensor of a checkpoint, and where engines of one tensor-parallel degree store it."""

    name: str
    shape: tuple[int, ...]
    engine: str
    """The engine's parameter. Tensors with the same one are stacked there, in the table's order."""
    boxes: tuple[tuple[Box, ...], ...]
    """For each engine rank, the rectangles that it stores, in order."""
    zeros: tuple[int, ...]
    """For each engine rank, elements of padding after `boxes`."""


def plain_table(shapes: Mapping[str, tuple[int, ...]], tensor: int) -> list[ParameterSpec]:
    """The table of an engine whose ranks store every tensor whole and under its own name."""
    return [
        ParameterSpec(name, shape, name, ((matrix(shape),),) * tensor, (0,) * tensor)
        for name, shape in shapes.items()
    ]


def table_to_json(table: Sequence[ParameterSpec]) -> str:
    return json.dumps([astuple(parameter) for parameter in table], separators=(",", ":"))


def table_from_json(text: str) -> list[ParameterSpec]:
    """Inverse of `table_to_json`. Raises `ValueError` or `TypeError` for another text."""
    return [
        ParameterSpec(
            name,
            tuple(shape),
            engine,
            tuple(tuple(Box(*box) for box in rank) for rank in boxes),
            tuple(zeros),
        )
        for name, shape, engine, boxes, zeros in json.loads(text)
    ]


def engine_owned(table: Sequence[ParameterSpec], tensor: int) -> list[Owned]:
    return [engine_rank_owned(table, rank, tensor) for rank in range(tensor)]


def engine_rank_owned(table: Sequence[ParameterSpec], rank: int, tensor: int) -> Owned:
    """What rank `rank` of `tensor` engine ranks stores: a buffer for each engine parameter, with
    padding.
    """
    owned = Owned()
    for parameter in table:
        assert len(parameter.boxes) == tensor, "the table is for another rollout.engine.tensor"
        for box in parameter.boxes[rank]:
            owned.add(parameter.name, box, parameter.engine)
        # Whole rows where they are, so that a buffer can be cut between rows.
        zeros, width = parameter.zeros[rank], matrix(parameter.shape).columns
        width = 1 if zeros % width else width
        owned.add(ZEROS, Box(0, zeros // width, 0, width), parameter.engine)
    return owned


def kinds_of(table: Sequence[ParameterSpec], shards: Mapping[str, Shard]) -> Kinds:
    """Tensors that engine and training ranks split and store alike, so that one plan serves all.

    `shards`: {tensor: how training ranks split it}. Two tensors are alike if their engine
    parameters stack equal shapes, boxes and shards, and both have the same place there.
    """
    stacked: dict[str, list[ParameterSpec]] = {}
    for parameter in table:
        stacked.setdefault(parameter.engine, []).append(parameter)
    first: dict[tuple[object, ...], list[ParameterSpec]] = {}
    like: dict[str, str] = {}
    for members in stacked.values():
        signature = tuple(
            (parameter.shape, parameter.boxes, parameter.zeros, shards.get(parameter.name))
            for parameter in members
        )
        for member, other in zip(members, first.setdefault(signature, members), strict=True):
            like[member.name] = other.name
    return Kinds(
        {member.name: like[member.name] for member in table},
        {member.name: member.engine for member in table},
    )


def refuse_other_model(
    in_table: Mapping[str, object], in_model: Mapping[str, object], model: str
) -> None:
    """Raise `ValueError` with the first name that differs. `in_table`, `in_model`: {tensor: its
    shape or size}; `model`: the model's name in the message.
    """
    for name in sorted(in_table.keys() | in_model.keys()):
        if in_table.get(name) != in_model.get(name):
            raise ValueError(
                f"{model} and its parameter table differ at {name}: {in_model.get(name)} in the"
                f" model, {in_table.get(name)} in the table; set model.path to another model"
            )
