"""Transport `point_to_point`: messages between hosts, gloo on CPU or NCCL on GPUs.

    trainer rank: its regions -> one message for each (bucket, engine rank) -> engine rank

Only bytes of the plan are sent. Trainer ranks and engine ranks form a process group apart from all
others (`megarl.weight_sync.transports.p2p_group`). At most two buckets are in flight at each side:
gloo transfers a message only once it is asked for, so nothing piles up. NCCL has not been run yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megarl.parallel.collectives import barrier, broadcast_object
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.boxes import Piece
from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy
from megarl.weight_sync.route import Route
from megarl.weight_sync.transports.base import Watch
from megarl.weight_sync.transports.messages import (
    Message,
    incoming,
    length,
    longest,
    outgoing,
    parts,
    unpack,
)
from megarl.weight_sync.transports.p2p_group import InFlight, P2PGroup, local_device, own_address

SLOTS = 2
"""Number of weight buckets that are in flight at the same time."""


class Sender:
    """Trainer rank's half of the transport `point_to_point`. Rank 0 hosts the key-value store
    through which the ranks connect.
    """

    SHARED = False
    LOCAL = False

    def __init__(self, route: Route, axis: Axis, folder: str) -> None:
        """Connect to the key-value store, which rank 0 creates and hosts. All ranks of `axis`, the
        trainer's ranks, call it together.

        `folder` is unused.
        """
        self._route, self._axis, device = route, axis, local_device()
        host = own_address() if axis.rank == 0 else ""
        own = P2PGroup(route, axis.size, 0, host, 0, device) if axis.rank == 0 else None
        host, port = broadcast_object((own.host, own.port) if own else ("", 0), axis)
        self._group = own or P2PGroup(route, axis.size, axis.rank, host, port, device)
        self._layouts = [_layout(found) for found in outgoing(route, axis.rank)]
        self._memory = torch.empty(
            SLOTS, max(size for _, size in self._layouts), dtype=route.dtype, device=device
        )
        self._in_flight: dict[int, InFlight] = {}
        self._num_groups, self._stale, self._joined = 0, True, 0
        self.sent: Counter[tuple[int, int]] = Counter()
        """Bytes of this version sent so far, by (source, destination)."""

    def init_info(self) -> dict[str, Any]:
        """Address of rank 0's store, for receivers.

        All ranks will connect anew for the next version.
        """
        self._stale = True
        return {
            "host": self._group.host,
            "port": self._group.port,
            "senders": self._axis.size,
            "device": self._group.device.type,
        }

    def begin(self, version: int) -> None:
        """Prepare to send a version: start a new attempt with a new number, which ranks add to
        their reports.
        """
        barrier(self._axis)
        if self._axis.rank == 0:
            self._stale = self._stale or bool(self._group.get(f"aborted/{self._group.attempt}"))
        self._group.attempt += 1
        if self._axis.rank == 0:
            self._group.set("attempt", self._group.attempt)
        self._in_flight.clear()
        self.sent.clear()

    def reserve(self, bucket: Bucket, watch: Watch) -> list[tuple[Copy, torch.Tensor]]:
        """(copy, view of the send buffer to fill) for everything that this rank sends of a bucket.

        Waits until the bucket that used the same slot has been sent. Where several engine ranks get
        identical content, it has one place in the buffer but an entry for each of them, so the
        caller writes the same values there several times.
        """
        self._join(watch)
        self._wait(bucket.number - SLOTS, watch)
        return [pair for message, flat in self._messages(bucket) for pair in parts(message, flat)]

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        """Start sending a written bucket; after the last bucket wait until all have been sent."""
        messages = {message[0].destination: flat for message, flat in self._messages(bucket)}
        for destination, flat in messages.items():
            self.sent[self._axis.rank, destination] += flat.nbytes
        self._in_flight[bucket.number] = self._group.send(messages, self._memory, bucket.number)
        if self._route.is_last(bucket):
            for number in sorted(self._in_flight):
                self._wait(number, watch)

    def abort(self) -> None:
        """Mark this attempt as aborted in the store and cancel this rank's messages."""
        self._group.abort()
        self._in_flight.clear()

    def progress(self, engine: int) -> int:
        """Number of buckets of this version that all ranks of an engine have received."""
        spec, attempt = self._route.spec, self._group.attempt
        numbers = [spec.destination(engine, rank) for rank in range(spec.engine_tensor)]
        return min(self._group.get(f"received/{attempt}/{number}") or 0 for number in numbers)

    def close(self) -> None:
        """Leave the process group."""
        self._group.leave()

    def _join(self, watch: Watch) -> None:
        """Join the process group of the current attempt to send a version; later calls in the same
        attempt do nothing.

        Rank 0 writes the group's number to the store: the previous group, or a new one at the first
        attempt, after an abort or when an engine was replaced.
        """
        if self._joined == self._group.attempt:
            return
        if self._axis.rank == 0:
            self._num_groups += int(self._stale)
            self._stale = False
            self._group.set(f"group/{self._group.attempt}", self._num_groups)
        self._group.join(watch)
        self._joined = self._group.attempt

    def _messages(self, bucket: Bucket) -> list[tuple[Message, torch.Tensor]]:
        """This rank's messages of a bucket, each with its flat send buffer."""
        slot = self._memory[bucket.number % SLOTS]
        return [
            (message, slot[start : start + length(message)])
            for message, start in self._layouts[bucket.number][0]
        ]

    def _wait(self, number: int, watch: Watch) -> None:
        """Wait until the messages of bucket `number`, if any are in flight, have been sent."""
        if number in self._in_flight:
            self._group.wait(self._in_flight[number], watch)
            del self._in_flight[number]


