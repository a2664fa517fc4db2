"""The parts of a run, built in the order in which they need each other, and taken down in the reverse."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.cluster import Cluster, RolloutClient
from megarl.config import RunConfig, as_plain, dump, longest_request, patience_s
from megarl.engine_group import EngineGroup, RemoteEngine
from megarl.environments.scoring import Environment
from megarl.observe.observer import Observer
from megarl.parallel import mesh as mesh_module
from megarl.parallel.collectives import broadcast_object, gather_objects, on_first
from megarl.parallel.layout import Layout
from megarl.parallel.mesh import ProcessMesh
from megarl.placement import RankPlace, own_seats, shared_seats
from megarl.preflight import Checked
from megarl.prompts.source import load_prompts
from megarl.prompts.tokenizer import load_tokenizer
from megarl.publish.families import parameter_table
from megarl.publish.wire import Publisher
from megarl.rollout.service import RolloutService
from megarl.third_party import engine_environment, own_cluster_token
from megarl.training.checkpoint import Checkpoints
from megarl.training.policy import Policy
from megarl.types import Prompt, StepReport


@dataclass
class Parts:
    """What `megarl.loop` works with, on this rank."""

    config: RunConfig
    mesh: ProcessMesh
    policy: Policy
    publisher: Publisher
    rollouts: RolloutClient
    checkpoints: Checkpoints
    observer: Observer | None
    """On rank 0."""
    held_out: list[Prompt] | None
    engines: EngineGroup | None
    """On rank 0."""

    def begin_training(self) -> None:
        """Colocated: the engines sleep, and the optimizer's memory comes back. All ranks call it."""
        if self.config.rollout.placement == "colocated":
            self._ask_engines("putting the engines to sleep", EngineGroup.sleep)
            self.policy.engine.reload()

    def end_training(self) -> None:
        """Colocated: the optimizer's memory goes, and the engines wake up, empty until a version is published."""
        if self.config.rollout.placement == "colocated":
            self.policy.engine.offload()
            self._ask_engines("waking the engines up", EngineGroup.wake)

    def _ask_engines(self, doing: str, call: Callable[..., None]) -> None:
        """Rank 0 asks the engines; what goes wrong there is raised on every rank."""
        failure = on_first(lambda: call(self.engines, timeout_s=self.config.publish.timeout_s), self.mesh.world)
        if failure:
            raise RuntimeError(f"{doing} failed: {failure}")

    def start_rollouts(self) -> None:
        """Tell the service to begin; once, by rank 0."""
        if self.observer is not None:
            self.rollouts.start()

    def observe(self, report: StepReport, transcripts: list[dict[str, Any]]) -> None:
        """Write down a step; rank 0 only."""
        if self.observer is not None:
            self.observer.transcripts(report.step, transcripts)
            self.observer.step(report)


@contextmanager
def build(config: RunConfig, checked: Checked) -> Iterator[Parts]:
    """Build everything, yield it, and take it down; what has been built is taken down on any failure too."""
    training, folder = config.training, Path(config.folder)
    torch.set_num_threads(training.num_threads)
    with ExitStack() as stack:
        device = mesh_module.initialise(timeout_s=training.collective_timeout_s)
        stack.callback(mesh_module.finalise)
        mesh = stack.enter_context(
            ProcessMesh(checked.layout, ulysses=training.sequence.ulysses, timeout_s=training.collective_timeout_s)
        )
        main = mesh.world.rank == 0
        cluster, engines = None, None
        places = gather_objects(RankPlace.mine(on_cpu=device.type == "cpu"), mesh.world)
        if main:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "recipe.yaml").write_text(dump(config))
            # Engines take longest to start: they do so while this process builds the policy.
            cluster = stack.enter_context(Cluster(namespace=f"megarl-{os.getpid()}", token=own_cluster_token()))
            engines = start_engines(cluster, config, checked, on_cpu=device.type == "cpu", ranks=places)
        policy = Policy(
            model=config.model,
            training=training,
            algorithm=config.algorithm,
            temperature=config.rollout.temperature,
            mesh=mesh,
            device=device,
            total_steps=config.steps,
            seed=config.seed,
        )
        stack.callback(policy.engine.destroy)
        checkpoints = Checkpoints(
            folder / "checkpoints",
            keep=training.checkpoint.keep,
            engine=policy.engine,
            tokenizer=checked.tokenizer,
            mesh=mesh,
            seed=config.seed,
            data=checked.data,
        )
        chosen = broadcast_object(checked.resume_from, mesh.world)
        progress = checkpoints.load(chosen) if chosen is not None else None
        policy.step, first_ordinal = (progress.step, progress.next_ordinal) if progress else (0, 0)
        observer = None
        if main:
            observer = stack.enter_context(
                Observer(config.observe, folder, total_steps=config.steps, first_step=policy.step, resolved=as_plain(config))
            )
            assert cluster is not None and engines is not None
            engines.wait()
            builder = service_builder(config, checked, engines, policy.step, first_ordinal)
            engines.service = cluster.start_service(builder, timeout_s=config.rollout.engine.start_timeout_s)
        join_cluster(cluster, mesh, stack)
        draws = config.rollout.groups_per_step * max(1.0, config.rollout.dynamic_sampling.max_draws)
        requests = int((1 + config.rollout.max_staleness) * draws * config.rollout.samples_per_group)
        deadline = patience_s(config, max(requests, len(checked.held_out or ())))
        publisher = Publisher(
            config.publish,
            table=parameter_table(checked.hf.to_dict()),
            policy=policy,
            engines=engines,
            num_engines=config.rollout.num_engines,
            engine_tensor=config.rollout.engine.tensor,
            mesh=mesh,
            dtype=config.rollout.engine.dtype,
            precision=training.precision,
            vocabulary=len(checked.tokenizer),
            max_tokens=longest_request(config),
            seed=config.seed,
        )
        stack.callback(publisher.close)
        yield Parts(
            config=config,
            mesh=mesh,
            policy=policy,
            publisher=publisher,
            rollouts=RolloutClient(mesh.data.rank, deadline_s=deadline),
            checkpoints=checkpoints,
            observer=observer,
            held_out=list(checked.held_out) if checked.held_out is not None else None,
            engines=engines,
        )


