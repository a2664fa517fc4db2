"""The contract of a transport: bring buckets of weights from trainer ranks to engine ranks.

A bucket is one block of memory on each engine rank, into which trainer ranks copy regions of
tensors (`megarl.parallel.reshard.buckets`). A transport is one file with a `Sender` (trainer ranks)
and a `Receiver` (engine ranks). To add one, list both classes in
`megarl.weight_sync.transports.registry` and the name in `WeightSyncConfig.transport`. Plans,
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

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy

Watch = Callable[[], None]
"""Called again and again in every wait. Raises to end the wait: deadline, lost engine, failed rank.
"""


GIVEN_UP = "another process gave this version up"
"""Error message of a rank that stops because another rank abandoned the weight version."""


class Sender(Protocol):
    """A trainer rank's half of a transport; built with (route, world axis, weight_sync.folder)."""

    SHARED: bool
    """True if all engines read the same memory, so that each bucket is sent once for all
    engines."""
    LOCAL: bool
    """True if engine rank n is in the memory of trainer rank n."""

    def init_info(self) -> dict[str, Any]:
        """Rank 0's address for receivers, as JSON-like data."""
        ...

    def begin(self, version: int) -> None:
        """Prepare to send a weight version, whatever became of the last one.

        Collective: returns once all ranks are ready, and raises errors on all ranks.
        """
        ...

    def reserve(self, bucket: Bucket, watch: Watch) -> list[tuple[Copy, torch.Tensor]]:
        """Where this rank must write its part of a bucket; waits until that memory is free.

        Returns a list of (copy: the region to read, target: tensor [rows, columns] to write it to).
        """
        ...

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        """Send a bucket after its targets have been written.

        After the last one wait for delivery.
        """
        ...

    def abort(self) -> None:
        """Make every sender and receiver that waits for this version raise `Aborted`."""
        ...

    def progress(self, engine: int) -> int:
        """Number of buckets of this version that all ranks of an engine are known to have
        received."""
        ...

    def close(self) -> None:
        """Release memory, files and connections."""
        ...


class Receiver(Protocol):
    """An engine rank's half; built with (route, engine number, tensor rank, sender's init_info)."""

    def receive(self, version: int, watch: Watch) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Each bucket of a version with its memory block, uint8 [bucket.num_bytes], in order.

        A block is valid until the next bucket is asked for. Raises `Aborted`, or what `watch`
        raises.
        """
        ...

    def close(self) -> None:
        """Release memory, files and connections."""
        ...


class Aborted(RuntimeError):
    """Another rank abandoned this weight version; that rank reports the reason."""
