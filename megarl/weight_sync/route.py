"""The route of the weights: plan, buckets and destinations, the same for trainer and engines.

Only a `RouteSpec` of a few numbers is sent; trainer and engines each compute the same `Route` from
it and from their own model's parameter table.
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
"""{name: torch dtype} of the dtypes that engines may store."""


@dataclass(frozen=True)
class RouteSpec:
    """Everything that the transfer plan depends on, besides the model's parameter table."""

    data: int
    """Data-parallel degree of the trainer."""
    sequence: int
    """Context-parallel degree of the trainer."""
    tensor: int
    """Tensor-parallel degree of the trainer."""
    zero_stage: int
    """The trainer's ZeRO stage, 0 to 3."""
    shards: dict[str, list[int]]
    """{tensor name: [dimension, first index of each rank's part ..., length]} for tensors that the
    trainer's tensor-parallel ranks split."""
    engines: int
    """Number of inference engines."""
    engine_tensor: int
    """Tensor-parallel degree of one engine."""
    shared: bool
    """Whether all engines read the same memory, so that each bucket is sent once for all of
    them."""
    dtype: str
    """Dtype of the engines' weights, a key of `DTYPES`."""
    bucket_bytes: int
    """Bytes of a bucket, at most."""
    table: str
    """Fingerprint of the trainer's parameter table; an engine with another one has another
    model."""
    local: bool = False
    """Whether engine rank n is in the memory of trainer rank n, which then sends what it can
    itself."""

    @property
    def layout(self) -> Layout:
        """The trainer's layout."""
        return Layout(self.data, self.sequence, self.tensor)

    @property
    def num_destinations(self) -> int:
        """Number of receivers: all engine ranks, or if shared the tensor ranks of one engine."""
        return self.engine_tensor if self.shared else self.engines * self.engine_tensor

    def destination(self, engine: int, rank: int) -> int:
        """Number of the plan's destination for rank `rank` of engine `engine`.

        Where engines share memory, this is the tensor rank alone.
        """
        return rank if self.shared else engine * self.engine_tensor + rank

    def plain(self) -> dict[str, Any]:
        """The fields as a dict of numbers, strings and lists, for JSON and RPC."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"training {self.layout}, ZeRO {self.zero_stage} -> {self.engines} engine(s) of tensor"
            f" {self.engine_tensor}"
        )


def table_fingerprint(table: Sequence[ParameterSpec]) -> str:
    """XXH3 digest of a parameter table, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest("\n".join(map(str, table)).encode())


@dataclass(frozen=True)
class Route:
    """Which regions go from which trainer rank to which engine rank, in which bucket."""

    spec: RouteSpec
    """The numbers from which the route was computed."""
    plan: Plan
    """Every copy from the trainer ranks' parts of tensors to the engine ranks' parts."""
    buckets: list[Bucket]
    """The units of transfer, in the order in which they are sent."""
    copies: list[list[Copy]]
    """By bucket, the copies from trainer ranks to engine ranks."""
    tensors: list[str]
    """Tensor names in the table's order, in which digests are listed."""

    @staticmethod
    def of(spec: RouteSpec, table: Sequence[ParameterSpec]) -> Route:
        """Make the route of `spec` for the model of `table`.

        Raises `ValueError` where `table` belongs to another model than `spec`, or a layout cannot
        split it.
        """
        if table_fingerprint(table) != spec.table:
            raise ValueError(
                "the engine's model is not the trainer's: their parameter tables differ; start both"
                " from one model"
            )
        shards = {name: Shard(cut[0], tuple(cut[1:])) for name, cut in spec.shards.items()}
        sources = training_owned(
            {parameter.name: parameter.shape for parameter in table},
            shards,
            spec.layout,
            spec.zero_stage,
        )
        engine = engine_owned(table, spec.engine_tensor)
        local = (
            {number: number for number in range(min(spec.num_destinations, spec.layout.size))}
            if spec.local
            else {}
        )
        plan = make_plan(sources, engine if spec.shared else engine * spec.engines, local)
        buckets = make_buckets(engine[0], DTYPES[spec.dtype].itemsize, spec.bucket_bytes)
        assert all(owned.sizes == engine[0].sizes for owned in engine), (
            "buffers of one engine's ranks differ in size"
        )
        return Route(
            spec, plan, buckets, copies_of(plan, buckets), [parameter.name for parameter in table]
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the engines' weights."""
        return DTYPES[self.spec.dtype]

    def is_last(self, bucket: Bucket) -> bool:
        """Whether `bucket` is the last one of a version."""
        return bucket.number == self.buckets[-1].number

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest bucket of the route."""
        return max(bucket.num_bytes for bucket in self.buckets)

    def owned(self, destination: int) -> Owned:
        """The parts of tensors that the engine rank with number `destination` in the plan needs."""
        return self.plan.destinations[destination]

    def padding(self, bucket: Bucket, destination: int) -> list[Piece]:
        """The parts of a bucket that no tensor fills: zero rows that pad a vocabulary.

        `destination`: number of the engine rank in the plan.
        """
        zeros = [
            piece
            for piece in self.owned(destination).pieces
            if piece.tensor == ZEROS and piece.buffer in bucket.sizes
        ]
        return [part for piece in zeros if (part := bucket.part(piece)) is not None]

    def first_tensor(self, number: int) -> str:
        """Name of the first tensor in bucket `number`, for error messages."""
        return next(
            (copies[0].tensor for copies in self.copies[number:] if copies), self.tensors[-1]
        )

    @cached_property
    def written(self) -> int:
        """Bytes that trainer ranks write into other processes' memory for one version."""
        return self.plan.moved(self.dtype.itemsize)
