"""The process of the rollout service. It imports neither torch nor transformers, since it starts
while engines and trainer ranks need the CPU.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from megarl.checkpoints.lease import Claim
from megarl.engines.channel import Channel
from megarl.engines.pool import EngineManager, EngineStarts
from megarl.engines.remote import RemoteEngine, die_with_raylet
from megarl.environments.codec import Codec
from megarl.environments.scoring import Environment
from megarl.errors import ProcessLost
from megarl.ledger.recorder import Recorder
from megarl.rollout.service import RolloutService
from megarl.rollout.stored_arrays import loaded, stored
from megarl.settings.addresses import Token
from megarl.settings.environments import EnvironmentConfig
from megarl.system.private_folder import MARK
from megarl.system.spans import Recording, close_recording
from megarl.types import Segment


def service_arguments(
    known: dict[str, Any],
    *,
    engines: EngineStarts,
    environment: EnvironmentConfig,
    codec: Codec,
    token: Token | None,
    ledger: Path | None,
    claim: Claim | None,
    recording: Recording | None,
) -> dict[str, Any]:
    """The keyword arguments of a `RolloutService`; called in its process, since some cannot be
    pickled.

    `known`: those made by rank 0. `token`: for reward servers. `claim`: the service fails once
    another run has taken the folder over; None: not checked. Raises `OSError` or `ValueError` for a
    ledger that cannot be continued, `UserError` if another run owns the folder.
    """
    host, folder = ray.util.get_node_ip_address(), os.environ.get(MARK, "")
    channel = Channel(folder, "" if folder and host.startswith("127.") else host)
    if recording is not None:
        recording.open("service")
    return known | {
        "engines": [
            RemoteEngine(handle, channel, number=number)
            for number, handle in enumerate(engines.actors)
        ],
        "starts": engines,
        "environment": ServiceEnvironment(environment, codec, token),
        "ledger": Recorder(ledger, claim.problem if claim is not None else str),
        "keep": stored,
    }


class ServiceEnvironment(Environment):
    """Also decodes segments whose token arrays are in Ray's object store."""

    async def texts(self, segments: Sequence[Segment]) -> list[str]:
        return await super().texts([await loaded(segment) for segment in segments])


GC_THRESHOLD = (20_000, 20, 20)
"""Python's defaults (700, 10, 10) would take a tenth of the service's time: it keeps hundreds of
thousands of objects as long as a step lasts.
"""


class ServiceActor(RolloutService):
    """The service as a Ray actor, which owns the engines. Call `build()` first: verifiers cannot be
    pickled.
    """

    manager: EngineManager | None = None

    def __init__(self, arguments: Callable[[], dict[str, Any]]) -> None:
        """`arguments`: returns the service's, in the actor."""
        die_with_raylet()
        self._arguments = arguments

    async def build(self) -> None:
        arguments = self._arguments()
        if starts := arguments.pop("starts", None):
            self.manager = EngineManager(starts, use=self._use_engine, fail=self._fail)
        super().__init__(**arguments)
        await self.environment.start()
        # What is there now stays: a collection that looks through all of it takes 0.1 s.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLD)

    async def _fail(self, reason: str) -> None:
        await self._waits.fail(ProcessLost(reason))

    def _use_engine(self, number: int, actor: Any) -> None:
        """From now on send the requests of engine `number` to `actor`."""
        before = self.engines.engines[number].remote
        self.engines.replace(number, before.replaced_by(actor))

    async def engine_call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `EngineManager`."""
        return await getattr(self.manager, method)(*arguments)

    def silent_s(self) -> float:
        """Seconds since a step of an engine, or an answer."""
        moved_at = self.manager.moved_at if self.manager else 0.0
        return time.monotonic() - max(moved_at, self._attempts.moved_at)

    async def stop(self) -> None:
        stops = [self.manager.close()] if self.manager else []
        await asyncio.gather(self._stop(), *stops)
        close_recording()

    async def _stop(self) -> None:
        await super().stop()
        await self.environment.close()
