"""Ports for servers that start later."""

from __future__ import annotations

import random
import socket

import pytest

from megarl.parallel import launcher


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
