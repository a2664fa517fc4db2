"""All inference engines of a run as one object on trainer rank 0: calls to all of them with
deadlines, errors that number the engines that are lost, and the start of new engines in their
place.
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
from megarl.cluster.asking import KILL_S, POLL_S, ActorDied, ask, ask_service, done_within
from megarl.cluster.processes import Process, end, with_descendants
from megarl.console import say
from megarl.errors import EngineLost
from megarl.rollout.config import ENGINE_STARTS

ActorHandle = Any
"""A Ray actor handle. The type is `Any`, since Ray creates the methods at run time."""


class EngineGroup:
    """All inference engines of a run, Ray actors numbered from 0, as trainer rank 0 controls them.

    Each call to the engines ends within its time limit, and its error names the engine that failed.
    A publication is the sending of the trainer's weights to all engines that run. Two threads of
    rank 0 use this object: the training loop, and the supervisor, which looks for dead engines
    (`megarl.cluster.supervisor`). From `hold` or `sleep` to `let_go` only the training loop starts
    engines in the place of dead ones; at other times only the supervisor does.
    """

    def __init__(
        self,
        count: int,
        start: Callable[[int], ActorHandle],
        timeout_s: float,
        *,
        fewest: int | None = None,
    ) -> None:
        """Begin to start `count` engines, without waiting. `start(number)` makes the Ray actor of
        an engine and returns its handle. `timeout_s`: seconds that an engine may take to be ready.
        `fewest`: number of engines that a publication needs and waits for; the run goes on while as
        many can be started. None: all.
        """
        self._start, self._timeout_s = start, timeout_s
        self._fewest = count if fewest is None else fewest
        self.members = list(range(count))
        """Numbers of the engines that get weights in the present publication, ascending."""
        self.given_up: set[int] = set()
        """Numbers of the engines without which the run goes on, since they cannot be started."""
        self._failures = dict.fromkeys(range(count), 0)
        """{engine: starts in a row that have failed}."""
        self.handles = [start(number) for number in range(count)]
        self.starting = {
            number: handle.start.remote() for number, handle in enumerate(self.handles)
        }
        """{engine: Ray object reference} of the engines that are starting. A reference is ready
        when the start has ended: {"processes": the engine's, "seconds": that it took}, or the
        start's error."""
        self._started_at = dict.fromkeys(self.starting, time.monotonic())
        self._processes: dict[int, list[Process]] = {}
        self.fresh: set[int] = set()
        """Numbers of the engines that have replaced others and get no requests yet from the rollout
        service, because they lack the current weights or the service was not told of them."""
        self.dead: set[int] = set()
        """Numbers of the engines that have died or were killed, and are not yet started again."""
        self._replaced = 0
        self.preemptions = 0
        """Times that engines have pushed a running request out of a full key-value cache so far, as
        the supervisor has heard."""
        self._born = {number: handle.process.remote() for number, handle in enumerate(self.handles)}
        """{engine number: object reference of its actor's process}."""
        self._is_under_way = False
        """Whether all engines have been ready once."""
        self.broken = ""
        """Why no engine can be started any more; empty as long as it is possible."""
        self.is_held = False
        self.lock = threading.RLock()
        """Held by the thread that starts or kills engines, or changes `is_held`."""
        self.service: ActorHandle = None
        """The rollout service, which `admit` tells of replaced engines; None for a run without one.
        """

    def wait(self) -> float:
        """Block until every starting engine is ready. An engine whose process dies meanwhile is
        started again, up to `ENGINE_STARTS` (3) times; so is, after the first call, one whose start
        fails in another way. Returns the seconds of the slowest start. Raises `RuntimeError` if an
        engine is not ready within one start's time limit, or has failed too often.
        """
        slowest, deadline = 0.0, time.monotonic() + self._timeout_s
        again: type[RuntimeError] = RuntimeError if self._is_under_way else ActorDied
        for number in range(len(self.handles)):
            while number in self.starting:
                left_s = deadline - time.monotonic()
                try:
                    slowest = max(slowest, self.finish_start(number, left_s))
                except again as error:
                    if time.monotonic() > deadline or self.broken:
                        raise
                    self.start_failed(number, str(error), fewest=len(self.handles))
        self._is_under_way = True
        return slowest

    def finish_start(self, number: int, timeout_s: float) -> float:
        """Block until the starting engine `number` is ready, at most `timeout_s` seconds; returns
        its start-up time in seconds. Raises `ActorDied` if its process dies, and `RuntimeError` if
        it cannot start or is late.
        """
        reference, deadline = self.starting[number], time.monotonic() + timeout_s
        while not ray.wait([reference], timeout=POLL_S)[0]:
            if self.broken:
                raise RuntimeError(f"engine {number} cannot start: {self.broken}")
            if time.monotonic() > deadline:
                raise self._late(f"engine {number} did not answer")
        answer = ask(f"engine {number}", reference, POLL_S, "starting")
        del self.starting[number]
        self._failures[number] = 0
        self._processes[number] = answer["processes"]
        return answer["seconds"]

    def follow_starts(self) -> None:
        """Note, without waiting, which engines have finished starting, and start those again whose
        start has failed or takes too long. Raises `RuntimeError` if fewer engines than the run
        needs can be started.
        """
        for number, reference in list(self.starting.items()):
            if ray.wait([reference], timeout=0)[0]:
                try:
                    seconds = self.finish_start(number, POLL_S)
                    say(f"megarl: engine {number} is ready again after {seconds:.0f} s")
                except RuntimeError as error:
                    self.start_failed(number, str(error))
            elif time.monotonic() - self._started_at[number] > self._timeout_s:
                self.start_failed(number, str(self._late(f"engine {number} did not answer")))

    @property
    def replaceable(self) -> set[int]:
        """Numbers of the dead engines that are to be replaced: all but those given up after 3
        failed starts in a row.
        """
        return self.dead - self.given_up

    @property
    def missing(self) -> int:
        """Number of the run's engines that are dead or starting, and so do not receive the weights
        that the trainer is sending.
        """
        return len(self.handles) - len(self.members)

    def start_failed(self, number: int, problem: str, fewest: int | None = None) -> None:
        """Start engine `number` again after a failed start, without waiting; or give the engine up
        after 3 failures in a row, and go on without it. `problem`: why the start failed, a sentence
        for the log. Raises `RuntimeError` if fewer than `fewest` engines are left then (None: the
        number that must be ready to receive weights).
        """
        self._failures[number] += 1
        if self._failures[number] < ENGINE_STARTS:
            say(f"megarl: {problem}; it is started again")
            self.restart([number])
            return
        reason = f"{ENGINE_STARTS} starts of engine {number} failed; the last: {problem}"
        self.kill(number, self.handles[number])
        left = len(self.handles) - len(self.given_up) - 1
        if left < (self._fewest if fewest is None else fewest):
            raise RuntimeError(reason)
        with self.lock:
            self.given_up.add(number)
            self.fresh.discard(number)
        say(
            f"megarl: warning: {reason}; the run goes on with {left} of {len(self.handles)} engines"
        )

    def is_one_host(self) -> bool:
        """Whether the Ray cluster has only one node, this host, so that all engines run here."""
        return sum(node["Alive"] for node in ray.nodes()) == 1

    def connect(self, info: Callable[[int], dict[str, Any]], *, timeout_s: float) -> None:
        """Tell each engine of `members`, those that are to get weights, where its weights come
        from, and block until all have connected. `info(position)`: the dict for the engine at this
        index of `members`, with "transport" (name of the way to send weights),
        "spec" (fields of a `RouteSpec`: how trainer and engines split the model), "engine" (the
        index), "init_info" (addresses and other data of the sender), and "table" (JSON text that
        lists the model's parameters).

        Raises `EngineLost` if an engine is dead or has no answer within `timeout_s` seconds, and
        `RuntimeError` if a living engine cannot receive weights.
        """
        handles = enumerate(self._members())
        answers = Answers([handle.connect.remote(info(position)) for position, handle in handles])
        refused = answers.refused(timeout_s=timeout_s)
        if refused:  # it lives, and another in its place would say the same
            raise RuntimeError(
                "; ".join(
                    f"engine {self.members[position]} cannot take weights in: {why}"
                    for position, why in refused.items()
                )
            )

    def update(self, version: int, *, timeout_s: float) -> Answers:
        """Have every engine of `members` (those that are to get weights) begin to receive the
        weights of `version`; returns at once. `result` of the returned `Answers` waits, and gives
        for each engine a list with a dict for each of its ranks: "version", "digests" (an int64 for
        each tensor), "seconds" and "problem" (error message or ""). An engine itself gives up after
        `timeout_s` seconds.
        """
        return Answers([one.update.remote(version, timeout_s) for one in self._members()])

    def load_adapter(self, version: int, files: dict[str, bytes], *, timeout_s: float) -> Answers:
        """Have every engine of `members` (those that are to get weights) begin to load LoRA
        adapters as the weights of `version`; returns at once. `files`: {file name: content} in
        PEFT's format. `result` of the returned `Answers` waits, and gives for each engine
        {"version", "receipt": digest of the adapters, as hex text}. `timeout_s` is unused.
        """
        shared = ray.put(files)
        return Answers([one.load_adapter.remote(version, shared) for one in self._members()])

    def sleep(self, *, timeout_s: float) -> None:
        """Have every engine free its GPU memory for a colocated trainer, and block until it has:
        first until all starting engines are ready, then at most `timeout_s` seconds. Generation
        pauses until the trainer sends weights again. An engine that is dead or late is killed, and
        replaced when weights are sent; until then no engine is started. Raises `RuntimeError` if a
        living engine fails.
        """
        with self.lock:
            self.is_held = True
        self.wait()
        self._each("sleep", timeout_s)

    def wake(self, *, timeout_s: float) -> None:
        """Have every engine allocate its GPU memory for weights again, uninitialised, and block
        until it has, at most `timeout_s` seconds. An engine that dies or is late here is killed,
        and replaced when the trainer next sends weights; generation goes on after that. Raises
        `RuntimeError` if a living engine fails.
        """
        self._each("wake", timeout_s)

    def score(
        self, token_ids: list[int], *, timeout_s: float, adapted: bool = True
    ) -> list[list[float]]:
        """Have every engine of `members` (those that get the present weights) score one sequence:
        for each engine, the log-probs of `token_ids[1:]`, each given the tokens before it, at
        temperature 1. With `adapted` False without LoRA adapters. Raises `EngineLost` if an engine
        is dead, fails or has no answer within `timeout_s` seconds.
        """
        answers = Answers([one.score.remote(token_ids, adapted) for one in self._members()])
        return answers.result(timeout_s=timeout_s)

    def processes(self) -> list[Process]:
        """The processes of all engines that are ready, each as (host name, process id, start time
        in seconds since 1970).
        """
        return [process for found in self._processes.values() for process in found]

    def pids(self, number: int) -> list[int]:
        """Process ids of engine `number`, which is ready: its Ray actor first, then vLLM's
        processes.
        """
        return [pid for _, pid, _ in self._processes[number]]

    def hold(self) -> list[int]:
        """Begin to send a weight version to the engines: from now until `let_go` only the caller
        starts engines in the place of dead ones, not the supervisor thread. Begins to start new
        ones for those that are dead, and sets `members` to the engines that are ready; blocks while
        these are fewer than the run needs. Returns the numbers of the engines of `members` that are
        new and have no weights yet. Raises `RuntimeError` if too few engines can be started in
        time.
        """
        with self.lock:
            self.is_held = True
        self._find_members()
        return sorted(self.fresh & set(self.members))

    def _find_members(self) -> None:
        """Set `members`; see `hold`. Raises `RuntimeError` if too few engines are ready within one
        start's time limit, or can be started.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            self.restart(sorted(self.replaceable))
            self.follow_starts()
            away = self.dead | self.starting.keys()
            self.members = [one for one in range(len(self.handles)) if one not in away]
            if len(self.members) >= self._fewest:
                return
            if self.broken:
                raise RuntimeError(f"an engine cannot start: {self.broken}")
            if time.monotonic() > deadline:
                first = f"engine {min(away)} did not answer"
                raise self._late(first if self.members else "no engine is ready")
            ray.wait(list(self.starting.values()), timeout=POLL_S)

    def _late(self, what: str) -> RuntimeError:
        """The error of a start that took too long. `what`: what has not happened in time."""
        return RuntimeError(
            f"{what} within {self._timeout_s:g} s (starting; raise rollout.engine.start_timeout_s)"
        )

    def _members(self) -> list[ActorHandle]:
        """The actor of each member."""
        return [self.handles[number] for number in self.members]

    def let_go(self) -> None:
        """End what `hold` or `sleep` began: from now on the supervisor, a thread of rank 0 that
        looks for dead engines, starts new engines in the place of dead ones again.
        """
        with self.lock:
            self.is_held = False

    def kill(self, number: int, handle: ActorHandle) -> None:
        """Kill the processes of engine `number`, which then counts as dead and is not started again
        by this call. Does nothing if another actor than `handle` has this number by now.
        """
        with self.lock:
            if self.handles[number] is not handle:
                return
            self.dead.add(number)
            self.starting.pop(number, None)
            processes = self._processes.pop(number, None) or self._begun(number)
        done_within(KILL_S, partial(ray.kill, handle))
        end(processes, patience_s=0.0)

    def restart(self, numbers: Sequence[int]) -> None:
        """Kill what is left of the engines with these `numbers`, and begin to start new ones under
        the same numbers, without waiting until they are ready.
        """
        for number in numbers:
            self.kill(number, self.handles[number])
        with self.lock:
            for number in numbers:
                self.handles[number] = self._start(number)
                self.starting[number] = self.handles[number].start.remote()
                self._born[number] = self.handles[number].process.remote()
                self.fresh.add(number)
                self._started_at[number] = time.monotonic()
                self._replaced += 1
                self.dead.discard(number)

    def replace(self, numbers: Sequence[int]) -> None:
        """Kill what is left of the engines with these `numbers`, and begin to start new engines
        under the same numbers, all at once. Sets `members` to the engines that are ready; blocks
        while these are fewer than the run needs. Raises `RuntimeError` if too few engines can be
        started in time.
        """
        self.restart(numbers)
        self._find_members()

    def _begun(self, number: int) -> list[Process]:
        """The processes so far of engine `number`, whose start has not ended."""
        with contextlib.suppress(Exception):
            return with_descendants(ray.get(self._born[number], timeout=0))
        return []

    def admit(self) -> int:
        """Tell the rollout service to send requests to the engines of `members` (those that get the
        present weights) that have replaced others. Call it once they have the current weights;
        blocks until the service has answered. Returns how many engines were replaced in the run so
        far.
        """
        fresh = sorted((self.fresh & set(self.members)) - self.starting.keys() - self.dead)
        if self.service is not None:
            for number in fresh:
                tell = partial(self.service.use_engine.remote, number, self.handles[number])
                ask_service(tell, "hearing of fresh engines")
        self.fresh.difference_update(fresh)
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
            failed = (f"engine {number} failed: {why}" for number, why in refused.items())
            raise RuntimeError("; ".join(failed))
