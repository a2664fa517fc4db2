"""Watches the engines of a run, ends those that hang, and replaces those that are dead; watches
Ray too (`ray_problem`).

    starting -> ready, without weights -> serving -> dead -> starting ...

The supervisor is a thread of rank 0. Every `BEAT_S` seconds it asks each engine for a sign of
life. A dead engine is replaced at once, while the others go on; the new one gets its weights from
the next publication. If the training ranks wait for rollouts or an evaluation, the rollout service
has them publish again (`megarl.rollout.waits`). While a publication runs, it replaces lost engines
itself; the supervisor then only ends dead engines, so that the publication need not wait for them.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, OutOfMemoryError

from megarl.cluster.asking import ask_service
from megarl.cluster.deaths import DEATHS, why_dead
from megarl.cluster.engines import EngineGroup
from megarl.console import say
from megarl.files import in_thread
from megarl.rollout.inference_engine import Pulse

NODE_DEAD = "Ray's node of this machine is dead: its raylet was ended, or hangs"
ANSWER_S = 20.0
"""Seconds that Ray's head has to list the cluster's nodes."""


def ray_problem() -> str:
    """Ask Ray's head (GCS) whether it answers and whether this machine's node is alive. Returns why
    Ray cannot be relied on, as a phrase for an error message, or "". Blocks for at most `ANSWER_S`
    (20) seconds; the question itself, which may never be answered, is asked in a thread.
    """
    node = ray.get_runtime_context().get_node_id()
    try:
        nodes = in_thread("Ray's health", ray.nodes).result(ANSWER_S)
    except TimeoutError:
        return f"Ray's head (GCS) has not answered for {ANSWER_S:.0f} s"
    except Exception as error:
        why = (str(error).splitlines() or [repr(error)])[0]
        return f"Ray's head (GCS) cannot be reached: {why}"
    if any(one["NodeID"] == node and not one["Alive"] for one in nodes):
        return NODE_DEAD
    return ""


def end_raylet() -> None:
    """Kill the raylet of this process's Ray node, which Ray must have declared dead. A raylet that
    hangs answers nothing, and Ray's calls to it have no deadline: a rank in `ray.wait` would wait
    for ever. Once the raylet is gone, such calls fail, and the node's actors end.
    """
    mark = f"--node_id={ray.get_runtime_context().get_node_id()}"
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if mark in process.cmdline():
                process.kill()


GOES_ON = "`--resume auto` goes on from the newest checkpoint"

BEAT_S = 1.0
"""Seconds between two looks at the engines."""


@dataclass
class Watched:
    """What the supervisor, the thread that looks for dead and hanging engines, knows of one engine
    actor: its last sign of life and the time of its last progress, by which `problem` tells whether
    the engine is to be replaced.
    """

    handle: Any
    moved_at: float
    """Time of the last sign of progress, by `time.monotonic`."""
    asked: Any = None
    """Object reference of the call `pulse` that is not answered yet; None if there is none."""
    pulse: Pulse | None = None
    """The engine's last answer; None before the first."""
    is_away: bool = False
    """Whether the last call of `pulse` did not reach the engine."""

    def hears(self, pulse: Pulse, now: float) -> int:
        """Note the engine's sign of life `pulse` (counts of its steps and open requests, whether it
        is paused or dead), which came at the time `now` (`time.monotonic`). Returns the number of
        engine steps since the previous pulse.
        """
        before = self.pulse.steps if self.pulse is not None else 0
        if pulse.steps != before or pulse.requests == 0 or pulse.is_paused or self.pulse is None:
            self.moved_at = now
        self.pulse, self.is_away = pulse, False
        return pulse.steps - before

    def problem(self, now: float, stall_s: float) -> str:
        """Why the engine is to be replaced, as a phrase that continues "engine 3"; empty if it is
        well. It is not well if a process of it is dead, or if it has made no progress for more than
        `stall_s` seconds until `now` (`time.monotonic`).
        """
        if self.pulse is not None and self.pulse.is_dead:
            return "has lost one of vLLM's processes"
        silent_s = now - self.moved_at
        if silent_s <= stall_s:
            return ""
        if self.asked is not None or self.is_away or self.pulse is None:
            return f"has not said for {silent_s:.0f} s that it lives"
        return f"has made no step for {silent_s:.0f} s, with {self.pulse.requests} requests open"


