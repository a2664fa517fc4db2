"""The route of the weights: which copies from trainer to engine ranks a process takes part in.

Only a `RouteSpec` is sent. From it and its own parameter table each process computes its `Route`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import xxhash

from megarl.parallel.layout import Layout
from megarl.parallel.reshard.boxes import ZEROS, Owned, Piece
from megarl.parallel.reshard.buckets import Bucket, copies_of, make_buckets
from megarl.parallel.reshard.owned import training_owned
from megarl.parallel.reshard.part import PlanPart
from megarl.parallel.reshard.plan import Copy
from megarl.parallel.tensor import Shard
from megarl.weights.parameters import (
    ParameterSpec,
    engine_owned,
    engine_rank_owned,
    kinds_of,
)


@dataclass(frozen=True)
class RouteSpec:
    """How trainer and engines split the model: from it all ranks compute the same plan."""

    layout: Layout
    zero_stage: int
    shards: dict[str, Shard]
    """{parameter: how the trainer's ranks split it}."""
    engines: int
    engine_tensor: int
    dtype: str
    bucket_bytes: int
    table: str
    """`table_fingerprint` of the trainer's table."""
    fused: dict[str, list[tuple[str, tuple[int, int]]]] = field(default_factory=dict)
    """The trainer's parameters that are made of several tensors; see `Fused`."""
    local: bool = False
    """Engine rank n, over all engines, shares memory with trainer rank n. Else all engines receive
    the same.
    """
    shares_gpus: bool = False
    """Engines and trainer ranks have the same GPUs: NCCL refuses two ranks on one."""
    one_host: bool = False
    """All engines are on the host of trainer rank 0; only that rank knows."""

    @property
    def num_destinations(self) -> int:
        """Number of receivers in the plan: ranks of all engines if `local`, else of one."""
        return self.engines * self.engine_tensor if self.local else self.engine_tensor

    def destination(self, engine: int, rank: int) -> int:
        """Number of an engine's rank among the plan's receivers."""
        return engine * self.engine_tensor + rank if self.local else rank

    def __str__(self) -> str:
        return (
            f"training {self.layout}, ZeRO {self.zero_stage} -> {self.engines} engine(s) of tensor"
            f" {self.engine_tensor}"
        )


def table_fingerprint(table: Sequence[ParameterSpec]) -> str:
    """XXH3 digest as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest("\n".join(map(str, table)).encode())


@dataclass(frozen=True)
class Route:
    """One process's part in the transfer: the copies that it sends or receives."""

    spec: RouteSpec
    buckets: list[Bucket]
    """In the order in which they are sent."""
    copies: list[list[Copy]]
    """For each bucket, the copies in which this process takes part."""
    owned: Owned
    """What this engine rank stores; at a trainer rank, what the first engine rank stores."""
    tensors: list[str]
    """Tensor names in the table's order, that of digests."""
    written: int
    """Bytes that all trainer ranks write for one version."""

    @staticmethod
    def of_source(spec: RouteSpec, table: Sequence[ParameterSpec], source: int) -> Route:
        """The part of trainer rank `source`: the copies that it sends to engine ranks. Raises
        `ValueError` if `table` is of another model than `spec`, or a degree cannot split a tensor.
        """
        plan = _plan(spec, table)
        first_owned = engine_rank_owned(table, 0, spec.engine_tensor)  # of the first engine rank
        return _route(spec, table, plan.of_source(source), first_owned, plan.moved)

    @staticmethod
    def of_destination(spec: RouteSpec, table: Sequence[ParameterSpec], destination: int) -> Route:
        """Raises as `of_source`."""
        plan = _plan(spec, table)
        owned = engine_rank_owned(table, destination % spec.engine_tensor, spec.engine_tensor)
        return _route(spec, table, plan.of_destination(destination), owned, plan.moved)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.spec.dtype)

    def is_last(self, bucket: Bucket) -> bool:
        return bucket.number == self.buckets[-1].number

    @cached_property
    def largest_bytes(self) -> int:
        return max(bucket.num_bytes for bucket in self.buckets)

    def padding(self) -> list[list[Piece]]:
        """For each bucket, the pieces of its buffers that no tensor fills; the receiver sets them
        to zero.
        """
        zeros = [piece for piece in self.owned.pieces if piece.tensor == ZEROS]
        return [
            [inside for piece in zeros if (inside := bucket.part(piece)) is not None]
            for bucket in self.buckets
        ]

    def first_tensor(self, number: int) -> str:
        """First tensor in bucket `number`, or in a later one if it has only padding; for
        messages.
        """
        for bucket in self.buckets[number:]:
            for piece in self.owned.pieces:
                if piece.tensor != ZEROS and bucket.part(piece) is not None:
                    return piece.tensor
        return self.tensors[-1]


def _plan(spec: RouteSpec, table: Sequence[ParameterSpec]) -> PlanPart:
    """The plan of all ranks. Raises `ValueError` if `table` is not the one of `spec`."""
    if table_fingerprint(table) != spec.table:
        raise ValueError(
            "the engine's model is not the trainer's: their parameter tables differ; start both"
            " from one model"
        )
    kinds = kinds_of(table, spec.shards)
    chosen = set(kinds.like.values())
    few = [parameter for parameter in table if parameter.name in chosen]
    engine = engine_owned(few, spec.engine_tensor)
    destinations = engine * spec.engines if spec.local else engine
    return PlanPart(training_parts(spec, few), destinations, kinds, own_ranks(spec))


def training_parts(spec: RouteSpec, table: Sequence[ParameterSpec]) -> list[Owned]:
    """For each trainer rank, what it holds by tensor parallelism and ZeRO."""
    return training_owned(
        {parameter.name: parameter.shape for parameter in table},
        spec.shards,
        spec.layout,
        spec.zero_stage,
        spec.fused,
    )


def own_ranks(spec: RouteSpec) -> dict[int, int]:
    """{engine rank: the trainer rank that shares its memory}, both numbered over all engines."""
    shared = min(spec.num_destinations, spec.layout.size) if spec.local else 0
    return {number: number for number in range(shared)}


def _route(
    spec: RouteSpec,
    table: Sequence[ParameterSpec],
    copies: list[Copy],
    owned: Owned,
    moved: int,
) -> Route:
    """`moved`: elements that all trainer ranks write."""
    itemsize = getattr(torch, spec.dtype).itemsize
    first = engine_rank_owned(table, 0, spec.engine_tensor)  # all ranks have the same buckets
    buckets = make_buckets(first, itemsize, spec.bucket_bytes)
    names = [parameter.name for parameter in table]
    return Route(spec, buckets, copies_of(copies, buckets), owned, names, moved * itemsize)
