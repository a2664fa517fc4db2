"""The tree over which engines pass weights on, and the NCCL group of `point_to_point`, made with a stand-in for torch's class, which CPU builds do not
have: how it is made, and that a rank that never comes does not outlast the deadline.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.weight_sync.transports import p2p_group, point_to_point
from megarl.weight_sync.transports.p2p_group import (
    InFlight,
    P2PGroup,
    PeerGone,
    Rendezvous,
    StoreServer,
)
from megarl.weight_sync.transports.point_to_point import FANOUT, children, parent

MADE: list[Any] = []


class Nccl:
    """Notes what torch's class would be given."""

    blocks = threading.Event()
    hangs = threading.Event()
    hangs.set()
    Options = SimpleNamespace

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.environment = {name: os.environ.get(name) for name in p2p_group.WATCHDOG_OFF}
        self.timeout_s, self.connected = options._timeout.total_seconds(), None
        self.thread = threading.current_thread()
        MADE.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected = device
        self.blocks.wait(30)

    def abort(self) -> None:
        self.aborted_by = threading.current_thread()
        self.hangs.wait(60)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[P2PGroup]:
    """The only rank of a group on a GPU, before it has joined."""
    MADE.clear()
    Nccl.blocks = threading.Event()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    server = StoreServer("127.0.0.1")
    meeting = Rendezvous(server.address, server.key, 1)
    yield P2PGroup(meeting, "alone", 0, ["alone"], torch.device("cuda", 0))
    meeting.close()
    server.close()


def test_one_communicator_is_made_and_no_watchdog(
    group: P2PGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    Nccl.blocks.set()
    group.join(1, lambda: None)
    (made,) = MADE
    assert made.environment == p2p_group.WATCHDOG_OFF
    assert made.connected == torch.device("cuda", 0)
    assert made.timeout_s > 3600  # `watch` limits a message
    assert made.thread is not threading.current_thread()
    # The trainer's own groups keep theirs.
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ
    group.leave()


class FailedWork:
    """A message of NCCL whose peer is gone: it counts as completed, and waiting raises nothing."""

    def is_completed(self) -> bool:
        return True

    def exception(self) -> Exception:
        return dist.DistBackendError("NCCL error: remote process exited")

    def wait(self) -> bool:
        return True


def test_a_message_that_failed_is_not_taken_for_received() -> None:
    memory: Any = SimpleNamespace(is_cuda=True)
    works: Any = {3: FailedWork()}
    names: Any = {3: "engine 3"}
    with pytest.raises(PeerGone, match="engine 3 is gone: NCCL error: remote process exited"):
        InFlight(works, memory, names).check()


def test_a_communicator_that_is_never_made_ends_at_the_deadline(group: P2PGroup) -> None:
    deadline = time.monotonic() + 0.3

    def watch() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError("engine 0 is late")

    with pytest.raises(TimeoutError, match="engine 0 is late"):
        group.join(1, watch)
    assert time.monotonic() < deadline + 60
    assert MADE[0].connected is not None
    Nccl.blocks.set()


def test_an_abort_that_hangs_is_left_to_its_thread(
    group: P2PGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL ends a communicator within the time of a message, which is a day here."""
    Nccl.blocks.set()
    group.join(1, lambda: None)
    monkeypatch.setattr(Nccl, "hangs", threading.Event())
    monkeypatch.setattr(p2p_group, "ABORT_TIMEOUT_S", 0.1, raising=False)
    started_at = time.monotonic()
    group.leave()
    assert time.monotonic() < started_at + 30
    assert MADE[0].aborted_by is not threading.current_thread()
    Nccl.hangs.set()
    group.join(2, lambda: None)  # another communicator can be made
    assert len(MADE) == 2
    group.leave()


class Stream:
    """A stream of a GPU that notes in `told` what it is asked to do, with the asking thread."""

    def __init__(self, told: list[tuple[str, str]]) -> None:
        self.told = told

    def record_event(self) -> str:
        self.told.append(("record", threading.current_thread().name))
        return "written"

    def wait_event(self, event: str) -> None:
        self.told.append((f"wait for {event}", threading.current_thread().name))


def test_a_relay_sends_a_bucket_after_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads have streams of their own, so that nothing else orders the writing of a bucket and
    the message that carries it.
    """
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(told))
    sends = lambda *_: told.append(("send", threading.current_thread().name))  # noqa: E731
    group: Any = SimpleNamespace(
        **{name: lambda *_: None for name in ("join", "wait", "leave")}, send=sends
    )
    relay = point_to_point.Relay(group, 1, 2, lambda: None, lambda: None)
    block: Any = SimpleNamespace(is_cuda=True, device="cuda:0")
    for number in (1, 2):
        relay.offer(block)
        while relay.sent < number and not relay._ended.done():
            time.sleep(0.001)
    relay.check()
    main, other = threading.current_thread().name, told[1][1]
    once = [("record", main), ("wait for written", other), ("send", other)]
    assert told == once * 2 and main != other


def test_the_tree_reaches_every_engine_once_in_few_hops() -> None:
    for engines in (1, 2, 3, 4, 7, 8, 9, 100, 512, 1000):
        reached, hops, level = [0], 0, [0]
        while level:
            assert all(
                parent(child) == engine for engine in level for child in children(engine, engines)
            )
            assert all(len(children(engine, engines)) <= FANOUT for engine in level)
            level = [child for engine in level for child in children(engine, engines)]
            reached, hops = reached + level, hops + 1
        assert sorted(reached) == list(range(engines)) and parent(0) is None
        assert hops == 1 + int(math.log2(engines))
