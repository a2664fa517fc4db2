"""Builds what the RL loop works with on each rank: models, engines, rollouts, the transfer of
weights, checkpoints, time limits. "All ranks" includes those of other models than the policy.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.checkpoints.checkpoint import Checkpoints
from megarl.kernels.divergence import Divergence
from megarl.observe.live_report import LiveReport
from megarl.observe.observer import Observer
from megarl.parallel.collectives import broadcast_object, wait_for_first
from megarl.parallel.mesh import Axis, ProcessMesh, all_ranks
from megarl.parallel.rank0_commands import Rank0Commands
from megarl.rollout.batch_files import BatchWriter
from megarl.rollout.client import RolloutClient
from megarl.run.rollouts import Generation, start_generation
from megarl.settings.config import DistillConfig, RunConfig, patience_s, silence_s
from megarl.system.console import phase
from megarl.system.spans import activity
from megarl.trainer.context import RunContext, RunInputs, trained_roles
from megarl.trainer.critic import Critic
from megarl.trainer.distillation import Distillation
from megarl.trainer.heads import HeadName
from megarl.trainer.model_config import longest_sequence
from megarl.trainer.model_rewards import RewardModels
from megarl.trainer.policy import PolicyGradient
from megarl.trainer.role import Role
from megarl.trainer.role_placement import policy_as_reference, reference_adapter, role_training
from megarl.trainer.teacher import Teacher
from megarl.trainer.transfer import BatchTransfer, Scorer
from megarl.weights.adapter_publisher import AdapterPublisher
from megarl.weights.probe import Probe
from megarl.weights.publication import Publication
from megarl.weights.publisher import Publisher


@dataclass
class TrainingParts:
    """What a rank of the policy needs to train on batches."""

    config: RunConfig
    context: RunContext
    first_step: int
    """Steps done by the resumed checkpoint."""
    policy: Role
    reference: Scorer | None
    """None without a KL penalty."""
    critics: list[Critic]
    """None, one for GAE, or those that a user's own advantage function needs."""
    rewards: RewardModels
    """Adds reward models' scores, if there are any."""
    teacher: Teacher | None
    """For `task: distill`."""
    serving: Rank0Commands | None
    """Rank 0's orders to ranks without a part of the policy, if there are any."""
    learner: PolicyGradient | Distillation
    checkpoints: Checkpoints
    observer: Observer | None
    """Writes metrics on rank 0."""
    report: LiveReport
    """Writes `report.html` as the run goes."""

    @property
    def trained(self) -> list[Role]:
        """The models on this rank that have an optimizer."""
        return [self.policy, *(critic.role for critic in self.critics if critic.role is not None)]

    def algorithm_state(self) -> dict[str, float]:
        """What the algorithm adapts during a run, such as the KL coefficient, for a checkpoint."""
        return self.learner.state() if isinstance(self.learner, PolicyGradient) else {}


@dataclass
class Parts(TrainingParts):
    """What a rank of the policy needs for the RL loop."""

    generation: Generation
    rollouts: RolloutClient
    publisher: Publication
    num_held_out: int
    """Held-out problems."""
    batches: BatchWriter | None
    """Writes batches for `megarl replay`, if the recipe asks for it, on one of the ranks with equal
    samples.
    """


@dataclass
class ServingParts:
    """What a rank without a part of the policy needs."""

    config: RunConfig
    reference: Scorer | None
    critics: list[Critic]
    rewards: RewardModels
    teacher: Teacher | None
    serving: Rank0Commands
    """Orders of rank 0."""
    checkpoints: Checkpoints


def build(context: RunContext, config: RunConfig, inputs: RunInputs) -> Parts | ServingParts:
    """The objects of this rank: `Parts`, ready, or `ServingParts` without a part of the policy.
    Collective over all ranks; takes minutes.

    `context.stack` closes what is created.
    """
    mesh, stack, generation = context.mesh, context.stack, None
    num_held_out = broadcast_object(len(inputs.held_out or ()), all_ranks())
    if mesh.is_member and config.rollout.placement == "disaggregated":
        # Engines take longest to start: they load while this process builds the policy.
        generation = start_generation(context, config, inputs)
    training = build_training(context, config, inputs, step_deadline_s(config, num_held_out))
    if isinstance(training, ServingParts):
        return training
    if generation is None:
        # vLLM sizes its cache by the memory that is free, and takes what others free meanwhile for
        # its own: first every rank, which the start waits for, has built its roles and lent theirs.
        for role in training.trained:
            role.engine.offload()
        generation = start_generation(context, config, inputs)
    start_s, whom = config.rollout.engine.start_timeout_s, "engines" if context.is_main else "rank0"
    with (
        phase("engines, beside the model"),
        activity("start of the engines", kind="wait", of=whom, deadline_s=start_s),
    ):
        stage, longest_s = "the start of the engines", start_s + mesh.timeout_s
        wait_for_first(generation.wait, mesh.world, stage, longest_s)
        generation.join(stack)
    publisher = make_publisher(config, inputs, training.policy, generation, mesh)
    stack.callback(publisher.close)
    claim, batches = context.claim(), None
    if mesh.sample.rank == 0:
        lost = claim.problem if claim else str
        batches = BatchWriter(context.folder, mesh.data.rank, mesh.data.size, lost)
        batches.start(training.first_step)  # also where none are written: old ones count no longer
    return Parts(
        **vars(training),
        generation=generation,
        rollouts=RolloutClient(mesh.data.rank, silence_s=silence_s(config)),
        publisher=publisher,
        num_held_out=num_held_out,
        batches=batches if config.observe.batches else None,
    )


