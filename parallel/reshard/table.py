"""A model's parameter table: each tensor's name, shape, how tensor ranks share it, and which engine parameter it is part of.

A table is data, made from a model's `config.json` (`megarl.publish.families`). From it follows what every rank of a training
layout, of an engine, or of no layout at all (a Hugging Face checkpoint) holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megarl.parallel.layout import Layout
from megarl.parallel.reshard.pieces import ZEROS, Held, matrix
from megarl.parallel.tensor import Shard

Cut = Literal["whole", "outputs", "inputs", "keys", "words"]
"""How tensor ranks share a tensor:

* whole: each has all of it
* outputs: rows, evenly (queries, gate, up; one expert's too)
* inputs: columns, evenly (attention output, down)
* keys: rows of key or value heads; where heads are fewer than ranks, neighbours have the same one
* words: rows of a vocabulary, even or not
"""

WORDS_MULTIPLE = 64
"""Engines pad a vocabulary to a multiple of this before they cut it (vLLM: DEFAULT_VOCAB_PADDING_SIZE)."""


@dataclass(frozen=True)
class Row:
    """One tensor of a model, as a checkpoint names it."""

    name: str
    shape: tuple[int, ...]
    cut: Cut
    engine: str
    """The engine's parameter; tensors that share one are stacked in the table's order."""
    heads: int = 0
    """Key-value heads that `keys` are of."""


def training_shards(table: Sequence[Row], tensor: int) -> dict[str, Shard]:
    """How `tensor` training ranks cut each tensor; those not named they hold whole, key heads fewer than ranks among them."""
    made = {}
    for row in table:
        if tensor == 1 or row.cut == "whole" or (row.cut == "keys" and row.heads % tensor):
            continue
        dim = 1 if row.cut == "inputs" else 0
        made[row.name] = Shard.even(dim, row.shape[dim], tensor)
    return made


def training_held(
    shapes: Mapping[str, tuple[int, ...]], shards: Mapping[str, Shard], layout: Layout, zero_stage: int
) -> list[Held]:
    """What each rank of a training layout holds; one buffer a tensor, which ZeRO 3 slices over data x sequence.

    Raises `ValueError` where a tensor is cut along another dimension than its first or last of two.
    """
    whole_ranks = []
    for rank in range(layout.tensor):
        held = Held()
        for name, shape in shapes.items():
            box, shard = matrix(shape), shards.get(name)
            if shard is not None:
                if shard.dim > 1 or len(shape) > 2:
                    raise ValueError(f"{name} {shape} is cut along dimension {shard.dim}, which no reshard plan can describe")
                start, stop = shard.edges[rank], shard.edges[rank + 1]
                box = box._replace(top=start, bottom=stop) if shard.dim == 0 else box._replace(left=start, right=stop)
            held.add(name, box, name)
        whole_ranks.append(held)
    replicas, made = layout.size // layout.tensor, []
    for rank in range(layout.size):
        place = layout.coordinates(rank)
        held, replica = whole_ranks[place["tensor"]], place["data"] * layout.sequence + place["sequence"]
        made.append(held.slice(replica, replicas) if zero_stage == 3 and replicas > 1 else held)
    return made


def engine_held(table: Sequence[Row], tensor: int) -> list[Held]:
    """What each of an engine's `tensor` ranks holds, one buffer a parameter of the engine.

    Raises `ValueError` where `tensor` does not divide what it has to.
    """
    made = []
    for rank in range(tensor):
        held = Held()
        for row in table:
            box = matrix(row.shape)
            if row.cut == "words":
                padded = -(-row.shape[0] // WORDS_MULTIPLE) * WORDS_MULTIPLE
                if padded % tensor:
                    raise ValueError(
                        f"rollout.engine.tensor is {tensor}, which does not divide the {padded} padded words of {row.name}; set "
                        "it to a divisor"
                    )
                share = padded // tensor
                first = min(rank * share, box.bottom)
                real = box._replace(top=first, bottom=min(first + share, box.bottom))
                held.add(row.name, real, row.engine)
                held.add(ZEROS, real._replace(top=0, bottom=share - real.rows), row.engine)
                continue
            if row.cut != "whole":
                size, parts, index = (box.columns if row.cut == "inputs" else box.rows), tensor, rank
                if row.cut == "keys" and row.heads < tensor:
                    parts, index = row.heads, rank * row.heads // tensor
                if size % parts or (row.cut == "keys" and row.heads % tensor and tensor % row.heads):
                    raise ValueError(
                        f"rollout.engine.tensor is {tensor}, which does not divide {row.name} {row.shape}; set it to a divisor"
                    )
                start, stop = index * size // parts, (index + 1) * size // parts
                box = box._replace(left=start, right=stop) if row.cut == "inputs" else box._replace(top=start, bottom=stop)
            held.add(row.name, box, row.engine)
        made.append(held)
    return made


def whole_held(shapes: Mapping[str, tuple[int, ...]]) -> list[Held]:
    """One holder of every tensor whole: a Hugging Face checkpoint."""
    held = Held()
    for name, shape in shapes.items():
        held.add(name, matrix(shape), name)
    return [held]
