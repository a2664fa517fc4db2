"""What each rank of a training layout owns of a model, by layout and ZeRO stage.

shapes of whole tensors, tensor-parallel shards, layout, ZeRO stage -> [Owned of each rank]
"""

from __future__ import annotations

from collections.abc import Mapping

from megarl.parallel.layout import Layout
from megarl.parallel.reshard.boxes import Box, Owned, matrix
from megarl.parallel.tensor import Shard


def training_owned(
    shapes: Mapping[str, tuple[int, ...]],
    shards: Mapping[str, Shard],
    layout: Layout,
    zero_stage: int,
) -> list[Owned]:
    """What each rank of a training layout has of a model: by rank, the rectangles of whole tensors
    in its flat buffers, one buffer for each tensor and of the same name.

    `shapes`: {tensor: whole shape}. `shards`: {tensor: `Shard`, the dimension and indices at which
    tensor-parallel ranks split it}; others are whole on every rank. With `zero_stage` 3 each buffer
    is sliced over the data x sequence ranks; with a lower stage each of these ranks has the whole
    buffer. Raises `ValueError` for a split tensor of more than two dimensions.
    """
    whole_ranks = []
    for rank in range(layout.tensor):
        owned = Owned()
        for name, shape in shapes.items():
            owned.add(name, shard_box(name, shape, shards.get(name), rank), name)
        whole_ranks.append(owned)
    replicas, made = layout.size // layout.tensor, []
    for rank in range(layout.size):
        place = layout.coordinates(rank)
        owned, replica = (
            whole_ranks[place["tensor"]],
            place["data"] * layout.sequence + place["sequence"],
        )
        made.append(owned.slice(replica, replicas) if zero_stage == 3 and replicas > 1 else owned)
    return made


def shard_box(name: str, shape: tuple[int, ...], shard: Shard | None, rank: int) -> Box:
    """The rectangle of tensor `name` (whole shape `shape`) that tensor-parallel rank `rank` has.
    `shard`: the dimension and indices at which the ranks split the tensor; None where each has all
    of it. Raises `ValueError` for a split tensor of more than two dimensions. Rows are dimension 0;
    columns are all other dimensions flattened.
    """
    box = matrix(shape)
    if shard is None:
        return box
    if shard.dim > 1 or len(shape) > 2:
        raise ValueError(
            f"{name} {shape} is cut along dimension {shard.dim}, which no reshard plan can describe"
        )
    start, stop = shard.edges[rank], shard.edges[rank + 1]
    if shard.dim == 0:
        return box._replace(top=start, bottom=stop)
    return box._replace(left=start, right=stop)


def whole_owned(shapes: Mapping[str, tuple[int, ...]]) -> list[Owned]:
    """A list of one rank that has every tensor whole, as a Hugging Face checkpoint: one buffer for
    each tensor and of the same name. `shapes`: {tensor: shape}.
    """
    owned = Owned()
    for name, shape in shapes.items():
        owned.add(name, matrix(shape), name)
    return [owned]
