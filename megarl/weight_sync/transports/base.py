"""The contract of a transport: bring buckets of weights from trainer ranks to engine ranks.

A bucket is one block of memory on each engine rank, into which trainer ranks copy regions of
tensors (`megarl.parallel.reshard.buckets`). A transport is one file with a `Sender` (trainer ranks)
and a `Receiver` (engine ranks). To add one, list both classes in
`megarl.weight_sync.transports.transport_table` and the name in `WeightSyncConfig.transport`. Plans,
digests and the engine's own parameters are not a transport's concern.

One weight version, in calls:

    every trainer rank                              every engine rank
    sender.begin(version)                           for bucket, block in receiver.receive(...):
    for bucket in route.buckets:                        install block
        for copy, target in sender.reserve(...):
            write copy to target
        sender.commit(...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy
from megarl.weight_sync.route import Route

Watch = Callable[[], None]
"""A function that a waiting transport calls repeatedly. It raises to end the wait: deadline passed,
engine lost, or another rank failed."""


GIVEN_UP = "another process gave this version up"
"""Error message of a rank that stops because another rank abandoned the weight version."""


class Sender(Protocol):
    """Interface of the trainer rank's side of a transport. The constructor takes (route, axis of
    all ranks, weight_sync.folder).
    """

    SHARED: bool
    """True if each bucket is sent once for all engines: they read the same memory, or pass it on to
    each other."""
    LOCAL: bool
    """True if engine rank n is in the memory of trainer rank n."""

    def init_info(self) -> dict[str, Any]:
        """Rank 0's address for receivers, as JSON-like data."""
        ...

    def begin(self, version: int) -> None:
        """Prepare to send a weight version, also after an aborted one.

        All ranks call it together. It returns once all are ready, and raises errors on all ranks.
        """
        ...

    def reserve(self, bucket: Bucket, watch: Watch) -> list[tuple[Copy, torch.Tensor]]:
        """Where this rank must write its part of a bucket; waits until that memory is free.

        Returns a list of (copy: the region to read, target: tensor [rows, columns] to write it to).
        """
        ...

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        """Send a bucket, after its memory from `reserve` has been written. The call for the last
        bucket waits until the version is delivered.
        """
        ...

    def abort(self) -> None:
        """Make every sender and receiver that waits for this version raise `Aborted`."""
        ...

    def progress(self, engine: int) -> int:
        """Number of buckets of this version that all ranks of an engine are known to have
        received."""
        ...

    def lost(self) -> int | None:
        """An engine that another engine has lost while it received this version from it, or sent it
        to it; or None.
        """
        ...

    def relay(self, engine: int) -> int | None:
        """The engine that passes weights on to `engine`; None if trainer ranks send to it."""
        ...

    def close(self) -> None:
        """Release memory, files and connections."""
        ...


class Direct:
    """Base class of a `Sender` whose engines receive from trainer ranks alone."""

    def lost(self) -> int | None:
        """See `Sender.lost`."""
        return None

    def relay(self, engine: int) -> int | None:
        """See `Sender.relay`."""
        return None


class Receiver(Protocol):
    """Interface of the engine rank's side of a transport. The constructor takes (route, engine
    number, tensor-parallel rank, the sender's init_info).
    """

    def receive(self, version: int, watch: Watch) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Iterate over the buckets of a version: (bucket, memory block, uint8 [bucket.num_bytes]),
        in order.

        A block is valid until the next bucket is requested. Raises `Aborted`, or what `watch`
        raises.
        """
        ...

    def close(self) -> None:
        """Release memory, files and connections."""
        ...


class Aborted(RuntimeError):
    """Raised on a rank because another rank abandoned this weight version; that other rank reports
    the reason.
    """


Message = list[Copy]
"""The tensor regions of a message, in the order of their elements in its flat buffer."""


def outgoing(route: Route) -> list[dict[int, Message]]:
    """By bucket, {destination: message} of all messages that a trainer rank sends, sorted."""
    return [_by(copies, lambda copy: copy.destination) for copies in route.copies]


def incoming(route: Route) -> list[dict[int, Message]]:
    """By bucket, {source: message} of all messages that an engine rank receives, sorted."""
    return [_by(copies, lambda copy: copy.source) for copies in route.copies]


def _by(copies: Sequence[Copy], peer: Callable[[Copy], int]) -> dict[int, Message]:
    """{rank of the peer: message} for the copies of one bucket, sorted."""
    found: dict[int, Message] = {}
    for copy in copies:
        found.setdefault(peer(copy), []).append(copy)
    return dict(sorted(found.items()))


def length(message: Message) -> int:
    """Number of elements of all regions in a message."""
    return sum(copy.area for copy in message)


def longest(buckets: Sequence[dict[int, Message]]) -> int:
    """Largest number of elements that the messages of one bucket have together."""
    return max((sum(map(length, found.values())) for found in buckets), default=0)


def parts(message: Message, flat: torch.Tensor) -> list[tuple[Copy, torch.Tensor]]:
    """Each copy of a message with its part of the message's buffer, [rows, columns]."""
    found, start = [], 0
    for copy in message:
        found.append(
            (
                copy,
                flat[start : start + copy.area].view(copy.taken.box.rows, copy.taken.box.columns),
            )
        )
        start += copy.area
    return found


def unpack(message: Message, flat: torch.Tensor, buffers: dict[str, torch.Tensor]) -> None:
    """Copy a received message's parts to their places in the flat buffers of a bucket."""
    for copy, part in parts(message, flat):
        copy.put.view(buffers[copy.put.buffer]).copy_(part)
