"""Messages: what one source rank has for one destination in one bucket, copy after copy in one flat
buffer.

Both ends know the copies, so that a message needs no header, and pairs without copies exchange
none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.parallel.reshard.plan import Copy
from megarl.weight_sync.route import Route

Message = list[Copy]


def messages(copies: Sequence[Copy]) -> dict[tuple[int, int], Message]:
    """(source, destination) -> its message, in the order of sources, then destinations: the same at
    both ends.
    """
    found: dict[tuple[int, int], Message] = {}
    for copy in copies:
        found.setdefault((copy.source, copy.destination), []).append(copy)
    return dict(sorted(found.items()))


def outgoing(route: Route, source: int) -> list[dict[int, Message]]:
    """What a source rank sends, by bucket: destination -> message."""
    return [
        {pair[1]: found for pair, found in messages(copies).items() if pair[0] == source}
        for copies in route.copies
    ]


def incoming(route: Route, image: int) -> list[dict[int, Message]]:
    """What a destination takes in, by bucket: source -> message."""
    return [
        {pair[0]: found for pair, found in messages(copies).items() if pair[1] == image}
        for copies in route.copies
    ]


def length(message: Message) -> int:
    """Elements of a message."""
    return sum(copy.area for copy in message)


def longest(buckets: Sequence[dict[int, Message]]) -> int:
    """Elements of the bucket with most of them."""
    return max((sum(map(length, found.values())) for found in buckets), default=0)


def parts(message: Message, flat: torch.Tensor) -> list[tuple[Copy, torch.Tensor]]:
    """Each copy of a message with its place [rows, columns] in the message's buffer."""
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
    """Put a message where it belongs in a bucket's buffers."""
    for copy, part in parts(message, flat):
        copy.put.view(buffers[copy.put.buffer]).copy_(part)
