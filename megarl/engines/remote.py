"""Inference engines as Ray actors (`EngineActor`), and as the rollout service calls them
(`RemoteEngine`).
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
from ray.exceptions import ActorUnavailableError

from megarl.engines.channel import Channel, ChannelActor, Remote
from megarl.engines.interface import InferenceEngine, Pulse
from megarl.engines.vllm_engine import Engine
from megarl.environments.user_code import function_of
from megarl.errors import EngineLost, EngineUnreachable
from megarl.settings.rollout import EngineConfig
from megarl.system.deaths import DEATHS, why_dead
from megarl.system.processes import Process, with_descendants
from megarl.system.signals import die_with_parent, keep_blocked_signals
from megarl.system.spans import Recording, Requests, activity, close_recording
from megarl.types import Segment

PAUSED_WITHIN_S = 10.0
"""Seconds that an engine has to say how long its generation was paused."""


def engine_name(number: int) -> str:
    """Name of the process of engine `number` in the run's activity files, the record of what each
    process does, such as "engine3".
    """
    return f"engine{number}"


def own_process() -> Process:
    """(host name, process id, start time in seconds since 1970) of this process; the three together
    are unique.
    """
    return socket.gethostname(), os.getpid(), psutil.Process().create_time()


def die_with_raylet() -> None:
    """Have the kernel kill this actor's process when Ray's raylet, the parent of all actors of a
    node, ends. Ray itself cannot end an actor that is stopped by a signal once its raylet is dead.
    """
    die_with_parent(os.getppid())


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """The message by which the rollout service has an engine generate the model's next turn of a
    rollout: the prompt, the earlier turns, and how to sample.
    """

    prompt_ids: np.ndarray
    """[P] int32 prompt tokens."""
    earlier: list[np.ndarray]
    """For each earlier segment of the rollout, the model's and the environment's, [T] int32 tokens.
    """
    seed: int
    max_tokens: int
    temperature: float
    stop: tuple[str, ...] = ()
    """Texts at which the turn ends, beside those of the recipe."""


ENGINES: dict[str, Callable[..., InferenceEngine]] = {"vllm": Engine}
"""{value of the setting `rollout.engine.kind`: class of the inference engine}"""


class EngineActor(ChannelActor):
    """Ray actor that holds one inference engine, which runs in the actor's process. The rollout
    service calls its methods through Ray, and sends it a `GenerateRequest` over ZeroMQ. The
    methods not explained here, such as `score`, `update` and `sleep`, call the engine's method of
    the same name with the same arguments and return its result.
    """

    def __init__(
        self, *, config: EngineConfig, recording: Recording | None = None, **arguments: Any
    ) -> None:
        """Make the engine, without starting it. `config.kind` names its class. `recording`: where
        this process records what it does, or None. `arguments`: further keyword arguments of the
        engine's class, such as `number` and `model` of `megarl.engines.vllm_engine.Engine`.
        """
        if recording is not None:
            recording.open(engine_name(arguments["number"]))
        die_with_raylet()
        keep_blocked_signals()  # vLLM starts processes
        made = function_of(config.kind, ENGINES, "rollout.engine.kind", is_class=True)
        self.engine: InferenceEngine = made(config=config, **arguments)
        self._number, self._is_ready, self._start = arguments["number"], False, asyncio.Lock()

    async def process(self) -> Process:
        """(host name, process id, time at which the process started) of the process that this Ray
        actor runs in, by which it can be found and ended. May be called before `start`.
        """
        return own_process()

    async def start(self) -> list[Process]:
        """Start the engine, unless an earlier call has done so, and return once it is ready: the
        processes of the actor and below it, each as (host, process id, start time).
        """
        async with self._start:  # a run that was ended may have begun it
            if not self._is_ready:
                with activity("start of the engine", kind="load"):
                    await self.engine.start()
            self._is_ready = True
        return with_descendants(own_process())

    async def record(self, recording: Recording | None) -> None:
        """From now on, record in the folder of another run what this process does; None: no more.
        The process in which vLLM computes goes on in the folder of the run that has started it.
        """
        close_recording()
        if recording is not None:
            recording.open(engine_name(self._number))

    async def serve(self, request: GenerateRequest) -> Segment:
        """Coroutine: generate the model's next turn of a rollout. The returned `Segment` holds at
        most `request.max_tokens` int32 token ids, their float32 log-probs, and, for each run of
        tokens, the version of the weights that generated it.
        """
        token_ids = np.concatenate([request.prompt_ids, *request.earlier])
        asked: dict[str, Any] = {}
        # An engine of the user's own may not know it; an agent reads up to the text all the same.
        if request.stop and "stop" in inspect.signature(self.engine.generate).parameters:
            asked["stop"] = request.stop
        return await self.generate(
            token_ids.tolist(),
            seed=request.seed,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            **asked,
        )

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
        """Stop the engine's processes, and close the file in which this process records its
        activity.
        """
        await self.engine.stop()
        close_recording()


class RemoteEngine:
    """The rollout service's object for one inference engine, which runs in a Ray actor: `await
    generate(...)` sends a request to the actor over ZeroMQ and returns the segment (token ids and
    log-probs) that the engine has generated.
    """

    def __init__(self, handle: Any, channel: Channel, *, number: int = 0) -> None:
        """`handle`: Ray handle of the `EngineActor`. `channel`: the rollout service's ZeroMQ
        socket. `number`: the engine's number in the run.
        """
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
        earlier = [part.arrays.token_ids for part in segments]
        request = GenerateRequest(prompt_ids, earlier, seed, max_tokens, temperature, stop)
        return await self._remote.ask(request)

    def replaced_by(self, handle: Any) -> RemoteEngine:
        """A new `RemoteEngine` for the Ray actor `handle` of an engine that replaces this one, with
        the same channel and number.
        """
        return RemoteEngine(handle, self._remote.channel, number=self.number)

    async def paused_s(self, last_s: float) -> float:
        """Ask the engine for how many of the last `last_s` seconds its generation was paused on
        purpose, because weights arrived or the engine slept; 0 if it has not answered after 10
        seconds, since an engine that hangs is not paused. The caller has waited `last_s` seconds
        for a request. Raises `EngineLost` if the engine is dead, and `EngineUnreachable` if it may
        be alive.
        """
        try:
            return await asyncio.wait_for(self.handle.paused_s.remote(last_s), PAUSED_WITHIN_S)
        except TimeoutError:
            return 0.0
        except ActorUnavailableError as error:
            raise EngineUnreachable(str(error).splitlines()[0]) from error
        except DEATHS as error:
            raise EngineLost(f"its process died ({why_dead(error)})") from error
