"""What an engine rank does with a version whatever it runs on: receive bucket after bucket, zero
padding, digest what arrived.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy
from megarl.weight_sync.checksums import digest
from megarl.weight_sync.route import Route


@dataclass
class InitInfo:
    """What an engine must know before the first version."""

    transport: str
    spec: dict[str, Any]
    """A `RouteSpec`, plain."""
    engine: int
    """This engine's number."""
    init_info: dict[str, Any]
    """The sender's."""


@dataclass
class UpdateInfo:
    """One version."""

    version: int
    timeout_s: float


class Intake:
    """One engine rank's share of a route: receives, digests, and hands over the buffers of each
    bucket.
    """

    def __init__(self, route: Route, receiver: Any, image: int) -> None:
        self.route, self.receiver, self.owned = route, receiver, route.owned(image)
        self._number = {name: number for number, name in enumerate(route.tensors)}
        self._copies: list[list[Copy]] = [
            [c for c in copies if c.destination == image] for copies in route.copies
        ]
        self._padding = [route.padding(bucket, image) for bucket in route.buckets]

    def take(
        self, bucket: Bucket, watch: Any, seconds: dict[str, float]
    ) -> dict[str, torch.Tensor]:
        """The bucket's flat buffers, complete, with padding zeroed; valid until the receiver
        releases the bucket.
        """
        started_at = time.perf_counter()
        image = self.receiver.wait(bucket, watch)
        seconds["wait"] += time.perf_counter() - started_at
        buffers = bucket.buffers(image, self.route.dtype)
        for piece in self._padding[bucket.number]:
            piece.view(buffers[piece.buffer]).zero_()
        return buffers

    def digest(
        self,
        bucket: Bucket,
        owned: Mapping[str, torch.Tensor],
        digests: list[int],
        seconds: dict[str, float],
    ) -> None:
        """Add the digests of what is stored of a bucket's buffers to those of their tensors."""
        started_at = time.perf_counter()
        for copy in self._copies[bucket.number]:
            digests[self._number[copy.tensor]] += digest(
                copy.put.view(owned[copy.put.buffer]), copy.put.box
            )
        seconds["digest"] += time.perf_counter() - started_at


class Modules:
    """Puts parts of buffers together until a module has all of its own: an engine rebuilds whole
    modules.

    Only what is larger than a bucket is copied, and let go when its module is complete.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """`sizes`: elements of each buffer (`layer.weight`)."""
        self._sizes, self._parts, self._filled = sizes, {}, defaultdict(int)
        self._members: dict[str, list[str]] = defaultdict(list)
        for name in sizes:
            self._members[name.rpartition(".")[0]].append(name)

    def complete(
        self, buffers: Mapping[str, torch.Tensor], bucket: Bucket
    ) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """(module, its flat parameters by their own names) of each that a bucket completes; valid
        until the next bucket.
        """
        for path in dict.fromkeys(name.rpartition(".")[0] for name in buffers):
            members, here = self._members[path], {}
            if all(name in buffers and len(buffers[name]) == self._sizes[name] for name in members):
                here = {name: buffers[name] for name in members}
            else:
                for name in members:
                    self._keep(name, buffers, bucket)
                if all(self._filled[name] == self._sizes[name] for name in members):
                    here = {name: self._parts.pop(name) for name in members}
            if here:
                yield path, {name.rpartition(".")[2]: flat for name, flat in here.items()}

    def _keep(self, name: str, buffers: Mapping[str, torch.Tensor], bucket: Bucket) -> None:
        if name in buffers:
            flat, start = buffers[name], bucket.starts[name]
            whole = self._parts.setdefault(name, flat.new_empty(self._sizes[name]))
            whole[start : start + len(flat)] = flat
            self._filled[name] += len(flat)


def deadline_watch(timeout_s: float) -> Any:
    """A watch that raises `RuntimeError` once `timeout_s` have passed."""
    deadline = time.monotonic() + timeout_s

    def watch() -> None:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"nothing more came from the trainer within {timeout_s:g} s; raise"
                " weight_sync.timeout_s"
            )

    return watch
