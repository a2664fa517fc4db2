"""The route of the weights: which copies of tensor regions from trainer to engine ranks a process
takes part in, and in which buckets (blocks of memory that are sent at once).

Only a `RouteSpec` of a few numbers is sent. From it and from its own model's parameter table each
process computes its `Route`, its own part of one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """How trainer and engines split the model, and the size of the blocks that are sent. From this
    and the model's parameter table each trainer rank and engine rank computes the same plan of the
    transfer. The trainer sends it to the engines as a dict.
    """

    layout: Layout
    """The trainer's degrees of data, sequence and tensor parallelism."""
    zero_stage: int
    """The trainer's ZeRO stage, 0 to 3."""
    shards: dict[str, Shard]
    """How the trainer's tensor-parallel ranks split the model: {tensor name: a `Shard`: rank r has
    the indices [edges[r], edges[r + 1]) of dimension `dim`}."""
    engines: int
    """Number of inference engines."""
    engine_tensor: int
    """Tensor-parallel degree of one engine."""
    dtype: str
    """Name of the torch dtype of the engines' weights, such as "bfloat16"."""
    bucket_bytes: int
    """Bytes of a bucket, the weights that are sent at once, at most."""
    table: str
    """Fingerprint (`table_fingerprint`) of the trainer's parameter table; an engine with another
    one has another model."""
    local: bool = False
    """True if engine rank n (counted over all engines) is in the memory of trainer rank n, which
    then sends what it can itself. Else all engines receive the same."""
    shares_gpus: bool = False
    """Whether engines and trainer ranks have the same GPUs: NCCL refuses two ranks on one."""
    one_host: bool = False
    """Whether all engines are on the host of trainer rank 0, so that loopback may suffice; only
    that rank knows."""

    @property
    def num_destinations(self) -> int:
        """Number of receivers (destinations) in the plan of the transfer. It is the number of ranks
        of all engines if engine ranks share memory with trainer ranks (`local`), else that of the
        ranks of one engine, since all engines receive the same.
        """
        return self.engines * self.engine_tensor if self.local else self.engine_tensor

    def destination(self, engine: int, rank: int) -> int:
        """Number of rank `rank` of engine `engine` among the plan's receivers, from 0.

        Where all engines receive the same, this is `rank` itself.
        """
        return engine * self.engine_tensor + rank if self.local else rank

    def __str__(self) -> str:
        return (
            f"training {self.layout}, ZeRO {self.zero_stage} -> {self.engines} engine(s) of tensor"
            f" {self.engine_tensor}"
        )


def table_fingerprint(table: Sequence[ParameterSpec]) -> str:
    """XXH3 digest of a parameter table (for each tensor of a model its name, shape and split) as 16
    hexadecimal digits, the same in every process.
    """
    return xxhash.xxh3_64_hexdigest("\n".join(map(str, table)).encode())


