"""Where ranks meet to send weights, and ports for servers that start later."""

from __future__ import annotations

import random
import socket
import time

import pytest
import torch

from megarl.errors import ProcessLost
from megarl.parallel import launcher
from megarl.weights.transports import p2p_group
from megarl.weights.transports.base import Aborted
from megarl.weights.transports.p2p_group import (
    P2PGroup,
    Rendezvous,
    address_toward,
    network_place,
    own_address,
)


def test_ranks_meet_in_attempts() -> None:
    mine = Rendezvous("127.0.0.1", 0, 2)
    theirs = Rendezvous("127.0.0.1", mine.port, 2)
    mine.begin(1, 1)
    theirs.follow()
    assert (theirs.attempt, theirs.group) == (1, 1)
    theirs.report("0/0", 7)
    assert theirs.reported("0/0") == mine.reported("0/0") == 7 and mine.reported("1/0") == -1
    theirs.abort()
    assert theirs.is_aborted() and mine.is_aborted()
    with pytest.raises(Aborted):
        mine.until(lambda: False, lambda: None)
    mine.begin(2, 1)
    assert not mine.is_aborted() and mine.reported("0/0") == -1
    theirs.report("0/0", 9)
    assert theirs.reported("0/0") == 9
    assert mine.reported("0/0") == -1, "of an attempt that is over"


PEERS = [("trainer rank 0", ()), ("rank 0 of engine 0", (0,))]


@pytest.mark.parametrize(("rank", "waits_s"), [(0, 0.3), (1, 0.6)])
def test_a_rank_that_hangs_while_it_joins_is_named(
    rank: int, waits_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer, which can replace the engine, gives up before the engine does."""
    meeting = Rendezvous("127.0.0.1", 0, 2)
    meeting.begin(1, 1)
    meeting.store.set(f"joined/1/{1 - rank}", "")
    monkeypatch.setattr(p2p_group, "CONNECT_TIMEOUT_S", 0.3)
    began = time.monotonic()
    with pytest.raises(ProcessLost, match=f"{PEERS[1 - rank][0]} is gone: wait timeout") as lost:
        P2PGroup(meeting, rank, PEERS, torch.device("cpu")).join(lambda: None)
    assert lost.value.engines == PEERS[1 - rank][1] and time.monotonic() - began > waits_s


def test_the_store_listens_on_one_address_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback's store is not to be reached under another address of this host."""
    server = Rendezvous("127.0.0.1", 0, 2)
    port, meeting = server.port, Rendezvous("127.0.0.1", server.port, 2)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), 2)
    server.begin(1, 1)
    meeting.follow()
    del server
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
    with pytest.raises(RuntimeError):
        meeting.is_aborted()
    meeting.abort()  # which tells nobody, and does not fail
    monkeypatch.setattr(p2p_group, "CONNECT_TIMEOUT_S", 0.5)
    with pytest.raises(RuntimeError, match=f"cannot reach trainer rank 0's store at .* {port}"):
        Rendezvous("127.0.0.1", port, 2)
    with pytest.raises(OSError):
        Rendezvous("203.0.113.1", 0, 1)  # no address of this host (RFC 5737)


def test_the_address_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network_place() == network_place()
    assert (
        address_toward("127.0.0.2") == "127.0.0.1" and address_toward("no.such.host") == "127.0.0.1"
    )
    default = address_toward("192.0.2.1")
    for address in ("localhost", "127.0.0.5", default):
        monkeypatch.setenv("MASTER_ADDR", address)
        assert own_address() == default


def test_the_kernel_gives_the_port_to_nobody_else() -> None:
    with socket.socket() as unnamed:
        unnamed.bind(("", 0))
        first = int(launcher.KERNELS.read_text().split()[0])
        drawn = {launcher.free_port() for _ in range(20)}
    assert all(launcher.FIRST <= port < first for port in drawn), drawn
    assert len(drawn) > 15  # two processes that ask at once get two ports


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", launcher.free_port())) as server:
        taken = server.getsockname()[1]
        free = launcher.free_port()
        answers = iter([taken, taken, free])

        def draw(_self: random.Random, _first: int, _below: int) -> int:
            return next(answers)

        monkeypatch.setattr(random.Random, "randrange", draw)
        assert launcher.free_port() == free


def test_without_a_range_the_kernel_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(*_: object, **__: object) -> str:
        return "1024 65535"

    monkeypatch.setattr(type(launcher.KERNELS), "read_text", whole)
    with socket.create_server(("", launcher.free_port())):
        pass
