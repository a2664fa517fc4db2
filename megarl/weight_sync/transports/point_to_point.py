"""Transport `point_to_point`: messages between hosts, gloo on CPU or NCCL on GPUs.

    trainer ranks -> engine 0 -> engines 1, 2 -> engines 3, 4, 5, 6 -> ...

A trainer rank sends its regions, in one message for each (bucket, rank of engine 0). Rank r of an
engine passes the buckets that it receives on to rank r of two others. So the trainer sends one
engine's weights, however many engines there are, no process sends more than two, and a bucket
reaches all engines after log2(engines) hops. Buckets follow each other without waiting for the last
engine: time grows by the hops of one bucket, not of a version.

Trainer ranks and the ranks of engine 0 form one process group, each relay and its receiver another
(`megarl.weight_sync.transports.p2p_group`). At most two buckets are in flight at each side:
gloo transfers a message only once it is asked for, so nothing piles up. NCCL has not been run yet.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import Any

import torch

from megarl.errors import EngineLost
from megarl.files import in_thread
from megarl.parallel.collectives import broadcast_object, gather_objects
from megarl.parallel.mesh import Axis
from megarl.parallel.reshard.buckets import Bucket
from megarl.parallel.reshard.plan import Copy
from megarl.weight_sync.route import Route, RouteSpec
from megarl.weight_sync.transports import base
from megarl.weight_sync.transports.p2p_group import (
    ABORT_POLL_S,
    CANCEL_TIMEOUT_S,
    P2PGroup,
    PeerGone,
    Rendezvous,
    StoreServer,
    group_device,
    network_place,
    own_address,
)

SLOTS = 2
"""Number of weight buckets (blocks that are sent at once) that are in flight at the same time."""

RELAY_BLOCKS = SLOTS + 1
"""Blocks of an engine rank that passes buckets on: one is received, one installed, one sent."""


FANOUT = 2
"""Engines that an engine passes weights on to."""


def parent(engine: int) -> int | None:
    """Number of the engine that sends weights to engine number `engine`; None for engine 0, which
    the trainer ranks send to.
    """
    return (engine - 1) // FANOUT if engine else None


def children(engine: int, engines: int) -> list[int]:
    """Numbers of the engines that engine number `engine` sends weights to, in a run of `engines`
    engines: at most `FANOUT` (2), none at the end of the tree.
    """
    first = FANOUT * engine + 1
    return list(range(first, min(first + FANOUT, engines)))


def _name(rank: int, engine: int) -> str:
    return f"rank {rank} of engine {engine}"


def _members(spec: RouteSpec) -> int:
    """Number of trainer ranks and engine ranks together."""
    return spec.layout.size + spec.engines * spec.engine_tensor


def _first_group(meeting: Rendezvous, spec: RouteSpec, rank: int, device: torch.device) -> P2PGroup:
    """The group of the trainer ranks, which come first, and the ranks of engine 0."""
    names = [f"trainer rank {number}" for number in range(spec.layout.size)]
    names += [_name(number, 0) for number in range(spec.engine_tensor)]
    return P2PGroup(meeting, "trainer", rank, names, device)


class Sender(base.Sender):
    """Trainer rank's half of the transport `point_to_point`: sends its part of the weights to the
    ranks of engine 0, from which the other engines get them. Rank 0 hosts the key-value store
    through which the ranks connect.
    """

    def __init__(self, route: Route, axis: Axis, folder: str) -> None:
        """Connect to the key-value store, which rank 0 creates and hosts. All ranks of `axis`, the
        trainer's ranks, call it together.

        `folder` is unused.
        """
        self._route, self._axis, device = route, axis, group_device()
        places, found, self._server = gather_objects(network_place(), axis), ("", ""), None
        if axis.rank == 0:
            is_one_host = route.spec.one_host and len(set(places)) == 1
            self._server = StoreServer("127.0.0.1" if is_one_host else own_address())
            found = self._server.address, self._server.key
        self._meeting = Rendezvous(*broadcast_object(found, axis), _members(route.spec))
        self._group = _first_group(self._meeting, route.spec, axis.rank, device)
        self._messages = base.outgoing(route)
        self._memory = torch.empty(
            SLOTS, base.longest(self._messages), dtype=route.dtype, device=device
        )
        self._num_groups, self._stale = 0, True

    def init_info(self) -> dict[str, Any]:
        """What receivers need to connect, a dict: "address" and "key" of rank 0's key-value store,
        and "device", "cpu" or "cuda".

        The call also has the effect that all ranks form new process groups for the next version.
        """
        self._stale = True
        found = self._meeting
        return {"address": found.address, "key": found.key, "device": self._memory.device.type}

    def begin(self, version: int, attempt: int) -> None:
        """Prepare to send a weight version. `attempt`: number of this try, with which ranks mark
        their entries in the key-value store, so that those of earlier tries are ignored. `version`
        is unused.
        """
        meeting = self._meeting
        if self._axis.rank == 0:
            self._stale = self._stale or meeting.is_aborted()
            meeting.set("attempt", str(attempt))
        meeting.attempt = attempt

    def reserve(self, bucket: Bucket, watch: base.Watch) -> list[tuple[Copy, torch.Tensor]]:
        """The send buffer to which this rank must write its part of a bucket (block of weights that
        is sent at once): (region of a tensor, view [rows, columns] to write it to) for each region.

        Waits until the bucket that used the same buffer before has been sent and, for the first
        bucket, until the ranks of engine 0 have connected. Raises `EngineLost` if the connection to
        engine 0 has ended.
        """
        if bucket.number == 0:
            self._join(watch)
        with self._naming_engine():
            self._group.wait(bucket.number - SLOTS, watch)
        return base.reserved(self._messages[bucket.number], self._memory[bucket.number % SLOTS])

    def commit(self, bucket: Bucket, watch: base.Watch) -> None:
        """Start to send a bucket (block of weights) that was written to `reserve`'s memory; after
        the last bucket wait until all have been sent. Raises `EngineLost` if the connection to
        engine 0 has ended.
        """
        memory = self._memory[bucket.number % SLOTS]
        found = base.flats(self._messages[bucket.number], memory)
        ready = {self._axis.size + to: flat for to, flat in found.items()}
        with self._naming_engine():
            self._group.send(ready, memory, bucket.number)
            if self._route.is_last(bucket):
                for number in range(bucket.number + 1 - SLOTS, bucket.number + 1):
                    self._group.wait(number, watch)

    def abort(self) -> None:
        """Mark this try as aborted in the key-value store, so that all ranks that wait in it raise
        `Aborted`, and cancel this rank's messages.
        """
        self._meeting.abort()
        self._group.leave()

    def progress(self, engine: int) -> int:
        """Number of buckets (blocks of weights) of this version that all ranks of the engine at
        position `engine` have reported as received. With more than 64 ranks in the run, trainer's
        and engines', not every bucket is reported, and the number may be too low.
        """
        attempt, ranks = self._meeting.attempt, range(self._route.spec.engine_tensor)
        keys = [f"received/{attempt}/{engine}/{rank}" for rank in ranks]
        return min(self._meeting.number(key) or 0 for key in keys)

    def lost(self) -> int | None:
        """The position of an engine whose connection to another engine has ended while this version
        was sent, as that other engine has reported; None if none was reported.
        """
        return self._meeting.lost()

    def relay(self, engine: int) -> int | None:
        """The position of the engine that passes weights on to `engine`; None for engine 0, to
        which the trainer sends.
        """
        return parent(engine)

    def close(self) -> None:
        """Leave the process group, and end the connection to the key-value store, which rank 0
        shuts down.
        """
        self._group.leave()
        self._meeting.close()
        if self._server is not None:
            self._server.close()

    def _join(self, watch: base.Watch) -> None:
        """Join the process group of the current attempt to send a version.

        Rank 0 writes the group's number to the store: the previous group, or a new one at the first
        attempt, after an abort or when an engine was replaced.
        """
        if self._axis.rank == 0:
            self._num_groups += int(self._stale)
            self._stale = False
            self._meeting.set(f"group/{self._meeting.attempt}", str(self._num_groups))
        self._group.join(_group_number(self._meeting, watch), watch)

    @contextlib.contextmanager
    def _naming_engine(self) -> Iterator[None]:
        """Raise `EngineLost` where a peer is gone: one of engine 0, as trainer ranks exchange no
        messages here.
        """
        try:
            yield
        except PeerGone as error:
            raise EngineLost(str(error), (0,)) from error


def _group_number(meeting: Rendezvous, watch: base.Watch) -> int:
    """Number of the groups of this attempt, once trainer rank 0 has set it."""
    key = f"group/{meeting.attempt}"
    meeting.until(lambda: meeting.check([key]), watch, meeting.pause_s)
    number = meeting.number(key)
    assert number
    return number


class Relay:
    """A thread on an engine's rank that sends the buckets (blocks of weights) of one weight
    version, which the rank has received itself, to one rank of another engine. Call `offer` for
    each bucket.
    """

    def __init__(
        self, group: P2PGroup, number: int, count: int, watch: base.Watch, lose: Callable[[], None]
    ) -> None:
        """Start the thread. `group`: the process group of this rank (number 0) and the receiving
        rank (number 1); `number`: with which to join it, the same on both; `count`: buckets of a
        version; `watch`: called in every wait, raises once the version has failed; `lose`: called
        when the connection to the receiving rank has ended.
        """
        self._to, self._number, self._count, self._watch = group, number, count, watch
        self._lose = lose
        self._offered: queue.SimpleQueue[tuple[torch.Tensor, Any]] = queue.SimpleQueue()
        """Each bucket, and on a GPU what the thread's stream waits for: its last writing."""
        self._is_closed, self.sent = False, 0
        """`sent`: buckets that the other rank has received."""
        self._ended = in_thread("weights: relay", self._pass_on)

    def offer(self, block: torch.Tensor) -> None:
        """Have the thread send the next bucket (block of weights); returns at once. `block`: the
        bucket's memory, [n] uint8, which must not change before the attribute `sent`, the number of
        buckets delivered, counts this bucket. Only vocabulary padding may change, because every
        rank sets it to zero by itself.
        """
        written = torch.cuda.current_stream(block.device).record_event() if block.is_cuda else None
        self._offered.put((block, written))

    def check(self) -> None:
        """Raise the error that has ended the thread, if there is one. If the connection to the
        receiving rank has ended, this is `Aborted`: the thread has already reported the loss, by
        calling the constructor's argument `lose`.
        """
        if self._ended.done():
            try:
                self._ended.result()
            except PeerGone as error:  # which is reported already
                raise base.Aborted(base.GIVEN_UP) from error

    def close(self) -> None:
        """Stop sending: cancel the messages that are under way, leave the process group, and wait
        for the thread to end.
        """
        self._is_closed = True
        self._to.leave()
        wait([self._ended], CANCEL_TIMEOUT_S)

    def _pass_on(self) -> None:
        """The thread: join the group, then send bucket after bucket, as `offer` brings them."""
        self._to.join(self._number, self._watch)
        for number in range(self._count):
            block = self._next()
            if block is None:
                return
            try:
                self._to.send({1: block}, block, number)
                self._to.wait(number, self._watch)
            except PeerGone:
                if not self._is_closed:
                    self._lose()
                raise
            self.sent = number + 1

    def _next(self) -> torch.Tensor | None:
        """Wait for the next bucket; None if the relay was closed."""
        while not self._is_closed:
            self._watch()
            with contextlib.suppress(queue.Empty):
                block, written = self._offered.get(timeout=ABORT_POLL_S)
                if written is not None:  # the current stream is per thread, vLLM has one of its own
                    torch.cuda.current_stream(block.device).wait_event(written)
                return block
        return None


