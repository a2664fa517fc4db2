"""Processes that are not trainer ranks: Ray, the engines and the rollout service. Rank 0 starts them and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from megarl.contracts import EngineLost
from megarl.placement import Seat
from megarl.rollout.engine import Engine
from megarl.third_party import use_cluster_token
from megarl.types import Prompt, StepBatch

ActorHandle = Any
"""Ray makes these at run time: no type says what methods they have."""

Evaluated = tuple[dict[str, float], list[dict[str, Any]]]

SERVICE = "rollouts"
STOP_TIMEOUT_S = 5.0
"""Patience with an engine or service that is asked to stop, before it is killed."""

ADMIT_TIMEOUT_S = 30.0
"""Patience with the rollout service when it is told of a fresh engine."""

IMPATIENT_STOP_TIMEOUT_S = 0.5
"""The same when the run ends by a signal or an error."""


class Cluster:
    """Ray and what runs on it. A context manager: on leaving, everything it started has ended."""

    def __init__(self, *, namespace: str, token: str, address: str = "") -> None:
        """Start Ray on this machine, or join the cluster at `address` (or in RAY_ADDRESS) that knows `token`."""
        use_cluster_token(token)
        self.namespace = namespace
        self._owned: list[ActorHandle] = []
        self._pids: list[int] = []
        address = address or os.environ.get("RAY_ADDRESS", "")
        # Ray puts handlers of its own in place, which end the process on the spot.
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        options: dict[str, Any] = {"namespace": namespace, "log_to_driver": True, "logging_level": "ERROR"}
        if address:
            ray.init(address=address, **options)
        else:
            ray.init(include_dashboard=False, num_cpus=max(4, os.cpu_count() or 1), object_store_memory=512 * 2**20, **options)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        self.address: str = ray.get_runtime_context().gcs_address

    def start_engines(
        self, seats: Sequence[Seat], *, timeout_s: float, environment: dict[str, str], **arguments: Any
    ) -> EngineGroup:
        """An engine on every seat, starting side by side; `.wait()` for them before use."""

        def start(number: int) -> ActorHandle:
            actor = ray.remote(Engine).options(max_concurrency=100_000, **seats[number].options)
            handle = actor.remote(number=number, environment=environment | seats[number].environment, **arguments)
            self._owned.append(handle)
            return handle

        return EngineGroup(len(seats), start, timeout_s, self._pids)

    def start_service(self, build: Callable[[], Any], *, timeout_s: float) -> ActorHandle:
        """The rollout service, made by `build` inside an actor of its own that every rank can find by name."""
        handle = ray.remote(ServiceActor).options(name=SERVICE, num_cpus=0, max_concurrency=100_000).remote(build)
        self._owned.insert(0, handle)
        _get([handle.build.remote()], timeout_s, "starting the rollout service; raise rollout.engine.start_timeout_s")
        return handle

    def close(self, *, stop_timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the actors, then Ray, then whatever of vLLM's processes is still there."""
        stops = []
        for handle in self._owned:
            with contextlib.suppress(Exception):
                stops.append(handle.stop.remote())
        if stops:
            with contextlib.suppress(Exception):
                ray.wait(stops, num_returns=len(stops), timeout=stop_timeout_s)
        for handle in self._owned:
            with contextlib.suppress(Exception):
                ray.kill(handle)
        self._owned = []
        with contextlib.suppress(Exception):
            ray.shutdown()
        deadline = time.monotonic() + 1.0
        while any(map(_alive, self._pids)) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in filter(_alive, self._pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(stop_timeout_s=STOP_TIMEOUT_S if kind is None else IMPATIENT_STOP_TIMEOUT_S)


class EngineGroup:
    """The engines, from rank 0: each call reaches all of them; it raises within its time limit, naming the engine."""

    def __init__(self, count: int, start: Callable[[int], ActorHandle], timeout_s: float, pids: list[int]) -> None:
        self._start, self._timeout_s, self._pids = start, timeout_s, pids
        self.handles = [start(number) for number in range(count)]
        self._starting = {number: handle.start.remote() for number, handle in enumerate(self.handles)}
        self._own_pids: dict[int, list[int]] = {}
        self._fresh: list[int] = []
        self.service: ActorHandle = None
        """The rollout service, to be told of engines that take another's place."""

    def wait(self) -> float:
        """Until every engine that starts is ready; returns the slowest one's seconds."""
        answers = _get(list(self._starting.values()), self._timeout_s, "starting; raise rollout.engine.start_timeout_s")
        for number, answer in zip(self._starting, answers, strict=True):
            self._own_pids[number] = answer["pids"]
            self._pids += answer["pids"]
        self._starting = {}
        return max(answer["seconds"] for answer in answers)

    def connect(self, info: Callable[[int], dict[str, Any]], *, timeout_s: float) -> None:
        """Tell every engine, by its number, where its weights come from. Raises `EngineLost` where one is dead."""
        try:
            Answers([h.connect.remote(info(n)) for n, h in enumerate(self.handles)]).result(timeout_s=timeout_s)
        except EngineLost as lost:
            if isinstance(lost.__cause__, RayTaskError):  # it lives, and another would say the same
                raise RuntimeError(f"engine {lost.engine} cannot take these weights in: {lost}") from lost
            raise

    def update(self, version: int, *, timeout_s: float) -> Answers:
        """Every engine begins to take in a version."""
        return Answers([h.update.remote(version, timeout_s) for h in self.handles])

    def sleep(self, *, timeout_s: float) -> None:
        """Every engine gives its GPUs' memory away; what it computes stops."""
        _get([h.sleep.remote() for h in self.handles], timeout_s, "raise publish.timeout_s")

    def wake(self, *, timeout_s: float) -> None:
        """Every engine takes its memory back; weights must be published before it generates."""
        _get([h.wake.remote() for h in self.handles], timeout_s, "raise publish.timeout_s")

    def pids(self, number: int) -> list[int]:
        """Processes of an engine, its actor's first."""
        return self._own_pids[number]

    def replace(self, number: int) -> None:
        """End what is left of an engine and start another in its place, ready when this returns."""
        with contextlib.suppress(Exception):
            ray.kill(self.handles[number])
        for pid in filter(_alive, self._own_pids.pop(number, [])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.handles[number] = self._start(number)
        self._starting = {number: self.handles[number].start.remote()}
        self._fresh.append(number)
        self.wait()

    def admit(self) -> None:
        """Fresh engines hold a version now: let the rollout service send them requests."""
        while self._fresh:
            number = self._fresh.pop()
            if self.service is not None:
                told = self.service.use_engine.remote(number, self.handles[number])
                _get([told], ADMIT_TIMEOUT_S, "telling the rollout service")

    def score(self, token_ids: list[int], *, timeout_s: float) -> list[list[float]]:
        """Every engine's log-probs of `token_ids[1:]`."""
        return _get([h.score.remote(token_ids) for h in self.handles], timeout_s, "raise publish.timeout_s")


class Answers:
    """The engines' answers to one update, on their way."""

    def __init__(self, references: list[Any]) -> None:
        self._references = references

    def poll(self) -> None:
        """Raise `EngineLost` where an engine has failed by now."""
        done, _ = ray.wait(self._references, num_returns=len(self._references), timeout=0)
        for reference in done:
            self._take(reference)

    def result(self, *, timeout_s: float) -> list[Any]:
        """Every engine's answer; raises `EngineLost` where one has none within `timeout_s`."""
        ray.wait(self._references, num_returns=len(self._references), timeout=timeout_s)
        self.poll()
        return [self._take(reference) for reference in self._references]

    def settle(self, *, timeout_s: float) -> None:
        """Wait until no engine is at it any more, whatever came of it."""
        ray.wait(self._references, num_returns=len(self._references), timeout=timeout_s)

    def _take(self, reference: Any) -> Any:
        number = self._references.index(reference)
        try:
            return ray.get(reference, timeout=0)
        except GetTimeoutError:
            raise EngineLost(number, "it did not answer in time; raise publish.timeout_s") from None
        except RayTaskError as error:
            raise EngineLost(number, str(error.cause)) from error
        except RayActorError as error:
            raise EngineLost(number, f"its process died ({str(error).splitlines()[0]})") from error


class RemoteEngine:
    """An engine, from the rollout service: calls become coroutines."""

    def __init__(self, handle: ActorHandle) -> None:
        self._handle = handle

    async def generate(self, prompt_ids: list[int], *, seed: int, max_tokens: int, temperature: float) -> Any:
        """See `Engine.generate`. Raises `EngineLost` where its process is gone."""
        try:
            return await self._handle.generate.remote(prompt_ids, seed=seed, max_tokens=max_tokens, temperature=temperature)
        except RayActorError as error:
            raise EngineLost(-1, f"its process died ({str(error).splitlines()[0]})") from error


class ServiceActor:
    """The shell around `RolloutService`: it is built where it runs, since prompts and verifiers need not travel."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build

    async def build(self) -> None:
        self._service, self._environment = self._build()
        await self._environment.start()

    async def start(self) -> None:
        await self._service.start()

    async def take(self, step: int, data_rank: int) -> StepBatch:
        return await self._service.take(step, data_rank)

    async def release(self, version: int) -> None:
        await self._service.release(version)

    async def cursor(self, step: int) -> int:
        return await self._service.cursor(step)

    async def evaluate(self, prompts: list[Prompt], temperature: float, name: str) -> Evaluated:
        return await self._service.evaluate(prompts, temperature, name)

    async def use_engine(self, number: int, handle: ActorHandle) -> None:
        self._service.use_engine(number, RemoteEngine(handle))

    async def stop(self) -> None:
        await self._service.stop()
        await self._environment.close()


class RolloutClient:
    """One rank's end of the rollout service; every call has a deadline."""

    def __init__(self, data_rank: int, *, deadline_s: float) -> None:
        self._service = ray.get_actor(SERVICE)
        self._data_rank, self._deadline_s = data_rank, deadline_s

    def start(self) -> None:
        """Let the service begin."""
        self._ask(self._service.start.remote(), "starting rollouts")

    def take(self, step: int) -> StepBatch:
        """This rank's share of step `step`."""
        return self._ask(self._service.take.remote(step, self._data_rank), f"waiting for the rollouts of step {step}")

    def release(self, step: int) -> None:
        """Step `step` is trained and version `step + 1` is on the engines."""
        self._ask(self._service.release.remote(step + 1), f"releasing step {step}")

    def cursor(self, step: int) -> int:
        """First ordinal not yet trained after `step` steps."""
        return self._ask(self._service.cursor.remote(step), f"reading the prompt cursor of step {step}")

    def evaluate(self, prompts: list[Prompt], temperature: float, name: str) -> Evaluated:
        """One scored answer to each prompt: (metrics, transcripts)."""
        return self._ask(self._service.evaluate.remote(prompts, temperature, name), "evaluating")

    def _ask(self, reference: Any, doing: str) -> Any:
        return _get([reference], self._deadline_s, doing)[0]


def _get(references: list[Any], timeout_s: float, hint: str) -> list[Any]:
    """`ray.get` with a deadline, and errors that say which of several failed and why."""
    deadline = time.monotonic() + timeout_s
    answers = []
    for number, reference in enumerate(references):
        which = f"engine {number}" if len(references) > 1 else "the other process"
        try:
            answers.append(ray.get(reference, timeout=max(0.0, deadline - time.monotonic())))
        except GetTimeoutError:
            raise RuntimeError(f"{which} did not answer within {timeout_s:g} s ({hint})") from None
        except RayTaskError as error:
            raise RuntimeError(f"{which} failed ({hint}): {error.cause}") from error
        except RayActorError as error:
            raise RuntimeError(f"{which} died ({hint}): {error}") from error
    return answers


def _alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
