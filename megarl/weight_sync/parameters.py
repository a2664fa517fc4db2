"""A model's parameter table: each tensor's name, shape, how tensor ranks share it, and which engine
parameter it is part of.

A table is data, made from a model's `config.json` (`megarl.weight_sync.families`). From it follows
what every rank of a training layout, of an engine, or of no layout at all (a Hugging Face
checkpoint) holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megarl.parallel.reshard.boxes import ZEROS, Owned, matrix
from megarl.parallel.tensor import Shard

Cut = Literal["whole", "outputs", "inputs", "kv_heads", "vocab"]
"""How tensor ranks share a tensor:

* whole: each has all of it
* outputs: rows, evenly (queries, gate, up; one expert's too)
* inputs: columns, evenly (attention output, down)
* keys: rows of key or value heads; where heads are fewer than ranks, neighbours have the same one
* words: rows of a vocabulary, even or not
"""

WORDS_MULTIPLE = 64
"""Engines pad a vocabulary to a multiple of this before they cut it (vLLM:
DEFAULT_VOCAB_PADDING_SIZE).
"""


@dataclass(frozen=True)
class ParameterSpec:
    """One tensor of a model, as a checkpoint names it."""

    name: str
    shape: tuple[int, ...]
    cut: Cut
    engine: str
    """The engine's parameter; tensors that share one are stacked in the table's order."""
    heads: int = 0
    """Key-value heads that `keys` are of."""


def training_shards(table: Sequence[ParameterSpec], tensor: int) -> dict[str, Shard]:
    """How `tensor` training ranks cut each tensor; those not named they hold whole, key heads fewer
    than ranks among them.
    """
    made = {}
    for row in table:
        if tensor == 1 or row.cut == "whole" or (row.cut == "kv_heads" and row.heads % tensor):
            continue
        dim = 1 if row.cut == "inputs" else 0
        made[row.name] = Shard.even(dim, row.shape[dim], tensor)
    return made


def engine_owned(table: Sequence[ParameterSpec], tensor: int) -> list[Owned]:
    """What each of an engine's `tensor` ranks holds, one buffer a parameter of the engine.

    Raises `ValueError` where `tensor` does not divide what it has to.
    """
    made = []
    for rank in range(tensor):
        owned = Owned()
        for row in table:
            box = matrix(row.shape)
            if row.cut == "vocab":
                padded = -(-row.shape[0] // WORDS_MULTIPLE) * WORDS_MULTIPLE
                if padded % tensor:
                    raise ValueError(
                        f"rollout.engine.tensor is {tensor}, which does not divide the {padded}"
                        f" padded words of {row.name}; set it to a divisor"
                    )
                share = padded // tensor
                first = min(rank * share, box.bottom)
                real = box._replace(top=first, bottom=min(first + share, box.bottom))
                owned.add(row.name, real, row.engine)
                owned.add(ZEROS, real._replace(top=0, bottom=share - real.rows), row.engine)
                continue
            if row.cut != "whole":
                size, parts, index = (
                    (box.columns if row.cut == "inputs" else box.rows),
                    tensor,
                    rank,
                )
                if row.cut == "kv_heads" and row.heads < tensor:
                    parts, index = row.heads, rank * row.heads // tensor
                if size % parts or (
                    row.cut == "kv_heads" and row.heads % tensor and tensor % row.heads
                ):
                    raise ValueError(
                        f"rollout.engine.tensor is {tensor}, which does not divide {row.name}"
                        f" {row.shape}; set it to a divisor"
                    )
                start, stop = index * size // parts, (index + 1) * size // parts
                box = (
                    box._replace(left=start, right=stop)
                    if row.cut == "inputs"
                    else box._replace(top=start, bottom=stop)
                )
            owned.add(row.name, box, row.engine)
        made.append(owned)
    return made
