"""The contract of a transport, a way to bring weights from trainer ranks to engine ranks.

A bucket is one block of memory on each engine rank, into which trainer ranks copy regions of
tensors (`megarl.parallel.reshard.buckets`). A transport is one file with a `Sender` (trainer ranks)
and a `Receiver` (engine ranks). To add one, list both classes in
`megarl.weights.transports.transport_table` and the name in `WeightSyncConfig.transport`. Plans,
digests and the engine's own parameters are not a transport's concern.

One weight version, in calls:

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
"""A function that a waiting transport calls repeatedly. It raises to end the wait: deadline passed,
engine lost, or another rank failed."""


GIVEN_UP = "another process gave this version up"
"""Error message of a rank that stops because another rank abandoned the weight version."""


class Sender(Protocol):
    """Interface of a trainer rank's half of a transport, the way in which weights get to engines.
    Weights are sent in buckets, blocks of memory on each engine rank. The constructor takes (this
    rank's `Route`, which says what it sends; the process group of all trainer ranks, an `Axis`).
    `watch` is a function that a method calls repeatedly while it waits, and that raises to end the
    wait. Methods that wait raise `Aborted` if another process gave the version up.
    """

    LOCAL: bool = False
    """True if engine rank n (counted over all engines) is in the memory of trainer rank n. Else
    all engines receive the same."""

    SENDS_TO_EACH: bool = False
    """Whether trainer ranks send a version once for each engine."""

    def init_info(self) -> dict[str, Any]:
        """What an engine's `Receiver` needs to connect, as JSON-like data; rank 0 calls it and
        sends it to every engine.
        """
        ...

    def begin(self, attempt: int, *, anew: bool = False) -> None:
        """Prepare to send a weight version. `attempt`: number of this try, higher than those
        before. `anew`, on rank 0: engines will connect anew, as at first and after an abort.

        Rank 0 calls it first, when no rank is busy with an earlier attempt; the others call it
        after it has returned there.
        """
        ...

    def reserve(self, bucket: Bucket, watch: Watch) -> list[tuple[Copy, torch.Tensor]]:
        """The memory to which this rank must write its part of a bucket; waits until that memory is
        free.

        Returns a list of (copy: whose `taken` says which rectangle of which tensor to read, in
        elements; target: tensor [rows, columns] to write it to).
        """
        ...

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        """Send a bucket, after the memory that `reserve` returned for it has been written. The call
        for the last bucket waits until the version is delivered.
        """
        ...

    def abort(self) -> None:
        """Give this version up: every sender and receiver that waits for it raises `Aborted`."""
        ...

    def progress(self, engine: int) -> int:
        """Number of buckets of this version that all ranks of the engine at position `engine` are
        known to have received; -1 if one is known not to have begun."""
        ...

    def close(self) -> None:
        """Release what this rank has opened: memory, files, connections; called at the end."""
        ...


class Receiver(Protocol):
    """Interface of an engine rank's half of a transport, the way in which weights get to engines.
    The constructor takes (this rank's `Route`, which says what it receives; position of the engine
    among those that receive; tensor-parallel rank; what the sender's `init_info` returned).
    """

    def receive(self, watch: Watch) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Iterate over the buckets of a version, in order: (bucket, its memory block, uint8
        [bucket.num_bytes]), as each arrives. `watch` is called while waiting and raises to end
        that.

        A block is valid until the next bucket is requested. Raises `Aborted` if another process
        gave the version up, or what `watch` raises.
        """
        ...

    def close(self) -> None:
        """Release what this rank has opened: memory, files, connections; called at the end."""
        ...


class Aborted(RuntimeError):
    """Raised on a rank that waits, because another process gave this weight version up; that other
    process reports the reason.
    """


FIRST_PAUSE_S, LONGEST_PAUSE_S = 2e-5, 2e-4
"""Seconds between two polls of a condition: the first pause, which grows by half, and the
longest."""


def wait_until(
    ready: Callable[[], bool],
    aborted: Callable[[], bool],
    watch: Watch,
    *,
    longest_pause_s: float = LONGEST_PAUSE_S,
) -> None:
    """Poll until `ready()` is true, with growing pauses of at most `longest_pause_s` seconds; calls
    `watch` before each pause. Raises `Aborted` once `aborted()` is true, or what `watch` raises.
    """
    pause = FIRST_PAUSE_S
    while not ready():
        if aborted():
            raise Aborted(GIVEN_UP)
        watch()
        time.sleep(pause)
        pause = min(pause * 1.5, longest_pause_s)


Message = list[Copy]
"""The tensor regions that one rank sends another in one flat buffer, in the order in which they lie
there."""


def outgoing(route: Route) -> list[dict[int, Message]]:
    """What a trainer rank sends: for each bucket, {engine rank: message to it}, ascending. `route`:
    the trainer rank's. A message is the list of regions that one rank sends another, each a `Copy`:
    the places of a rectangle of a tensor at the sending and at the receiving rank.
    """
    return [_by(copies, lambda copy: copy.destination) for copies in route.copies]


def incoming(route: Route) -> list[dict[int, Message]]:
    """What an engine rank receives: for each bucket, {trainer rank: message from it}, ascending.
    `route`: the engine rank's. A message is the list of regions that one rank sends another, each a
    `Copy`: the places of a rectangle of a tensor at the sending and at the receiving rank.
    """
    return [_by(copies, lambda copy: copy.source) for copies in route.copies]


def _by(copies: Sequence[Copy], peer: Callable[[Copy], int]) -> dict[int, Message]:
    """{rank of the peer: message} for the copies of one bucket, sorted."""
    return {rank: list(found) for rank, found in groupby(sorted(copies, key=peer), peer)}


def length(message: Message) -> int:
    """Number of elements of all tensor regions that a message has."""
    return sum(copy.area for copy in message)


def longest(buckets: Sequence[dict[int, Message]]) -> int:
    """Elements that a send or receive buffer needs: the largest sum over the messages of one
    bucket. `buckets`: for each bucket, {rank of the peer: message, a list of tensor regions}.
    """
    return max((sum(map(length, found.values())) for found in buckets), default=0)


def parts(message: Message, flat: torch.Tensor) -> list[tuple[Copy, torch.Tensor]]:
    """Cut the flat buffer of a message into its regions: (region, view [rows, columns] of its
    elements in `flat`) for each, in order.
    """
    pieces, boxes = flat.split([copy.area for copy in message]), [one.taken.box for one in message]
    shaped = [piece.view(box.rows, box.columns) for piece, box in zip(pieces, boxes, strict=True)]
    return list(zip(message, shaped, strict=True))


def flats(messages: Mapping[int, Message], memory: torch.Tensor) -> dict[int, torch.Tensor]:
    """Divide a flat buffer among the messages of one bucket: {rank of the peer: view of its part}.
    `messages`: {rank of the peer: list of tensor regions}, which lie one after the other in
    `memory`, whose rest is unused.
    """
    found, start = {}, 0
    for peer, message in messages.items():
        found[peer] = memory[start : start + length(message)]
        start += length(message)
    return found


def reserved(
    messages: Mapping[int, Message], memory: torch.Tensor
) -> list[tuple[Copy, torch.Tensor]]:
    """What `Sender.reserve` returns where a bucket's messages are sent from the flat buffer
    `memory`: (region of a tensor to read, view [rows, columns] of `memory` to write it to) for each
    region. `messages`: {rank of the peer: list of regions}.
    """
    found = flats(messages, memory)
    return [pair for peer, message in messages.items() for pair in parts(message, found[peer])]


def unpack(message: Message, flat: torch.Tensor, buffers: dict[str, torch.Tensor]) -> None:
    """Copy the tensor regions of a received message to their places in a bucket. `flat`: the
    message's elements. `buffers`: {engine parameter: flat tensor}, the bucket's, which is changed.
    """
    for copy, part in parts(message, flat):
        copy.put.view(buffers[copy.put.buffer]).copy_(part)
