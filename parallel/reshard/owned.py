"""What each rank of a training layout owns of a model.

whole shapes, tensor-parallel shards, layout, ZeRO stage -> [Owned of each rank]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.parallel.layout import Layout
from megarl.parallel.reshard.boxes import Box, Owned, matrix
from megarl.parallel.tensor import Shard

Fused = Mapping[str, Sequence[tuple[str, tuple[int, int]]]]
"""{fused tensor: (name, shape) of the published tensors that it has one after the other}, as many
for each index of its first dimension: gate and up of expert 0, gate and up of expert 1, ...
"""


def training_owned(
    shapes: Mapping[str, tuple[int, ...]],
    shards: Mapping[str, Shard],
    layout: Layout,
    zero_stage: int,
    fused: Fused | None = None,
) -> list[Owned]:
    """By rank, the boxes in its flat buffers: one for each tensor of `shapes`, of the same name.

    `shapes`: {tensor: whole shape}. `shards`: how ranks split tensors; others are whole.
    `zero_stage` 3 slices each buffer over the ranks that share it. `fused`: the boxes of such a
    buffer are of the published tensors. Raises as `shard_box`.
    """
    by_experts = {name for name in shapes if name in shards and shards[name].axis == "experts"}
    wholes, parts = dict[int, Owned](), []
    for rank in range(layout.size):
        replica, tensor = divmod(rank, layout.tensor)
        number = rank % (layout.expert * layout.tensor)  # on the axis `experts`
        if number not in wholes:
            wholes[number] = owned = Owned()
            for name, shape in shapes.items():
                index = number if name in by_experts else tensor
                add_part(owned, name, shape, shards.get(name), index, fused or {})
        expert = replica // layout.expert, layout.replicas // layout.expert

        def cut_of(
            name: str, dense: tuple[int, int] = (replica, layout.replicas), expert=expert
        ) -> tuple[int, int]:
            return expert if name in by_experts else dense

        is_cut = zero_stage == 3 and layout.replicas > 1
        parts.append(wholes[number].slice(cut_of) if is_cut else wholes[number])
    return parts


def add_part(
    owned: Owned, name: str, shape: tuple[int, ...], shard: Shard | None, rank: int, fused: Fused
) -> None:
    """Append what rank `rank` of the shard's axis has of tensor `name` to the buffer of that
    name.
    """
    if name not in fused:
        owned.add(name, shard_box(name, shape, shard, rank), name)
        return
    count = len(fused[name]) // shape[0]
    first, end = (0, shape[0]) if shard is None else shard.edges[rank : rank + 2]
    for part, part_shape in fused[name][first * count : end * count]:
        owned.add(part, matrix(part_shape), name)


def shard_box(name: str, shape: tuple[int, ...], shard: Shard | None, rank: int) -> Box:
    """The box of tensor `name` that rank `rank` of the shard's axis has; `shard` None: all of it.
    Raises `ValueError` for a tensor of more than two dimensions that is split along another than
    the first.
    """
    box = matrix(shape)
    if shard is None:
        return box
    if shard.dim > 1 or (shard.dim == 1 and len(shape) > 2):
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
