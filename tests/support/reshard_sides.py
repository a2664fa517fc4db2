"""Every way to hold one random model over ranks: training layouts, engines, a checkpoint; each as
boxes and as plain tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st

from megarl.parallel.layout import Layout
from megarl.parallel.reshard import plan as plan_module
from megarl.parallel.reshard.boxes import Owned
from megarl.parallel.reshard.owned import training_owned, whole_owned
from megarl.parallel.reshard.plan import Plan, make_plan
from megarl.weights.parameters import engine_owned
from support.engine_ranks import model_table
from support.tables import VOCAB_PADDING, Row, engine_table, training_shards

Buffers = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Side:
    """One end of a plan: what its ranks hold, and the same in numbers, cut with plain torch from
    whole tensors.
    """

    what: str
    owned: list[Owned]
    by_hand: list[Buffers]


@st.composite
def tables(draw: st.DrawFn, tensor: int) -> list[Row]:
    """A model that an engine of `tensor` ranks can cut, smaller than a slice or not; training may
    cut it unevenly.
    """
    fewer = [tensor // parts for parts in (1, 2, 4, 8) if tensor % parts == 0]
    key_heads = draw(st.sampled_from([*fewer, 2 * tensor]))
    heads = math.lcm(key_heads, tensor) * draw(st.integers(1, 2))
    layers, hidden, width, intermediate = (draw(st.integers(1, most)) for most in (3, 12, 3, 4))
    vocabulary = 2 * draw(st.integers(0, 90)) + 1
    sizes = (layers, hidden, heads, key_heads, width, intermediate * tensor, vocabulary)
    return model_table(
        sizes, draw(st.sampled_from([0, 0, 1, 4])), *(draw(st.booleans()) for _ in range(3))
    )


TENSORS = st.sampled_from([1, 2, 4, 8])
LAYOUTS = st.builds(Layout, st.integers(1, 3), st.integers(1, 2), st.integers(1, 4))


def whole_tensors(table: Sequence[Row]) -> Buffers:
    """A number of its own for every element of the model, from 1: 0 is padding."""
    sizes = [math.prod(row.shape) for row in table]
    flat = torch.arange(1, sum(sizes) + 1).split(sizes)
    return {row.name: part.reshape(row.shape) for row, part in zip(table, flat, strict=True)}


def training(table: Sequence[Row], layout: Layout, stage: int) -> Side:
    whole, by_hand = whole_tensors(table), []
    for rank in range(layout.size):
        replica, tensor = divmod(rank, layout.tensor)
        buffers = {}
        for row in table:
            cut = row.cut != "whole" and not (row.cut == "kv_heads" and row.heads % layout.tensor)
            parts = (
                whole[row.name].tensor_split(layout.tensor, int(row.cut == "inputs"))
                if cut
                else [whole[row.name]]
            )
            mine = parts[tensor % len(parts)].contiguous().reshape(-1)
            length = -(-len(mine) // (layout.data * layout.sequence))
            buffers[row.name] = (
                mine[replica * length : (replica + 1) * length] if stage == 3 else mine
            )
        by_hand.append(buffers)
    owned = training_owned(
        {row.name: row.shape for row in table}, training_shards(table, layout.tensor), layout, stage
    )
    return Side(f"{layout}, ZeRO {stage}", owned, by_hand)


def engine(table: Sequence[Row], tensor: int, engines: int = 1) -> Side:
    whole, by_hand = whole_tensors(table), []
    for rank in range(tensor):
        parts: dict[str, list[torch.Tensor]] = {}
        for row in table:
            part = whole[row.name]
            if row.cut == "kv_heads":
                part = part.unflatten(0, (row.heads, -1)).repeat_interleave(
                    max(1, tensor // row.heads), 0
                )
            if row.cut == "vocab":
                part = torch.cat(
                    [part, part.new_zeros(-len(part) % VOCAB_PADDING, *part.shape[1:])]
                )
            if row.cut != "whole":
                part = part.tensor_split(tensor, int(row.cut == "inputs"))[rank]
            parts.setdefault(row.engine, []).append(part.reshape(-1))
        by_hand.append({name: torch.cat(found) for name, found in parts.items()})
    return Side(
        f"{engines} engines of {tensor}",
        engine_owned(engine_table(table, tensor), tensor) * engines,
        by_hand * engines,
    )


def checkpoint(table: Sequence[Row]) -> Side:
    whole = {name: tensor.reshape(-1) for name, tensor in whole_tensors(table).items()}
    return Side("Hugging Face", whole_owned({row.name: row.shape for row in table}), [whole])


@st.composite
def sides(draw: st.DrawFn) -> list[Side]:
    """Every way to hold one model: training twice, engines, a checkpoint."""
    tensor = draw(TENSORS)
    table = draw(tables(tensor))
    made = [training(table, draw(LAYOUTS), draw(st.integers(0, 3))) for _ in range(2)]
    return [*made, engine(table, tensor, draw(st.integers(1, 3))), checkpoint(table)]


ENDS = st.tuples(sides(), st.permutations(range(4))).map(
    lambda drawn: (drawn[0][drawn[1][0]], drawn[0][drawn[1][1]])
)
GRAINS = st.sampled_from([1, 5, 40, 2**20])


def planned(
    source: Side, destination: Side, grain: int, local: Mapping[int, int] | None = None
) -> Plan:
    """A plan whose regions of more than `grain` elements are shared between replicas, as those of
    large models are.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "GRAIN", grain)
        return make_plan(source.owned, destination.owned, local)


def draw_local(data: st.DataObject, source: Side, destination: Side) -> dict[int, int]:
    ranks = st.integers(0, len(source.owned) - 1)
    return data.draw(st.dictionaries(st.integers(0, len(destination.owned) - 1), ranks))


def same(found: Sequence[Buffers], wanted: Sequence[Buffers]) -> bool:
    """Whether all ranks have the same buffers in the same order, to the bit."""
    return [list(buffers) for buffers in found] == [list(buffers) for buffers in wanted] and all(
        torch.equal(mine[name], other[name])
        for mine, other in zip(found, wanted, strict=True)
        for name in other
    )


def fixed_digest() -> str:
    """Of a plan with replicas, slices, padding and colocated ranks; called here and in a process
    that hashes otherwise.
    """
    table = model_table((2, 12, 8, 2, 3, 20, 131), experts=2, tied=False, biases=True, norms=True)
    found = hashlib.sha256()
    for stage in (0, 3):
        source, destination = training(table, Layout(3, 2, 2), stage), engine(table, 4, 2)
        found.update(repr(planned(source, destination, 5, {0: 3, 5: 1}).copies).encode())
    return found.hexdigest()
