"""The contract of a transport: bring the images of buckets from trainer ranks to engine ranks.

An image is the memory block of one bucket as one engine rank needs it. A transport is one file with
a `Sender` (trainer ranks) and a `Receiver` (engine ranks). To add one, list both classes in
`megarl.weight_sync.transports.registry` and the name in `WeightSyncConfig.transport`. Plans,
digests and the engine's own parameters are not a transport's concern.

One weight version, in calls:

    every trainer rank                              every engine rank
    sender.begin(version)                           for bucket, image in receiver.receive(...):
    for bucket in route.buckets:                        install image
        for copy, target in sender.reserve(...):
            write copy to target
        sender.commit(...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy

Watch = Callable[[], None]
"""Called again and again in every wait. Raises to end the wait: deadline, lost engine, failed rank.
"""


GIVEN_UP = "another process gave this version up"
"""Message of `Aborted`."""


class Sender(Protocol):
    """A trainer rank's half of a transport; built with (route, world axis, weight_sync.folder)."""

    SHARED: bool
    """True if engines read the same images, so that each image is sent once for all engines."""
    LOCAL: bool
    """True if destination n lies in the memory of trainer rank n."""

    def init_info(self) -> dict[str, Any]:
        """Rank 0's address for receivers, as JSON-like data."""
        ...

    def begin(self, version: int) -> None:
        """Discard the last version, prepare for this one. Collective; errors reach all ranks."""
        ...

    def reserve(self, bucket: Bucket, watch: Watch) -> list[tuple[Copy, torch.Tensor]]:
        """Wait for free memory; returns this rank's copies of the bucket with their targets
        [rows, columns].
        """
        ...

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        """Send the bucket, whose targets are written; after the last bucket wait for delivery."""
        ...

    def abort(self) -> None:
        """Make every sender and receiver that waits for this version raise `Aborted`."""
        ...

    def progress(self, engine: int) -> int:
        """Number of buckets that all ranks of an engine have received, as far as is known here."""
        ...

    def close(self) -> None:
        """Release memory, files and connections."""
        ...


class Receiver(Protocol):
    """An engine rank's half; built with (route, engine number, tensor rank, sender's init_info)."""

    def receive(self, version: int, watch: Watch) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Each bucket of a version in order, with its complete image, uint8 [bucket.num_bytes].

        An image is valid until the next bucket is asked for. Raises `Aborted`, or what `watch`
        raises.
        """
        ...

    def close(self) -> None:
        """Release memory, files and connections."""
        ...


class Aborted(RuntimeError):
    """Another rank abandoned this weight version; that rank reports the reason."""
