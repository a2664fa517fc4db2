"""The rollout service as a trainer rank sees it: waits for token arrays have a deadline, and
deadlines of waits for rollouts and for a whole step, by arithmetic.
"""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.errors import ProcessLost
from megarl.rollout import client as rollout_client
from megarl.rollout.client import RolloutClient
from megarl.run.build import rollout_deadline_s, step_deadline_s
from megarl.settings.agents import AgentConfig
from megarl.settings.config import RunConfig, silence_s
from megarl.settings.data import PromptsConfig
from megarl.settings.objectives import AlgorithmConfig
from megarl.settings.rollout import DynamicSamplingConfig, EngineConfig, RolloutConfig
from megarl.settings.schema import replace
from megarl.settings.training import ModelConfig, TrainingConfig
from megarl.settings.weight_sync import WeightSyncConfig


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
    service = SimpleNamespace(silent_s=SimpleNamespace(remote=None))
    monkeypatch.setattr(rollout_client.ray, "get_actor", lambda name: service)
    monkeypatch.setattr(rollout_client.ray, "wait", store.wait)
    monkeypatch.setattr(rollout_client, "fetch", store.fetch)
    made = RolloutClient(0, silence_s=silence_s)

    def ask(call: Any, doing: str) -> float:
        store.told.append(doing)
        return 0.0

    monkeypatch.setattr(made, "_ask", ask)
    return made


ARRAYS: Any = [SimpleNamespace(ref="a"), SimpleNamespace(ref="b")]


def test_a_signal_during_the_wait_for_arrays_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(waits=5)
    made = client(store, monkeypatch, silence_s=60)
    made.stop.number = signal.SIGTERM
    assert made._fetch("arrays", ARRAYS) == ["arrays of a", "arrays of b"]
    assert store.told == ["ending the run"] and len(store.asked) == 5
    assert made._fetch("arrays", []) == []
    assert max(store.asked) <= rollout_client.POLL_S


def test_arrays_that_do_not_come_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(waits=10**9)
    made = client(store, monkeypatch, silence_s=0.3)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="did not arrive"):
        made._fetch("arrays", ARRAYS)
    assert time.monotonic() - began < 60 and {*store.told} <= {"waiting for token arrays of arrays"}


def test_a_service_that_died_ends_the_wait_for_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's raylet may hang, which sends no arrays any more and says nothing."""
    made = client(Store(waits=10**9), monkeypatch, silence_s=300)
    monkeypatch.setattr(made, "_poll_s", 0.1)

    def dies(call: Any, doing: str) -> float:
        raise ProcessLost(f"the rollout service died ({doing})")

    monkeypatch.setattr(made, "_ask", dies)
    with pytest.raises(ProcessLost, match="waiting for token arrays of segments"):
        made._fetch("segments", ARRAYS)


BASE = RunConfig(
    folder="run",
    model=ModelConfig(path="model"),
    prompts=PromptsConfig(source="prompts.jsonl"),
    # A step looks at no more than 4 x 3 groups of 5, and two steps may be open: 120 requests.
    rollout=RolloutConfig(
        groups_per_step=4,
        group_size=5,
        max_staleness=1,
        dynamic_sampling=DynamicSamplingConfig(max_draws=3.0),
        request_timeout_s=11.0,
        num_engines=2,
        engine=EngineConfig(max_num_sequences=10, stall_timeout_s=5.0, start_timeout_s=1000.0),
    ),
    algorithm=AlgorithmConfig(old_logprobs="engine"),
    training=TrainingConfig(num_mini_batches=2, collective_timeout_s=100_000.0),
    weight_sync=WeightSyncConfig(timeout_s=10_000.0, replacements=2),
)
"""120 requests at 20 at once: 6 times `rollout.request_timeout_s`, and two more."""


def with_rollout(**changes: Any) -> RunConfig:
    return replace(BASE, rollout=replace(BASE.rollout, **changes))


REMAX = AlgorithmConfig(advantage="remax", old_logprobs="engine")
"""Generates one greedy response more for each group."""


@pytest.mark.parametrize(("config", "num_held_out", "wanted_s"), [
    (BASE, 0, 8 * 11.0), (BASE, 120, 8 * 11.0), (BASE, 400, 22 * 11.0),
    (with_rollout(request_timeout_s=20.0), 0, 8 * 20.0),
    (with_rollout(max_staleness=3), 0, 14 * 11.0), (with_rollout(group_size=10), 0, 14 * 11.0),
    (with_rollout(num_engines=1), 0, 14 * 11.0), (replace(BASE, algorithm=REMAX), 0, 9 * 11.0),
])  # fmt: skip
def test_rollouts_of_a_step_may_take_what_their_requests_may(
    config: RunConfig, num_held_out: int, wanted_s: float
) -> None:
    assert rollout_deadline_s(config, num_held_out) == wanted_s


def test_a_step_may_take_what_is_done_in_it() -> None:
    """Rollouts and two evaluations of 88 s, a publication of 10,000 s and a start of engines of
    1,000 s with two repetitions each, and two collectives of 100,000 s.
    """
    assert step_deadline_s(BASE, 0) == 3 * 88.0 + 30_000.0 + 3_000.0 + 200_000.0
    assert step_deadline_s(BASE, 400) - step_deadline_s(BASE, 0) == 3 * (242.0 - 88.0)


def test_an_agent_may_work_as_long_as_it_is_allowed_to() -> None:
    """In which it need not call the model, nor is anything judged."""
    agent = AgentConfig(function="own.py:solve", time_limit_s=3600.0)
    config = replace(BASE, environment=replace(BASE.environment, agent=agent))
    assert silence_s(config) == silence_s(BASE) + 3600.0
