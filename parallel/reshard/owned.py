"""What each rank of a training layout owns of a model, by layout and ZeRO stage.

shapes of whole tensors, tensor-parallel shards, layout, ZeRO stage -> [Owned of each rank]
"""

from __future__ import annotations

from collections.abc import Mapping

from megarl.parallel.layout import Layout
from megarl.parallel.reshard.boxes import Owned, matrix
from megarl.parallel.tensor import Shard


def training_owned(
    shapes: Mapping[str, tuple[int, ...]],
    shards: Mapping[str, Shard],
    layout: Layout,
    zero_stage: int,
) -> list[Owned]:
    """What each rank of a training layout owns, one buffer for each tensor.

    Under ZeRO 3 buffers are sliced over data x sequence. Raises `ValueError` for a tensor that is
    split along another dimension than the first, or the last of two.
    """
    whole_ranks = []
    for rank in range(layout.tensor):
        owned = Owned()
        for name, shape in shapes.items():
            box, shard = matrix(shape), shards.get(name)
            if shard is not None:
                if shard.dim > 1 or len(shape) > 2:
                    raise ValueError(
                        f"{name} {shape} is cut along dimension {shard.dim}, which no reshard plan"
                        " can describe"
                    )
                start, stop = shard.edges[rank], shard.edges[rank + 1]
                box = (
                    box._replace(top=start, bottom=stop)
                    if shard.dim == 0
                    else box._replace(left=start, right=stop)
                )
            owned.add(name, box, name)
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


def whole_owned(shapes: Mapping[str, tuple[int, ...]]) -> list[Owned]:
    """One rank that owns every tensor whole: a Hugging Face checkpoint."""
    owned = Owned()
    for name, shape in shapes.items():
        owned.add(name, matrix(shape), name)
    return [owned]
