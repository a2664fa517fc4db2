"""The engines as trainer rank 0 calls them: through the rollout service, which owns them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray

from megarl.engines.pool import ActorHandle, CallOutcome, EngineStarts
from megarl.errors import ProcessLost
from megarl.settings.rollout import ENGINE_STARTS
from megarl.system.console import say
from megarl.system.ray_calls import SERVICE_TIMEOUT_S, THE_SERVICE, ask
from megarl.weights.transports.base import GIVEN_UP, Aborted


class EngineCall:
    """A call to all members at once (`publication.Update`)."""

    def __init__(self, engines: EngineClient, reference: Any) -> None:
        """`reference`: Ray's, of the call to the service."""
        self._engines, self._reference = engines, reference

    def poll(self) -> None:
        """Raises as `result`, without waiting."""
        if ray.wait([self._reference], timeout=0)[0]:
            self.result(timeout_s=0.0)

    def result(self, *, timeout_s: float) -> list[Any]:
        """The members' answers. Raises `ProcessLost` for engines that are dead, failed or late, and
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
        """Positions of the members where the call still runs, or failed by an error of its own."""
        outcomes: list[CallOutcome] = self._engines.ask("settled", timeout_s, timeout_s=timeout_s)
        return [
            n
            for n, outcome in enumerate(outcomes)
            if outcome.problem and GIVEN_UP not in outcome.problem
        ]


class EngineClient:
    """All engines of a run (`publication.Engines`)."""

    def __init__(self, service: ActorHandle, starts: EngineStarts) -> None:
        """`service`: the Ray actor that owns the engines."""
        self._service, self._starts = service, starts
        self.members = list[int]()
        """Numbers of the engines in the present publication."""
        self.preemptions = 0
        """Requests pushed out of a full key-value cache so far."""

    @property
    def missing(self) -> int:
        """Engines that do not get the present weights."""
        return len(self._starts.actors) - len(self.members)

    def ask(self, method: str, *arguments: Any, timeout_s: float = 0.0) -> Any:
        """The answer of a method of `EngineManager` that takes at most `timeout_s`."""
        return self.answer(self._begin(method, *arguments), timeout_s)

    def answer(self, reference: Any, timeout_s: float) -> Any:
        return ask(THE_SERVICE, reference, timeout_s + SERVICE_TIMEOUT_S, "calling the engines")

    def _begin(self, method: str, *arguments: Any) -> Any:
        return self._service.engine_call.remote(method, *arguments)

    def _call(self, method: str, arguments: list[Any], timeout_s: float) -> EngineCall:
        return EngineCall(self, self._begin("call", method, arguments, timeout_s))

    def wait(self) -> None:
        """Block until all engines are ready. Raises `RuntimeError` if one cannot start."""
        if problem := self.ask("ready", timeout_s=self._starts.timeout_s):
            raise RuntimeError(problem)
        self.hold()

    def is_one_host(self) -> bool:
        """Whether the Ray cluster has only this node."""
        return sum(node["Alive"] for node in ray.nodes()) == 1

    def connect(self, info: Callable[[int], dict[str, Any]], *, timeout_s: float) -> None:
        """Raises `ProcessLost` if an engine is dead or late, `RuntimeError` if a living one cannot
        receive.
        """
        infos = [(info(position),) for position in range(len(self.members))]
        # Of all: a healthy engine that is still at it when another fails would count as late.
        until = asyncio.ALL_COMPLETED
        outcomes = self.ask("call", "connect", infos, timeout_s, until, timeout_s=timeout_s)
        for number, outcome in zip(self.members, outcomes, strict=True):
            if outcome.problem and not outcome.is_lost:
                raise RuntimeError(f"engine {number} cannot take weights in: {outcome.problem}")
        lost = {n: outcome.problem for n, outcome in enumerate(outcomes) if outcome.problem}
        if lost:
            raise ProcessLost("; ".join(dict.fromkeys(lost.values())), tuple(lost))

    def update(self, version: int, *, timeout_s: float) -> EngineCall:
        """Returns at once."""
        return self._call("update", [(version, timeout_s)] * len(self.members), timeout_s)

    def load_adapter(
        self, version: int, files: dict[str, bytes], *, timeout_s: float
    ) -> EngineCall:
        """Returns at once."""
        return self._call(
            "load_adapter", [(version, ray.put(files))] * len(self.members), timeout_s
        )

    def score(
        self, token_ids: list[int], *, timeout_s: float, adapted: bool = True
    ) -> list[list[float]]:
        """[engine][token] log-probs at temperature 1 of each of `token_ids` but the first, given
        those before it. `adapted`: with the LoRA adapter. Raises `ProcessLost`.
        """
        asked = [(token_ids, adapted)] * len(self.members)
        return self._call("score", asked, timeout_s).result(timeout_s=timeout_s)

    def hold(self, lost: Sequence[int] = ()) -> list[int]:
        """Begin an attempt to publish without the engines `lost`. Returns those without weights.
        Raises `ProcessLost` if none is left.
        """
        timeout_s = ENGINE_STARTS * self._starts.timeout_s
        self.members, fresh, notices = self.ask("hold", lost, timeout_s=timeout_s)
        for line in notices:
            say(line)
        return fresh

    def replace(self, numbers: Sequence[int]) -> None:
        self.hold(numbers)

    def admit(self) -> int:
        """Let the engines that have the new weights answer requests. Returns how many engines were
        replaced so far.
        """
        replaced, self.preemptions = self.ask("admit")
        return replaced

    def sleep(self, *, timeout_s: float) -> None:
        """Free the engines' GPU memory for a colocated trainer. One that is dead or late is
        replaced later; raises `RuntimeError` if a living one fails.
        """
        self._each("sleep", timeout_s, ENGINE_STARTS * self._starts.timeout_s)

    def wake(self, *, timeout_s: float) -> None:
        """Allocate the memory for weights again; raises as `sleep`."""
        self._each("wake", timeout_s, 0.0)

    def _each(self, method: str, timeout_s: float, start_s: float) -> None:
        if failed := self.ask(method, timeout_s, timeout_s=timeout_s + start_s):
            raise RuntimeError("; ".join(failed))
