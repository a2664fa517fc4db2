"""What both ends of the wire know before a byte travels: the plan, its buckets, and who takes part
in which.

A `RouteSpec` is small and plain, and travels; each end makes the same `Route` of it and of its own
parameter table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
import xxhash

from megarl.parallel.layout import Layout
from megarl.parallel.reshard.boxes import ZEROS, Owned, Piece
from megarl.parallel.reshard.buckets import Bucket, copies_of, make_buckets
from megarl.parallel.reshard.owned import training_owned
from megarl.parallel.reshard.plan import Copy, Plan, make_plan
from megarl.parallel.tensor import Shard
from megarl.weight_sync.parameters import ParameterSpec, engine_owned

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}


@dataclass(frozen=True)
class RouteSpec:
    """Everything a plan depends on besides the model."""

    data: int
    sequence: int
    tensor: int
    zero_stage: int
    shards: dict[str, list[int]]
    """How the training's tensor ranks cut each tensor: [dim, edges...]; whole ones are left out."""
    engines: int
    engine_tensor: int
    shared: bool
    """Whether engines read the same images, so that each is sent once, not once an engine."""
    dtype: str
    bucket_bytes: int
    table: str
    """Fingerprint of the parameter table: the same on both ends, or they are of different models.
    """
    local: bool = False
    """Whether destination n lies in the memory of trainer rank n, from which it is then filled
    where it can be.
    """

    @property
    def layout(self) -> Layout:
        """The trainer's."""
        return Layout(self.data, self.sequence, self.tensor)

    @property
    def num_images(self) -> int:
        """Destinations of the plan."""
        return self.engine_tensor if self.shared else self.engines * self.engine_tensor

    def image(self, engine: int, rank: int) -> int:
        """The destination that rank `rank` of engine `engine` takes in."""
        return rank if self.shared else engine * self.engine_tensor + rank

    def plain(self) -> dict[str, Any]:
        """For a wire that knows numbers, texts, lists and dictionaries."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"training {self.layout}, ZeRO {self.zero_stage} -> {self.engines} engine(s) of tensor"
            f" {self.engine_tensor}"
        )


def table_fingerprint(table: Sequence[ParameterSpec]) -> str:
    """What a parameter table says, in 16 letters."""
    return xxhash.xxh3_64_hexdigest("\n".join(map(str, table)).encode())


@dataclass(frozen=True)
class Route:
    """A plan in buckets."""

    spec: RouteSpec
    plan: Plan
    buckets: list[Bucket]
    copies: list[list[Copy]]
    """By bucket."""
    tensors: list[str]
    """Names, in the order in which digests are listed."""

    @staticmethod
    def of(spec: RouteSpec, table: Sequence[ParameterSpec]) -> Route:
        """Raises `ValueError` where `table` is of another model than `spec`, or the two layouts do
        not fit it.
        """
        if table_fingerprint(table) != spec.table:
            raise ValueError(
                "the engine's model is not the trainer's: their parameter tables differ; start both"
                " from one model"
            )
        shards = {name: Shard(cut[0], tuple(cut[1:])) for name, cut in spec.shards.items()}
        sources = training_owned(
            {row.name: row.shape for row in table}, shards, spec.layout, spec.zero_stage
        )
        engine = engine_owned(table, spec.engine_tensor)
        local = (
            {image: image for image in range(min(spec.num_images, spec.layout.size))}
            if spec.local
            else {}
        )
        plan = make_plan(sources, engine if spec.shared else engine * spec.engines, local)
        buckets = make_buckets(engine[0], DTYPES[spec.dtype].itemsize, spec.bucket_bytes)
        assert all(owned.sizes == engine[0].sizes for owned in engine), (
            "ranks of one engine hold alike"
        )
        return Route(spec, plan, buckets, copies_of(plan, buckets), [row.name for row in table])

    @property
    def dtype(self) -> torch.dtype:
        """What engines hold."""
        return DTYPES[self.spec.dtype]

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest bucket's image."""
        return max(bucket.num_bytes for bucket in self.buckets)

    def owned(self, image: int) -> Owned:
        """What a destination holds."""
        return self.plan.destinations[image]

    def padding(self, bucket: Bucket, image: int) -> list[Piece]:
        """The pieces of a bucket's image that no tensor fills."""
        zeros = [
            piece
            for piece in self.owned(image).pieces
            if piece.tensor == ZEROS and piece.buffer in bucket.sizes
        ]
        return [part for piece in zeros if (part := bucket.part(piece)) is not None]

    def first_tensor(self, number: int) -> str:
        """The tensor with which bucket `number` begins."""
        return next(
            (copies[0].tensor for copies in self.copies[number:] if copies), self.tensors[-1]
        )

    @cached_property
    def written(self) -> int:
        """Bytes that trainer ranks bring into another memory for one version."""
        return self.plan.moved(self.dtype.itemsize)