def join_cluster(cluster: Cluster | None, mesh: ProcessMesh, stack: ExitStack) -> None:
    """Bring ranks other than 0 into rank 0's Ray; all ranks call it."""
    place = (cluster.address, cluster.namespace, own_cluster_token()) if cluster is not None else None
    place = broadcast_object(place, mesh.world)
    if cluster is None:
        assert place is not None
        stack.enter_context(Cluster(namespace=place[1], address=place[0], token=place[2]))


def start_engines(
    cluster: Cluster,
    config: RunConfig,
    checked: Checked,
    *,
    on_cpu: bool,
    ranks: Sequence[RankPlace] = (),
    load: bool = False,
) -> EngineGroup:
    """The recipe's engines, starting: beside the trainer's `ranks` where they are colocated. With `load` they read the model's
    weights instead of waiting for version 0."""
    engine, count = config.rollout.engine, config.rollout.num_engines
    shares = config.rollout.placement == "colocated" and bool(ranks)
    if shares:
        seats = shared_seats(count, tensor=engine.tensor, ranks=ranks)
    else:
        seats = own_seats(count, tensor=engine.tensor, gpus=not on_cpu, timeout_s=engine.start_timeout_s)
    return cluster.start_engines(
        seats,
        timeout_s=engine.start_timeout_s,
        load=load,
        sleeps=shares and not on_cpu,
        model=config.model.path,
        config=engine,
        max_tokens=longest_request(config),
        stop_token_ids=checked.stop_token_ids,
        trust_remote_code=config.model.trust_remote_code,
        seed=config.seed,
        environment=engine_environment(on_cpu=on_cpu, num_threads=engine.num_threads, kv_cache_gib=engine.kv_cache_gib),
    )


def service_builder(config: RunConfig, checked: Checked, engines: EngineGroup, step: int, ordinal: int) -> Any:
    """A function that builds the rollout service where it will run."""
    return functools.partial(build_service, config, list(engines.handles), checked.layout, step, ordinal)


def build_service(
    config: RunConfig, handles: list[Any], layout: Layout, first_step: int, first_ordinal: int
) -> tuple[RolloutService, Environment]:
    """The rollout service and its environment, inside the service's own process."""
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path, trust_remote_code=config.model.trust_remote_code)
    environment = Environment(config.environment)
    service = RolloutService(
        config=config.rollout,
        seed=config.seed,
        prompts=load_prompts(config.prompts, tokenizer, seed=config.seed),
        engines=[RemoteEngine(handle) for handle in handles],
        score=environment.score,
        decode=functools.partial(tokenizer.decode, skip_special_tokens=True),  # pyright: ignore[reportArgumentType]
        num_data_ranks=layout.data,
        mini_batches=config.training.mini_batches,
        micro_batch_tokens=config.training.micro_batch_tokens * layout.sequence,
        last_step=config.steps - 1,
        transcripts_per_step=config.observe.transcripts_per_step,
        first_ordinal=first_ordinal,
        first_step=first_step,
    )
    return service, environment
