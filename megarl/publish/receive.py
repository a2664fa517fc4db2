"""What an engine rank does with a version whatever it runs on: receive bucket after bucket, zero padding, digest what arrived."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy
from megarl.publish.digests import digest
from megarl.publish.route import Route


@dataclass
class InitInfo:
    """What an engine must know before the first version."""

    carrier: str
    spec: dict[str, Any]
    """A `RouteSpec`, plain."""
    engine: int
    """This engine's number."""
    invitation: dict[str, Any]
    """The sender's."""


@dataclass
class UpdateInfo:
    """One version."""

    version: int
    timeout_s: float


class Intake:
    """One engine rank's share of a route: receives, digests, and hands over the buffers of each bucket."""

    def __init__(self, route: Route, receiver: Any, image: int) -> None:
        self.route, self.receiver, self.image = route, receiver, image
        self._number = {name: number for number, name in enumerate(route.tensors)}
        self._copies: list[list[Copy]] = [[c for c in copies if c.destination == image] for copies in route.copies]
        self._padding = [route.padding(bucket, image) for bucket in route.buckets]

    def take(self, bucket: Bucket, watch: Any, digests: list[int], seconds: dict[str, float]) -> dict[str, torch.Tensor]:
        """The bucket's flat buffers, complete, with padding zeroed; their digests are added to `digests`."""
        begun = time.perf_counter()
        image = self.receiver.wait(bucket, watch)
        waited = time.perf_counter()
        buffers = bucket.buffers(image, self.route.dtype)
        for piece in self._padding[bucket.number]:
            piece.view(buffers[piece.buffer]).zero_()
        for copy in self._copies[bucket.number]:
            view = copy.put.view(buffers[copy.put.buffer])
            digests[self._number[copy.tensor]] += digest(view, copy.put.box)
        seconds["wait"] += waited - begun
        seconds["digest"] += time.perf_counter() - waited
        return buffers


def deadline_watch(timeout_s: float) -> Any:
    """A watch that raises `RuntimeError` once `timeout_s` have passed."""
    deadline = time.monotonic() + timeout_s

    def watch() -> None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing more came from the trainer within {timeout_s:g} s; raise publish.timeout_s")

    return watch


def wrapped(value: int) -> int:
    """`value` as a signed 64-bit number: sums of digests count modulo 2^64."""
    return (value + 2**63) % 2**64 - 2**63
