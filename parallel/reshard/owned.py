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
    """By rank, the boxes in its flat buffers: one for each tensor, of the same name.

    `shapes`: {published tensor: whole shape}. `shards`: {parameter: how ranks split it}; others are
    whole. `fused`: the parameters that are made of several tensors. `zero_stage` 3 slices each
    parameter over the ranks that share it. Raises as `shard_box`.
    """
    fused = fused or {}
    fused_of = {tensor: name for name, parts in fused.items() for tensor, _ in parts}
    names = dict.fromkeys(fused_of.get(tensor, tensor) for tensor in shapes)
    by_experts = {name for name in names if name in shards and shards[name].axis == "experts"}
    wholes, parts = dict[int, Owned](), []
    for rank in range(layout.size):
        replica, tensor = divmod(rank, layout.tensor)
        number = rank % (layout.expert * layout.tensor)  # on the axis `experts`
        if number not in wholes:
            wholes[number] = Owned()
            for name in names:
                index = number if name in by_experts else tensor
                shape = shapes.get(name, ())
                add_part(wholes[number], name, shape, shards.get(name), index, fused)
        dense = replica, layout.replicas
        expert = replica // layout.expert, layout.replicas // layout.expert
        owned = wholes[number]
        if zero_stage == 3 and layout.replicas > 1:
            owned = owned.slice({name: expert if name in by_experts else dense for name in names})
        parts.append(_by_tensor(owned, fused))
    return parts


def add_part(
    owned: Owned, name: str, shape: tuple[int, ...], shard: Shard | None, rank: int, fused: Fused
) -> None:
    """Append what rank `rank` of the shard's axis has of parameter `name` to the buffer of that
    name.
    """
    if name not in fused:
        owned.add(name, shard_box(name, shape, shard, rank), name)
        return
    parts = fused[name]
    if shard is not None:
        count = len(parts) // shard.whole
        parts = parts[shard.edges[rank] * count : shard.edges[rank + 1] * count]
    for tensor, tensor_shape in parts:
        owned.add(tensor, matrix(tensor_shape), name)


def tensor_spans(owned: Owned, fused: Fused) -> dict[str, tuple[str, int, int]]:
    """{published tensor: (fused buffer, start, end)} of what a rank has in its fused buffers."""
    spans = dict[str, tuple[str, int, int]]()
    for piece in owned.pieces:
        if piece.buffer in fused:
            start = spans[piece.tensor][1] if piece.tensor in spans else piece.offset
            spans[piece.tensor] = piece.buffer, start, piece.end
    return spans


def _by_tensor(owned: Owned, fused: Fused) -> Owned:
    """The same with a buffer for each published tensor in place of the fused buffers."""
    spans = tensor_spans(owned, fused)
    if not spans:
        return owned
    sizes = {name: size for name, size in owned.sizes.items() if name not in fused}
    pieces = [
        piece._replace(buffer=piece.tensor, offset=piece.offset - spans[piece.tensor][1])
        if piece.tensor in spans
        else piece
        for piece in owned.pieces
    ]
    return Owned(pieces, sizes | {name: end - start for name, (_, start, end) in spans.items()})


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
