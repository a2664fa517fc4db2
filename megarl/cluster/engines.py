"""The engines as rank 0 and the rollout service see them: calls with deadlines, losses by number,
processes surely theirs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from megarl.errors import EngineLost
from megarl.weight_sync.transports.base import GIVEN_UP, Aborted

ActorHandle = Any
"""Ray makes these at run time: no type says what methods they have."""

Process = tuple[str, int, float]
"""(host, process id, time of birth): a number alone may be another's on another host, or later."""

ADMIT_TIMEOUT_S = 30.0
"""Patience with the rollout service when it is told of a fresh engine."""

END_TIMEOUT_S = 10.0
"""Patience with killed processes, which hold memory until they are gone."""


def is_alive(process: Process) -> bool:
    """Whether a process of this host still runs; those of other hosts are out of reach, and Ray's
    to end.
    """
    host, pid, born = process
    if host != socket.gethostname():
        return False
    try:
        found = psutil.Process(pid)
        return found.create_time() == born and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(processes: Sequence[Process], *, patience_s: float) -> None:
    """Kill those that have not ended by themselves within `patience_s`, and wait until they are
    gone.
    """
    deadline = time.monotonic() + patience_s
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in filter(is_alive, processes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process[1], signal.SIGKILL)
    deadline = time.monotonic() + END_TIMEOUT_S
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def ask(references: Mapping[str, Any], timeout_s: float, doing: str, fix: str = "") -> list[Any]:
    """`ray.get` of {who: reference} with a deadline, and errors that say who failed and why; `fix`
    is for who is late.
    """
    deadline = time.monotonic() + timeout_s
    answers = []
    for which, reference in references.items():
        try:
            answers.append(ray.get(reference, timeout=max(0.0, deadline - time.monotonic())))
        except GetTimeoutError:
            raise RuntimeError(
                f"{which} did not answer within {timeout_s:g} s ({doing}{fix and '; '}{fix})"
            ) from None
        except RayTaskError as error:
            raise RuntimeError(f"{which} failed ({doing}): {error.cause}") from error
        except RayActorError as error:
            raise RuntimeError(f"{which} died ({doing}): {error}") from error
    return answers


class EngineGroup:
    """The engines, from rank 0: each call reaches all of them; it raises within its time limit,
    naming the engine.
    """

    def __init__(self, count: int, start: Callable[[int], ActorHandle], timeout_s: float) -> None:
        self._start, self._timeout_s = start, timeout_s
        self.handles = [start(number) for number in range(count)]
        self._starting = {
            number: handle.start.remote() for number, handle in enumerate(self.handles)
        }
        self._processes: dict[int, list[Process]] = {}
        self._fresh: list[int] = []
        self.service: ActorHandle = None
        """The rollout service, to be told of engines that take another's place."""

    def wait(self) -> float:
        """Until every engine that starts is ready; returns the slowest one's seconds."""
        starting, self._starting = self._starting, {}
        answers = self._ask(
            starting, self._timeout_s, "starting", "raise rollout.engine.start_timeout_s"
        )
        for number, answer in zip(starting, answers, strict=True):
            self._processes[number] = [(host, pid, born) for host, pid, born in answer["processes"]]
        return max(answer["seconds"] for answer in answers)

    def connect(self, info: Callable[[int], dict[str, Any]], *, timeout_s: float) -> None:
        """Tell every engine, by its number, where its weights come from. Raises `EngineLost` where
        one is dead.
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
        """Every engine begins to take in a version."""
        return Answers([handle.update.remote(version, timeout_s) for handle in self.handles])

    def sleep(self, *, timeout_s: float) -> None:
        """Every engine gives its GPUs' memory away; what it computes stops."""
        self._ask(self._call("sleep"), timeout_s, "going to sleep")

    def wake(self, *, timeout_s: float) -> None:
        """Every engine takes its memory back; weights must be published before it generates."""
        self._ask(self._call("wake"), timeout_s, "waking up")

    def score(self, token_ids: list[int], *, timeout_s: float) -> list[list[float]]:
        """Every engine's log-probs of `token_ids[1:]`."""
        return self._ask(self._call("score", token_ids), timeout_s, "scoring")

    def processes(self) -> list[Process]:
        """Every engine's."""
        return [process for found in self._processes.values() for process in found]

    def pids(self, number: int) -> list[int]:
        """Process ids of an engine, its actor's first."""
        return [pid for _, pid, _ in self._processes[number]]

    def replace(self, numbers: Sequence[int]) -> None:
        """End what is left of engines and start others in their places, side by side, ready when
        this returns.
        """
        for number in numbers:
            with contextlib.suppress(Exception):
                ray.kill(self.handles[number])
        end(
            [process for number in numbers for process in self._processes.pop(number, [])],
            patience_s=0.0,
        )
        for number in numbers:
            self.handles[number] = self._start(number)
        self._starting = {number: self.handles[number].start.remote() for number in numbers}
        self._fresh = sorted({*self._fresh, *numbers})
        self.wait()

    def admit(self) -> None:
        """Fresh engines hold a version now: let the rollout service send them requests."""
        if self.service is not None:
            for number in self._fresh:
                told = self.service.use_engine.remote(number, self.handles[number])
                ask({"the rollout service": told}, ADMIT_TIMEOUT_S, "hearing of fresh engines")
        self._fresh = []

    def _call(self, method: str, *arguments: Any) -> dict[int, Any]:
        """The answers, on their way, of every engine."""
        return {
            number: getattr(handle, method).remote(*arguments)
            for number, handle in enumerate(self.handles)
        }

    def _ask(
        self,
        references: Mapping[int, Any],
        timeout_s: float,
        doing: str,
        fix: str = "raise weight_sync.timeout_s",
    ) -> list[Any]:
        return ask(
            {f"engine {number}": reference for number, reference in references.items()},
            timeout_s,
            doing,
            fix,
        )


class Answers:
    """The engines' answers to one call, on their way."""

    def __init__(self, references: list[Any]) -> None:
        self._references = references

    def poll(self) -> None:
        """Raise `EngineLost` where engines have failed by now, `Aborted` where they gave up because
        they were told to.
        """
        self._check(self._done(0.0))

    def result(self, *, timeout_s: float) -> list[Any]:
        """Every engine's answer; raises as `poll`, and `EngineLost` where some have none within
        `timeout_s`.
        """
        self._done(timeout_s)
        return self._check(range(len(self._references)))

    def refused(self, *, timeout_s: float) -> dict[int, str]:
        """What engines that live could not do, by number; raises `EngineLost` where some are dead
        or late.
        """
        self._done(timeout_s)
        found = {number: self._outcome(number) for number in range(len(self._references))}
        self._raise({number: why for number, (_, why, is_lost) in found.items() if is_lost})
        return {number: why for number, (_, why, _) in found.items() if why}

    def settle(self, *, timeout_s: float) -> list[int]:
        """Wait until no engine is at it any more; the numbers of those that failed, or still are at
        it.
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
        """(answer, why there is none, whether the engine is dead or late)."""
        try:
            return ray.get(self._references[number], timeout=0), "", False
        except GetTimeoutError:
            return None, "it did not answer in time; raise weight_sync.timeout_s", True
        except RayTaskError as error:
            return None, str(error.cause), is_dead(error)
        except RayActorError as error:
            return None, f"its process died ({str(error).splitlines()[0]})", True


def is_dead(error: RayTaskError) -> bool:
    """Whether an engine's error says that one of vLLM's processes is gone; by name, since vLLM is
    not to be imported here.
    """
    return type(error.cause).__name__ == "EngineDeadError"
