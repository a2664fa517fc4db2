"""A model's parameter table: one `ParameterSpec` for each tensor of its checkpoint.

The table is made from a model's `config.json` (`megarl.weight_sync.families`). It says which part
of each tensor every rank has: of a training layout, of an inference engine, or of a whole Hugging
Face checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from megarl.parallel.reshard.boxes import ZEROS, Box, Owned, matrix
from megarl.parallel.reshard.part import Kinds
from megarl.parallel.tensor import Shard

Cut = Literal["whole", "outputs", "inputs", "kv_heads", "vocab", "sections", "recorded"]
"""How tensor-parallel ranks split a weight [outputs, inputs]:

* whole: not split, every rank has all of it
* outputs: rows, evenly (query, gate and up projections, also of an expert)
* inputs: columns, evenly (attention output and down projections)
* kv_heads: rows by KV head; with fewer heads than ranks, neighbouring ranks share a head
* vocab: rows by token id, evenly or not
* sections: rows of several layers that the checkpoint stores as one tensor, each cut by itself
* recorded: as vLLM's loader does for one tensor-parallel degree (`megarl.cluster.recorded_table`)
"""

VOCAB_PADDING = 64
"""vLLM pads a vocabulary to a multiple of this before splitting it (DEFAULT_VOCAB_PADDING_SIZE)."""


class Section(NamedTuple):
    """One of the layers, such as q, k and v, in a tensor that stacks several layers: how many rows
    it has there, and how tensor-parallel ranks split them.
    """

    rows: int
    cut: Cut
    heads: int = 0
    """Number of KV heads where `cut` is "kv_heads", else 0."""


@dataclass(frozen=True)
class ParameterSpec:
    """One tensor of a model's checkpoint, and where an inference engine stores it. A list of these,
    in the order of vLLM's model, is the model's parameter table.
    """

    name: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole tensor, not split."""
    cut: Cut
    """How tensor-parallel ranks split it."""
    engine: str
    """Name of the engine's parameter; tensors with the same one are stacked there, in the table's
    order."""
    heads: int = 0
    """Number of KV heads where `cut` is "kv_heads", else 0."""
    sections: tuple[Section, ...] = ()
    """Where `cut` is "sections": the layers that the tensor stacks, from its first row on."""
    boxes: tuple[tuple[Box, ...], ...] = ()
    """Where `cut` is "recorded": for each engine rank, the rectangles of the tensor that the rank
    stores, in the order in which it stores them."""
    zeros: tuple[int, ...] = ()
    """Where `cut` is "recorded": for each engine rank, the elements of padding after `boxes`."""


def table_to_json(table: Sequence[ParameterSpec]) -> str:
    """A parameter table (a list with one entry for each tensor of a model) that was recorded from
    vLLM's loader, as JSON text. `table_from_json` reads it, once `json.loads` has parsed it.
    """
    return json.dumps(
        [(one.name, one.shape, one.engine, one.boxes, one.zeros) for one in table],
        separators=(",", ":"),
    )


def table_from_json(rows: Sequence[Any]) -> list[ParameterSpec]:
    """Rebuild a parameter table, a list with one entry for each tensor of a model, from the JSON
    text that `table_to_json` returned. `rows`: this text, parsed by `json.loads`.
    """
    return [
        ParameterSpec(
            *(name, tuple(shape), "recorded", engine),
            boxes=tuple(tuple(Box(*box) for box in rank) for rank in boxes),
            zeros=tuple(zeros),
        )
        for name, shape, engine, boxes, zeros in rows
    ]


def training_shards(table: Sequence[ParameterSpec], tensor: int) -> dict[str, Shard]:
    """How training splits a model over `tensor` tensor-parallel ranks: {tensor name: a `Shard`:
    rank r has the indices [edges[r], edges[r + 1]) of dimension `dim`}.

    Tensors that every rank has whole are left out. Beside norms and the like, these are KV heads
    that do not divide evenly over the ranks, tensors that stack several layers, and tensors that
    were recorded from vLLM's loader.
    """
    shards = {}
    for parameter in table:
        is_shared = parameter.cut == "kv_heads" and parameter.heads % tensor
        if tensor == 1 or parameter.cut in ("whole", "sections", "recorded") or is_shared:
            continue
        dim = 1 if parameter.cut == "inputs" else 0
        shards[parameter.name] = Shard.even(dim, parameter.shape[dim], tensor)
    return shards


def engine_owned(table: Sequence[ParameterSpec], tensor: int) -> list[Owned]:
    """What each of an engine's `tensor` tensor-parallel ranks stores of the tensors of `table`,
    which has an entry for each tensor of the model. Returns for each rank an `Owned`: `pieces`,
    rectangles of tensors with their places in flat buffers, in elements, and `sizes`, the elements
    of each buffer: one buffer for each parameter of the engine, padding included.

    Raises `ValueError` where a tensor cannot be split over `tensor` ranks.
    """
    return [engine_rank_owned(table, rank, tensor) for rank in range(tensor)]