class EngineSupervisor:
    """A thread of trainer rank 0 that watches the engines of `group`: it kills engines that hang
    and starts new ones in the place of dead ones. If that is impossible, or Ray fails, it ends the
    run: every call that waits for rollouts or engines raises an error.
    """

    def __init__(self, group: EngineGroup, *, stall_s: float, loads: bool) -> None:
        """Start the thread. `stall_s`: seconds without progress after which an engine is taken for
        hung. `loads`: the engines read their weights from disk, so that a new one serves requests
        as soon as it is ready; otherwise it needs the trainer's weights first.
        """
        self._group, self._stall_s, self._loads = group, stall_s, loads
        self._watched: dict[int, Watched] = {}
        self._told: dict[int, Any] = {}
        """{number: actor} of the new engines of which the service knows that they are ready."""
        self._telling: Any = None
        """Reference of the call that tells the service of engine steps."""
        self._untold = 0
        """Engine steps of which the service has not been told."""
        self._close = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine supervisor", daemon=True)
        # By itself: where Ray hangs, so may a call of the other thread.
        threading.Thread(target=self._watch_ray, name="watch of Ray", daemon=True).start()
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End the thread: from now on nobody starts engines in the place of dead ones. Blocks until
        the thread has ended, at most `timeout_s` seconds.
        """
        self._close.set()
        self._thread.join(timeout_s)

    def _watch_ray(self) -> None:
        while not self._close.wait(BEAT_S):
            if (problem := ray_problem()) and not self._close.is_set():
                self._fail(f"{problem}; {GOES_ON}")
                if problem == NODE_DEAD:
                    end_raylet()
                return

    def _run(self) -> None:
        while not self._close.wait(BEAT_S) and not self._group.broken:
            try:
                steps = self._watch()
                self._replace()
                if not self._close.is_set():
                    self._report(steps)
            except DEATHS as error:
                # The ranks that ask the service say so; one that waits for an engine asks nobody.
                if self._group.broken:
                    return
                self._group.broken = f"the rollout service died ({why_dead(error)})"
                say(f"megarl: {self._group.broken}; the run ends at its next question to it")
                return
            except Exception as error:
                if self._close.is_set() or self._group.broken:
                    return
                self._fail(f"the engine supervisor has failed: {type(error).__name__}: {error}")
                return

    def _watch(self) -> int:
        """Ask every started engine for a sign of life, and kill those that are dead or hang.
        Returns the steps that all engines have made since the last call.
        """
        group, steps = self._group, 0
        for number, handle in enumerate(list(group.handles)):
            if self._close.is_set():
                return steps
            if number in group.starting or number in group.dead:
                self._watched.pop(number, None)
                continue
            known = self._watched.get(number)
            if known is None or known.handle is not handle:
                known = self._watched[number] = Watched(handle, time.monotonic())
            if known.asked is None:
                known.asked = handle.pulse.remote()
        asked = {known.asked: known for known in self._watched.values()}
        if asked:
            ray.wait(list(asked), num_returns=len(asked), timeout=BEAT_S)
        for number, known in list(self._watched.items()):
            problem = ""
            try:
                before = known.pulse
                pulse: Any = ray.get(known.asked, timeout=0)
                steps += known.hears(pulse, time.monotonic())
                group.preemptions += pulse.preemptions - (before.preemptions if before else 0)
                known.asked = None
            except GetTimeoutError:
                pass
            except ActorUnavailableError:  # unreachable for a moment; it counts as silence
                known.asked, known.is_away = None, True
            except DEATHS as error:
                problem = f"is dead ({why_dead(error)})"
                if isinstance(error, OutOfMemoryError):  # another one would be ended as well
                    self._fail(f"engine {number} {problem}; {GOES_ON}")
                    return steps
            if problem := problem or known.problem(time.monotonic(), self._stall_s):
                self._lose(number, known, problem)
        return steps

    def _lose(self, number: int, known: Watched, problem: str) -> None:
        """Kill an engine that is dead or hangs, unless it has been replaced meanwhile."""
        del self._watched[number]
        if self._group.handles[number] is known.handle and not self._close.is_set():
            say(f"megarl: engine {number} {problem}; it is replaced")
            self._group.kill(number, known.handle)

    def _replace(self) -> None:
        """Start engines in the place of dead ones, and follow those that start, unless a
        publication does.
        """
        group = self._group
        with group.lock:
            if group.is_held or self._close.is_set():
                return
            group.restart(sorted(group.replaceable))
            group.follow_starts()
            new = group.fresh - group.starting.keys()
        for number in sorted(new - group.dead):
            if self._told.get(number) is group.handles[number]:
                continue
            self._told[number] = group.handles[number]
            if self._loads:
                group.admit()
            else:
                ready = partial(group.service.engine_is_ready.remote, number)
                ask_service(ready, "hearing of the engines")
        for number in self._told.keys() - group.fresh:
            del self._told[number]

    def _report(self, steps: int) -> None:
        """Tell the service that the engines make progress: its callers wait as long as they do.
        Does not wait for the service's answer.
        """
        self._untold += steps
        try:
            if self._telling is not None:
                ray.get(self._telling, timeout=0)
        except GetTimeoutError:
            return  # told with the next look
        except ActorUnavailableError:  # for a moment
            pass
        self._telling, self._untold = self._group.service.progress.remote(self._untold), 0

    def _fail(self, reason: str) -> None:
        """End the run: whoever waits for rollouts, or for an engine, gets `reason` as an error."""
        self._group.broken = reason
        say(f"megarl: {reason}")
        try:
            ask_service(partial(self._group.service.fail.remote, reason), "ending the run")
        except Exception as error:
            say(f"megarl: the rollout service could not be told: {error}")
