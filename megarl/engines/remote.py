"""Engines as Ray actors (`EngineActor`), and as the rollout service calls them (`RemoteEngine`)."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil
from ray.exceptions import ActorUnavailableError

from megarl.engines.channel import Channel, ChannelActor, Remote
from megarl.engines.interface import InferenceEngine, Pulse
from megarl.engines.vllm_engine import Engine
from megarl.environments.user_code import function_of
from megarl.errors import ActorUnreachable, ProcessLost
from megarl.settings.rollout import EngineConfig
from megarl.system.deaths import DEATHS, why_dead
from megarl.system.processes import Process, with_descendants
from megarl.system.signals import die_with_parent, keep_blocked_signals
from megarl.system.spans import Recording, Requests, activity, close_recording
from megarl.types import Segment


def engine_name(number: int) -> str:
    """The process's name in activity files."""
    return f"engine{number}"


def own_process() -> Process:
    return socket.gethostname(), os.getpid(), psutil.Process().create_time()


def die_with_raylet() -> None:
    """Ray cannot end an actor that is stopped by a signal once its raylet, the actors' parent, is
    dead.
    """
    die_with_parent(os.getppid())


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    prompt_ids: np.ndarray
    """[P] int32."""
    earlier: list[np.ndarray]
    """For each earlier segment, [T] int32 tokens."""
    seed: int
    max_tokens: int
    temperature: float
    stop: tuple[str, ...] = ()
    """Texts that end the turn, beside the recipe's."""
    reported: int = 0
    """First tokens whose experts are known from earlier answers."""


ENGINES: dict[str, Callable[..., InferenceEngine]] = {"vllm": Engine}
"""{value of `rollout.engine.kind`: class}"""


class EngineActor(ChannelActor):
    """One engine in a Ray actor. The service calls methods through Ray, and sends each
    `GenerateRequest` over ZeroMQ. Methods without a docstring are the engine's.
    """

    def __init__(
        self, *, config: EngineConfig, recording: Recording | None = None, **arguments: Any
    ) -> None:
        """Make the engine, without starting it. `recording`: where to write activity. `arguments`:
        of the engine's class.
        """
        if recording is not None:
            recording.open(engine_name(arguments["number"]))
        die_with_raylet()
        keep_blocked_signals()  # vLLM starts processes
        engine_class = function_of(config.kind, ENGINES, "rollout.engine.kind")
        self.engine: InferenceEngine = engine_class(config=config, **arguments)
        self._number, self._is_ready, self._start = arguments["number"], False, asyncio.Lock()

    async def process(self) -> Process:
        """May be called before `start`."""
        return own_process()

    async def start(self) -> list[Process]:
        """Start the engine, unless it is ready; returns the processes of the actor and below it."""
        async with self._start:  # a run that was ended may have begun it
            if not self._is_ready:
                with activity("start of the engine", kind="load"):
                    await self.engine.start()
            self._is_ready = True
        return with_descendants(own_process())

    async def record(self, recording: Recording | None) -> None:
        """Write activity to another run's folder from now on, or none."""
        close_recording()
        if recording is not None:
            recording.open(engine_name(self._number))

    async def serve(self, request: GenerateRequest) -> Segment:
        """Generate the model's next turn."""
        token_ids = np.concatenate([request.prompt_ids, *request.earlier])
        asked: dict[str, Any] = {}
        # An engine of the user's own may not know it; an agent reads up to the text all the same.
        if request.stop and "stop" in inspect.signature(self.engine.generate).parameters:
            asked["stop"] = request.stop
        segment = await self.engine.generate(
            token_ids.tolist(),
            seed=request.seed,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            **asked,
        )
        if segment.arrays.experts is None:
            return segment
        new = len(token_ids) - request.reported + segment.num_tokens
        arrays = segment.arrays._replace(experts=segment.arrays.experts[-new:])
        return replace(segment, arrays=arrays)

    async def generate(self, prompt_ids: list[int], **asked: Any) -> Segment:
        return await self.engine.generate(prompt_ids, **asked)

    async def score(self, token_ids: list[int], adapted: bool = True) -> list[float]:
        return await self.engine.score(token_ids, adapted)

    async def connect(self, info: dict[str, Any]) -> None:
        await self.engine.connect(info)

    async def update(self, version: int, timeout_s: float) -> list[dict[str, Any]]:
        with activity(f"weights {version}", kind="publish"):
            return await self.engine.update(version, timeout_s)

    async def load_adapter(self, version: int, files: dict[str, bytes]) -> dict[str, Any]:
        with activity(f"adapters {version}", kind="publish"):
            return await self.engine.load_adapter(version, files)

    async def pulse(self) -> Pulse:
        return await self.engine.pulse()

    async def paused_s(self, last_s: float) -> float:
        return await self.engine.paused_s(last_s)

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()

    async def stop(self) -> None:
        await self.engine.stop()
        close_recording()


def reported_tokens(num_prompt: int, segments: Sequence[Segment]) -> int:
    """Count the leading tokens, of a prompt with `num_prompt` tokens and the `segments` after it,
    whose chosen experts the engine has reported; 0 for a model without experts.
    """
    ends = itertools.accumulate((segment.num_tokens for segment in segments), initial=num_prompt)
    counts = [
        end - 1  # an engine does not compute the last token that it samples
        for segment, end in zip(segments, list(ends)[1:], strict=True)
        if segment.arrays.experts is not None
    ]
    return max(counts, default=0)


class RemoteEngine:
    """One engine, for the rollout service."""

    def __init__(self, handle: Any, channel: Channel, *, number: int = 0) -> None:
        """`handle`: of the `EngineActor`."""
        name = engine_name(number)
        requests = Requests(f"responses of {name}", kind="wait", of=name)
        self._remote = Remote(channel, handle, requests)
        self.handle, self.number = handle, number

    async def generate(
        self,
        prompt_ids: np.ndarray,
        segments: Sequence[Segment],
        *,
        seed: int,
        max_tokens: int,
        temperature: float,
        stop: tuple[str, ...] = (),
    ) -> Segment:
        earlier = [segment.arrays.token_ids for segment in segments]
        reported = reported_tokens(len(prompt_ids), segments)
        request = GenerateRequest(
            prompt_ids, earlier, seed, max_tokens, temperature, stop, reported
        )
        return await self._remote.ask(request)

    def replaced_by(self, handle: Any) -> RemoteEngine:
        """As this one, for the Ray actor `handle`."""
        return RemoteEngine(handle, self._remote.channel, number=self.number)

    async def paused_s(self, last_s: float) -> float:
        """0 if there is no answer within 10 seconds, since an engine that hangs is not paused.
        Raises `ProcessLost` if the engine is dead, `ActorUnreachable` if it may be alive.
        """
        try:
            return await asyncio.wait_for(self.handle.paused_s.remote(last_s), timeout=10.0)
        except TimeoutError:
            return 0.0
        except ActorUnavailableError as error:
            raise ActorUnreachable(str(error).splitlines()[0]) from error
        except DEATHS as error:
            raise ProcessLost(f"its process died ({why_dead(error)})") from error
