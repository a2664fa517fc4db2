"""Engines pass weights on to engines: a binary tree over the engines, and the thread of a relay.

    trainer ranks -> engine 0 -> engines 1, 2 -> engines 3, 4, 5, 6 -> ...

Rank r of an engine passes the buckets that it receives on to rank r of two others. So the trainer
sends one engine's weights, however many engines there are, no process sends more than two, and a
bucket reaches all engines after log2(engines) hops. Buckets follow each other without waiting for
the last engine: time grows by the hops of one bucket, not of a version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from megarl.weight_sync.transports.base import GIVEN_UP, Aborted, Watch
from megarl.weight_sync.transports.p2p_group import BlockingTask, P2PGroup, PeerGone

FANOUT = 2
"""Engines that an engine passes weights on to."""

OFFER_POLL_S = 0.05
"""Seconds after which a relay that waits for a bucket looks whether the version was given up."""


def parent(engine: int) -> int | None:
    """Number of the engine that sends weights to engine number `engine`; None for engine 0, which
    the trainer ranks send to.
    """
    return (engine - 1) // FANOUT if engine else None


def children(engine: int, engines: int) -> list[int]:
    """Numbers of the engines that engine number `engine` sends weights to, in a run of `engines`
    engines: at most `FANOUT`, and none at the end of the tree.
    """
    first = FANOUT * engine + 1
    return list(range(first, min(first + FANOUT, engines)))


class Relay(BlockingTask):
    """A thread on an engine's rank that sends the buckets of one weight version, which the rank has
    received itself, to one rank of another engine.
    """

    def __init__(
        self, group: P2PGroup, number: int, count: int, watch: Watch, lose: Callable[[], None]
    ) -> None:
        """Start the thread. `group`: the process group of this rank (number 0) and the receiving
        rank (number 1); `number`: which of the groups of that name to join; `count`: buckets of a
        version; `watch`: called in every wait, raises once the version has failed; `lose`: called
        when the connection to the receiving rank has ended.
        """
        self._to, self._number, self._count, self._watch = group, number, count, watch
        self._lose = lose
        self._offered: list[tuple[torch.Tensor, torch.Event | torch.cuda.Event | None]] = []
        """Each bucket, and on a GPU what the thread's stream waits for: its last writing."""
        self._changed, self._is_closed = threading.Condition(), False
        self.sent = 0
        """Buckets that the other rank has received."""
        super().__init__(self._pass_on)

    def offer(self, block: torch.Tensor) -> None:
        """Have the thread send the next bucket; returns at once. `block`: the bucket's memory, [n]
        uint8, which must not change before `sent` counts the bucket. Only vocabulary padding may
        change, because every rank sets it to zero by itself.
        """
        written = torch.cuda.current_stream(block.device).record_event() if block.is_cuda else None
        with self._changed:
            self._offered.append((block, written))
            self._changed.notify()

    def check(self) -> None:
        """Raise the error that has ended the thread, if there is one: `Aborted` where the receiving
        rank is gone, which `lose` has reported already.
        """
        if self.done():
            try:
                self.result()
            except PeerGone as error:  # which is reported already
                raise Aborted(GIVEN_UP) from error

    def close(self) -> None:
        """Stop sending: cancel the messages that are under way, leave the process group, and wait
        for the thread to end.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._to.leave()
        self.join()

    def _pass_on(self) -> None:
        """The thread: join the group, then send bucket after bucket, as `offer` brings them."""
        self._to.join(self._number, self._watch)
        for number in range(self._count):
            block = self._next(number)
            if block is None:
                return
            try:
                self._to.wait(self._to.send({1: block}, block, number), self._watch)
            except PeerGone:
                if not self._is_closed:
                    self._lose()
                raise
            self.sent = number + 1

    def _next(self, number: int) -> torch.Tensor | None:
        """Wait for bucket `number`; None if the relay was closed."""
        with self._changed:
            while not self._is_closed and len(self._offered) <= number:
                self._changed.wait(OFFER_POLL_S)
                self._watch()
            if self._is_closed:
                return None
            block, written = self._offered[number]
        if written is not None:  # the current stream is per thread, and vLLM has one of its own
            torch.cuda.current_stream(block.device).wait_event(written)
        return block


def slowest(relays: Sequence[Relay]) -> int:
    """Number of buckets that each of `relays` has sent to its receiving rank: the number of the
    slowest. 2**62, more than any version has, if `relays` is empty.
    """
    return min((relay.sent for relay in relays), default=2**62)
