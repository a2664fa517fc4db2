"""The part of an engine rank's receiving that does not depend on vLLM: buckets, padding,
digests.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import TypeAdapter

from megarl.parallel.reshard.buckets import Bucket
from megarl.weights.checksums import Digest, digest, signed
from megarl.weights.parameters import table_from_json
from megarl.weights.route import Route, RouteSpec
from megarl.weights.transports.base import Receiver
from megarl.weights.transports.transport_table import TRANSPORTS


@dataclass
class InitInfo:
    """What an engine needs to know once, before the first weights; sent as a dict."""

    transport: str
    """Name, as in `weight_sync.transport`."""
    spec: dict[str, Any]
    """`dataclasses.asdict` of a `RouteSpec`."""
    engine: int
    """The engine's position, from 0, among those that receive."""
    init_info: dict[str, Any]
    """What `init_info` of the transport's sender returned."""
    table: str
    """The parameter table, by `table_to_json`."""


@dataclass
class UpdateInfo:
    """Which weight version vLLM's ranks shall receive, and how long they may wait for it."""

    version: int
    timeout_s: float


class BucketReceiver:
    """Receives one engine rank's weights by buckets, and digests what the engine has stored.

    For each version go through `buckets`, call `digest` for each, then `status`.
    """

    def __init__(self, info: InitInfo, rank: int) -> None:
        """`rank`: the tensor-parallel rank in the engine. Connects to the trainer's transport."""
        spec = TypeAdapter(RouteSpec).validate_python(info.spec)
        self.route = Route.of_destination(
            spec, table_from_json(info.table), spec.destination(info.engine, rank)
        )
        self.receiver: Receiver = TRANSPORTS[info.transport].Receiver(
            self.route, info.engine, rank, info.init_info
        )
        self._tensor_index = {name: index for index, name in enumerate(self.route.tensors)}
        self._padding = self.route.padding()
        self.seconds = dict[str, float]()
        """Of the present version: {"wait": s, "digest": s, "install": s}."""
        self._digests: list[Digest] = []

    def buckets(self, timeout_s: float) -> Iterator[tuple[Bucket, dict[str, torch.Tensor]]]:
        """Yields (bucket, {engine parameter: flat tensor of the part in this bucket}); valid until
        the next one. Padding is set to zero. Raises `RuntimeError` after `timeout_s`, or
        `Aborted`.
        """
        self.seconds = dict.fromkeys(("wait", "digest", "install"), 0.0)
        self._digests = [0] * len(self.route.tensors)
        deadline = time.monotonic() + timeout_s

        def watch() -> None:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"nothing more came from the trainer within {timeout_s:g} s; raise"
                    " weight_sync.timeout_s"
                )

        received = self.receiver.receive(watch)
        while True:
            started_at = time.perf_counter()
            bucket, block = next(received, (None, None))
            self.seconds["wait"] += time.perf_counter() - started_at
            if bucket is None or block is None:
                return
            buffers = bucket.buffers(block, self.route.dtype)
            for piece in self._padding[bucket.number]:
                piece.view(buffers[piece.buffer]).zero_()
            yield bucket, buffers

    def digest(self, bucket: Bucket, stored: Mapping[str, torch.Tensor]) -> None:
        """Add the digests of a bucket to the sums. `stored`: as `buckets` yields, but as the engine
        has stored it.
        """
        started_at = time.perf_counter()
        for copy in self.route.copies[bucket.number]:
            self._digests[self._tensor_index[copy.tensor]] += digest(
                copy.put.view(stored[copy.put.buffer]), copy.put.box
            )
        self.seconds["digest"] += time.perf_counter() - started_at

    def status(self, version: int) -> dict[str, Any]:
        """This rank's answer: {"version", "digests": [a signed 64-bit int for each tensor],
        "seconds"}.
        """
        digests = [signed(value) for value in self._digests]
        return {"version": version, "digests": digests, "seconds": self.seconds}


class Modules:
    """Collects parameters from buckets until a torch module is complete, since vLLM repacks whole
    modules.

    Parameters are copied only where a module spans several buckets.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """`sizes`: {parameter name: number of elements}."""
        self._sizes, self._parts, self._filled = sizes, {}, defaultdict(int)
        self._members: dict[str, list[str]] = defaultdict(list)
        for name in sizes:
            self._members[name.rpartition(".")[0]].append(name)

    def complete(
        self, buffers: Mapping[str, torch.Tensor], bucket: Bucket
    ) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Add the parts that came with `bucket`, {parameter name: flat tensor}. Yields (module
        path, {name in the module: flat whole parameter}) for each module that is now complete;
        valid until the next bucket.
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
