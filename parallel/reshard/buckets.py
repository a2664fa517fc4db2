"""Buckets: a destination's buffers in groups that travel together, each group one block of memory (an image)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from megarl.parallel.reshard.plan import Copy, Plan

ALIGN = 64
"""Bytes to which each buffer of an image is aligned."""


@dataclass(frozen=True)
class Bucket:
    """Whole buffers of a destination, and where each lies in the bucket's image."""

    number: int
    offsets: Mapping[str, int]
    """Buffer -> first byte."""
    sizes: Mapping[str, int]
    """Buffer -> elements."""
    itemsize: int

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the image."""
        return max((self.offsets[name] + _aligned(size * self.itemsize) for name, size in self.sizes.items()), default=0)

    def buffers(self, image: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The flat buffers in an image (bytes [num_bytes] or more), uncopied."""
        return {name: image[start : start + self.sizes[name] * self.itemsize].view(dtype) for name, start in self.offsets.items()}


def make_buckets(sizes: Mapping[str, int], itemsize: int, limit_bytes: int) -> list[Bucket]:
    """Buffers in their order, as many to a bucket as fit into `limit_bytes`, at least one module.

    The buffers of one module (`layer.weight`, `layer.bias`) stay together: an engine rebuilds a module at a time.
    """
    modules: dict[str, list[str]] = {}
    for name in sizes:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    made: list[Bucket] = []
    group: list[str] = []
    filled = 0
    for names in modules.values():
        more = sum(_aligned(sizes[name] * itemsize) for name in names)
        if group and filled + more > limit_bytes:
            made.append(_bucket(len(made), group, sizes, itemsize))
            group, filled = [], 0
        group += names
        filled += more
    return [*made, _bucket(len(made), group, sizes, itemsize)] if group else made


def copies_of(plan: Plan, buckets: list[Bucket]) -> list[list[Copy]]:
    """A plan's copies, by bucket."""
    where = {name: bucket.number for bucket in buckets for name in bucket.sizes}
    made: list[list[Copy]] = [[] for _ in buckets]
    for copy in plan.copies:
        made[where[copy.put.buffer]].append(copy)
    return made


def _bucket(number: int, names: list[str], sizes: Mapping[str, int], itemsize: int) -> Bucket:
    offsets, filled = {}, 0
    for name in names:
        offsets[name] = filled
        filled += _aligned(sizes[name] * itemsize)
    return Bucket(number, offsets, {name: sizes[name] for name in names}, itemsize)


def _aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN
