"""The NCCL group of `point_to_point`, made with a stand-in for torch's class, which CPU builds do not
have: how it is made, and that a rank that never comes does not outlast the deadline.
"""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.errors import ProcessLost
from megarl.weights.transports import p2p_group
from megarl.weights.transports.p2p_group import InFlight, P2PGroup, Rendezvous

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
def group(monkeypatch: pytest.MonkeyPatch) -> P2PGroup:
    """The only rank of a group on a GPU, before it has joined."""
    MADE.clear()
    Nccl.blocks = threading.Event()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    meeting = Rendezvous("127.0.0.1", 0, 1)
    meeting.begin(1, 1)
    return P2PGroup(meeting, 0, [("alone", ())], torch.device("cuda", 0))


def test_one_communicator_is_made_and_no_watchdog(
    group: P2PGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    Nccl.blocks.set()
    group.join(lambda: None)
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
    peers: Any = {3: ("engine 3", (3,))}
    said = "engine 3 is gone: NCCL error: remote process exited"
    with pytest.raises(ProcessLost, match=said) as lost:
        InFlight(works, memory, peers).check()
    assert lost.value.engines == (3,)


def test_a_communicator_that_is_never_made_ends_at_the_deadline(group: P2PGroup) -> None:
    deadline = time.monotonic() + 0.3

    def watch() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError("engine 0 is late")

    with pytest.raises(TimeoutError, match="engine 0 is late"):
        group.join(watch)
    assert time.monotonic() < deadline + 60
    assert MADE[0].connected is not None
    Nccl.blocks.set()


def test_an_abort_that_hangs_is_left_to_its_thread(
    group: P2PGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL ends a communicator within the time of a message, which is a day here."""
    Nccl.blocks.set()
    group.join(lambda: None)
    monkeypatch.setattr(Nccl, "hangs", threading.Event())
    monkeypatch.setattr(p2p_group, "ABORT_TIMEOUT_S", 0.1, raising=False)
    started_at = time.monotonic()
    group.leave()
    assert time.monotonic() < started_at + 30
    assert MADE[0].aborted_by is not threading.current_thread()
    Nccl.hangs.set()
    group._meeting.begin(2, 2)
    group.join(lambda: None)  # another communicator can be made
    assert len(MADE) == 2
    group.leave()