def build_training(
    context: RunContext, config: RunConfig, inputs: RunInputs, deadline_s: float
) -> TrainingParts | ServingParts:
    """The models of this rank, and the checkpoint to resume from. Collective over all ranks.
    `deadline_s`: how long a rank without a part of the policy waits for an order.
    """
    mesh, everyone, orders = context.mesh, all_ranks(), None
    if len(mesh.ranks) < everyone.size:
        # In one collective a rank may wait for another role's whole step, or its loading.
        everyone = all_ranks(timeout_s=STEPS_OF * config.training.collective_timeout_s)
        orders = Rank0Commands(silence_s=config.training.collective_timeout_s, longest_s=deadline_s)
        context.stack.callback(orders.close)
    updates = (config.steps - config.warmup_steps) * config.training.optimizer_steps
    policy = learner = None
    with phase("model and optimizer"), activity("model and optimizer", kind="load"):
        if mesh.is_member:
            policy = context.role("policy", config.model, optimizer_steps=updates)
            learner = make_learner(config, policy)
        reference, critics, rewards = make_roles(context, config, everyone, policy)
    checkpoints = context.checkpoints(
        policy.engine if policy else None,
        {critic.section: critic.role.engine for critic in critics if critic.role is not None},
        roles=trained_roles(config, inputs.roles),
        everyone=everyone,
    )
    teacher = make_teacher(context, config, everyone, policy)
    progress = context.resume(checkpoints)
    if policy is None or learner is None:
        assert orders is not None
        return ServingParts(config, reference, critics, rewards, teacher, orders, checkpoints)
    first_step = progress.step if progress else 0
    if progress and isinstance(learner, PolicyGradient):
        learner.restore(progress.algorithm)
    learner.guard.has_updated = first_step > config.warmup_steps
    return TrainingParts(
        config=config,
        context=context,
        first_step=first_step,
        policy=policy,
        reference=reference,
        critics=critics,
        rewards=rewards,
        teacher=teacher,
        serving=orders,
        learner=learner,
        checkpoints=checkpoints,
        observer=context.observe(first_step),
        report=LiveReport(context.folder),
    )


def make_publisher(
    config: RunConfig, inputs: RunInputs, policy: Role, generation: Generation, mesh: ProcessMesh
) -> Publication:
    """Sends whole weights, or with `training.lora.publish: adapter` adapters. Collective over the
    policy's ranks.
    """
    engine, lora = config.rollout.engine, config.training.lora
    probe = Probe.random(
        dtypes=(engine.dtype, config.training.dtype),
        vocab_size=len(inputs.tokenizer),
        max_tokens=longest_sequence(config, inputs.hf),
        seed=config.seed,
        tolerance=config.weight_sync.probe_tolerance,
    )
    if lora.is_on and lora.publish == "adapter":
        return AdapterPublisher(
            config.weight_sync,
            policy=policy,
            engines=generation.engines,
            mesh=mesh,
            probe=probe,
            layouts=f"adapters of rank {lora.rank}, training {mesh.layout}",
        )
    table = broadcast_object(inputs.table, mesh.world)
    assert table is not None, "the checks make it wherever engines get all weights"
    return Publisher(
        config.weight_sync,
        table=table,
        policy=policy,
        engines=generation.engines,
        num_engines=config.rollout.num_engines,
        engine_tensor=engine.tensor,
        mesh=mesh,
        dtype=engine.dtype,
        probe=probe,
        shares_gpus=config.rollout.placement == "colocated",
    )


def make_learner(config: RunConfig, policy: Role) -> PolicyGradient | Distillation:
    """What trains the policy on a step's rollouts."""
    rollout = config.rollout
    if isinstance(config, DistillConfig):
        at_same = config.distillation.temperature == rollout.temperature
        compares = at_same and not rollout.sampling.truncation
        return Distillation(policy, config.distillation, compares_engines=compares)
    return PolicyGradient(policy, config.algorithm, temperature=rollout.temperature)


