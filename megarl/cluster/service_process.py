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

from megarl.activity.recording import Recording, close_recording
from megarl.checkpoints.lease import Claim
from megarl.cluster.channel import Channel
from megarl.cluster.remote import RemoteEngine, die_with_raylet
from megarl.cluster.stored_arrays import loaded, stored
from megarl.config import RunConfig
from megarl.data.source import PromptList
from megarl.environments.addresses import Token
from megarl.environments.codec import Codec
from megarl.environments.scoring import Environment
from megarl.ledger.journal import FILE
from megarl.ledger.recorder import Recorder
from megarl.parallel.layout import Layout
from megarl.private_folder import MARK
from megarl.rollout.batch import SharePlan
from megarl.rollout.evaluation import Evaluated
from megarl.rollout.service import RolloutService
from megarl.rollout.waits import PublishAgain
from megarl.trainer.prefixes import must_save
from megarl.types import Cursor, Group, Prompt, Segment


def build_service(
    config: RunConfig,
    handles: list[Any],
    layout: Layout,
    prompts: PromptList,
    codec: Codec,
    first_step: int,
    cursor: Cursor,
    token: Token | None,
    recording: Recording | None = None,
    carried: Sequence[Group] = (),
    windows: Sequence[int | None] = (),
) -> tuple[RolloutService, Environment]:
    """Create the rollout service, which has engines generate and the environment score rollouts,
    and deals them out to trainer ranks. Called in the service's process. Returns (service,
    environment). The service has no ledger (the record of what became of each prompt);
    `with_ledger` adds one.

    `handles`: the Ray actors of the engines. `layout`: the policy's degrees of parallelism.
    `codec`: decodes and encodes token ids. `first_step`: the step, from 0, with which the run
    begins or is resumed. `cursor`: the prompts that earlier steps have used. `token`: bearer token
    for reward servers, which only rank 0 can read. `recording`: the run's folder of activity files,
    to which the process writes what it does, or None. `carried`: finished groups in the checkpoint
    from which the run is resumed. `windows`: the sliding window of each layer of the policy in
    tokens, None for a layer without one.
    """
    host, folder = ray.util.get_node_ip_address(), os.environ.get(MARK, "")
    channel = Channel(folder, "" if folder and host.startswith("127.") else host)
    deadline_s = config.rollout.request_timeout_s
    if recording is not None:
        recording.open("service")
    environment = ServiceEnvironment(config.environment, codec, token)
    service = RolloutService(
        config=config.rollout,
        seed=config.seed,
        prompts=prompts,
        engines=[
            RemoteEngine(handle, channel, number=number, deadline_s=deadline_s)
            for number, handle in enumerate(handles)
        ],
        environment=environment,
        num_data_ranks=layout.data,
        num_mini_batches=config.training.num_mini_batches,
        micro_batch_tokens=config.training.micro_batch_tokens * layout.sequence,
        prefix_saves=must_save(config.training.share_prefix),
        windows=windows,
        last_step=config.steps - 1,
        transcripts_per_step=config.observe.transcripts_per_step,
        cursor=cursor,
        first_step=first_step,
        carried=carried,
        group_filter=config.group_filter,
        skips_equal_groups=config.skips_equal_groups,
        greedy_baseline=config.greedy_baseline,
        max_turns=config.environment.max_turns,
        max_failure_share=config.environment.max_failure_share,
        keep=stored,
    )
    return service, environment


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


class ServiceActor:
    """Ray actor with the rollout service. Trainer ranks call its methods through `RolloutClient`,
    rank 0's supervisor of engines some of them too. A method not explained here passes its
    arguments on to the method of `RolloutService` with the same name. `build()` must be called
    first: it creates service and environment in the actor, since verifiers cannot be pickled.
    """

    def __init__(self, build: Callable[[], Any], held_out: list[Prompt]) -> None:
        die_with_raylet()
        self._build, self._held_out = build, held_out

    async def build(self) -> None:
        self._service, self._environment = self._build()
        await self._environment.start()
        # What is there now stays: a collection that looks through all of it takes 0.1 s.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLD)

    async def start(self, receipts: Sequence[str] = ()) -> None:
        await self._service.start(receipts)

    async def interrupt(self, is_early_stop: bool) -> None:
        await self._service.interrupt(is_early_stop=is_early_stop)

    async def is_early_stop(self) -> bool:
        return self._service.is_early_stop

    async def take(
        self, step: int, data_rank: int, publications: int
    ) -> SharePlan | PublishAgain | None:
        return await self._service.take(step, data_rank, publications)

    async def release(self, version: int, receipts: Sequence[str] = ()) -> None:
        await self._service.release(version, receipts)

    async def cursor(self, step: int) -> Cursor:
        return await self._service.cursor(step)

    async def unused(self, step: int, data_rank: int) -> list[Group]:
        return await self._service.unused(step, data_rank)

    async def evaluate(
        self, temperature: float, name: str, publications: int
    ) -> Evaluated | PublishAgain | None:
        return await self._service.evaluate(self._held_out, temperature, name, publications)

    async def answers(
        self, prompts: list[Prompt], temperature: float, name: str, inspects: bool
    ) -> list[dict[str, Any]]:
        return await self._service.answers(prompts, temperature, name, inspects=inspects)

    async def engine_is_ready(self, number: int) -> None:
        await self._service.engine_is_ready(number)

    async def fail(self, reason: str) -> None:
        await self._service.fail(reason)

    async def progress(self, engine_steps: int = 0) -> int:
        return self._service.progress(engine_steps)

    async def silent_s(self) -> float:
        """Seconds since an engine has made a step, or an engine or the environment has answered, as
        far as the service was told.
        """
        self._service.progress()
        return self._service.moved.silent_s

    async def use_engine(self, number: int, handle: Any) -> None:
        """From now on send the requests of engine `number` to `handle`, the Ray actor of a new
        engine that has the current weights. A second call with the same actor changes nothing, so a
        caller may repeat a call whose answer was lost.
        """
        known = self._service.engines.engines[number]
        assert isinstance(known, RemoteEngine)
        if known.handle != handle:
            self._service.use_engine(number, known.replaced_by(handle))

    async def stop(self) -> None:
        await self._service.stop()
        await self._environment.close()
        close_recording()


Built = tuple[RolloutService, Environment]


def with_ledger(build: Callable[[], Built], folder: Path, claim: Claim | None) -> Built:
    """Call `build`, which creates (rollout service, environment), and return both, the service with
    a ledger: it records what becomes of each group of rollouts in a file of the run folder
    `folder`. Called in the service's process. `claim`: says whether this run still owns the folder;
    once it does not, the service fails instead of writing. None: not checked. Raises `OSError` or
    `ValueError` if the folder has a ledger that cannot be continued, and `UserError` if another run
    owns the folder.
    """
    service, environment = build()
    lost = claim.problem if claim is not None else str
    service.ledger = Recorder(folder / FILE, lost)
    return service, environment
