"""What each rank of a training layout owns of a model.

whole shapes, tensor-parallel shards, layout, ZeRO stage -> [Owned of each rank]
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
    """By rank, the boxes in its flat buffers: one for each tensor, of the same name.

    `shapes`: {tensor: whole shape}. `shards`: how tensor-parallel ranks split tensors; others are
    whole. `zero_stage` 3 slices each buffer over data x sequence. Raises as `shard_box`.
    """
    whole_ranks = []
    for rank in range(layout.tensor):
        owned = Owned()
        for name, shape in shapes.items():
            owned.add(name, shard_box(name, shape, shards.get(name), rank), name)
        whole_ranks.append(owned)
    replicas, parts = layout.size // layout.tensor, []
    for rank in range(layout.size):
        axes = layout.coordinates(rank)
        owned, replica = (
            whole_ranks[axes["tensor"]],
            axes["data"] * layout.sequence + axes["sequence"],
        )
        parts.append(owned.slice(replica, replicas) if zero_stage == 3 and replicas > 1 else owned)
    return parts


def shard_box(name: str, shape: tuple[int, ...], shard: Shard | None, rank: int) -> Box:
    """The box of tensor `name` that tensor-parallel rank `rank` has; `shard` None: all of it.
    Raises `ValueError` for a split tensor of more than two dimensions.
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
    """One rank with whole tensors {name: shape}, as a Hugging Face checkpoint."""
    owned = Owned()
    for name, shape in shapes.items():
        owned.add(name, matrix(shape), name)
    return [owned]
