"""The rollout service as a trainer rank sees it: waits for token arrays have a deadline."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster import rollout_client
from megarl.cluster.rollout_client import RolloutClient


class Store:
    """Ray's object store: arrays are there once `ray.wait` was asked `waits` times."""

    def __init__(self, waits: int) -> None:
        self.left, self.asked, self.told = waits, list[Any](), list[str]()

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[Any, Any]:
        self.asked.append(timeout)
        self.left -= 1
        time.sleep(min(timeout, 0.02))
        return ([], refs) if self.left > 0 else (refs, [])

    def fetch(self, arrays: Any, timeout_s: float, what: str) -> list[str]:
        if self.left > 0:
            raise RuntimeError("the token arrays did not arrive")
        return [f"arrays of {one.ref}" for one in arrays]


def client(store: Store, monkeypatch: pytest.MonkeyPatch, silence_s: float) -> RolloutClient:
    monkeypatch.setattr(rollout_client.ray, "get_actor", lambda name: SimpleNamespace())
    monkeypatch.setattr(rollout_client.ray, "wait", store.wait)
    monkeypatch.setattr(rollout_client, "fetch", store.fetch)
    made = RolloutClient(0, silence_s=silence_s)
    monkeypatch.setattr(made, "_ask", lambda call, doing: store.told.append(doing))
    return made


ARRAYS: Any = [SimpleNamespace(ref="a"), SimpleNamespace(ref="b")]


def test_a_signal_during_the_wait_for_arrays_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(waits=5)
    made = client(store, monkeypatch, silence_s=60)
    made.stop.number = signal.SIGTERM
    assert made._fetch("arrays", ARRAYS) == ["arrays of a", "arrays of b"]
    assert store.told == ["ending the run"] and len(store.asked) == 5
    assert made._fetch("arrays", []) == []
    assert max(store.asked) <= rollout_client.STOP_POLL_S


def test_arrays_that_do_not_come_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(waits=10**9)
    made = client(store, monkeypatch, silence_s=0.3)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="did not arrive"):
        made._fetch("arrays", ARRAYS)
    assert time.monotonic() - began < 60 and not store.told