def engine_rank_owned(table: Sequence[ParameterSpec], rank: int, tensor: int) -> Owned:
    """What tensor-parallel rank `rank` of an engine's `tensor` ranks stores of the tensors of
    `table`, which has an entry for each tensor of the model. Returns an `Owned`: `pieces`,
    rectangles of tensors with their places in flat buffers, in elements, and `sizes`, the elements
    of each buffer: one buffer for each parameter of the engine, padding included. Raises
    `ValueError` where a tensor cannot be split over `tensor` ranks.
    """
    owned = Owned()
    for parameter in table:
        if parameter.cut == "recorded":
            if len(parameter.boxes) != tensor:
                raise ValueError(f"{parameter.name} was recorded for another rollout.engine.tensor")
            for box in parameter.boxes[rank]:
                owned.add(parameter.name, box, parameter.engine)
            # Whole rows where they are, so that a buffer can be cut between rows.
            zeros, width = parameter.zeros[rank], matrix(parameter.shape).columns
            width = 1 if zeros % width else width
            owned.add(ZEROS, Box(0, zeros // width, 0, width), parameter.engine)
        elif parameter.cut == "vocab":
            real, padding = _vocab_part(parameter, rank, tensor)
            owned.add(parameter.name, real, parameter.engine)
            owned.add(ZEROS, padding, parameter.engine)
        else:
            for box in _parts(parameter, rank, tensor):
                owned.add(parameter.name, box, parameter.engine)
    return owned


def kinds_of(table: Sequence[ParameterSpec], shards: Mapping[str, Shard]) -> Kinds:
    """Find tensors of `table` that engine and training ranks split and store alike, such as the
    same weight of each layer, so that the transfer is planned for only one of them. `shards`:
    {tensor: how training ranks split it}. Returns `Kinds`: {tensor: the first tensor like it,
    perhaps itself} and {tensor: engine parameter}.

    An engine parameter may stack several tensors. Two tensors are alike if their engine parameters
    stack tensors of equal shapes, cuts and shards, and the two have the same place there.
    """
    stacked: dict[str, list[ParameterSpec]] = {}
    for parameter in table:
        stacked.setdefault(parameter.engine, []).append(parameter)
    first: dict[tuple[object, ...], list[ParameterSpec]] = {}
    like: dict[str, str] = {}
    for members in stacked.values():
        kind = tuple(
            (
                *(one.shape, one.cut, one.heads, one.sections, one.boxes, one.zeros),
                shards.get(one.name),
            )
            for one in members
        )
        for one, other in zip(members, first.setdefault(kind, members), strict=True):
            like[one.name] = other.name
    return Kinds(
        {one.name: like[one.name] for one in table}, {one.name: one.engine for one in table}
    )


def _vocab_part(parameter: ParameterSpec, rank: int, tensor: int) -> tuple[Box, Box]:
    """Tensor-parallel rank `rank`'s rows of a vocabulary, and the zero rows that pad them.

    Raises `ValueError` where the padded vocabulary cannot be split over `tensor` ranks.
    """
    box = matrix(parameter.shape)
    padded = -(-parameter.shape[0] // VOCAB_PADDING) * VOCAB_PADDING
    if padded % tensor:
        raise ValueError(
            f"rollout.engine.tensor is {tensor}, which does not divide the {padded} padded"
            f" vocabulary rows of {parameter.name}; set it to a divisor"
        )
    share = padded // tensor
    first = min(rank * share, box.bottom)
    real = box._replace(top=first, bottom=min(first + share, box.bottom))
    return real, real._replace(top=0, bottom=share - real.rows)


def _parts(parameter: ParameterSpec, rank: int, tensor: int) -> list[Box]:
    """The boxes that tensor-parallel rank `rank` owns of a tensor that is not a vocabulary, in the
    order in which the engine stores them. Raises `ValueError` as `_part`.
    """
    if parameter.cut != "sections":
        return [_part(parameter, rank, tensor)]
    boxes, top = [], 0
    for rows, cut, heads in parameter.sections:
        layer = replace(parameter, shape=(rows, *parameter.shape[1:]), cut=cut, heads=heads)
        box = _part(layer, rank, tensor)
        boxes.append(box._replace(top=top + box.top, bottom=top + box.bottom))
        top += rows
    return boxes


def _part(parameter: ParameterSpec, rank: int, tensor: int) -> Box:
    """The box that tensor-parallel rank `rank` owns of a tensor that is not a vocabulary.

    Raises `ValueError` where the tensor cannot be split over `tensor` ranks.
    """
    box = matrix(parameter.shape)
    if parameter.cut == "whole":
        return box
    size = box.columns if parameter.cut == "inputs" else box.rows
    heads = parameter.heads if parameter.cut == "kv_heads" else 0
    parts, index = tensor, rank
    if heads and heads < tensor:
        parts, index = heads, rank * heads // tensor
    if size % parts or (heads and heads % tensor and tensor % heads):
        raise ValueError(
            f"rollout.engine.tensor is {tensor}, which does not divide {parameter.name}"
            f" {parameter.shape}; set it to a divisor"
        )
    start, stop = index * size // parts, (index + 1) * size // parts
    if parameter.cut == "inputs":
        return box._replace(left=start, right=stop)
    return box._replace(top=start, bottom=stop)


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
                f" model, {in_table.get(name)} in the table; correct the family's entry in"
                " megarl/weight_sync/families.py"
            )
