"""A model's parameter table: one `ParameterSpec` for each tensor of its checkpoint, which says what
every rank of an inference engine stores of it, and where.

The table is recorded from vLLM's loader (`megarl.weights.recorded_table`); `plain_table` makes that
of an engine that stores tensors as the checkpoint has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from megarl.parallel.reshard.boxes import ZEROS, Box, Owned, matrix
from megarl.parallel.reshard.part import Kinds
from megarl.parallel.tensor import Shard


@dataclass(frozen=True)
class ParameterSpec:
    """One tensor of a model's checkpoint, and where an inference engine stores it. A list of these,
    in the order of the engine's parameters, is the model's parameter table for one tensor-parallel
    degree.
    """

    name: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    engine: str
    """Name of the engine's parameter; tensors with the same one are stacked there, in the table's
    order."""
    boxes: tuple[tuple[Box, ...], ...]
    """For each engine rank, the rectangles of the tensor that the rank stores, in the order in
    which it stores them."""
    zeros: tuple[int, ...]
    """For each engine rank, the elements of padding after `boxes`."""


def plain_table(shapes: Mapping[str, tuple[int, ...]], tensor: int) -> list[ParameterSpec]:
    """The parameter table of an engine each of whose `tensor` ranks stores every tensor whole and
    under its own name. `shapes`: {tensor name: shape}.
    """
    return [
        ParameterSpec(name, shape, name, ((matrix(shape),),) * tensor, (0,) * tensor)
        for name, shape in shapes.items()
    ]


def table_to_json(table: Sequence[ParameterSpec]) -> str:
    """A parameter table as JSON text, which `table_from_json` reads."""
    return json.dumps([astuple(parameter) for parameter in table], separators=(",", ":"))


def table_from_json(text: str) -> list[ParameterSpec]:
    """The parameter table of which `table_to_json` made this JSON text. Raises `ValueError` or
    `TypeError` for another text.
    """
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
    """`engine_rank_owned` of each of an engine's `tensor` ranks."""
    return [engine_rank_owned(table, rank, tensor) for rank in range(tensor)]


def engine_rank_owned(table: Sequence[ParameterSpec], rank: int, tensor: int) -> Owned:
    """What tensor-parallel rank `rank` of an engine's `tensor` ranks stores of the tensors of
    `table`: `pieces`, rectangles of tensors with their places in flat buffers, in elements, and
    `sizes`, the elements of each buffer: one for each parameter of the engine, padding included.
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
    """Find tensors of `table` that engine and training ranks split and store alike, such as the
    same weight of each layer, so that the transfer is planned for only one of them. `shards`:
    {tensor: how training ranks split it}. Returns `Kinds`: {tensor: the first tensor like it,
    perhaps itself} and {tensor: engine parameter}.

    An engine parameter may stack several tensors. Two tensors are alike if their engine parameters
    stack tensors of equal shapes, boxes and shards, and the two have the same place there.
    """
    stacked: dict[str, list[ParameterSpec]] = {}
    for parameter in table:
        stacked.setdefault(parameter.engine, []).append(parameter)
    first: dict[tuple[object, ...], list[ParameterSpec]] = {}
    like: dict[str, str] = {}
    for members in stacked.values():
        kind = tuple(
            (parameter.shape, parameter.boxes, parameter.zeros, shards.get(parameter.name))
            for parameter in members
        )
        for one, other in zip(members, first.setdefault(kind, members), strict=True):
            like[one.name] = other.name
    return Kinds(
        {one.name: like[one.name] for one in table}, {one.name: one.engine for one in table}
    )


def refuse_other_model(
    in_table: Mapping[str, object], in_model: Mapping[str, object], model: str
) -> None:
    """Raise `ValueError` if a model differs from a parameter table (the list of a model's tensors);
    the message names the first tensor, in alphabetical order, that differs. `in_table`, `in_model`:
    {tensor name: its shape, or its number of elements}. `model`: what to call the model in the
    message, such as "the engine's model".
    """
    for name in sorted(in_table.keys() | in_model.keys()):
        if in_table.get(name) != in_model.get(name):
            raise ValueError(
                f"{model} and its parameter table differ at {name}: {in_model.get(name)} in the"
                f" model, {in_table.get(name)} in the table; set model.path to another model"
            )
