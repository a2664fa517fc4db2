"""The store at which ranks meet serves those that know its secret, and nobody else."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from megarl.weight_sync.transports import secret_store
from megarl.weight_sync.transports.rendezvous import Rendezvous, network_place
from megarl.weight_sync.transports.secret_store import LENGTH, SecretServer, SecretStore, proof

SECRET = secrets.token_bytes(32)


@pytest.fixture
def server() -> Iterator[SecretServer]:
    made = SecretServer("127.0.0.1", SECRET)
    yield made
    made.close()


def connect(server: SecretServer, secret: bytes = SECRET, timeout_s: float = 5.0) -> SecretStore:
    return SecretStore(server.host, server.port, secret, timeout_s)


def test_ranks_that_know_the_secret_share_values(server: SecretServer) -> None:
    mine, theirs = connect(server), connect(server)
    assert not theirs.check(["a"])
    threading.Timer(0.1, mine.set, ("a", b"\x00\xff")).start()
    assert theirs.get("a") == b"\x00\xff"
    mine.set("b", "text")
    assert theirs.check(["a", "b"]) and theirs.get("b") == b"text"
    assert [mine.add("n", 2), theirs.add("n", 3)] == [2, 5]
    assert theirs.delete_key("n") and not mine.check(["n"])
    started_at = time.monotonic()
    with pytest.raises(RuntimeError, match=r"no rank has set a, c within 0\.1 s"):
        mine.wait(["a", "c"], timedelta(seconds=0.1))
    assert time.monotonic() - started_at < 60


def test_gloo_ranks_meet_in_it(server: SecretServer) -> None:
    found: dict[int, torch.Tensor] = {}

    def rank(number: int) -> None:
        store, value = connect(server), torch.full((3,), float(number))
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = timedelta(seconds=20)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group: Any = dist.ProcessGroupGloo(PrefixStore("g", store), number, 2, options)
        (group.send([value], 1, 0) if number == 0 else group.recv([value], 0, 0)).wait()
        found[number] = value

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found[1].tolist() == [0.0] * 3


def test_another_secret_is_refused_by_both(server: SecretServer) -> None:
    with pytest.raises(RuntimeError, match=r"closed|reset"):
        connect(server, secrets.token_bytes(32))
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor() -> None:
        taken, _ = listener.accept()
        taken.sendall(bytes(32))
        taken.recv(64)
        taken.sendall(proof(b"guess", b"server"))

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(RuntimeError, match="does not know the secret"):
        SecretStore("127.0.0.1", listener.getsockname()[1], SECRET, 5.0)
    thread.join()
    listener.close()


def handshake(server: SecretServer) -> tuple[socket.socket, bytes]:
    """A connection that is let in, and the key of its proofs."""
    made = socket.create_connection((server.host, server.port), 5)
    greetings = made.recv(32) + os.urandom(32)
    made.sendall(greetings[32:] + proof(SECRET, b"client", greetings))
    assert made.recv(32) == proof(SECRET, b"server", greetings)
    return made, proof(SECRET, b"channel", greetings)


def request(key: bytes, number: int, text: bytes, direction: bytes = b">") -> bytes:
    sealed = proof(key, direction, number.to_bytes(8, "big"), text)
    return LENGTH.pack(len(text)) + sealed + text


SET = b'{"what": "set", "key": "stolen", "value": ""}'


def test_messages_without_their_proof_end_the_connection(server: SecretServer) -> None:
    """A message without handshake, one with a wrong proof, one again, one too long, and noise."""
    mine = connect(server)
    made, key = handshake(server)
    good = request(key, 1, SET.replace(b"stolen", b"good"))
    made.sendall(good)
    assert made.recv(100) and mine.check(["good"])
    wrong = {
        "again": good,
        "changed": request(key, 2, SET)[:-1] + b" ",
        "another direction": request(key, 2, SET, b"<"),
        "another key": request(os.urandom(32), 2, SET),
        "too long": LENGTH.pack(2**30),
    }
    for name, sent in wrong.items():
        if name != "again":
            made, key = handshake(server)
            made.sendall(request(key, 1, SET.replace(b"stolen", b"other")))
            assert made.recv(100)
            sent = request(key, 2, SET)[:-1] + b" " if name == "changed" else sent
        made.settimeout(5)
        made.sendall(sent)
        assert made.recv(100) == b"", name
        made.close()
    for noise in (b"", os.urandom(64), request(SECRET, 1, SET)):
        made = socket.create_connection((server.host, server.port), 5)
        assert len(made.recv(32)) == 32
        made.sendall(noise + bytes(96))
        assert made.recv(100) == b""
        made.close()
    assert not mine.check(["stolen"]) and mine.check(["good"])


def test_who_says_nothing_is_not_waited_for(
    server: SecretServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_store, "HANDSHAKE_S", 0.1)
    made = socket.create_connection((server.host, server.port), 5)
    assert len(made.recv(32)) == 32 and made.recv(1) == b""
    made.close()


def test_it_listens_on_one_address_and_ends() -> None:
    """The loopback's store is not to be reached under another address of this host."""
    meeting = Rendezvous("127.0.0.1", 0, SECRET.hex(), 2)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", meeting.port), 2)
    meeting.set("a", 1)
    assert meeting.get("a") == 1 and meeting.get("b") is None
    meeting.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", meeting.port), 1).close()
        except OSError:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("it still listens")
    with pytest.raises(OSError):
        SecretServer("203.0.113.1", SECRET)  # no address of this host (RFC 5737)
    assert network_place() == network_place()
