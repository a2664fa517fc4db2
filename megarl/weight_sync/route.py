"""The route of the weights: which copies a process takes part in, and in which buckets.

Only a `RouteSpec` of a few numbers is sent. From it and from its own model's parameter table each
process computes its `Route`, its own part of one plan.
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
from megarl.parallel.reshard.part import PlanPart
from megarl.parallel.reshard.plan import Copy, Plan, make_plan
from megarl.parallel.tensor import Shard
from megarl.weight_sync.parameters import (
    ParameterSpec,
    engine_owned,
    engine_rank_owned,
    kinds_of,
)

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
    """Whether each bucket is sent once for all engines: they read the same memory, or pass it on to
    each other."""
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
    one_host: bool = False
    """Whether all engines are on the host of trainer rank 0, so that loopback may suffice."""

    @property
    def layout(self) -> Layout:
        """The trainer's layout."""
        return Layout(self.data, self.sequence, self.tensor)

    @property
    def training_shards(self) -> dict[str, Shard]:
        """`shards` as objects."""
        return {name: Shard(cut[0], tuple(cut[1:])) for name, cut in self.shards.items()}

    @property
    def num_destinations(self) -> int:
        """Number of receivers in the plan: all engine ranks, or if shared the tensor ranks of one
        engine."""
        return self.engine_tensor if self.shared else self.engines * self.engine_tensor

    def destination(self, engine: int, rank: int) -> int:
        """Number of the plan's destination for rank `rank` of engine `engine`.

        Where each bucket is sent once for all engines, this is the tensor rank alone.
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
    """Which regions one process sends or receives, in which bucket.

    A trainer rank's route has the copies that it sends, an engine rank's those that it receives.
    """

    spec: RouteSpec
    """The numbers from which the route was computed."""
    buckets: list[Bucket]
    """The units of transfer, in the order in which they are sent."""
    copies: list[list[Copy]]
    """By bucket, this process's copies from trainer ranks to engine ranks."""
    owned: Owned
    """The parts of tensors that an engine rank needs: this one's, at a trainer rank those of the
    first."""
    tensors: list[str]
    """Tensor names in the table's order, in which digests are listed."""
    written: int
    """Bytes that all trainer ranks write into other processes' memory for one version."""

    @staticmethod
    def of_source(spec: RouteSpec, table: Sequence[ParameterSpec], source: int) -> Route:
        """What trainer rank `source` sends of the model of `table`.

        Raises `ValueError` where `table` belongs to another model than `spec`, or a layout cannot
        split it.
        """
        part = _plan(spec, table)
        first = engine_rank_owned(table, 0, spec.engine_tensor)
        return _route(spec, table, part.of_source(source), first, part.moved)

    @staticmethod
    def of_destination(spec: RouteSpec, table: Sequence[ParameterSpec], destination: int) -> Route:
        """What the engine rank with number `destination` in the plan receives; raises as
        `of_source`.
        """
        part = _plan(spec, table)
        owned = engine_rank_owned(table, destination % spec.engine_tensor, spec.engine_tensor)
        return _route(spec, table, part.of_destination(destination), owned, part.moved)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the engines' weights."""
        return DTYPES[self.spec.dtype]

    def is_last(self, bucket: Bucket) -> bool:
        """Whether `bucket` is the last one of a version."""
        return bucket.number == self.buckets[-1].number

    @cached_property
    def largest_bytes(self) -> int:
        """Bytes of the largest bucket of the route."""
        return max(bucket.num_bytes for bucket in self.buckets)

    def padding(self, bucket: Bucket) -> list[Piece]:
        """The parts of a bucket that no tensor fills: zero rows that pad a vocabulary."""
        return [part for piece in self._zeros if (part := _part(bucket, piece)) is not None]

    @cached_property
    def _zeros(self) -> list[Piece]:
        return [piece for piece in self.owned.pieces if piece.tensor == ZEROS]

    def first_tensor(self, number: int) -> str:
        """Name of the first tensor in bucket `number`, for error messages."""
        for bucket in self.buckets[number:]:
            for piece in self.owned.pieces:
                if piece.tensor != ZEROS and _part(bucket, piece) is not None:
                    return piece.tensor
        return self.tensors[-1]


def whole_plan(spec: RouteSpec, table: Sequence[ParameterSpec]) -> Plan:
    """The copies of all ranks, in one plan; a route has one rank's part of it."""
    engine = engine_owned(table, spec.engine_tensor)
    destinations = engine if spec.shared else engine * spec.engines
    return make_plan(_sources(spec, table), destinations, _local(spec))


def _plan(spec: RouteSpec, table: Sequence[ParameterSpec]) -> PlanPart:
    """The plan of `spec`, from which one rank's copies can be made."""
    if table_fingerprint(table) != spec.table:
        raise ValueError(
            "the engine's model is not the trainer's: their parameter tables differ; start both"
            " from one model"
        )
    kinds = kinds_of(table, spec.training_shards)
    chosen = set(kinds.like.values())
    few = [parameter for parameter in table if parameter.name in chosen]
    engine = engine_owned(few, spec.engine_tensor)
    assert all(owned.sizes == engine[0].sizes for owned in engine), (
        "buffers of one engine's ranks differ in size"
    )
    destinations = engine if spec.shared else engine * spec.engines
    return PlanPart(_sources(spec, few), destinations, kinds, _local(spec))


def _sources(spec: RouteSpec, table: Sequence[ParameterSpec]) -> list[Owned]:
    """What each trainer rank owns."""
    return training_owned(
        {parameter.name: parameter.shape for parameter in table},
        spec.training_shards,
        spec.layout,
        spec.zero_stage,
    )


def _local(spec: RouteSpec) -> dict[int, int]:
    """{destination: trainer rank in the same memory}."""
    shared = min(spec.num_destinations, spec.layout.size) if spec.local else 0
    return {number: number for number in range(shared)}


def _route(
    spec: RouteSpec,
    table: Sequence[ParameterSpec],
    copies: list[Copy],
    owned: Owned,
    moved: int,
) -> Route:
    """The route of one rank's `copies`, divided into buckets. `moved`: elements that all trainer
    ranks write.
    """
    itemsize = DTYPES[spec.dtype].itemsize
    first = engine_rank_owned(table, 0, spec.engine_tensor)  # all ranks have the same buckets
    buckets = make_buckets(first, itemsize, spec.bucket_bytes)
    names = [parameter.name for parameter in table]
    return Route(spec, buckets, copies_of(copies, buckets), owned, names, moved * itemsize)


def _part(bucket: Bucket, piece: Piece) -> Piece | None:
    """The part of `piece` in `bucket`, or None."""
    return bucket.part(piece) if piece.buffer in bucket.sizes else None
