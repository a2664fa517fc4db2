"""Transport `point_to_point`: messages between hosts, gloo on CPU or NCCL on GPUs.

    trainer rank: its regions -> one message for each (bucket, rank of engine 0) -> engine 0
    engine: whole buckets -> two other engines (`megarl.weight_sync.transports.forwarding`)

Trainer ranks and the ranks of engine 0 form one process group, each relay and its receiver another
(`megarl.weight_sync.transports.p2p_group`). At most two buckets are in flight at each side:
gloo transfers a message only once it is asked for, so nothing piles up. NCCL has not been run yet.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megarl.errors import EngineLost
from megarl.parallel.collectives import barrier, broadcast_object, gather_objects
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.boxes import Piece
from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy
from megarl.weight_sync.route import Route, RouteSpec
from megarl.weight_sync.transports import forwarding
from megarl.weight_sync.transports.base import (
    GIVEN_UP,
    Aborted,
    Message,
    Watch,
    incoming,
    length,
    longest,
    outgoing,
    parts,
    unpack,
)
from megarl.weight_sync.transports.forwarding import Relay, slowest
from megarl.weight_sync.transports.p2p_group import (
    InFlight,
    P2PGroup,
    PeerGone,
    local_device,
)
from megarl.weight_sync.transports.rendezvous import Rendezvous, network_place, own_address

SLOTS = 2
"""Number of weight buckets that are in flight at the same time."""

RELAY_BLOCKS = SLOTS + 1
"""Blocks of an engine rank that passes buckets on: one is received, one installed, one sent."""


def _name(rank: int, engine: int) -> str:
    return f"rank {rank} of engine {engine}"


def _first_group(meeting: Rendezvous, spec: RouteSpec, rank: int, device: torch.device) -> P2PGroup:
    """The group of the trainer ranks, which come first, and the ranks of engine 0."""
    senders = spec.layout.size

    def name(rank: int) -> str:
        return f"trainer rank {rank}" if rank < senders else _name(rank - senders, 0)

    return P2PGroup(meeting, "trainer", senders + spec.engine_tensor, rank, name, device)


class Sender:
    """Trainer rank's half of the transport `point_to_point`. Rank 0 hosts the key-value store
    through which the ranks connect.
    """

    SHARED, LOCAL = True, False

    def __init__(self, route: Route, axis: Axis, folder: str) -> None:
        """Connect to the key-value store, which rank 0 creates and hosts. All ranks of `axis`, the
        trainer's ranks, call it together.

        `folder` is unused.
        """
        self._route, self._axis, device = route, axis, local_device()
        places, found = gather_objects(network_place(), axis), None
        members = axis.size + route.spec.engines * route.spec.engine_tensor
        if axis.rank == 0:
            is_one_host = route.spec.one_host and len(set(places)) == 1
            host = "127.0.0.1" if is_one_host else own_address()
            self._meeting = Rendezvous(host, 0, secrets.token_hex(32), members)
            found = self._meeting.host, self._meeting.port, self._meeting.secret
        found = broadcast_object(found, axis)
        assert found is not None
        if axis.rank > 0:
            self._meeting = Rendezvous(*found, members)
        self._group = _first_group(self._meeting, route.spec, axis.rank, device)
        self._layouts = [_layout(found) for found in outgoing(route)]
        self._memory = torch.empty(
            SLOTS, max(size for _, size in self._layouts), dtype=route.dtype, device=device
        )
        self._in_flight: dict[int, InFlight] = {}
        self._num_groups, self._stale, self._joined = 0, True, 0
        self.sent: Counter[tuple[int, int]] = Counter()
        """Bytes of this version sent so far, by (source, destination)."""

    def init_info(self) -> dict[str, Any]:
        """Address and secret of rank 0's store, for receivers.

        All ranks will connect anew for the next version.
        """
        self._stale = True
        return {
            "host": self._meeting.host,
            "port": self._meeting.port,
            "secret": self._meeting.secret,
            "device": self._memory.device.type,
        }

    def begin(self, version: int) -> None:
        """Prepare to send a version: start a new attempt with a new number, which ranks add to
        their reports.
        """
        barrier(self._axis)
        if self._axis.rank == 0:
            self._stale = self._stale or self._meeting.is_aborted()
        self._meeting.attempt += 1
        if self._axis.rank == 0:
            self._meeting.set("attempt", self._meeting.attempt)
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
        first, flats = self._axis.size, messages.items()
        try:
            self._in_flight[bucket.number] = self._group.send(
                {first + to: flat for to, flat in flats}, self._memory, bucket.number
            )
        except PeerGone as error:
            raise self._lost(error) from error
        if self._route.is_last(bucket):
            for number in sorted(self._in_flight):
                self._wait(number, watch)

    def abort(self) -> None:
        """Mark this attempt as aborted in the store and cancel this rank's messages."""
        self._meeting.abort()
        self._group.leave()
        self._in_flight.clear()

    def progress(self, engine: int) -> int:
        """Number of buckets of this version that all ranks of an engine have received."""
        attempt, ranks = self._meeting.attempt, range(self._route.spec.engine_tensor)
        return min(self._meeting.get(f"received/{attempt}/{engine}/{rank}") or 0 for rank in ranks)

    def lost(self) -> int | None:
        """The engine that another engine has lost while this version was sent, or None."""
        return self._meeting.lost()

    def relay(self, engine: int) -> int | None:
        """The engine that passes weights on to `engine`, or None."""
        return forwarding.parent(engine)

    def close(self) -> None:
        """Leave the process group and the store."""
        self._group.leave()
        self._meeting.close()

    def _join(self, watch: Watch) -> None:
        """Join the process group of the current attempt to send a version; later calls in the same
        attempt do nothing.

        Rank 0 writes the group's number to the store: the previous group, or a new one at the first
        attempt, after an abort or when an engine was replaced.
        """
        attempt = self._meeting.attempt
        if self._joined == attempt:
            return
        if self._axis.rank == 0:
            self._num_groups += int(self._stale)
            self._stale = False
            self._meeting.set(f"group/{attempt}", self._num_groups)
        self._group.join(_group_number(self._meeting, watch), watch)
        self._joined = attempt

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
            try:
                self._group.wait(self._in_flight[number], watch)
            except PeerGone as error:
                raise self._lost(error) from error
            del self._in_flight[number]

    def _lost(self, error: PeerGone) -> RuntimeError:
        """The error to raise where a peer is gone; trainer ranks exchange no messages here."""
        assert error.peer >= self._axis.size
        return EngineLost(str(error), (0,))


