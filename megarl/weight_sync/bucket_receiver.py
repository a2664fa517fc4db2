"""The part of receiving weights that does not depend on vLLM: buckets, padding, digests."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megarl.parallel.reshard.buckets import Bucket
from megarl.weight_sync.checksums import Digest, digest
from megarl.weight_sync.route import Route
from megarl.weight_sync.transports.base import Receiver, Watch


@dataclass
class InitInfo:
    """What an engine needs to know once, before its first weight update."""

    transport: str
    """Name in `megarl.weight_sync.transports.transport_table`."""
    spec: dict[str, Any]
    """The fields of a `RouteSpec`."""
    engine: int
    """This engine's number, from 0."""
    init_info: dict[str, Any]
    """The address of the trainer, as returned by `init_info` of the transport's sender."""


@dataclass
class UpdateInfo:
    """A request to receive one weight version."""

    version: int
    timeout_s: float
    """Seconds after which the engine gives up waiting for the version."""


class BucketReceiver:
    """Receives one engine rank's buckets through a transport and digests what was stored."""

    def __init__(self, route: Route, receiver: Receiver) -> None:
        """`route`: this engine rank's."""
        self.route, self.receiver = route, receiver
        self._tensor_index = {name: index for index, name in enumerate(route.tensors)}
        self._padding = [route.padding(bucket) for bucket in route.buckets]

    def buckets(
        self, version: int, watch: Watch, seconds: dict[str, float]
    ) -> Iterator[tuple[Bucket, dict[str, torch.Tensor]]]:
        """Each bucket of a version with its flat buffers, vocabulary padding zeroed.

        The buffers are valid until the next bucket is asked for. Adds the seconds spent waiting to
        `seconds["wait"]`.
        """
        received = self.receiver.receive(version, watch)
        while True:
            started_at = time.perf_counter()
            bucket, block = next(received, (None, None))
            seconds["wait"] += time.perf_counter() - started_at
            if bucket is None or block is None:
                return
            buffers = bucket.buffers(block, self.route.dtype)
            for piece in self._padding[bucket.number]:
                piece.view(buffers[piece.buffer]).zero_()
            yield bucket, buffers

    def digest(
        self,
        bucket: Bucket,
        stored: Mapping[str, torch.Tensor],
        digests: list[Digest],
        seconds: dict[str, float],
    ) -> None:
        """Add the digests of a bucket's regions to `digests`, one number for each tensor.

        `stored`: the bucket's flat buffers as the engine stored them. Adds to `seconds["digest"]`.
        """
        started_at = time.perf_counter()
        for copy in self.route.copies[bucket.number]:
            digests[self._tensor_index[copy.tensor]] += digest(
                copy.put.view(stored[copy.put.buffer]), copy.put.box
            )
        seconds["digest"] += time.perf_counter() - started_at


class Modules:
    """Collects parameters from the buckets until all parameters of a module have arrived, since
    engines rebuild whole modules.

    Parameters are copied only if the module spans several buckets. The copies are freed once the
    module is complete.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """`sizes`: {parameter name, for example "layers.0.mlp.weight": number of elements}."""
        self._sizes, self._parts, self._filled = sizes, {}, defaultdict(int)
        self._members: dict[str, list[str]] = defaultdict(list)
        for name in sizes:
            self._members[name.rpartition(".")[0]].append(name)

    def complete(
        self, buffers: Mapping[str, torch.Tensor], bucket: Bucket
    ) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Add the flat `buffers` of `bucket`. Yields (module path, {parameter name in the module:
        flat tensor}) for each module that is now complete.

        The tensors are valid until the next bucket is received.
        """
        for path in dict.fromkeys(name.rpartition(".")[0] for name in buffers):
            members, ready = self._members[path], {}
            if all(name in buffers and len(buffers[name]) == self._sizes[name] for name in members):
                ready = {name: buffers[name] for name in members}
            else:
                for name in members:
                    self._keep(name, buffers, bucket)
                if all(self._filled[name] == self._sizes[name] for name in members):
                    ready = {name: self._parts.pop(name) for name in members}
            if ready:
                yield path, {name.rpartition(".")[2]: flat for name, flat in ready.items()}

    def _keep(self, name: str, buffers: Mapping[str, torch.Tensor], bucket: Bucket) -> None:
        if name in buffers:
            flat, start = buffers[name], bucket.starts[name]
            whole = self._parts.setdefault(name, flat.new_empty(self._sizes[name]))
            whole[start : start + len(flat)] = flat
            self._filled[name] += len(flat)


def deadline_watch(timeout_s: float) -> Watch:
    """A `Watch` that raises `RuntimeError` once `timeout_s` seconds have passed from now."""
    deadline = time.monotonic() + timeout_s

    def watch() -> None:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"nothing more came from the trainer within {timeout_s:g} s; raise"
                " weight_sync.timeout_s"
            )

    return watch
