"""The contract of a transport, a way to bring weights from trainer ranks to engine ranks.

To add one, write a file with a `Sender` and a `Receiver`, and list it in `transport_table` and its
name in `WeightSyncConfig.transport`. One weight version:

    every trainer rank                              every engine rank
    sender.begin(attempt)                           for bucket, block in receiver.receive(...):
    for bucket in route.buckets:                        install block
        for copy, target in sender.reserve(...):
            write copy to target
        sender.commit(...)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch

from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy
from megarl.weights.route import Route

Watch = Callable[[], None]
"""A waiting transport calls it repeatedly; it raises to end the wait."""


GIVEN_UP = "another process gave this version up"


class Sender(Protocol):
    """A trainer rank's half. The constructor takes its `Route` and the `Axis` of all trainer
    ranks.
    """

    LOCAL: bool = False
    """As `RouteSpec.local`."""

    SENDS_TO_EACH: bool = False
    """Whether trainer ranks send a version once for each engine."""

    def init_info(self) -> dict[str, Any]:
        """What a `Receiver` needs to connect, as JSON-like data; rank 0 calls it."""
        ...

    def begin(self, attempt: int, *, anew: bool = False) -> None:
        """Prepare to send a version. Rank 0 calls it first, when no rank is busy with an earlier
        attempt. `anew`, on rank 0: engines will connect anew.
        """
        ...

    def reserve(self, bucket: Bucket, watch: Watch) -> list[tuple[Copy, torch.Tensor]]:
        """Wait until a bucket's memory is free. Returns (copy, tensor [rows, columns] to write its
        `taken` to) for this rank's part. Waits raise `Aborted` if another process gave up.
        """
        ...

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        """Send a bucket that has been written. The last one waits until the version is
        delivered.
        """
        ...

    def abort(self) -> None:
        """Give this version up: whoever waits for it raises `Aborted`."""
        ...

    def progress(self, engine: int) -> int:
        """Buckets that all ranks of an engine have received, by its position; -1 if one has not
        begun.
        """
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """An engine rank's half, made of (`Route`, the engine's position, tensor-parallel rank,
    `init_info`).
    """

    def receive(self, watch: Watch) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Yields (bucket, its uint8 block [bucket.num_bytes], valid until the next one), in order.
        Raises `Aborted` if another process gave up.
        """
        ...

    def close(self) -> None: ...


class Aborted(RuntimeError):
    """Another process gave this version up, and reports the reason."""


def wait_until(
    ready: Callable[[], bool],
    aborted: Callable[[], bool],
    watch: Watch,
    *,
    longest_pause_s: float = 2e-4,
) -> None:
    """Poll until `ready()`, with pauses that grow by half. Raises `Aborted` once `aborted()` is
    true, or what `watch` raises.
    """
    pause = 2e-5
    while not ready():
        if aborted():
            raise Aborted(GIVEN_UP)
        watch()
        time.sleep(pause)
        pause = min(pause * 1.5, longest_pause_s)


Message = list[Copy]
"""The tensor regions that one rank sends another in one flat buffer, in order."""


def outgoing(route: Route) -> list[dict[int, Message]]:
    """For each bucket, {engine rank: message to it}, ascending; `route` is a trainer rank's."""
    return [_by(copies, lambda copy: copy.destination) for copies in route.copies]


def incoming(route: Route) -> list[dict[int, Message]]:
    """For each bucket, {trainer rank: message from it}, ascending; `route` is an engine rank's."""
    return [_by(copies, lambda copy: copy.source) for copies in route.copies]


def _by(copies: Sequence[Copy], peer: Callable[[Copy], int]) -> dict[int, Message]:
    return {rank: list(group) for rank, group in groupby(sorted(copies, key=peer), peer)}


def length(message: Message) -> int:
    """Number of elements."""
    return sum(copy.area for copy in message)


def longest(buckets: Sequence[dict[int, Message]]) -> int:
    """Elements that a buffer needs for the messages of any bucket."""
    return max((sum(map(length, by_peer.values())) for by_peer in buckets), default=0)


def parts(message: Message, flat: torch.Tensor) -> list[tuple[Copy, torch.Tensor]]:
    """(region, view [rows, columns] of `flat`) for each region of a message."""
    pieces, boxes = (
        flat.split([copy.area for copy in message]),
        [copy.taken.box for copy in message],
    )
    shaped = [piece.view(box.rows, box.columns) for piece, box in zip(pieces, boxes, strict=True)]
    return list(zip(message, shaped, strict=True))


def flats(messages: Mapping[int, Message], memory: torch.Tensor) -> dict[int, torch.Tensor]:
    """{peer: view of its part of `memory`}, one after the other."""
    views, start = {}, 0
    for peer, message in messages.items():
        views[peer] = memory[start : start + length(message)]
        start += length(message)
    return views


def targets_of(
    messages: Mapping[int, Message], memory: torch.Tensor
) -> list[tuple[Copy, torch.Tensor]]:
    """(copy, view [rows, columns] of `memory` to write it to) for each copy in `messages`, {engine
    rank: copies}, which lie in `memory` one after another.
    """
    views = flats(messages, memory)
    return [pair for peer, message in messages.items() for pair in parts(message, views[peer])]


def unpack(message: Message, flat: torch.Tensor, buffers: dict[str, torch.Tensor]) -> None:
    """Copy a received message, `flat`, into a bucket's `buffers`, {engine parameter: flat
    tensor}.
    """
    for copy, region in parts(message, flat):
        copy.put.view(buffers[copy.put.buffer]).copy_(region)
