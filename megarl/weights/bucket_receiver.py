"""The part of receiving weights in an engine rank that does not depend on vLLM: buckets (blocks of
memory that are received at once), padding, digests.
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
    """The message in which the trainer tells an engine, once, before the first weights, how they
    will arrive: by which transport, from which address, and how trainer and engines split the
    model. It is sent as a dict.
    """

    transport: str
    """Name of the transport, as in the setting `weight_sync.transport`."""
    spec: dict[str, Any]
    """The fields of a `RouteSpec`, as `dataclasses.asdict` returns them."""
    engine: int
    """This engine's position, from 0, among those that receive weights."""
    init_info: dict[str, Any]
    """The address of the trainer, as returned by `init_info` of the transport's sender."""
    table: str
    """The model's parameter table as JSON (`megarl.weights.parameters.table_to_json`)."""


@dataclass
class UpdateInfo:
    """What vLLM's ranks are told with each weight version: which one to receive, and how long to
    wait for it.
    """

    version: int
    timeout_s: float
    """Seconds after which the engine gives up waiting for the version."""


class BucketReceiver:
    """Receives one engine rank's weights, bucket after bucket (a bucket is a block of memory that
    is sent at once), and digests what the engine has stored. For each version go through `buckets`,
    call `digest` for each, then `status`.
    """

    def __init__(self, info: InitInfo, rank: int) -> None:
        """Work out what tensor-parallel rank `rank` of the engine receives, and connect to the
        trainer's transport.
        """
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
        """Seconds spent on the present version: {"wait": s, "digest": s, "install": s}."""
        self._digests: list[Digest] = []

    def buckets(self, timeout_s: float) -> Iterator[tuple[Bucket, dict[str, torch.Tensor]]]:
        """Iterate over the buckets of a weight version: (bucket, {engine parameter: flat tensor of
        the part of it in this bucket}). The `Bucket` says where in the parameter each part lies.
        Padding, such as vocabulary rows that no tensor fills, is set to zero.

        The tensors are valid until the next bucket is asked for. Raises `RuntimeError` where the
        whole version has not come within `timeout_s` seconds, and `Aborted` where the trainer gives
        the version up.
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
        """Digest what the engine has stored of a bucket, and add this to the sums, one for each
        tensor of the model, that `status` returns. `stored`: {engine parameter: flat tensor}, the
        bucket's part of each parameter as the engine has stored it.
        """
        started_at = time.perf_counter()
        for copy in self.route.copies[bucket.number]:
            self._digests[self._tensor_index[copy.tensor]] += digest(
                copy.put.view(stored[copy.put.buffer]), copy.put.box
            )
        self.seconds["digest"] += time.perf_counter() - started_at

    def status(self, version: int) -> dict[str, Any]:
        """What this rank answers once it has received all of `version`: {"version", "digests": [one
        signed 64-bit int for each tensor of the model], "seconds": {"wait": s, "digest": s,
        "install": s}}.
        """
        digests = [signed(value) for value in self._digests]
        return {"version": version, "digests": digests, "seconds": self.seconds}


class Modules:
    """Collects parameters from the buckets until all parameters of a torch module have arrived,
    since vLLM transforms the weights of a module (such as by repacking) only together.

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
        """Add the parameters, or parts of them, that have come with `bucket`. `buffers`: {parameter
        name: flat tensor of its part in this bucket}. Yields (module path, {parameter name in the
        module: flat tensor of the whole parameter}) for each module that is now complete.

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