class Receiver:
    """Engine rank's half of the transport `point_to_point`: receives buckets of weights and
    passes them on to the same rank of up to two further engines. Engine 0 receives them from the
    trainer's ranks, every other engine from the engine before it in a binary tree.
    """

    def __init__(self, route: Route, engine: int, rank: int, init_info: dict[str, Any]) -> None:
        """Connect to the trainer's key-value store. `engine`: position of the engine. `rank`:
        tensor-parallel rank.

        Raises `ValueError` where only one of trainer and engine is on GPUs, `RuntimeError` where
        the store cannot be reached.
        """
        device = group_device() if init_info["device"] == "cuda" else torch.device("cpu")
        if device.type != init_info["device"]:
            raise ValueError(
                "the trainer is on GPUs and this engine is not: weight_sync.transport"
                " point_to_point needs both or neither"
            )
        spec, self._route, self._engine, self._rank = route.spec, route, engine, rank
        self._meeting = Rendezvous(init_info["address"], init_info["key"], _members(spec))
        self._parent, self._children = parent(engine), children(engine, spec.engines)
        if self._parent is None:
            self._from = _first_group(self._meeting, spec, spec.layout.size + rank, device)
        else:
            self._from = self._pair(self._parent, engine, 1, device)
        self._to = [self._pair(engine, child, 0, device) for child in self._children]
        self._relays: list[Relay] = []
        # Buckets of another engine arrive as they are installed; those of trainer ranks in parts.
        self._messages = base.incoming(route) if self._parent is None else []
        self._memory = torch.empty(base.longest(self._messages), dtype=route.dtype, device=device)
        shape = RELAY_BLOCKS if self._to else SLOTS, route.largest_bytes
        self._blocks = torch.empty(shape, dtype=torch.uint8, device=device)
        self._reported_at = 0.0

    def receive(self, version: int, watch: base.Watch) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Iterate over the buckets (blocks of weights) of a version: (bucket, its memory, uint8
        [bucket.num_bytes], valid until the next). While a bucket is used, the next one is received
        and those before are passed on. `watch` is called while waiting and raises to end that;
        raises `Aborted` if another process gave up or an engine was lost.
        """
        meeting, buckets = self._meeting, self._route.buckets
        attempt = meeting.number("attempt")
        assert attempt, "senders begin first"
        meeting.attempt = attempt
        try:
            number = _group_number(meeting, watch)
            self._relays = [
                Relay(group, number, len(buckets), watch, lambda child=child: meeting.lose(child))
                for group, child in zip(self._to, self._children, strict=True)
            ]
            self._from.join(number, watch)
            self._start(buckets[0], watch)
            for bucket in buckets:
                block = self._finish(bucket, watch)
                for one in self._relays:
                    one.offer(block)
                if not self._route.is_last(bucket):
                    self._start(buckets[bucket.number + 1], watch)
                yield bucket, block
                self._report(bucket)
            self._until_passed_on(len(buckets), watch)
        except BaseException as error:
            self._leave()
            if not isinstance(error, PeerGone) or self._parent is None:
                raise
            meeting.lose(self._parent)
            raise base.Aborted(base.GIVEN_UP) from error

    def close(self) -> None:
        """Destroy this rank's process groups, cancel what is on its way through them, and close the
        connection to the key-value store at which trainer and engines meet.
        """
        self._leave()
        self._meeting.close()

    def _leave(self) -> None:
        """Leave the process groups; messages in flight are cancelled."""
        relays, self._relays = self._relays, []
        for one in relays:
            one.close()
        for group in (self._from, *self._to):
            group.leave()

    def _pair(self, sender: int, receiver: int, place: int, device: torch.device) -> P2PGroup:
        """The group of this rank of two engines; `place` is this process's rank in it."""
        names = _name(self._rank, sender), _name(self._rank, receiver)
        key = f"engine/{receiver}/{self._rank}"
        return P2PGroup(self._meeting, key, place, names, device)

    def _block(self, bucket: Bucket) -> torch.Tensor:
        """Memory of a bucket, uint8 [bucket.num_bytes]."""
        return self._blocks[bucket.number % len(self._blocks)][: bucket.num_bytes]

    def _start(self, bucket: Bucket, watch: base.Watch) -> None:
        """Start receiving a bucket, once its memory is free."""
        self._until_passed_on(bucket.number + 1 - len(self._blocks), watch)
        if self._parent is None:
            found = base.flats(self._messages[bucket.number], self._memory)
            self._from.receive(found, self._memory, bucket.number)
        else:
            block = self._block(bucket)
            self._from.receive({0: block}, block, bucket.number)

    def _finish(self, bucket: Bucket, watch: base.Watch) -> torch.Tensor:
        """Wait for a bucket; returns its block."""
        self._from.wait(bucket.number, watch)
        block = self._block(bucket)
        if self._parent is None:
            buffers = bucket.buffers(block, self._route.dtype)
            for source, flat in base.flats(self._messages[bucket.number], self._memory).items():
                base.unpack(self._messages[bucket.number][source], flat, buffers)
        return block

    def _until_passed_on(self, count: int, watch: base.Watch) -> None:
        """Wait until the first `count` buckets are passed on to all engines that get them here."""

        def ready() -> bool:
            for one in self._relays:
                one.check()
            return all(one.sent >= count for one in self._relays)

        self._meeting.until(ready, watch)

    def _report(self, bucket: Bucket) -> None:
        """Tell the trainer how many buckets have arrived: of many engines not each one."""
        now = time.monotonic()
        if self._route.is_last(bucket) or now >= self._reported_at + self._meeting.progress_s:
            self._reported_at = now
            key = f"received/{self._meeting.attempt}/{self._engine}/{self._rank}"
            self._meeting.set(key, str(bucket.number + 1))