def _group_number(meeting: Rendezvous, watch: Watch) -> int:
    """Number of the groups of this attempt, once trainer rank 0 has set it."""
    key = f"group/{meeting.attempt}"
    meeting.until(lambda: meeting.has([key]), watch, meeting.pause_s)
    number = meeting.get(key)
    assert number
    return number


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
    """Engine rank's half of the transport `point_to_point`: receives buckets from the trainer or
    from another engine, and passes them on.
    """

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
        spec, self._route, self._engine, self._rank = route.spec, route, engine, rank
        members = spec.layout.size + spec.engines * spec.engine_tensor
        self._meeting = Rendezvous(
            init_info["host"], init_info["port"], init_info["secret"], members
        )
        self._parent, self._children = (
            forwarding.parent(engine),
            forwarding.children(engine, spec.engines),
        )
        if self._parent is None:
            self._from = _first_group(self._meeting, spec, spec.layout.size + rank, device)
        else:
            self._from = self._pair(self._parent, engine, 1, device)
        self._to = [self._pair(engine, child, 0, device) for child in self._children]
        self._relays: list[Relay] = []
        # Buckets of another engine arrive as they are installed; those of trainer ranks in parts.
        self._messages = incoming(route) if self._parent is None else []
        self._memory = torch.empty(longest(self._messages), dtype=route.dtype, device=device)
        self._blocks = torch.empty(
            RELAY_BLOCKS if self._to else SLOTS,
            route.largest_bytes,
            dtype=torch.uint8,
            device=device,
        )
        self._reported_at = 0.0

    def receive(self, version: int, watch: Watch) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Iterate over the buckets of a version with their memory blocks. While a bucket is used,
        the next one is received and those before are passed on.
        """
        meeting, buckets = self._meeting, self._route.buckets
        attempt = meeting.get("attempt")
        assert attempt, "senders begin first"
        meeting.attempt = attempt
        try:
            number = _group_number(meeting, watch)
            self._relays = [
                Relay(group, number, len(buckets), watch, lambda child=child: meeting.lose(child))
                for group, child in zip(self._to, self._children, strict=True)
            ]
            self._from.join(number, watch)
            pending = self._start(buckets[0], watch)
            for bucket in buckets:
                block = self._finish(pending, bucket, watch)
                for one in self._relays:
                    one.offer(block)
                if not self._route.is_last(bucket):
                    pending = self._start(buckets[bucket.number + 1], watch)
                yield bucket, block
                self._report(bucket)
            self._until_passed_on(len(buckets), watch)
        except PeerGone as error:
            self._leave()
            if self._parent is None:
                raise
            meeting.lose(self._parent)
            raise Aborted(GIVEN_UP) from error
        except BaseException:
            self._leave()
            raise

    def close(self) -> None:
        """Leave the process groups and the store."""
        self._leave()
        self._meeting.close()

    def _leave(self) -> None:
        """Leave the process groups; messages in flight are cancelled."""
        relays, self._relays = self._relays, []
        for one in relays:
            one.close()
        for group in (self._from, *self._to):
            group.leave()

    def _pair(self, sender: int, receiver: int, place: int, device: torch.device) -> P2PGroup:
        """The group of this rank of two engines; `place` is this process's rank in it."""
        names = _name(self._rank, sender), _name(self._rank, receiver)
        key = f"engine/{receiver}/{self._rank}"
        return P2PGroup(self._meeting, key, 2, place, lambda rank: names[rank], device)

    def _block(self, bucket: Bucket) -> torch.Tensor:
        """Memory of a bucket, uint8 [bucket.num_bytes]."""
        return self._blocks[bucket.number % len(self._blocks)][: bucket.num_bytes]

    def _start(self, bucket: Bucket, watch: Watch) -> InFlight:
        """Start receiving a bucket, once its memory is free."""
        self._until_passed_on(bucket.number + 1 - len(self._blocks), watch)
        if self._parent is None:
            flats = self._flats(bucket.number)
            return self._from.receive(flats, self._memory, bucket.number)
        block = self._block(bucket)
        return self._from.receive({0: block}, block, bucket.number)

    def _finish(self, pending: InFlight, bucket: Bucket, watch: Watch) -> torch.Tensor:
        """Wait for a bucket; returns its block."""
        self._from.wait(pending, watch)
        block = self._block(bucket)
        if self._parent is None:
            buffers = bucket.buffers(block, self._route.dtype)
            for source, flat in self._flats(bucket.number).items():
                unpack(self._messages[bucket.number][source], flat, buffers)
        return block

    def _until_passed_on(self, count: int, watch: Watch) -> None:
        """Wait until the first `count` buckets are passed on to all engines that get them here."""

        def ready() -> bool:
            for one in self._relays:
                one.check()
            return slowest(self._relays) >= count

        self._meeting.until(ready, watch)

    def _report(self, bucket: Bucket) -> None:
        """Tell the trainer how many buckets have arrived: of many engines not each one."""
        now = time.monotonic()
        if self._route.is_last(bucket) or now >= self._reported_at + self._meeting.progress_s:
            self._reported_at = now
            key = f"received/{self._meeting.attempt}/{self._engine}/{self._rank}"
            self._meeting.set(key, bucket.number + 1)

    def _flats(self, number: int) -> dict[int, torch.Tensor]:
        """{source rank: flat receive buffer of its message} of bucket `number`."""
        found, start = {}, 0
        for source, message in self._messages[number].items():
            found[source] = self._memory[start : start + length(message)]
            start += length(message)
        return found
