"""The generating side of a run: engines and the rollout service on Ray, started from rank 0.

generation = start_generation(...)   # rank 0: engines and service begin to start
...build the model meanwhile...
generation.wait()                    # rank 0: wait for them
generation.join(stack)               # the other ranks connect to the same Ray cluster
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.checkpoints.group_files import read_groups
from megarl.checkpoints.progress import read_progress
from megarl.engines.client import EngineClient
from megarl.engines.pool import EngineStarts
from megarl.environments.codec import Codec
from megarl.environments.scoring import client_token
from megarl.ledger.journal import FILE
from megarl.parallel.collectives import broadcast_object, gather_objects, on_first
from megarl.parallel.mesh import ProcessMesh
from megarl.rollout.batch import shares
from megarl.rollout.ray_cluster import Cluster, object_store_bytes
from megarl.rollout.service_process import service_arguments
from megarl.rollout.stored_arrays import store
from megarl.settings.combinations import with_hidden
from megarl.settings.config import RunConfig, made_with
from megarl.system.console import say
from megarl.system.placement import RankPlace, own_seats, shared_seats
from megarl.system.process_env import engine_environment, own_cluster_token
from megarl.system.spans import Recording
from megarl.trainer.attention import layer_windows
from megarl.trainer.context import RunInputs
from megarl.trainer.model_config import load_model_config, longest_sequence
from megarl.trainer.prefixes import must_save
from megarl.trainer.threads import engine_threads
from megarl.types import START, Group


@dataclass
class Generation:
    """One trainer rank's handle on the part of a run that generates rollouts (Ray, the engines and
    the rollout service): waits until it is ready, and puts colocated engines to sleep and wakes
    them. `start_generation` makes it on every rank. `cluster` and `engines` are None except on rank
    0.
    """

    config: RunConfig
    mesh: ProcessMesh
    cluster: Cluster | None
    engines: EngineClient | None

    def wait(self) -> None:
        """On rank 0, block until rollout service and engines are ready; other ranks return at once.
        Raises `RuntimeError` if one fails, or is not ready within `rollout.engine.start_timeout_s`
        seconds.
        """
        if self.cluster is not None and self.engines is not None:
            self.cluster.wait_for_service(self.config.rollout.engine.start_timeout_s)
            self.engines.wait()

    def join(self, stack: ExitStack) -> None:
        """Have all other ranks join the Ray cluster of rank 0. All ranks call it together; it
        blocks. `stack`: disconnects when it closes.
        """
        place = None
        if self.cluster is not None:
            place = (self.cluster.address, self.cluster.namespace, own_cluster_token())
        place = broadcast_object(place, self.mesh.world)
        if self.cluster is None:
            assert place is not None
            stack.enter_context(Cluster(namespace=place[1], address=place[0], token=place[2]))

    def sleep(self) -> None:
        """Have colocated engines free their GPU memory for training, and block until they have. All
        ranks call it together. Raises `RuntimeError` on every rank if an engine fails.
        """
        self._ask_engines("putting the engines to sleep", EngineClient.sleep)

    def wake(self) -> None:
        """Have colocated engines allocate the memory of their weights again, uninitialised, and
        block until they have. The values come when the trainer next sends its weights. All ranks
        call it together. Raises `RuntimeError` on every rank if an engine fails.
        """
        self._ask_engines("waking the engines up", EngineClient.wake)

    def _ask_engines(self, doing: str, call: Callable[..., None]) -> None:
        """Run a call to the engines on rank 0; an error is raised on every rank."""
        timeout_s = self.config.weight_sync.timeout_s
        failure = on_first(lambda: call(self.engines, timeout_s=timeout_s), self.mesh.world)
        if failure:
            raise RuntimeError(f"{doing} failed: {failure}")


def start_generation(
    config: RunConfig, inputs: RunInputs, mesh: ProcessMesh, stack: ExitStack, *, on_cpu: bool
) -> Generation:
    """On rank 0, start Ray, begin to start the engines and the rollout service, and return without
    waiting for them: the caller builds the model meanwhile. All ranks call it together. Call
    `Generation.wait` on the result before use. `inputs`: made by `megarl.checks.preflight`; has, on
    rank 0, the prompts for training and evaluation, the tokenizer, the tokens that end a response,
    and the folder of the checkpoint to resume from. `stack`: ends all that was started when it
    closes. `on_cpu`: whether trainer and engines run without GPUs.
    """
    ranks = gather_objects(RankPlace.mine(on_cpu=on_cpu), mesh.world)
    if mesh.world.rank != 0:
        return Generation(config, mesh, None, None)
    cluster = stack.enter_context(
        Cluster(
            namespace=f"megarl-{os.getpid()}",
            token=own_cluster_token(),
            object_store_bytes=object_store_bytes(config.rollout),
            hidden=config.environment.remote.token_variable,
        )
    )
    run_id = inputs.owner.run_id if inputs.owner is not None else ""
    recording = Recording.of(config.folder, run_id, enabled=config.observe.activity)
    lora = config.training.lora
    adapts = lora.is_on and lora.publish == "adapter"
    starts = start_engines(
        config,
        inputs.stop_token_ids,
        on_cpu=on_cpu,
        ranks=ranks,
        load=adapts,
        adapter_rank=lora.rank if adapts else 0,
        recording=recording,
    )
    engines = start_service(config, cluster, starts, inputs, records=True, recording=recording)
    return Generation(config, mesh, cluster, engines)


def carried_groups(config: RunConfig, inputs: RunInputs, checkpoint: Path) -> list[Group]:
    """The finished groups (all rollouts of a prompt) in the checkpoint folder `checkpoint` that no
    step has trained on, in the order of their prompts. Their token arrays are put into Ray's object
    store and live as long as this process. Groups that were made with other settings are left out,
    which a line on the console says.
    """
    assert inputs.prompts is not None
    groups, left_out = read_groups(checkpoint, made_with(config), inputs.prompts.at)
    if left_out:
        say(
            f"{left_out} finished groups of {checkpoint.name} are generated again: they were made"
            " with other settings of rollout, environment or algorithm"
        )
    if groups:
        say(
            f"{len(groups)} finished groups of {checkpoint.name} are trained on, those excepted"
            " that a step might find too old"
        )
    return store(groups)


def start_engines(
    config: RunConfig,
    stop_token_ids: list[int],
    *,
    on_cpu: bool,
    ranks: Sequence[RankPlace] = (),
    load: bool = False,
    adapter_rank: int = 0,
    recording: Recording | None = None,
) -> EngineStarts:
    """Begin to start the engines that `config` asks for in the Ray cluster that this process has
    joined, and return without waiting. Called on rank 0.

    `stop_token_ids`: tokens that end a response. `ranks`: host and GPU of each trainer rank, whose
    GPUs colocated engines use; empty where nothing is trained. `load`: engines read the model's
    weights from disk instead of waiting for the trainer's weights of version 0. `adapter_rank`:
    rank of the LoRA adapters that will be sent to the engines, 0 for none. `recording`: the run's
    folder of activity files, to which the engines write what they do; None: they write none.
    """
    engine, count = config.rollout.engine, config.rollout.num_engines
    shares = config.rollout.placement == "colocated" and bool(ranks)
    if shares:
        seats = shared_seats(count, tensor=engine.tensor, ranks=ranks)
    else:
        seats = own_seats(
            count, tensor=engine.tensor, gpus=not on_cpu, timeout_s=engine.start_timeout_s
        )
    arguments: dict[str, Any] = dict(
        load=load,
        adapter_rank=adapter_rank,
        recording=recording,
        sleeps=shares and not on_cpu,
        model=config.model.path,
        config=engine,
        max_tokens=longest_sequence(config, load_model_config(config.model)),
        stop_token_ids=stop_token_ids,
        trust_remote_code=config.model.trust_remote_code,
        seed=config.seed,
        sampling=config.rollout.sampling,
        tokenizer=(config.model.tokenizer or config.model.path)
        if config.rollout.stop or config.environment.agent.is_used  # for texts that end a response
        else "",
        environment=engine_environment(
            on_cpu=on_cpu,
            num_threads=engine_threads(config, trains=bool(ranks)),
            kv_cache_gib=engine.kv_cache_gib,
        ),
    )
    timeouts = engine.start_timeout_s, engine.stall_timeout_s
    return EngineStarts(seats, arguments, *timeouts, takes_turns=shares).begin()


def start_service(
    config: RunConfig,
    cluster: Cluster,
    engines: EngineStarts,
    inputs: RunInputs,
    *,
    records: bool = False,
    recording: Recording | None = None,
) -> EngineClient:
    """Begin to start the rollout service in a Ray actor, which takes the engines over; returns what
    rank 0 calls these by. Called on rank 0; does not wait (`Cluster.wait_for_service` does). The
    prompts of `inputs`, which only rank 0 has, are moved to the service, and so are position and
    finished groups of the checkpoint to resume from, if there is one.

    `records`: whether the service writes the ledger of the run folder. `recording`: the run's
    folder of activity files; None: service and environment write none.
    """
    assert inputs.prompts is not None
    step, cursor, carried = 0, START, list[Group]()
    if inputs.resume_from is not None:
        progress = read_progress(inputs.resume_from)
        step, cursor = progress.step, progress.cursor
        carried = carried_groups(config, inputs, inputs.resume_from)
    deal = functools.partial(
        shares,
        num_data_ranks=inputs.layout.data,
        num_mini_batches=config.training.num_mini_batches,
        micro_batch_tokens=config.training.micro_batch_tokens * inputs.layout.sequence,
        transcripts=config.observe.transcripts_per_step,
        truncated=config.algorithm.truncated,
        sends_untrained=bool(config.reward_models),
        skips_equal=config.skips_equal_groups,
        prefix_saves=must_save(config.training.share_prefix),
        windows=layer_windows(inputs.hf),
    )
    environment = with_hidden(config).within(
        config.rollout.max_new_tokens,
        config.training.micro_batch_tokens * inputs.layout.sequence,
    )
    known: dict[str, Any] = dict(
        config=config.rollout,
        seed=config.seed,
        prompts=inputs.prompts,
        num_data_ranks=inputs.layout.data,
        deal=deal,
        last_step=config.steps - 1,
        held_out=list(inputs.held_out or ()),
        cursor=cursor,
        first_step=step,
        carried=carried,
        group_filter=config.group_filter,
        greedy_baseline=config.greedy_baseline,
        truncated=config.algorithm.truncated,
        max_turns=config.environment.max_turns,
        max_together=environment.agent.rollout_tokens,
        max_failure_share=config.environment.max_failure_share,
    )
    codec = Codec.of(
        inputs.tokenizer,
        whole=config.environment.needs_template,
        variables=config.prompts.parts[0].template_variables,
        chats=bool(config.environment.session) and config.prompts.parts[0].template == "chat",
        allows_control=config.environment.control_tokens,
    )
    service = cluster.start_service(
        functools.partial(
            service_arguments,
            known,
            engines=engines,
            environment=environment,
            codec=codec,
            token=client_token(config.environment),
            ledger=Path(config.folder).absolute() / FILE if records else None,
            claim=inputs.owner.claim if inputs.owner is not None else None,
            recording=recording,
        )
    )
    return EngineClient(service, engines)
