"""Transport `point_to_point`: messages between hosts, by NCCL where trainer and engines have GPUs
of their own, else by gloo. NCCL has not been run yet.

    trainer ranks --one message for each (bucket, engine rank)--> engine ranks

At most two buckets are in flight: gloo transfers a message only once it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from megarl.parallel.collectives import broadcast_object, gather_objects
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy
from megarl.weights.route import Route, RouteSpec
from megarl.weights.transports import base
from megarl.weights.transports.p2p_group import (
    P2PGroup,
    Peer,
    Rendezvous,
    group_device,
    network_place,
    own_address,
)

SLOTS = 2
"""Buckets in flight."""


def _peers(spec: RouteSpec) -> list[Peer]:
    """Trainer ranks first, then those of each engine."""
    peers: list[Peer] = [(f"trainer rank {rank}", ()) for rank in range(spec.layout.size)]
    for engine in range(spec.engines):
        ranks = range(spec.engine_tensor)
        peers += [(f"rank {rank} of engine {engine}", (engine,)) for rank in ranks]
    return peers


class Sender(base.Sender):
    """Rank 0 serves the key-value store through which the ranks connect."""

    SENDS_TO_EACH = True

    def __init__(self, route: Route, axis: Axis) -> None:
        """Collective over `axis`."""
        self._route, self._axis, spec = route, axis, route.spec
        device = torch.device("cpu") if spec.shares_gpus else group_device()
        peers, address = _peers(spec), ("", 0)
        hosts = set(gather_objects(network_place(), axis))
        if axis.rank == 0:
            host = "127.0.0.1" if spec.one_host and len(hosts) == 1 else own_address()
            self._meeting = Rendezvous(host, 0, len(peers))
            address = host, self._meeting.port
        address = broadcast_object(address, axis)
        if axis.rank > 0:
            self._meeting = Rendezvous(*address, len(peers))
        self._group = P2PGroup(self._meeting, axis.rank, peers, device)
        self._messages = base.outgoing(route)
        self._memory = torch.empty(
            SLOTS, base.longest(self._messages), dtype=route.dtype, device=device
        )
        self._num_groups = 0

    def init_info(self) -> dict[str, Any]:
        """ "host" and "port" of the store, and the messages' "device"."""
        meeting, device = self._meeting, self._memory.device.type
        return {"host": meeting.host, "port": meeting.port, "device": device}

    def begin(self, attempt: int, *, anew: bool = False) -> None:
        """With `anew` on rank 0 all ranks make a new process group."""
        if self._axis.rank > 0:
            self._meeting.follow()
        else:
            self._num_groups += anew
            self._meeting.begin(attempt, self._num_groups)

    def reserve(self, bucket: Bucket, watch: base.Watch) -> list[tuple[Copy, torch.Tensor]]:
        """Waits for the bucket that used the same buffer and, first, for all engine ranks. Raises
        `ProcessLost`.
        """
        if bucket.number == 0:
            self._group.join(watch)
        self._group.wait(bucket.number - SLOTS, watch)
        return base.targets_of(self._messages[bucket.number], self._memory[bucket.number % SLOTS])

    def commit(self, bucket: Bucket, watch: base.Watch) -> None:
        """Raises `ProcessLost` if the connection to an engine ended."""
        spec, memory = self._route.spec, self._memory[bucket.number % SLOTS]
        flats = base.flats(self._messages[bucket.number], memory)
        messages = {
            self._axis.size + engine * spec.engine_tensor + rank: flat
            for engine in range(spec.engines)
            for rank, flat in flats.items()
        }
        self._group.send(messages, memory, bucket.number)
        if self._route.is_last(bucket):
            for number in range(bucket.number + 1 - SLOTS, bucket.number + 1):
                self._group.wait(number, watch)

    def abort(self) -> None:
        self._meeting.abort()
        self._group.leave()

    def progress(self, engine: int) -> int:
        """As `base.Sender.progress`; of many processes not every bucket is reported."""
        ranks = range(self._route.spec.engine_tensor)
        return min(self._meeting.reported(f"{engine}/{rank}") for rank in ranks)

    def close(self) -> None:
        self._group.leave()


class Receiver:
    """An engine rank's half."""

    def __init__(self, route: Route, engine: int, rank: int, init_info: dict[str, Any]) -> None:
        """Raises `ValueError` if only the trainer is on GPUs, `RuntimeError` if the store is out of
        reach.
        """
        device = group_device() if init_info["device"] == "cuda" else torch.device("cpu")
        if device.type != init_info["device"]:
            raise ValueError(
                "the trainer is on GPUs and this engine is not: weight_sync.transport"
                " point_to_point needs both or neither"
            )
        spec, peers, self._name = route.spec, _peers(route.spec), f"{engine}/{rank}"
        self._route, self._messages = route, base.incoming(route)
        self._meeting = Rendezvous(init_info["host"], init_info["port"], len(peers))
        number = spec.layout.size + engine * spec.engine_tensor + rank
        self._group = P2PGroup(self._meeting, number, peers, device)
        self._memory = torch.empty(base.longest(self._messages), dtype=route.dtype, device=device)
        self._block = torch.empty(route.largest_bytes, dtype=torch.uint8, device=device)
        self._next_report = 0.0

    def receive(self, watch: base.Watch) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """As `base.Receiver.receive`. While a bucket is used, the next one is received."""
        buckets = self._route.buckets
        self._meeting.follow()
        self._meeting.report(self._name, 0)
        try:
            self._group.join(watch)
            self._start(buckets[0])
            for bucket in buckets:
                self._group.wait(bucket.number, watch)
                block = self._unpack(bucket)
                if not self._route.is_last(bucket):
                    self._start(buckets[bucket.number + 1])
                yield bucket, block
                if torch.cuda.is_initialized():  # copies from the block may only be started
                    torch.cuda.current_stream().synchronize()
                self._report(bucket)
        except BaseException:
            self._group.leave()
            raise

    def close(self) -> None:
        self._group.leave()

    def _start(self, bucket: Bucket) -> None:
        flats = base.flats(self._messages[bucket.number], self._memory)
        self._group.receive(flats, self._memory, bucket.number)

    def _unpack(self, bucket: Bucket) -> torch.Tensor:
        block = self._block[: bucket.num_bytes]
        buffers = bucket.buffers(block, self._route.dtype)
        for source, flat in base.flats(self._messages[bucket.number], self._memory).items():
            base.unpack(self._messages[bucket.number][source], flat, buffers)
        return block

    def _report(self, bucket: Bucket) -> None:
        now = time.monotonic()
        if self._route.is_last(bucket) or now >= self._next_report:
            self._next_report = now + self._meeting.report_s
            self._meeting.report(self._name, bucket.number + 1)
