"""Weights as messages between hosts: each trainer rank sends each engine rank what the plan says,
and nothing else. Both ends.

    trainer rank: its regions -> one message for each (bucket, engine rank)       engine rank: its
    messages -> its own image

Trainer ranks and engine ranks form a process group beside every other group of either
(`megarl.weight_sync.transports.p2p_group`): gloo on CPU, NCCL on GPUs (not yet run there). At most
two buckets are under way at either end. Gloo takes a message only when the other end asks for it,
so nothing piles up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
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
"""Buckets under way at once."""


class Sender:
    """A trainer rank's end; rank 0 keeps the store."""

    SHARED = False
    """Each engine rank is a destination of its own."""
    LOCAL = False

    def __init__(self, route: Route, axis: Axis, folder: str) -> None:
        """All ranks of `axis`, the trainer's world, make theirs together; `folder` is for
        transports that write files.
        """
        self._route, self._axis, device = route, axis, local_device()
        host = own_address() if axis.rank == 0 else ""
        mine = P2PGroup(route, axis.size, 0, host, 0, device) if axis.rank == 0 else None
        host, port = broadcast_object((mine.host, mine.port) if mine else ("", 0), axis)
        self._group_of_ranks = mine or P2PGroup(route, axis.size, axis.rank, host, port, device)
        self._places = [_stage(found) for found in outgoing(route, axis.rank)]
        self._memory = torch.empty(
            SLOTS, max(size for _, size in self._places), dtype=route.dtype, device=device
        )
        self._under_way: dict[int, InFlight] = {}
        self._connections, self._stale, self._joined = 0, True, 0
        self.sent: Counter[tuple[int, int]] = Counter()
        """Bytes of this version so far, by (source, destination)."""

    def init_info(self) -> dict[str, Any]:
        self._stale = True
        return {
            "host": self._group_of_ranks.host,
            "port": self._group_of_ranks.port,
            "senders": self._axis.size,
            "device": self._group_of_ranks.device.type,
        }

    def begin(self, version: int) -> None:
        barrier(self._axis)
        if self._axis.rank == 0:
            self._stale = self._stale or bool(
                self._group_of_ranks.told(f"aborted/{self._group_of_ranks.attempt}")
            )
        self._group_of_ranks.attempt += 1
        if self._axis.rank == 0:
            self._group_of_ranks.tell("attempt", self._group_of_ranks.attempt)
        self._under_way.clear()
        self.sent.clear()

    def reserve(self, bucket: Bucket, watch: Watch) -> list[tuple[Copy, torch.Tensor]]:
        self._join(watch)
        self._land(bucket.number - SLOTS, watch)
        # Engines that want the same are sent the same memory, which is then written more than once.
        return [pair for message, flat in self._flats(bucket) for pair in parts(message, flat)]

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        messages = {message[0].destination: flat for message, flat in self._flats(bucket)}
        for destination, flat in messages.items():
            self.sent[self._axis.rank, destination] += flat.nbytes
        self._under_way[bucket.number] = self._group_of_ranks.send(
            messages, self._memory, bucket.number
        )

    def end(self, watch: Watch) -> None:
        for number in sorted(self._under_way):
            self._land(number, watch)

    def abort(self) -> None:
        self._group_of_ranks.abort()
        self._under_way.clear()

    def progress(self, engine: int) -> int:
        spec, attempt = self._route.spec, self._group_of_ranks.attempt
        images = [spec.image(engine, rank) for rank in range(spec.engine_tensor)]
        return min(self._group_of_ranks.told(f"read/{attempt}/{image}") or 0 for image in images)

    def close(self) -> None:
        self._group_of_ranks.cut()

    def _join(self, watch: Watch) -> None:
        """Once a version: be where the receivers are. Rank 0 decides whether that is a new
        group.
        """
        if self._joined == self._group_of_ranks.attempt:
            return
        if self._axis.rank == 0:
            self._connections += int(self._stale)
            self._stale = False
            self._group_of_ranks.tell(
                f"connection/{self._group_of_ranks.attempt}", self._connections
            )
        self._group_of_ranks.join(watch)
        self._joined = self._group_of_ranks.attempt

    def _flats(self, bucket: Bucket) -> list[tuple[Message, torch.Tensor]]:
        """This rank's messages of a bucket, and where they are packed."""
        slot = self._memory[bucket.number % SLOTS]
        return [
            (message, slot[start : start + length(message)])
            for message, start in self._places[bucket.number][0]
        ]

    def _land(self, number: int, watch: Watch) -> None:
        if number in self._under_way:
            self._group_of_ranks.land(self._under_way[number], watch)
            del self._under_way[number]


def _stage(found: Mapping[int, Message]) -> tuple[list[tuple[Message, int]], int]:
    """Where each message of a bucket begins, in elements, and how many there are; messages that say
    the same share a place.
    """
    starts: dict[tuple[Piece, ...], int] = {}
    placed, size = [], 0
    for message in found.values():
        said = tuple(copy.taken for copy in message)
        if said not in starts:
            starts[said] = size
            size += length(message)
        placed.append((message, starts[said]))
    return placed, size


class Receiver:
    """An engine rank's end."""

    def __init__(self, route: Route, engine: int, rank: int, init_info: dict[str, Any]) -> None:
        device = local_device() if init_info["device"] == "cuda" else torch.device("cpu")
        if device.type != init_info["device"]:
            raise ValueError(
                "the trainer is on GPUs and this engine is not: weight_sync.transport"
                " point_to_point needs both or neither"
            )
        self._route, self._image = route, route.spec.image(engine, rank)
        place = init_info["senders"] + self._image
        self._group_of_ranks = P2PGroup(
            route, init_info["senders"], place, init_info["host"], init_info["port"], device
        )
        self._messages = incoming(route, self._image)
        self._memory = torch.empty(longest(self._messages), dtype=route.dtype, device=device)
        self._bytes = torch.empty(route.largest_bytes, dtype=torch.uint8, device=device)
        self._asked: tuple[int, InFlight] | None = None

    def begin(self, version: int) -> None:
        attempt = self._group_of_ranks.told("attempt")
        assert attempt, "senders begin first"
        self._group_of_ranks.attempt, self._asked = attempt, None

    def wait(self, bucket: Bucket, watch: Watch) -> torch.Tensor:
        if bucket.number == 0:
            self._group_of_ranks.join(watch)
        try:
            self._ask(bucket.number)
            assert self._asked
            self._group_of_ranks.land(self._asked[1], watch)
        except BaseException:
            self.close()
            raise
        image = self._bytes[: bucket.num_bytes]
        buffers = bucket.buffers(image, self._route.dtype)
        for source, flat in self._flats(bucket.number).items():
            unpack(self._messages[bucket.number][source], flat, buffers)
        if bucket.number + 1 < len(self._route.buckets):
            self._ask(bucket.number + 1)  # it travels while the engine takes this one in
        return image

    def release(self, bucket: Bucket) -> None:
        self._group_of_ranks.tell(
            f"read/{self._group_of_ranks.attempt}/{self._image}", bucket.number + 1
        )

    def close(self) -> None:
        self._group_of_ranks.cut()
        self._asked = None

    def _ask(self, number: int) -> None:
        if self._asked is None or self._asked[0] != number:
            self._asked = (
                number,
                self._group_of_ranks.receive(self._flats(number), self._memory, number),
            )

    def _flats(self, number: int) -> dict[int, torch.Tensor]:
        """By source, where its message of a bucket comes to lie."""
        found, start = {}, 0
        for source, message in self._messages[number].items():
            found[source] = self._memory[start : start + length(message)]
            start += length(message)
        return found