def _layout(messages: Mapping[int, Message]) -> tuple[list[tuple[Message, int]], int]:
    """([(message, first element in the send buffer)], elements of the buffer) of one bucket.

    Messages with the same content share their place in the buffer.
    """
    starts: dict[tuple[Piece, ...], int] = {}
    placed, size = [], 0
    for message in messages.values():
        content = tuple(copy.taken for copy in message)
        if content not in starts:
            starts[content] = size
            size += length(message)
        placed.append((message, starts[content]))
    return placed, size


class Receiver:
    """Engine rank's half of the transport `point_to_point`."""

    def __init__(self, route: Route, engine: int, rank: int, init_info: dict[str, Any]) -> None:
        """Connect to the trainer's store.

        Raises `ValueError` where only one of trainer and engine is on GPUs, `RuntimeError` where
        the store cannot be reached.
        """
        device = local_device() if init_info["device"] == "cuda" else torch.device("cpu")
        if device.type != init_info["device"]:
            raise ValueError(
                "the trainer is on GPUs and this engine is not: weight_sync.transport"
                " point_to_point needs both or neither"
            )
        self._route, self._destination = route, route.spec.destination(engine, rank)
        group_rank = init_info["senders"] + self._destination
        self._group = P2PGroup(
            route, init_info["senders"], group_rank, init_info["host"], init_info["port"], device
        )
        self._messages = incoming(route, self._destination)
        self._memory = torch.empty(longest(self._messages), dtype=route.dtype, device=device)
        self._bytes = torch.empty(route.largest_bytes, dtype=torch.uint8, device=device)

    def receive(self, version: int, watch: Watch) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Iterate over the buckets of a version with their memory blocks. While a bucket is used,
        the next one is received.
        """
        attempt = self._group.get("attempt")
        assert attempt, "senders begin first"
        self._group.attempt = attempt
        self._group.join(watch)
        pending: InFlight | None = None
        for bucket in self._route.buckets:
            try:
                pending = pending or self._start(bucket.number)
                self._group.wait(pending, watch)
            except BaseException:
                self.close()
                raise
            block = self._bytes[: bucket.num_bytes]
            buffers = bucket.buffers(block, self._route.dtype)
            for source, flat in self._flats(bucket.number).items():
                unpack(self._messages[bucket.number][source], flat, buffers)
            pending = None if self._route.is_last(bucket) else self._start(bucket.number + 1)
            yield bucket, block
            self._group.set(f"received/{attempt}/{self._destination}", bucket.number + 1)

    def close(self) -> None:
        """Leave the process group; messages in flight are cancelled."""
        self._group.leave()

    def _start(self, number: int) -> InFlight:
        """Start receiving the messages of bucket `number`."""
        return self._group.receive(self._flats(number), self._memory, number)

    def _flats(self, number: int) -> dict[int, torch.Tensor]:
        """{source rank: flat receive buffer of its message} of bucket `number`."""
        found, start = {}, 0
        for source, message in self._messages[number].items():
            found[source] = self._memory[start : start + length(message)]
            start += length(message)
        return found
