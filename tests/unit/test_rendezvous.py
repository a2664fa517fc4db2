"""The store at which ranks meet serves those that know its key, and nobody else;
ports for servers that start later.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import zmq

from megarl.parallel import launcher
from megarl.weight_sync.transports import p2p_group
from megarl.weight_sync.transports.p2p_group import Rendezvous, StoreServer, network_place


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer("127.0.0.1")
    yield made
    made.close()


def connect(server: StoreServer) -> Rendezvous:
    return Rendezvous(server.address, server.key, 2)


def test_ranks_that_know_the_key_share_values(server: StoreServer) -> None:
    mine, theirs = connect(server), connect(server)
    assert not theirs.check(["a"])
    threading.Timer(0.1, mine.set, ("a", b"\x00\xff")).start()
    assert theirs.get("a") == b"\x00\xff"
    mine.set("b", "7")
    assert theirs.check(["a", "b"]) and theirs.get("b") == b"7"
    assert theirs.number("b") == 7 and theirs.number("c") is None
    assert [mine.add("n", 2), theirs.add("n", 3)] == [2, 5]
    assert theirs.delete_key("n") and not mine.check(["n"])
    started_at = time.monotonic()
    with pytest.raises(RuntimeError, match=r"no rank has set a, c within 0\.1 s"):
        mine.wait(["a", "c"], timedelta(seconds=0.1))
    assert time.monotonic() - started_at < 60


def test_strangers_and_impostors_are_refused(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has another key, or none, is not heard; a rank does not talk to another server either."""
    mine, other = connect(server), StoreServer("127.0.0.1")
    monkeypatch.setattr(p2p_group, "CONNECT_TIMEOUT_S", 0.5)
    for address, key in ((server.address, other.key), (other.address, server.key)):
        with pytest.raises(RuntimeError, match="cannot reach trainer rank 0's store"):
            Rendezvous(address, key, 2)
    plain = zmq.Context.instance().socket(zmq.REQ)
    plain.linger, plain.rcvtimeo = 0, 500
    plain.connect(server.address)
    plain.send_json(["set", "stolen", ""])
    with pytest.raises(zmq.Again):
        plain.recv_json()
    plain.close()
    with socket.create_connection((mine.host, int(server.address.rpartition(":")[2])), 5) as raw:
        raw.sendall(os.urandom(256))
    mine.set("a", "1")
    assert mine.check(["a"]) and not mine.check(["stolen"])
    other.close()


def test_it_listens_on_one_address_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback's store is not to be reached under another address of this host."""
    server = StoreServer("127.0.0.1")
    meeting, port = connect(server), int(server.address.rpartition(":")[2])
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port), 2)
    meeting.set("a", "1")
    server.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
    meeting._socket.rcvtimeo = 100
    for _ in range(2):  # the second time at once
        with pytest.raises(RuntimeError, match="cannot reach trainer rank 0's store"):
            meeting.check(["a"])
    meeting.abort()  # which tells nobody, and does not fail
    with pytest.raises(zmq.ZMQError):
        StoreServer("203.0.113.1")  # no address of this host (RFC 5737)
    assert network_place() == network_place()


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
