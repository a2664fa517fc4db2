"""A model's parameter table: one `ParameterSpec` for each tensor of its checkpoint.

The table is made from a model's `config.json` (`megarl.weight_sync.families`). It determines which
part of each tensor every rank owns: of a training layout, of an inference engine, or of a whole
Hugging Face checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from megarl.parallel.reshard.boxes import ZEROS, Box, Owned, matrix
from megarl.parallel.reshard.part import Kinds
from megarl.parallel.tensor import Shard

Cut = Literal["whole", "outputs", "inputs", "kv_heads", "vocab", "sections"]
"""How tensor-parallel ranks split a weight [outputs, inputs]:

* whole: not split, every rank has all of it
* outputs: rows, evenly (query, gate and up projections, also of an expert)
* inputs: columns, evenly (attention output and down projections)
* kv_heads: rows by KV head; with fewer heads than ranks, neighbouring ranks share a head
* vocab: rows by token id, evenly or not
* sections: rows of several layers that the checkpoint stores as one tensor, each cut by itself
"""

VOCAB_PADDING = 64
"""vLLM pads a vocabulary to a multiple of this before splitting it (DEFAULT_VOCAB_PADDING_SIZE)."""


class Section(NamedTuple):
    """Rows of one layer in a tensor of several."""

    rows: int
    cut: Cut
    heads: int = 0
    """As `ParameterSpec.heads`."""


@dataclass(frozen=True)
class ParameterSpec:
    """One tensor of a model's checkpoint, and where an engine stores it."""

    name: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    cut: Cut
    """How tensor-parallel ranks split it."""
    engine: str
    """The engine's parameter; tensors with the same one are stacked in the table's order."""
    heads: int = 0
    """Number of KV heads where `cut` is "kv_heads", else 0."""
    sections: tuple[Section, ...] = ()
    """The layers of which a tensor is stacked where `cut` is "sections", in its order."""


def training_shards(table: Sequence[ParameterSpec], tensor: int) -> dict[str, Shard]:
    """{tensor name: how `tensor` training ranks split it}; unsplit tensors are left out.

    KV heads that do not divide over the ranks are unsplit: every rank has all of them. So are
    tensors of several layers.
    """
    shards = {}
    for parameter in table:
        is_shared = parameter.cut == "kv_heads" and parameter.heads % tensor
        if tensor == 1 or parameter.cut in ("whole", "sections") or is_shared:
            continue
        dim = 1 if parameter.cut == "inputs" else 0
        shards[parameter.name] = Shard.even(dim, parameter.shape[dim], tensor)
    return shards


def engine_owned(table: Sequence[ParameterSpec], tensor: int) -> list[Owned]:
    """What each of an engine's `tensor` ranks owns, one buffer for each parameter of the engine.

    Raises `ValueError` where a tensor cannot be split over `tensor` ranks.
    """
    return [engine_rank_owned(table, rank, tensor) for rank in range(tensor)]


def engine_rank_owned(table: Sequence[ParameterSpec], rank: int, tensor: int) -> Owned:
    """What rank `rank` of an engine's `tensor` ranks owns; see `engine_owned`."""
    owned = Owned()
    for parameter in table:
        if parameter.cut == "vocab":
            real, padding = _vocab_part(parameter, rank, tensor)
            owned.add(parameter.name, real, parameter.engine)
            owned.add(ZEROS, padding, parameter.engine)
        else:
            for box in _parts(parameter, rank, tensor):
                owned.add(parameter.name, box, parameter.engine)
    return owned


def kinds_of(table: Sequence[ParameterSpec], shards: Mapping[str, Shard]) -> Kinds:
    """Which tensors of `table` lie alike: on the ranks of every engine, and on training ranks that
    split them by `shards`.

    Two tensors are alike if their engine parameters are stacked from tensors of equal shapes, cuts
    and shards, and they have the same place in it.
    """
    stacked: dict[str, list[ParameterSpec]] = {}
    for parameter in table:
        stacked.setdefault(parameter.engine, []).append(parameter)
    first: dict[tuple[object, ...], list[ParameterSpec]] = {}
    like: dict[str, str] = {}
    for members in stacked.values():
        kind = tuple(
            (one.shape, one.cut, one.heads, one.sections, shards.get(one.name)) for one in members
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
    table: Sequence[ParameterSpec], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise `ValueError` with the first tensor in which a table and a model's `shapes` differ."""
    in_table = {parameter.name: parameter.shape for parameter in table}
    for name in sorted(in_table.keys() | shapes.keys()):
        if in_table.get(name) != shapes.get(name):
            raise ValueError(
                f"the model and its parameter table differ at {name}: {shapes.get(name)} in the"
                f" model, {in_table.get(name)} in the table; correct the family's entry in"
                " megarl/weight_sync/families.py"
            )