@dataclass(frozen=True)
class Route:
    """One process's part in the transfer of weights: which regions of tensors it sends or receives,
    and in which bucket. Made by `of_source` and `of_destination`.

    A trainer rank's route has the copies that it sends, an engine rank's those that it receives.
    """

    spec: RouteSpec
    """The numbers from which the route was computed."""
    buckets: list[Bucket]
    """The blocks of memory that are sent at once, in the order in which they are sent."""
    copies: list[list[Copy]]
    """For each bucket, the copies from trainer ranks to engine ranks in which this process takes
    part."""
    owned: Owned
    """The parts of tensors that an engine rank stores: this engine rank's own; at a trainer rank
    those of the first engine rank."""
    tensors: list[str]
    """Tensor names in the parameter table's order, the order in which digests are listed."""
    written: int
    """Bytes that all trainer ranks together write into other processes' memory for one version; a
    transport may send them once for each engine."""

    @staticmethod
    def of_source(spec: RouteSpec, table: Sequence[ParameterSpec], source: int) -> Route:
        """The `Route` of trainer rank `source`: which regions of tensors it sends, and in which
        bucket. `spec`: how trainer and engines split the model. `table` lists the model's tensors.

        Raises `ValueError` where `table` belongs to another model than `spec`, or where the
        trainer's or the engines' tensor-parallel degree cannot split a tensor.
        """
        part = _plan(spec, table)
        first = engine_rank_owned(table, 0, spec.engine_tensor)
        return _route(spec, table, part.of_source(source), first, part.moved)

    @staticmethod
    def of_destination(spec: RouteSpec, table: Sequence[ParameterSpec], destination: int) -> Route:
        """The `Route` of an engine rank: which regions of tensors it receives, and in which bucket.
        `spec`: how trainer and engines split the model. `table` lists the model's tensors.
        `destination`: the rank's number by `spec.destination`. Raises `ValueError` where `table`
        belongs to another model than `spec`, or where a tensor-parallel degree cannot split a
        tensor.
        """
        part = _plan(spec, table)
        owned = engine_rank_owned(table, destination % spec.engine_tensor, spec.engine_tensor)
        return _route(spec, table, part.of_destination(destination), owned, part.moved)

    @property
    def dtype(self) -> torch.dtype:
        """torch dtype of the engines' weights."""
        return getattr(torch, self.spec.dtype)

    def is_last(self, bucket: Bucket) -> bool:
        """Whether `bucket` is the last one of a weight version."""
        return bucket.number == self.buckets[-1].number

    @cached_property
    def largest_bytes(self) -> int:
        """Bytes of the largest bucket, a block of weights that is sent at once; receive buffers
        have this size.
        """
        return max(bucket.num_bytes for bucket in self.buckets)

    def padding(self) -> list[list[Piece]]:
        """For each bucket, the parts of its flat buffers that no tensor fills, such as rows that
        pad a vocabulary: the receiver sets them to zero. `Piece.view(buffer)` gives such a part as
        a tensor.
        """
        zeros = [piece for piece in self.owned.pieces if piece.tensor == ZEROS]
        return [
            [part for piece in zeros if (part := bucket.part(piece)) is not None]
            for bucket in self.buckets
        ]

    def first_tensor(self, number: int) -> str:
        """Name, for error messages, of the first tensor in bucket `number`, from 0. Where the
        bucket holds only padding, a tensor of a later bucket, or else the model's last.
        """
        for bucket in self.buckets[number:]:
            for piece in self.owned.pieces:
                if piece.tensor != ZEROS and bucket.part(piece) is not None:
                    return piece.tensor
        return self.tensors[-1]


def _plan(spec: RouteSpec, table: Sequence[ParameterSpec]) -> PlanPart:
    """Which rank sends which elements of the weights to which; `Route`s of single ranks are made of
    it. Raises `ValueError` if `table` is not the parameter table that `spec` was made with.
    """
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
    """For each trainer rank, the part of the weights that it holds, as tensor parallelism and the
    ZeRO stage of `spec` divide them. An `Owned` lists the rectangles of tensors that a rank holds
    and where they lie in its flat buffers, in elements. `table`: the model's parameters.
    """
    return training_owned(
        {parameter.name: parameter.shape for parameter in table},
        spec.shards,
        spec.layout,
        spec.zero_stage,
    )


def own_ranks(spec: RouteSpec) -> dict[int, int]:
    """{engine rank, counted over all engines: the trainer rank that shares memory with it}. Engine
    rank n shares memory with trainer rank n, so each number is mapped to itself. Empty unless
    `spec.local`: else no memory is shared.
    """
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
    itemsize = getattr(torch, spec.dtype).itemsize
    first = engine_rank_owned(table, 0, spec.engine_tensor)  # all ranks have the same buckets
    buckets = make_buckets(first, itemsize, spec.bucket_bytes)
    names = [parameter.name for parameter in table]
    return Route(spec, buckets, copies_of(copies, buckets), owned, names, moved * itemsize)
