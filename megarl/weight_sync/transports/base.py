"""What a transport owes: to move images of buckets from trainer ranks to engine ranks, and to stop
when it is told to.

To add one, write both ends in one file and list them in `SENDERS` and `RECEIVERS` of
`megarl.weight_sync.transports.registry`, and in `WeightSyncConfig.transport`. Plans, digests and
the engine's own weights are none of its business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy

Watch = Callable[[], None]
"""Called in every wait; raises when there is nothing left to wait for: a deadline, a lost engine,
another rank's failure.
"""


GIVEN_UP = "another process gave this version up"


class Sender(Protocol):
    """A trainer rank's end. For each version, on every rank: begin, then reserve and commit of
    every bucket in turn, end.
    """

    SHARED: bool
    """Whether engines read the same images, so that each is sent once, not once an engine."""
    LOCAL: bool
    """Whether destination n lies in the memory of trainer rank n."""

    def init_info(self) -> dict[str, Any]:
        """What receivers must be told to find this end; rank 0's is used. Plain numbers and
        texts.
        """
        ...

    def begin(self, version: int) -> None:
        """Make ready for a version, whatever became of the one before; all ranks, who go on only
        when all have.

        What goes wrong here is raised on every rank.
        """
        ...

    def reserve(self, bucket: Bucket, watch: Watch) -> list[tuple[Copy, torch.Tensor]]:
        """This rank's copies of the bucket, each with the place [rows, columns] to write it to;
        waits until that is free.
        """
        ...

    def commit(self, bucket: Bucket, watch: Watch) -> None:
        """This rank's part of the bucket is written."""
        ...

    def end(self, watch: Watch) -> None:
        """Every bucket of this rank is on its way for good."""
        ...

    def abort(self) -> None:
        """Have every receiver and sender that waits give up."""
        ...

    def progress(self, engine: int) -> int:
        """The bucket that an engine was at, as far as this end knows."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """An engine rank's end. For each version: begin, then wait for and release every bucket in
    turn.
    """

    def begin(self, version: int) -> None: ...

    def wait(self, bucket: Bucket, watch: Watch) -> torch.Tensor:
        """The bucket's image, bytes [bucket.num_bytes], complete; valid until it is released."""
        ...

    def release(self, bucket: Bucket) -> None: ...

    def close(self) -> None: ...


class Aborted(RuntimeError):
    """Another rank gave this version up; what happened is said there."""
