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

from megarl.cluster.answers import Answers
from megarl.cluster.asking import ActorDied, ask, ask_service, kill_actor
from megarl.cluster.processes import Process, end, with_descendants
from megarl.console import say
from megarl.errors import EngineLost
from megarl.rollout.config import ENGINE_STARTS

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

    def __init__(
        self,
        count: int,
        start: Callable[[int], ActorHandle],
        timeout_s: float,
        *,
        fewest: int | None = None,
    ) -> None:
        """`start(number)` starts the actor of an engine. `timeout_s`: seconds that an engine may
        take to be ready. `fewest`: engines that a publication needs, and waits for; the run goes on
        while as many can be started. All by default.
        """
        self._start, self._timeout_s = start, timeout_s
        self._fewest = count if fewest is None else fewest
        self.members = list(range(count))
        """Numbers of the engines that take part in the present publication, ascending."""
        self.given_up: set[int] = set()
        """Engines without which the run goes on, since they cannot be started."""
        self.started_at: dict[int, float] = {}
        """{engine: time at which the engine that has this number was started, if it replaces
        another}, by `time.monotonic`."""
        self._failures: dict[int, int] = {}
        """{engine: starts in a row that have failed}."""
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
                raise self._late(f"engine {number} did not answer")
        answer = ask({f"engine {number}": reference}, START_POLL_S, "starting")[0]
        del self._starting[number]
        self._failures.pop(number, None)
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

    @property
    def replaceable(self) -> set[int]:
        """Numbers of the dead engines in whose place others are to be started."""
        return self.dead - self.given_up

    @property
    def missing(self) -> int:
        """Number of engines that do not take part in the present publication."""
        return len(self.handles) - len(self.members)

    def start_failed(self, number: int, problem: str) -> None:
        """Start an engine again whose start has failed. After `ENGINE_STARTS` failures in a row the
        run goes on without the engine; raises `RuntimeError` if too few are left for that.
        """
        self._failures[number] = self._failures.get(number, 0) + 1
        if self._failures[number] < ENGINE_STARTS:
            say(f"megarl: {problem}; it is started again")
            self.restart([number])
            return
        reason = f"{ENGINE_STARTS} starts of engine {number} failed; the last: {problem}"
        self.kill(number, self.handles[number])
        left = len(self.handles) - len(self.given_up) - 1
        if left < self._fewest:
            raise RuntimeError(reason)
        with self.lock:
            self.given_up.add(number)
            self._fresh.discard(number)
        say(
            f"megarl: warning: {reason}; the run goes on with {left} of {len(self.handles)} engines"
        )

    def is_one_host(self) -> bool:
        """Whether the Ray cluster has only this host."""
        return sum(node["Alive"] for node in ray.nodes()) == 1

    def connect(self, info: Callable[[int], dict[str, Any]], *, timeout_s: float) -> None:
        """Send each member `info(position)`: where it receives its weights from
        (`Engine.connect`). The position is that among `members`.

        Raises `EngineLost` if an engine is dead or late, and `RuntimeError` if a living engine
        cannot receive weights.
        """
        answers = Answers(
            [handle.connect.remote(info(position)) for position, handle in self._numbered()]
        )
        refused = answers.refused(timeout_s=timeout_s)
        if refused:  # it lives, and another in its place would say the same
            raise RuntimeError(
                "; ".join(
                    f"engine {self.members[position]} cannot take weights in: {why}"
                    for position, why in refused.items()
                )
            )

    def update(self, version: int, *, timeout_s: float) -> Answers:
        """Have every member start to receive weights of `version`; returns at once with the
        `Answers`.
        """
        return Answers([handle.update.remote(version, timeout_s) for _, handle in self._numbered()])

    def load_adapter(self, version: int, files: dict[str, bytes], *, timeout_s: float) -> Answers:
        """Have every member start to load the adapters in `files` (PEFT's format) as weights of
        `version`; returns at once with the `Answers`.
        """
        shared = ray.put(files)
        return Answers(
            [handle.load_adapter.remote(version, shared) for _, handle in self._numbered()]
        )

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

    def score(
        self, token_ids: list[int], *, timeout_s: float, adapted: bool = True
    ) -> list[list[float]]:
        """For each member, the log-probs of `token_ids[1:]`, at temperature 1; with `adapted` False
        without LoRA adapters. Raises `EngineLost` if an engine is dead or late.
        """
        answers = Answers(
            [handle.score.remote(token_ids, adapted) for _, handle in self._numbered()]
        )
        return answers.result(timeout_s=timeout_s)

    def processes(self) -> list[Process]:
        """The processes of all engines."""
        return [process for found in self._processes.values() for process in found]

    def pids(self, number: int) -> list[int]:
        """Process ids of engine `number`: its Ray actor first, then vLLM's processes."""
        return [pid for _, pid, _ in self._processes[number]]

    def hold(self) -> list[int]:
        """From now on only the caller replaces engines. Begins to start new ones in the place of
        those that are dead. `members` are then the engines that are ready; waits while they are
        fewer than the publication needs. Returns the numbers of those that have no weights yet.
        """
        with self.lock:
            self.is_held = True
            self.restart(sorted(self.replaceable))
        self._find_members()
        return sorted(self._fresh & set(self.members))

    def _find_members(self) -> None:
        """Set `members`; see `hold`. Raises `RuntimeError` if too few engines are ready within one
        start's time limit, or can be started.
        """
        if self._fewest == len(self.handles):
            self.wait()
            self.members = list(range(len(self.handles)))
            return
        deadline = time.monotonic() + self._timeout_s
        while True:
            for number, reference in self.starting.items():
                if ray.wait([reference], timeout=0)[0]:
                    try:
                        self.finish_start(number, START_POLL_S)
                    except RuntimeError as error:
                        self.start_failed(number, str(error))
            away = self.dead | self.starting.keys()
            self.members = [one for one in range(len(self.handles)) if one not in away]
            if len(self.members) >= self._fewest:
                return
            if self.broken:
                raise RuntimeError(f"no engine can start: {self.broken}")
            if time.monotonic() > deadline:
                raise self._late("no engine is ready")
            ray.wait(list(self.starting.values()), timeout=START_POLL_S)

    def _late(self, what: str) -> RuntimeError:
        """The error of a start that took too long. `what`: what has not happened in time."""
        return RuntimeError(
            f"{what} within {self._timeout_s:g} s (starting; raise rollout.engine.start_timeout_s)"
        )

    def _numbered(self) -> list[tuple[int, ActorHandle]]:
        """(position, actor) of each member."""
        return list(enumerate(self.handles[number] for number in self.members))

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
                self.started_at[number] = time.monotonic()
                self._replaced += 1
                self.dead.discard(number)

    def replace(self, numbers: Sequence[int]) -> None:
        """Kill the processes that are left of the engines `numbers`, and begin to start new engines
        with the same numbers, all at once. Waits while fewer engines are ready than a publication
        needs; `members` are then the engines that are ready.
        """
        self.restart(numbers)
        self._find_members()

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
        fresh = sorted((self._fresh & set(self.members)) - set(self._starting) - self.dead)
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
