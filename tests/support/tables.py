"""Parameter tables of made-up models by the ways in which tensor-parallel ranks split a tensor:
`engine_table` makes a table as it is recorded from vLLM, for one degree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megarl.parallel.reshard.boxes import Box, matrix
from megarl.parallel.tensor import Shard
from megarl.weights.parameters import ParameterSpec

Cut = Literal["whole", "outputs", "inputs", "kv_heads", "vocab"]
"""How tensor-parallel ranks split a weight [outputs, inputs]:

* whole: not split, every rank has all of it
* outputs: rows, evenly
* inputs: columns, evenly
* kv_heads: rows by KV head; with fewer heads than ranks, neighbouring ranks share a head
* vocab: rows by token id, padded to a multiple of `VOCAB_PADDING`
"""

VOCAB_PADDING = 64


@dataclass(frozen=True)
class Row:
    """One tensor of a model."""

    name: str
    shape: tuple[int, ...]
    cut: Cut
    engine: str
    """Name of the engine's parameter; tensors with the same one are stacked there."""
    heads: int = 0
    """Number of KV heads where `cut` is "kv_heads", else 0."""


def engine_table(rows: Sequence[Row], tensor: int) -> list[ParameterSpec]:
    """The parameter table for engines of `tensor` ranks."""
    table = []
    for row in rows:
        boxes, zeros = [], []
        for rank in range(tensor):
            if row.cut == "vocab":
                real, padding = _vocab_part(row, rank, tensor)
                boxes.append((real,))
                zeros.append(padding.area)
            else:
                boxes.append((_part(row, rank, tensor),))
                zeros.append(0)
        table.append(ParameterSpec(row.name, row.shape, row.engine, tuple(boxes), tuple(zeros)))
    return table


def training_shards(table: Sequence[Row], tensor: int) -> dict[str, Shard]:
    """How training splits a model over `tensor` ranks: {tensor name: its shard}; KV heads that do
    not divide evenly are whole.
    """
    shards = {}
    for parameter in table:
        is_shared = parameter.cut == "kv_heads" and parameter.heads % tensor
        if tensor == 1 or parameter.cut == "whole" or is_shared:
            continue
        dim = 1 if parameter.cut == "inputs" else 0
        shards[parameter.name] = Shard.even(dim, parameter.shape[dim], tensor)
    return shards


def _vocab_part(parameter: Row, rank: int, tensor: int) -> tuple[Box, Box]:
    """Rank `rank`'s rows of a vocabulary, and the zero rows that pad them."""
    box = matrix(parameter.shape)
    padded = -(-parameter.shape[0] // VOCAB_PADDING) * VOCAB_PADDING
    assert padded % tensor == 0
    share = padded // tensor
    first = min(rank * share, box.bottom)
    real = box._replace(top=first, bottom=min(first + share, box.bottom))
    return real, real._replace(top=0, bottom=share - real.rows)


def _part(parameter: Row, rank: int, tensor: int) -> Box:
    """The box that rank `rank` has of a tensor that is no vocabulary."""
    box = matrix(parameter.shape)
    if parameter.cut == "whole":
        return box
    size = box.columns if parameter.cut == "inputs" else box.rows
    heads = parameter.heads if parameter.cut == "kv_heads" else 0
    parts, index = tensor, rank
    if heads and heads < tensor:
        parts, index = heads, rank * heads // tensor
    assert size % parts == 0 and (not heads or heads % tensor == 0 or tensor % heads == 0)
    start, stop = index * size // parts, (index + 1) * size // parts
    if parameter.cut == "inputs":
        return box._replace(left=start, right=stop)
    return box._replace(top=start, bottom=stop)
