"""The environment's actor as the rollout service sees it: calls, and another actor in the place of
one that dies or hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from megarl.activity.busy import Busy
from megarl.activity.recording import Recording
from megarl.cluster.asking import kill_actor
from megarl.cluster.channel import Channel, Remote
from megarl.cluster.deaths import DEATHS
from megarl.cluster.processes import Process, end, with_descendants
from megarl.cluster.remote import ENVIRONMENT, EnvironmentActor
from megarl.cluster.stored_arrays import loaded
from megarl.console import say
from megarl.environments.addresses import Token
from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig
from megarl.environments.user_code import Sources
from megarl.environments.workers import GRACE_S, START_WITHIN_S
from megarl.errors import EngineLost, EngineUnreachable, SessionLost
from megarl.rollout.config import ENGINE_STARTS
from megarl.rollout.requests import MOST_LOSSES, UNREACHABLE_S
from megarl.types import Prompt, Segment, TokenArrays, Verdict

BEAT_S = 1.0
"""Seconds between two looks whether the environment answers."""

ALIVE_S = 15.0
"""Seconds that the environment has to say that it lives, once verdicts are overdue."""

NO_LOGPROBS = np.zeros(0, np.float32)

ACTOR_START_S = 60.0
"""Seconds that the process of a new environment has to start, before it loads the user's files."""