def make_teacher(
    context: RunContext, config: RunConfig, everyone: Axis, policy: Role | None
) -> Teacher | None:
    """The frozen teacher of `task: distill`, else None. Collective over `everyone`."""
    if not isinstance(config, DistillConfig):
        return None
    settings = config.distillation
    return Teacher(
        make_transfer(context, config, "teacher", everyone, head="states"),
        config.teacher.model,
        policy,
        Divergence(settings.divergence, settings.beta, settings.top_k, settings.temperature),
        precision=config.training.dtype,
    )


def make_transfer(
    context: RunContext,
    config: RunConfig,
    name: str,
    everyone: Axis,
    *,
    head: HeadName = "logprobs",
    optimizer_steps: int | None = None,
) -> BatchTransfer:
    """The model of section `name` (such as "critic", "reward_models.NAME") on its ranks, and the
    transfer of batches to it. Collective over `everyone`. `optimizer_steps`: in the whole run;
    None: frozen.
    """
    settings, placement = config.other_roles[name], context.inputs.roles.get(name)
    mesh = context.mesh
    if placement is not None and (placement.ranks, placement.layout) != (mesh.ranks, mesh.layout):
        mesh = context.make_mesh(placement)
    role = None
    if mesh.is_member:
        role = context.role(
            name,
            settings.model if settings.model.path else config.model,
            head=head,
            optimizer_steps=optimizer_steps,
            training=role_training(config, name),
            mesh=mesh,
        )
    return _transfer_to(role, mesh, context, config, everyone)


def _transfer_to(
    role: Role | None, mesh: ProcessMesh, context: RunContext, config: RunConfig, everyone: Axis
) -> BatchTransfer:
    return BatchTransfer(
        role,
        policy=context.mesh,
        mesh=mesh,
        everyone=everyone,
        device=context.device,
        micro_batch_tokens=config.training.micro_batch_tokens,
        share_prefix=config.training.share_prefix,
    )


def make_roles(
    context: RunContext, config: RunConfig, everyone: Axis, policy: Role | None
) -> tuple[Scorer | None, list[Critic], RewardModels]:
    """(reference, critics, reward models). With LoRA and no reference in the recipe, the policy
    without its adapters is the reference, or with its first ones if `reference.lora` is "start".
    Collective over `everyone`.
    """
    reference = None
    if "reference" in config.other_roles and policy_as_reference(config):
        transfer = _transfer_to(policy, context.mesh, context, config, everyone)
        if policy is None:
            reference = Scorer(transfer)
        elif reference_adapter(config):  # a checkpoint is loaded later, and changes only the policy
            reference = Scorer(transfer, within=policy.keep_adapters())
        else:
            reference = Scorer(transfer, within=policy.adapters_off)
    elif "reference" in config.other_roles:
        reference = Scorer(make_transfer(context, config, "reference", everyone))
    critics, updates = list[Critic](), config.steps * config.training.optimizer_steps
    for name, settings in config.all_critics.items():
        transfer = make_transfer(
            context, config, name, everyone, head="value", optimizer_steps=updates
        )
        critics.append(Critic(transfer, value_clip=settings.value_clip, section=name))
    scorers = {
        name: Scorer(
            make_transfer(context, config, f"reward_models.{name}", everyone, head="scalar")
        )
        for name in config.reward_models
    }
    weights = {name: model.weight for name, model in config.reward_models.items()}
    return reference, critics, RewardModels(scorers, weights)


STEPS_OF = 10
"""A rank waits so many times `training.collective_timeout_s` for another model's step, made of many
collectives.
"""


def rollout_deadline_s(config: RunConfig, num_held_out: int) -> float:
    """Seconds that the rollouts of one step, or one evaluation, may take."""
    draws = config.rollout.groups_per_step * config.rollout.dynamic_sampling.max_draws
    per_group = config.rollout.group_size + bool(config.greedy_baseline)
    requests = int((1 + config.rollout.max_staleness) * draws * per_group)
    most, agent = max(requests, num_held_out), config.environment.agent
    rounds = -(-most // agent.at_once) if agent.command else 1
    return rounds * (patience_s(config, most) + agent.longest_s)


def step_deadline_s(config: RunConfig, num_held_out: int) -> float:
    """Seconds that a rank without a part of the policy waits for the next batch: for rollouts,
    training, evaluations and publishing, with repeated starts of engines.
    """
    publish_s = (1 + config.weight_sync.replacements) * config.weight_sync.timeout_s
    start_s = (1 + config.weight_sync.replacements) * config.rollout.engine.start_timeout_s
    collectives_s = 2 * config.training.collective_timeout_s
    return 3 * rollout_deadline_s(config, num_held_out) + publish_s + start_s + collectives_s
