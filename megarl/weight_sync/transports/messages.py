"""Messages: what one trainer rank sends to one engine rank in one bucket, in one flat buffer.

Sender and receiver derive the same messages from their routes, so that a message has no header.
Pairs of ranks with nothing to send exchange no message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megarl.parallel.reshard.plan import Copy
from megarl.weight_sync.route import Route

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