class RemoteEnvironment:
    """The environment actor as the rollout service calls it; implements
    `megarl.rollout.attempts.EnvironmentHandle`.

    An actor that dies is replaced. So is one that gives no verdict for `limit_s` seconds while
    requests are open and does not say either that it lives, or gives none for `silence_s` seconds.
    Requests are then asked again. A session that has begun is lost with its actor: `SessionLost` is
    raised, and its rollout begins anew.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        codec: Codec,
        channel: Channel,
        token: Token | None = None,
        recording: Recording | None = None,
    ) -> None:
        """`token`: of the recipe's reward servers, as `client_token` reads it. `recording`: where
        the actor records what it does.
        """
        actor = ray.remote(EnvironmentActor).options(num_cpus=0, max_concurrency=100_000)
        self._make = functools.partial(actor.remote, config, codec, token, recording)
        limit_s = max(config.time_limit_s, config.start_limit_s if config.has_sessions else 0.0)
        self._busy = Busy("verdicts", kind="wait", of=ENVIRONMENT, quiet_s=limit_s + GRACE_S)
        self.limit_s = limit_s + GRACE_S
        loads_s = max(START_WITHIN_S, config.load_limit_s)
        # A worker process may end late in a call. Then another is started, loads the user's file,
        # and makes the call again.
        self.silence_s = self.limit_s + loads_s + config.time_limit_s
        self._start_s = ACTOR_START_S + loads_s * (config.has_sessions + config.needs_verifier)
        self._channel, self.has_start = channel, config.has_sessions
        self._answers = 0
        self._news = ""
        """What the next verdict is to tell as a warning."""
        self._lock = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._sources: Sources | None = None
        """The user's files as the first environment read them, which every later one runs."""
        self._handle: Any = self._make()
        self._remote = Remote(channel, self._handle, self._busy)

    async def start(self) -> None:
        """Wait until the verifier is loaded; raises `ValueError` if it does not load."""
        self._sources = await self._handle.start.remote()
        self._process = await self._handle.process.remote()
        self._watcher = asyncio.create_task(self._watch())

    async def begin(self, key: str, prompt: Prompt) -> Segment | Verdict | None:
        return await self._ask(("begin", {"key": key, "prompt": prompt}))

    async def step(
        self, key: str, prompt: Prompt, segment: Segment, *, num_tokens: int
    ) -> Segment | Verdict:
        segment = _without_logprobs(segment)
        arguments = {"key": key, "prompt": prompt, "segment": segment, "num_tokens": num_tokens}
        return await self._ask(("step", arguments), in_session=self.has_start)

    async def cut_off(self, key: str, num_tokens: int) -> Verdict:
        arguments = {"key": key, "num_tokens": num_tokens}
        return await self._ask(("cut_off", arguments), in_session=self.has_start)

    async def texts(self, segments: Sequence[Segment]) -> list[str]:
        bare = [_without_logprobs(await loaded(part)) for part in segments]
        return await self._ask(("texts", {"segments": bare}))

    async def _ask(self, request: tuple[str, dict[str, Any]], *, in_session: bool = False) -> Any:
        """The environment's answer. Raises `SessionLost` if the environment was replaced meanwhile
        and the request is about a session that has begun, and `RuntimeError` if `MOST_LOSSES`
        environments were lost while they answered.
        """
        losses = 0
        while True:
            handle = self._handle
            try:
                answer = await self._remote.ask(request)
            except EngineUnreachable as error:
                # A request that is sent twice would be two turns, or two sessions.
                if in_session or (self.has_start and request[0] == "begin"):
                    await self._replace(handle, str(error))
                    raise SessionLost(str(error)) from error
                await asyncio.sleep(UNREACHABLE_S)
            except EngineLost as error:
                losses += 1
                if losses == MOST_LOSSES:
                    raise RuntimeError(
                        f"the environment was lost {losses} times while it answered the same"
                        f" request, at last: {error}; see run.log for what it printed last"
                    ) from error
                await self._replace(handle, str(error))
                if in_session:
                    raise SessionLost(str(error)) from error
            else:
                self._answers += 1
                if self._news and isinstance(answer, Verdict):
                    said = "; ".join(filter(None, [answer.warning, self._news]))
                    answer, self._news = replace(answer, warning=said), ""
                return answer

    async def _watch(self) -> None:
        """Replace the environment whenever it gives no answer for too long. The beats are counted,
        since a service that was stopped itself must not blame the environment for it.
        """
        beats, answers = 0, -1
        while True:
            await asyncio.sleep(BEAT_S)
            beats = beats + 1 if self._busy.requests and answers == self._answers else 0
            answers, handle, silent_s, why = self._answers, self._handle, beats * BEAT_S, ""
            if silent_s > self.silence_s:
                why = f"it has given no verdict for {silent_s:.0f} s"
            elif silent_s > self.limit_s and not await self._lives(handle):
                why = f"it has not said for {ALIVE_S:g} s that it lives"
            if why:
                beats = 0
                # An error of the replacement reaches whoever asks next.
                with contextlib.suppress(Exception):
                    await self._replace(handle, why)

    async def _lives(self, handle: Any) -> bool:
        """Whether the environment answers a question that no worker process is needed for. True if
        it is dead, which is seen elsewhere.
        """
        try:
            async with asyncio.timeout(ALIVE_S):
                await handle.process.remote()
        except TimeoutError:
            return False
        except DEATHS:
            return True
        return True

    async def _replace(self, handle: Any, why: str) -> None:
        """End the environment `handle`, unless another has taken its place already, and start a new
        one. Raises `RuntimeError` if it does not start.
        """
        async with self._lock:
            if self._handle is not handle:
                return
            said = f"the environment was lost ({why}) and is replaced"
            say(f"megarl: {said}; its requests are asked again")
            await asyncio.to_thread(_kill, handle, self._process)
            problem = ""
            for _ in range(ENGINE_STARTS):
                fresh: Any = self._make(known=self._sources)
                try:
                    async with asyncio.timeout(self._start_s):
                        await fresh.start.remote()
                        self._process = await fresh.process.remote()
                except (RayError, TimeoutError) as error:
                    cause = getattr(error, "cause", None) or error  # of what the actor raised
                    late = f"not ready within {self._start_s:g} s"
                    problem = str(cause).partition("\n")[0] or late
                    await asyncio.to_thread(_kill, fresh, None)
                    continue
                self._handle, self._news = fresh, said
                self._remote = Remote(self._channel, fresh, self._busy)
                return
            raise RuntimeError(
                f"{said}, but {ENGINE_STARTS} starts failed; the last: {problem}; see run.log"
            )

    async def close(self) -> None:
        """End the worker processes and the actor."""
        if self._watcher is not None:
            self._watcher.cancel()
        await self._handle.stop.remote()
        await asyncio.to_thread(kill_actor, self._handle)


def _without_logprobs(segment: Segment) -> Segment:
    """The segment with token ids only."""
    return replace(segment, arrays=TokenArrays(segment.arrays.token_ids, NO_LOGPROBS))


def _kill(handle: Any, process: Process | None) -> None:
    """Kill an environment actor and its worker processes: Ray cannot end one that is stopped."""
    processes = with_descendants(process) if process is not None else []
    kill_actor(handle)
    end(processes, patience_s=0.0)
