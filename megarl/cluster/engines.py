"""The engines as rank 0 and the rollout service see them: calls with deadlines, losses by number,
processes surely theirs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from megarl.cluster.asking import ActorDied, ask, ask_service, kill_actor
from megarl.cluster.processes import Process, end, with_descendants
from megarl.console import say
from megarl.errors import EngineLost
from megarl.rollout.config import ENGINE_STARTS
from megarl.weight_sync.transports.base import GIVEN_UP, Aborted

ActorHandle = Any
"""A Ray actor handle. The type is `Any`, since Ray creates the methods at run time."""

ADMIT_TIMEOUT_S = 120.0
"""Seconds the rollout service has to accept an engine that replaces a dead one."""

START_POLL_S = 0.5
"""Seconds between two looks whether an engine can still be started."""


class EngineGroup:
    """All inference engines of a run, as rank 0 controls them.

    Each call to the engines raises within its time limit, naming the engine that failed. Two
    threads of rank 0 use the group: the training loop, and the supervisor
    (`megarl.cluster.supervisor`). While the loop publishes, or a colocated trainer has the GPUs
    (`hold`), only the loop replaces engines; otherwise only the supervisor does.
    """

    def __init__(self, count: int, start: Callable[[int], ActorHandle], timeout_s: float) -> None:
        self._start, self._timeout_s = start, timeout_s
        self.handles = [start(number) for number in range(count)]
        self._starting = {
            number: handle.start.remote() for number, handle in enumerate(self.handles)
        }
        self._processes: dict[int, list[Process]] = {}
        self._fresh: set[int] = set()
        """Engines that have replaced others and that the rollout service does not know yet."""
        self.dead: set[int] = set()
        """Engines that were ended and are not yet started again."""
        self._replaced = 0
        self._is_under_way = False
        """Whether all engines have been ready once."""
        self._born = {number: handle.process.remote() for number, handle in enumerate(self.handles)}
        """{engine number: object reference of its actor's process}."""
        self.broken = ""
        """Why no engine can be started any more; empty as long as it is possible."""
        self.is_held = False
        self.lock = threading.RLock()
        """Held by whoever replaces engines or changes who may."""
        self.service: ActorHandle = None
        """The rollout service, which `admit` tells of replaced engines; None for a run without one.
        """

    def wait(self) -> float:
        """Wait until every starting engine is ready. An engine whose process dies meanwhile, or, in
        a run that is under way, whose start fails, is started again, up to `ENGINE_STARTS` times,
        all within one start's time limit. Returns the seconds that the slowest took.
        """
        slowest, deadline = 0.0, time.monotonic() + self._timeout_s
        again: type[RuntimeError] = RuntimeError if self._is_under_way else ActorDied
        for number in sorted(self._starting):
            for attempt in range(1, ENGINE_STARTS + 1):
                left_s = deadline - time.monotonic()
                try:
                    slowest = max(slowest, self.finish_start(number, left_s))
                    break
                except again as error:
                    late = time.monotonic() > deadline
                    if attempt == ENGINE_STARTS or late or self.broken:
                        raise
                    say(f"megarl: {error}; it is started again")
                    self.restart([number])
        self._is_under_way = True
        return slowest

    def finish_start(self, number: int, timeout_s: float) -> float:
        """Wait until the starting engine `number` is ready; returns its start-up time in seconds.
        Raises `ActorDied` if its process dies, and `RuntimeError` if it cannot start or is late.
        """
        reference, deadline = self._starting[number], time.monotonic() + timeout_s
        while not ray.wait([reference], timeout=START_POLL_S)[0]:
            if self.broken:
                raise RuntimeError(f"engine {number} cannot start: {self.broken}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"engine {number} did not answer within {self._timeout_s:g} s (starting; raise"
                    " rollout.engine.start_timeout_s)"
                )
        answer = ask({f"engine {number}": reference}, START_POLL_S, "starting")[0]
        del self._starting[number]
        self._processes[number] = [(host, pid, born) for host, pid, born in answer["processes"]]
        return answer["seconds"]

    @property
    def starting(self) -> dict[int, Any]:
        """{engine number: object reference of its start's result} of engines that start."""
        return dict(self._starting)

    @property
    def fresh(self) -> set[int]:
        """Numbers of the engines that have replaced others and do not serve requests yet."""
        return set(self._fresh)

    def is_one_host(self) -> bool:
        """Whether the Ray cluster has only this host."""
        return sum(node["Alive"] for node in ray.nodes()) == 1

    def connect(self, info: Callable[[int], dict[str, Any]], *, timeout_s: float) -> None:
        """Send each engine `info(number)`: where it receives its weights from (`Engine.connect`).

        Raises `EngineLost` if an engine is dead or late, and `RuntimeError` if a living engine
        cannot receive weights.
        """
        answers = Answers(
            [handle.connect.remote(info(number)) for number, handle in enumerate(self.handles)]
        )
        refused = answers.refused(timeout_s=timeout_s)
        if refused:  # it lives, and another in its place would say the same
            raise RuntimeError(
                "; ".join(
                    f"engine {number} cannot take weights in: {why}"
                    for number, why in refused.items()
                )
            )

    def update(self, version: int, *, timeout_s: float) -> Answers:
        """Have every engine start to receive weights of `version`; returns at once with the
        `Answers`.
        """
        return Answers([handle.update.remote(version, timeout_s) for handle in self.handles])

    def load_adapter(self, version: int, files: dict[str, bytes], *, timeout_s: float) -> Answers:
        """Have every engine start to load the adapters in `files` (PEFT's format) as weights of
        `version`; returns at once with the `Answers`.
        """
        shared = ray.put(files)
        return Answers([handle.load_adapter.remote(version, shared) for handle in self.handles])

    def sleep(self, *, timeout_s: float) -> None:
        """Have every engine free its GPU memory; generation pauses. An engine that is lost is
        ended, and replaced by the next publication. No engine is started until then.
        """
        with self.lock:
            self.is_held = True
        self.wait()
        self._each("sleep", timeout_s)

    def wake(self, *, timeout_s: float) -> None:
        """Have every engine allocate its GPU memory again, without the weights: publish a version
        before generation. An engine that is lost is ended, and replaced by that publication.
        """
        self._each("wake", timeout_s)

    def score(self, token_ids: list[int], *, timeout_s: float) -> list[list[float]]:
        """For each engine, the log-probs of `token_ids[1:]`, at temperature 1. Raises `EngineLost`
        if an engine is dead or late.
        """
        answers = Answers([handle.score.remote(token_ids) for handle in self.handles])
        return answers.result(timeout_s=timeout_s)

    def processes(self) -> list[Process]:
        """The processes of all engines."""
        return [process for found in self._processes.values() for process in found]

    def pids(self, number: int) -> list[int]:
        """Process ids of engine `number`: its Ray actor first, then vLLM's processes."""
        return [pid for _, pid, _ in self._processes[number]]

    def hold(self) -> list[int]:
        """From now on only the caller replaces engines. Starts those that are dead, and waits for
        all that are being started; returns the numbers of those that have no weights yet.
        """
        with self.lock:
            self.is_held = True
            self.restart(sorted(self.dead))
        self.wait()
        return sorted(self._fresh)

    def let_go(self) -> None:
        """End what `hold` has begun: from now on the supervisor replaces engines."""
        with self.lock:
            self.is_held = False

    def kill(self, number: int, handle: ActorHandle) -> None:
        """Kill the processes of engine `number`, if its actor still is `handle`."""
        with self.lock:
            if self.handles[number] is not handle:
                return
            self.dead.add(number)
            self._starting.pop(number, None)
            processes = self._processes.pop(number, None) or self._begun(number)
        kill_actor(handle)
        end(processes, patience_s=0.0)

    def restart(self, numbers: Sequence[int]) -> None:
        """Kill what is left of the engines `numbers`, and begin to start new ones under the same
        numbers.
        """
        for number in numbers:
            self.kill(number, self.handles[number])
        with self.lock:
            for number in numbers:
                self.handles[number] = self._start(number)
                self._starting[number] = self.handles[number].start.remote()
                self._born[number] = self.handles[number].process.remote()
                self._fresh.add(number)
                self._replaced += 1
                self.dead.discard(number)

    def replace(self, numbers: Sequence[int]) -> None:
        """Kill what is left of the engines `numbers` and start new ones in parallel under the same
        numbers; returns once they are ready.
        """
        self.restart(numbers)
        self.wait()

    def _begun(self, number: int) -> list[Process]:
        """The processes so far of engine `number`, whose start has not ended."""
        with contextlib.suppress(Exception):
            return with_descendants(ray.get(self._born[number], timeout=0))
        return []

    def admit(self) -> int:
        """Hand the replaced engines to the rollout service, which then sends them requests. Call it
        once they have the current weights. Returns how many engines were replaced in the run so
        far.
        """
        fresh = sorted(self._fresh - set(self._starting) - self.dead)
        if self.service is not None:
            for number in fresh:
                tell = partial(self.service.use_engine.remote, number, self.handles[number])
                ask_service(tell, ADMIT_TIMEOUT_S, "hearing of fresh engines")
        self._fresh.difference_update(fresh)
        return self._replaced

    def _each(self, method: str, timeout_s: float) -> None:
        """Call `method` of every engine and wait. Engines that are dead or late are killed. Raises
        `RuntimeError` if a living engine fails.
        """
        handles = list(self.handles)
        answers = Answers([getattr(handle, method).remote() for handle in handles])
        try:
            refused = answers.refused(timeout_s=timeout_s)
        except EngineLost as lost:
            say(f"megarl: {method} of engines {lost.engines}: {lost}; they are replaced")
            for number in lost.engines:
                self.kill(number, handles[number])
            return
        if refused:
            raise RuntimeError(
                "; ".join(f"engine {number} failed: {why}" for number, why in refused.items())
            )


class Answers:
    """Pending results of one call to every engine."""

    def __init__(self, references: list[Any]) -> None:
        self._references = references

    def poll(self) -> None:
        """Check the results there are, without waiting. Raises `EngineLost` if an engine failed,
        and `Aborted` if an engine only stopped because it was told to abort.
        """
        self._check(self._done(0.0))

    def result(self, *, timeout_s: float) -> list[Any]:
        """Wait for the results of all engines, by engine number. Raises like `poll`; raises
        `EngineLost` if an engine has no result within `timeout_s`.
        """
        self._done(timeout_s)
        return self._check(range(len(self._references)))

    def refused(self, *, timeout_s: float) -> dict[int, str]:
        """Wait for all engines: {engine number: error message} of engines that are alive but
        failed.

        Raises `EngineLost` if an engine is dead, or has no result within `timeout_s`.
        """
        self._done(timeout_s)
        found = {number: self._outcome(number) for number in range(len(self._references))}
        self._raise({number: why for number, (_, why, is_lost) in found.items() if is_lost})
        return {number: why for number, (_, why, _) in found.items() if why}

    def settle(self, *, timeout_s: float) -> list[int]:
        """Wait until the call has ended on every engine, at most `timeout_s`. Returns the numbers
        of the engines where it failed or still runs.
        """
        self._done(timeout_s)
        found = {number: self._outcome(number)[1] for number in range(len(self._references))}
        return [number for number, why in found.items() if why and GIVEN_UP not in why]

    def _done(self, timeout_s: float) -> list[int]:
        done, _ = ray.wait(self._references, num_returns=len(self._references), timeout=timeout_s)
        return [self._references.index(reference) for reference in done]

    def _check(self, numbers: Sequence[int]) -> list[Any]:
        found = {number: self._outcome(number) for number in numbers}
        self._raise(
            {number: why for number, (_, why, _) in found.items() if why and GIVEN_UP not in why}
        )
        if any(why for _, why, _ in found.values()):
            raise Aborted(GIVEN_UP)
        return [answer for answer, _, _ in found.values()]

    def _raise(self, lost: dict[int, str]) -> None:
        if lost:
            raise EngineLost("; ".join(dict.fromkeys(lost.values())), tuple(lost))

    def _outcome(self, number: int) -> tuple[Any, str, bool]:
        """(result, error message or "", whether the engine is dead or late) of engine `number`."""
        try:
            return ray.get(self._references[number], timeout=0), "", False
        except GetTimeoutError:
            return None, "it did not answer in time; raise weight_sync.timeout_s", True
        except RayTaskError as error:
            return None, str(error.cause), is_dead(error)
        except RayActorError as error:
            return None, f"its process died ({str(error).splitlines()[0]})", True


def is_dead(error: RayTaskError) -> bool:
    """Whether an engine's error means that one of vLLM's processes is dead. Compares the
    exception's name, since vLLM must not be imported here.
    """
    return type(error.cause).__name__ == "EngineDeadError"
