"""The engines as trainer rank 0 calls them: through the rollout service, which owns them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from megarl.errors import ProcessLost
from megarl.settings.rollout import ENGINE_STARTS
from megarl.system.console import say
from megarl.system.ray_calls import SERVICE_TIMEOUT_S, THE_SERVICE, CallOutcome, ask
from megarl.weights.transports.base import GIVEN_UP, Aborted

DOING = "calling the engines"
SIGN_OF_LIFE_S = 10.0
"""Between checks that the service lives, during a long call."""


class EngineCall:
    """A call to all engines of the present publication, in which they are named by position."""

    def __init__(self, engines: EngineClient, reference: Any) -> None:
        """`reference`: Ray's, of the call to the service."""
        self._engines, self._reference = engines, reference

    def poll(self) -> None:
        """Raises as `result`, without waiting."""
        if ray.wait([self._reference], timeout=0)[0]:
            self.result(timeout_s=0.0)

    def result(self, *, timeout_s: float) -> list[Any]:
        """The engines' answers. Raises `ProcessLost` for those that are dead, failed or late, and
        `Aborted` if one only stopped because another process gave up.
        """
        outcomes: list[CallOutcome] = self._engines.answer(self._reference, timeout_s)
        failed = {n: outcome.problem for n, outcome in enumerate(outcomes) if outcome.problem}
        # The call ends at the first failure: others are late only if none has failed.
        known = {n: why for n, why in failed.items() if why != "late"}
        late = "it did not answer in time; raise weight_sync.timeout_s"
        lost = {n: why for n, why in known.items() if GIVEN_UP not in why}
        if known and not lost:
            raise Aborted(GIVEN_UP)
        if lost := lost or dict.fromkeys(failed, late):
            raise ProcessLost("; ".join(dict.fromkeys(lost.values())), tuple(lost))
        return [outcome.answer for outcome in outcomes]

    def settle(self, *, timeout_s: float) -> list[int]:
        """After an abort: the engines where the call still runs, or failed by an error of its
        own.
        """
        outcomes: list[CallOutcome] = self._engines.ask("settled", timeout_s, timeout_s=timeout_s)
        return [
            n
            for n, outcome in enumerate(outcomes)
            if outcome.problem and GIVEN_UP not in outcome.problem
        ]


class EngineClient:
    """All engines of a run. Methods with `timeout_s` raise `ProcessLost`."""

    def __init__(self, service: Any, start_timeout_s: float) -> None:
        """`service`: the Ray actor that owns the engines. `start_timeout_s`: of one engine."""
        self._service, self._start_timeout_s = service, start_timeout_s

    def ask(self, method: str, *arguments: Any, timeout_s: float = 0.0) -> Any:
        """The answer of a method of `EngineManager` that takes at most `timeout_s`."""
        return self.answer(self._service.engine_call.remote(method, *arguments), timeout_s)

    def answer(self, reference: Any, timeout_s: float) -> Any:
        """The answer of a call that takes at most `timeout_s`. A service that hangs is noticed
        within `SERVICE_TIMEOUT_S`.
        """
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends and not ray.wait([reference], timeout=SIGN_OF_LIFE_S)[0]:
            ask(THE_SERVICE, self._service.__ray_ready__.remote(), SERVICE_TIMEOUT_S, DOING)
        return ask(THE_SERVICE, reference, SERVICE_TIMEOUT_S, DOING)

    def _begin(self, method: str, *arguments: Any, timeout_s: float) -> EngineCall:
        """Call a method of every engine."""
        reference = self._service.engine_call.remote("call", method, arguments, timeout_s)
        return EngineCall(self, reference)

    def wait(self) -> None:
        """Block until all engines are ready. Raises `RuntimeError` if one cannot start."""
        if problem := self.ask("ready", timeout_s=self._start_timeout_s):
            raise RuntimeError(problem)
        self.hold()

    def is_one_host(self) -> bool:
        """Whether the Ray cluster has only this node."""
        return sum(node["Alive"] for node in ray.nodes()) == 1

    def connect(self, infos: Mapping[int, dict[str, Any]], *, timeout_s: float) -> None:
        """`infos`: {number of an engine: an `InitInfo` as a dict}. Raises `ProcessLost` if an
        engine is dead or late, `RuntimeError` if a living one cannot receive.
        """
        outcomes = self.ask("connect", [*infos.values()], timeout_s, timeout_s=timeout_s)
        for number, outcome in zip(infos, outcomes, strict=True):
            if outcome.problem and not outcome.is_lost:
                raise RuntimeError(f"engine {number} cannot take weights in: {outcome.problem}")
        lost = {n: outcome.problem for n, outcome in enumerate(outcomes) if outcome.problem}
        if lost:
            raise ProcessLost("; ".join(dict.fromkeys(lost.values())), tuple(lost))

    def update(self, version: int, *, timeout_s: float) -> EngineCall:
        """Have every engine begin to receive `version`; returns at once. The result has for each
        rank {"version", "digests", "seconds", "problem"}.
        """
        return self._begin("update", version, timeout_s, timeout_s=timeout_s)

    def load_adapter(
        self, version: int, files: dict[str, bytes], *, timeout_s: float
    ) -> EngineCall:
        """Have every engine begin to load adapters, {file name: content} in PEFT's format; returns
        at once. The result has {"version", "receipt"}.
        """
        return self._begin("load_adapter", version, ray.put(files), timeout_s=timeout_s)

    def score(
        self, token_ids: list[int], *, timeout_s: float, adapted: bool = True
    ) -> list[list[float]]:
        """[engine][token] log-probs at temperature 1 of each of `token_ids` but the first, given
        those before it. `adapted`: with the LoRA adapter.
        """
        call = self._begin("score", token_ids, adapted, timeout_s=timeout_s)
        return call.result(timeout_s=timeout_s)

    def hold(self, lost: Sequence[int] = ()) -> tuple[list[int], bool]:
        """Begin an attempt to publish, with replacements of the engines `lost`. Returns (numbers of
        the engines that take part, whether some have no weights). Raises `ProcessLost` if none is
        left.
        """
        timeout_s = ENGINE_STARTS * self._start_timeout_s
        members, has_new, notices = self.ask("hold", lost, timeout_s=timeout_s)
        for line in notices:
            say(line)
        return members, has_new

    def admit(self) -> dict[str, float]:
        """Let the engines that have the new weights answer requests. Returns metrics."""
        return self.ask("admit")

    def sleep(self, *, timeout_s: float) -> None:
        """Free the engines' GPU memory for a colocated trainer. One that is dead or late is
        replaced later; raises `RuntimeError` if a living one fails.
        """
        self._each("sleep", timeout_s, ENGINE_STARTS * self._start_timeout_s)

    def wake(self, *, timeout_s: float) -> None:
        """Allocate the memory for weights again; raises as `sleep`."""
        self._each("wake", timeout_s, 0.0)

    def _each(self, method: str, timeout_s: float, start_s: float) -> None:
        if failed := self.ask(method, timeout_s, timeout_s=timeout_s + start_s):
            raise RuntimeError("; ".join(failed))
