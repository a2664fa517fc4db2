"""Engines as Ray actors, and as the rollout service sees them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
from ray.exceptions import ActorUnavailableError

from megarl.activity.busy import Busy
from megarl.activity.recording import Recording, close_recording
from megarl.activity.spans import activity
from megarl.cluster.channel import Channel, ChannelActor, Remote
from megarl.cluster.deaths import DEATHS, why_dead
from megarl.cluster.processes import Process
from megarl.errors import EngineLost, EngineUnreachable
from megarl.rollout.engine import Engine
from megarl.signals import die_with_parent, keep_blocked_signals
from megarl.types import Segment

PAUSED_WITHIN_S = 10.0
"""Seconds that an engine has to say how long its generation was paused."""
NAMED_WITHIN_S = 2.0
"""Seconds without that answer after which the wait for the engine is reported: a process that is
stopped is to be named soon after the deadline, although it is not given up yet."""
JUDGE_S = 1.5 * PAUSED_WITHIN_S
"""Seconds after the deadline of a request within which it is known whether the engine was paused,
unless the event loop of this process hangs."""


def engine_name(number: int) -> str:
    """Name of the process of engine `number` in the run's activity files."""
    return f"engine{number}"


def own_process() -> Process:
    """(host, process id, start time) of this process, which no other process has."""
    return socket.gethostname(), os.getpid(), psutil.Process().create_time()


def die_with_raylet() -> None:
    """Have the kernel kill this actor's process when Ray's raylet, the parent of all actors of a
    node, ends: Ray cannot end an actor of a dead raylet that is stopped by a signal.
    """
    die_with_parent(os.getppid())


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What the rollout service sends to an engine to have the next segment of a rollout."""

    prompt_ids: np.ndarray
    """[P] int32 prompt tokens."""
    earlier: list[np.ndarray]
    """[T] int32 tokens of each earlier segment of the rollout."""
    seed: int
    max_tokens: int
    temperature: float


class EngineActor(ChannelActor, Engine):
    """Ray actor of an inference engine that answers the rollout service's requests."""

    def __init__(self, *, recording: Recording | None = None, **arguments: Any) -> None:
        """`recording`: where the actor records what it does. For the others see `Engine`."""
        if recording is not None:
            recording.open(engine_name(arguments["number"]))
        die_with_raylet()
        keep_blocked_signals()  # vLLM starts processes
        super().__init__(**arguments)

    async def start(self) -> dict[str, Any]:
        """Start vLLM as `Engine.start` does, and record how long it takes."""
        with activity("start of vLLM", kind="load"):
            return await super().start()

    async def update(self, version: int, timeout_s: float) -> list[dict[str, Any]]:
        """Receive weights as `Engine.update` does, and record how long it takes."""
        with activity(f"weights {version}", kind="publish"):
            return await super().update(version, timeout_s)

    async def load_adapter(self, version: int, files: dict[str, bytes]) -> dict[str, Any]:
        """Load LoRA adapters as `Engine.load_adapter` does, and record how long it takes."""
        with activity(f"adapters {version}", kind="publish"):
            return await super().load_adapter(version, files)

    async def stop(self) -> None:
        """Stop vLLM as `Engine.stop` does, and close this process's activity file."""
        await super().stop()
        close_recording()

    async def process(self) -> Process:
        """The actor's process; answered before `start` is called."""
        return own_process()

    async def serve(self, request: GenerateRequest) -> Segment:
        """Generate the next segment of a rollout."""
        token_ids = np.concatenate([request.prompt_ids, *request.earlier])
        return await self.generate(
            token_ids.tolist(),
            seed=request.seed,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
        )


class RemoteEngine:
    """An engine actor as the rollout service calls it; implements
    `megarl.rollout.requests.EngineHandle`.
    """

    def __init__(
        self, handle: Any, channel: Channel, *, number: int = 0, deadline_s: float = 0.0
    ) -> None:
        """`handle`: its actor. `deadline_s`: seconds after which an unanswered request is reported,
        not counting those of which `paused_s` says that the engine was paused; 0 for none.
        """
        name = engine_name(number)
        busy = self._busy = Busy(
            f"responses of {name}", kind="wait", of=name, deadline_s=deadline_s, judge_s=JUDGE_S
        )
        self._remote = Remote(channel, handle, busy)
        self.handle, self.number, self.deadline_s = handle, number, deadline_s

    async def generate(
        self,
        prompt_ids: np.ndarray,
        segments: Sequence[Segment],
        *,
        seed: int,
        max_tokens: int,
        temperature: float,
    ) -> Segment:
        earlier = [part.arrays.token_ids for part in segments]
        request = GenerateRequest(prompt_ids, earlier, seed, max_tokens, temperature)
        return await self._remote.ask(request)

    def replaced_by(self, handle: Any) -> RemoteEngine:
        """The actor `handle`, which takes the place of this one."""
        channel, deadline_s = self._remote.channel, self.deadline_s
        return RemoteEngine(handle, channel, number=self.number, deadline_s=deadline_s)

    async def paused_s(self, last_s: float) -> float:
        """See `megarl.rollout.requests.EngineHandle`. 0 if the engine does not say it within
        `PAUSED_WITHIN_S`: an engine that hangs is not paused. A request that has lasted for
        `last_s`, and is late without the pauses, is reported; it is reported too if the engine says
        nothing for `NAMED_WITHIN_S`.
        """
        asked: asyncio.Future[float] = asyncio.ensure_future(self.handle.paused_s.remote(last_s))
        is_named = not (await asyncio.wait([asked], timeout=NAMED_WITHIN_S))[0]
        if is_named:
            self._busy.judged(last_s + NAMED_WITHIN_S, 0.0)
        try:
            found = await asyncio.wait_for(asked, PAUSED_WITHIN_S - NAMED_WITHIN_S)
        except TimeoutError:
            return 0.0
        except ActorUnavailableError as error:
            raise EngineUnreachable(str(error).splitlines()[0]) from error
        except DEATHS as error:
            raise EngineLost(f"its process died ({why_dead(error)})") from error
        if not is_named:
            self._busy.judged(last_s, found)
        return found
