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

import numpy as np
from transformers import PretrainedConfig

from megarl.checkpoints.group_files import read_groups
from megarl.checkpoints.progress import read_progress
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
from megarl.settings.config import RunConfig, made_with
from megarl.settings.rl import with_hidden
from megarl.system.console import phase, say
from megarl.system.placement import RankPlace, own_seats, shared_seats
from megarl.system.process_env import engine_environment, own_cluster_token
from megarl.system.spans import Recording, activity
from megarl.trainer.attention import layer_windows
from megarl.trainer.context import RunContext, RunInputs
from megarl.trainer.experts import num_experts
from megarl.trainer.model_config import load_model_config, longest_sequence
from megarl.trainer.prefixes import must_save
from megarl.trainer.threads import engine_threads
from megarl.types import START, Group, expert_dtype
from megarl.weights.engine_client import EngineClient


@dataclass
class Generation:
    """A trainer rank's handle on Ray, the engines and the service; `cluster` and `engines` on rank
    0 only.
    """

    config: RunConfig
    mesh: ProcessMesh
    cluster: Cluster | None
    engines: EngineClient | None

    def wait(self) -> None:
        """On rank 0, wait until service and engines are ready. Raises `RuntimeError` if one fails
        or is late.
        """
        if self.cluster is not None and self.engines is not None:
            self.cluster.wait_for_service(self.config.rollout.engine.start_timeout_s)
            self.engines.wait()

    def join(self, stack: ExitStack) -> None:
        """Have the other ranks join Ray until `stack` closes. Collective."""
        address = None
        if self.cluster is not None:
            address = (self.cluster.address, self.cluster.namespace, own_cluster_token())
        address = broadcast_object(address, self.mesh.world)
        if self.cluster is None:
            assert address is not None
            stack.enter_context(Cluster(namespace=address[1], address=address[0], token=address[2]))

    def sleep(self) -> None:
        """Free the GPU memory of colocated engines. Collective. Raises `RuntimeError` on every rank
        if one fails.
        """
        self._ask_engines("putting the engines to sleep", EngineClient.sleep)

    def wake(self) -> None:
        """Allocate the memory again, uninitialised; otherwise as `sleep`."""
        self._ask_engines("waking the engines up", EngineClient.wake)

    def _ask_engines(self, doing: str, call: Callable[..., None]) -> None:
        timeout_s = self.config.weight_sync.timeout_s
        with activity(doing, kind="wait", of="engines", deadline_s=timeout_s):
            failure = on_first(lambda: call(self.engines, timeout_s=timeout_s), self.mesh.world)
        if failure:
            raise RuntimeError(f"{doing} failed: {failure}")


def start_generation(context: RunContext, config: RunConfig, inputs: RunInputs) -> Generation:
    """On rank 0, begin to start Ray, engines and service, until `context.stack` closes. Collective
    over the policy's ranks. Call `Generation.wait` before use, then `join`; meanwhile the caller
    builds the model.
    """
    mesh, on_cpu = context.mesh, context.device.type == "cpu"
    ranks = gather_objects(RankPlace.mine(on_cpu=on_cpu), mesh.world)
    if mesh.world.rank != 0:
        return Generation(config, mesh, None, None)
    with phase("Ray"), activity("start of Ray", kind="load"):
        room = object_store_bytes(config.rollout, expert_bytes(config, inputs.hf))
        cluster = context.stack.enter_context(
            Cluster(
                namespace=f"megarl-{os.getpid()}",
                token=own_cluster_token(),
                object_store_bytes=room,
                hidden=config.environment.remote.token_variable,
            )
        )
        run_id = inputs.owner.run_id if inputs.owner is not None else ""
        recording = Recording.of(config.folder, run_id, enabled=config.observe.activity)
        starts = start_engines(
            config, inputs.stop_token_ids, on_cpu=on_cpu, ranks=ranks, recording=recording
        )
        engines = start_service(config, cluster, starts, inputs, records=True, recording=recording)
    return Generation(config, mesh, cluster, engines)


def expert_bytes(config: RunConfig, hf: PretrainedConfig) -> int:
    """Bytes of a token's `TokenArrays.experts`."""
    if config.algorithm.router_replay != "rollout":
        return 0
    text, dtype = hf.get_text_config(), np.dtype(expert_dtype(num_experts(hf)))
    return text.num_hidden_layers * text.num_experts_per_tok * dtype.itemsize


def carried_groups(config: RunConfig, inputs: RunInputs, checkpoint: Path) -> list[Group]:
    """The checkpoint's finished groups that no step has used, with arrays in Ray's object store.
    Groups made with other settings are left out, which a line says.
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
    recording: Recording | None = None,
) -> EngineStarts:
    """Begin to start the engines of `config` on the joined Ray cluster, from rank 0.

    `ranks`: of the trainer, whose GPUs colocated engines use; empty where nothing is trained, and
    engines read the weights from disk. `recording`: where engines write activity.
    """
    lora, trains = config.training.lora, bool(ranks)
    adapts = trains and lora.is_on and lora.publish == "adapter"
    engine, count = config.rollout.engine, config.rollout.num_engines
    shares = config.rollout.placement == "colocated" and trains
    if shares:
        seats = shared_seats(count, tensor=engine.tensor, ranks=ranks)
    else:
        seats = own_seats(
            count, tensor=engine.tensor, gpus=not on_cpu, timeout_s=engine.start_timeout_s
        )
    arguments: dict[str, Any] = dict(
        load=adapts or not trains,
        adapter_rank=lora.rank if adapts else 0,
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
            num_threads=engine_threads(config, trains=trains),
            kv_cache_gib=engine.kv_cache_gib,
        ),
    )
    if trains and config.algorithm.router_replay == "rollout":
        arguments["records_experts"] = True
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
    """Begin to start the service, which takes over engines, the prompts of `inputs`, and the groups
    of the checkpoint to resume from. Returns what rank 0 calls engines by. `records`: write the
    ledger.
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
        config=config,
        prompts=inputs.prompts,
        num_data_ranks=inputs.layout.data,
        deal=deal,
        held_out=list(inputs.held_out or ()),
        cursor=cursor,
        first_step=step,
        carried=carried,
        max_together=environment.agent.rollout_tokens,
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
    return EngineClient(service, engines.timeout_s)
