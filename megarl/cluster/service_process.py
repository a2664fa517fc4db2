"""The process of the rollout service. It imports neither torch nor transformers, since it starts
while engines and trainer ranks need the CPU.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from megarl.activity.spans import Recording, close_recording
from megarl.checkpoints.lease import Claim
from megarl.cluster.channel import Channel
from megarl.cluster.remote import RemoteEngine, die_with_raylet
from megarl.cluster.stored_arrays import loaded, stored
from megarl.environments.addresses import Token
from megarl.environments.codec import Codec
from megarl.environments.config import EnvironmentConfig
from megarl.environments.scoring import Environment
from megarl.ledger.recorder import Recorder
from megarl.private_folder import MARK
from megarl.rollout.service import RolloutService
from megarl.types import Segment


def service_arguments(
    known: dict[str, Any],
    *,
    handles: list[Any],
    environment: EnvironmentConfig,
    codec: Codec,
    token: Token | None,
    ledger: Path | None,
    claim: Claim | None,
    recording: Recording | None,
) -> dict[str, Any]:
    """The keyword arguments of a run's `RolloutService`, which has engines generate and the
    environment score rollouts, and deals them out to trainer ranks; to be called in the service's
    process, since some of the arguments cannot be pickled.

    `known`: the arguments that can be pickled, made by rank 0. `handles`: the Ray actors of the
    engines. `codec`: decodes and encodes token ids. `token`: bearer token for reward servers, which
    only rank 0 can read; None for none. `ledger`: the file that records what becomes of each group
    (all rollouts of one prompt); None for no record. `claim`: this run's claim to its folder; if
    another run has taken the folder over, the service fails instead of writing. None: not checked.
    `recording`: folder in which the process records its activity, or None. Raises `OSError` or
    `ValueError` for a ledger that cannot be continued, and `UserError` if another run owns the
    folder.
    """
    host, folder = ray.util.get_node_ip_address(), os.environ.get(MARK, "")
    channel = Channel(folder, "" if folder and host.startswith("127.") else host)
    if recording is not None:
        recording.open("service")
    return known | {
        "engines": [
            RemoteEngine(handle, channel, number=number) for number, handle in enumerate(handles)
        ],
        "environment": ServiceEnvironment(environment, codec, token),
        "ledger": Recorder(ledger, claim.problem if claim is not None else str),
        "keep": stored,
    }


class ServiceEnvironment(Environment):
    """Scores a run's rollouts with its verifiers, and answers the model in rollouts of several
    turns; runs in the rollout service's process. Unlike its base class it also decodes to text
    those segments (parts of a rollout) whose token arrays are in Ray's object store.
    """

    async def texts(self, segments: Sequence[Segment]) -> list[str]:
        return await super().texts([await loaded(part) for part in segments])


GC_THRESHOLD = (20_000, 20, 20)
"""Of Python's garbage collector, whose defaults (700, 10, 10) suit a process with few objects. The
service keeps hundreds of thousands as long as a step lasts, in no cycles that it drops, and would
look through them for a tenth of its time."""


class ServiceActor(RolloutService):
    """The rollout service as a Ray actor. Trainer ranks call its methods through `RolloutClient`;
    some are also called by the thread on rank 0 that replaces dead engines. `build()` must be
    called first: it makes the service in the actor, since verifiers cannot be pickled.
    """

    def __init__(self, arguments: Callable[[], dict[str, Any]]) -> None:
        """`arguments`: returns the keyword arguments of `RolloutService`, in the actor."""
        die_with_raylet()
        self._arguments = arguments

    async def build(self) -> None:
        arguments = self._arguments()
        super().__init__(**arguments)
        self._environment: Environment = arguments["environment"]
        await self._environment.start()
        # What is there now stays: a collection that looks through all of it takes 0.1 s.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLD)

    def silent_s(self) -> float:
        """Seconds since the service last learned of progress: a step of an engine, or an answer of
        an engine or of the environment.
        """
        self.progress()
        return self.moved.silent_s

    def use_engine(self, number: int, engine: Any) -> None:
        """From now on send the requests of engine `number` to `engine`, the Ray actor of a new
        engine that has the current weights. A second call with the same actor changes nothing, so a
        caller may repeat a call whose answer was lost.
        """
        known = self.engines.engines[number]
        assert isinstance(known, RemoteEngine)
        if known.handle != engine:
            super().use_engine(number, known.replaced_by(engine))

    async def stop(self) -> None:
        await super().stop()
        await self._environment.close()
        close_recording()
