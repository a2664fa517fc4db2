"""The process of the rollout service. It imports neither torch nor transformers, since it starts
while engines and trainer ranks need the CPU.
"""

from __future__ import annotations

import functools
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
from megarl.ledger.recorder import Recorder
from megarl.parallel.layout import Layout
from megarl.private_folder import MARK
from megarl.rollout.batch import shares
from megarl.rollout.service import RolloutService
from megarl.trainer.prefixes import must_save
from megarl.types import Cursor, Group, Prompt, Segment


def service_arguments(
    config: RunConfig,
    *,
    handles: list[Any],
    layout: Layout,
    prompts: PromptList,
    held_out: list[Prompt],
    codec: Codec,
    token: Token | None,
    windows: Sequence[int | None],
    first_step: int,
    cursor: Cursor,
    carried: Sequence[Group],
    ledger: Path | None,
    claim: Claim | None,
    recording: Recording | None,
) -> dict[str, Any]:
    """The keyword arguments of a run's `RolloutService`, which has engines generate and the
    environment score rollouts, and deals them out to trainer ranks; made in the service's process.

    `handles`: the Ray actors of the engines. `layout`: the policy's degrees of parallelism.
    `held_out`: the problems of evaluations. `codec`: decodes and encodes token ids. `token`: bearer
    token for reward servers, which only rank 0 can read. `windows`: the sliding window of each
    layer of the policy in tokens, None for a layer without one. `first_step`: the step, from 0,
    with which the run begins or is resumed. `cursor`: the prompts that earlier steps have used.
    `carried`: finished groups in the checkpoint from which the run is resumed. `ledger`: the file
    that records what becomes of each group of rollouts; None for no record. `claim`: says whether
    this run still owns its folder; once it does not, the service fails instead of writing. None:
    not checked. `recording`: the run's folder of activity files, to which the process writes what
    it does, or None. Raises `OSError` or `ValueError` for a ledger that cannot be continued, and
    `UserError` if another run owns the folder.
    """
    host, folder = ray.util.get_node_ip_address(), os.environ.get(MARK, "")
    channel = Channel(folder, "" if folder and host.startswith("127.") else host)
    deadline_s = config.rollout.request_timeout_s
    if recording is not None:
        recording.open("service")
    return dict(
        config=config.rollout,
        seed=config.seed,
        prompts=prompts,
        engines=[
            RemoteEngine(handle, channel, number=number, deadline_s=deadline_s)
            for number, handle in enumerate(handles)
        ],
        environment=ServiceEnvironment(config.environment, codec, token),
        num_data_ranks=layout.data,
        deal=functools.partial(
            shares,
            num_data_ranks=layout.data,
            num_mini_batches=config.training.num_mini_batches,
            micro_batch_tokens=config.training.micro_batch_tokens * layout.sequence,
            transcripts=config.observe.transcripts_per_step,
            skips_equal=config.skips_equal_groups,
            prefix_saves=must_save(config.training.share_prefix),
            windows=windows,
        ),
        last_step=config.steps - 1,
        held_out=held_out,
        cursor=cursor,
        first_step=first_step,
        carried=carried,
        group_filter=config.group_filter,
        greedy_baseline=config.greedy_baseline,
        max_turns=config.environment.max_turns,
        max_failure_share=config.environment.max_failure_share,
        ledger=Recorder(ledger, claim.problem if claim is not None else str),
        keep=stored,
    )


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
    """The rollout service as a Ray actor. Trainer ranks call its methods through `RolloutClient`,
    rank 0's supervisor of engines some of them too. `build()` must be called first: it makes the
    service in the actor, since verifiers cannot be pickled.
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
        """Seconds since an engine has made a step, or an engine or the environment has answered, as
        far as the service was told.
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
