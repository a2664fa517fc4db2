"""What the reinforcement-learning loop works with: roles, engines, rollouts, publisher."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megarl.checkpoints.checkpoint import Checkpoints
from megarl.cluster.ray_cluster import RolloutClient
from megarl.cluster.rollouts import Generation, start_generation
from megarl.config import RunConfig, longest_request, patience_s
from megarl.observe.observer import Observer
from megarl.parallel.collectives import broadcast_object
from megarl.parallel.mesh import all_ranks
from megarl.trainer.context import RunContext, RunInputs
from megarl.trainer.policy import PolicyGradient
from megarl.trainer.role import Role
from megarl.trainer.scoring import Scorer
from megarl.weight_sync.families import parameter_table
from megarl.weight_sync.publisher import Publisher

if TYPE_CHECKING:
    pass


@dataclass
class Parts:
    """Objects that the training loop uses on a rank of the policy."""

    config: RunConfig
    first_step: int
    """First step to run: the steps done by the resumed checkpoint, or 0 for a new run."""
    policy: Role
    scorers: dict[str, Scorer]
    """{column name: role that computes the column of each batch before the policy is trained on
    it}."""
    learner: PolicyGradient
    generation: Generation
    rollouts: RolloutClient
    publisher: Publisher
    checkpoints: Checkpoints
    observer: Observer | None
    """Writes metrics; None except on rank 0."""
    num_held_out: int
    """Number of held-out problems; 0 if the recipe has none."""


@dataclass
class ServingParts:
    """Objects that the loop uses on a rank that only roles other than the policy use."""

    config: RunConfig
    first_step: int
    scorers: dict[str, Scorer]


def build(context: RunContext, config: RunConfig, inputs: RunInputs) -> Parts | ServingParts:
    """Create the objects of this rank; `context.stack` closes them. All ranks call it together."""
    mesh, stack, on_cpu = context.mesh, context.stack, context.device.type == "cpu"
    num_held_out = broadcast_object(len(inputs.held_out or ()), all_ranks())
    if not mesh.is_member:
        scorers = make_scorers(context, config, inputs, num_held_out)
        first_step = broadcast_object(0, all_ranks())
        return ServingParts(config, first_step, scorers)
    # Engines take longest to start: they load while this process builds the policy.
    generation = start_generation(config, inputs, mesh, stack, on_cpu=on_cpu)
    updates = config.steps * config.training.num_mini_batches
    policy = context.role("policy", config.model, optimizer_steps=updates)
    learner = PolicyGradient(policy, config.algorithm, temperature=config.rollout.temperature)
    scorers = make_scorers(context, config, inputs, num_held_out)
    checkpoints = context.checkpoints(policy.engine)
    progress = context.resume(checkpoints)
    first_step = progress.step if progress else 0
    broadcast_object(first_step, all_ranks())
    observer = context.observe(first_step)
    generation.wait()
    generation.join(stack)
    publisher = Publisher(
        config.weight_sync,
        table=parameter_table(inputs.hf.to_dict()),
        policy=policy,
        engines=generation.engines,
        num_engines=config.rollout.num_engines,
        engine_tensor=config.rollout.engine.tensor,
        mesh=mesh,
        dtype=config.rollout.engine.dtype,
        precision=config.training.precision,
        vocabulary=len(inputs.tokenizer),
        max_tokens=longest_request(config),
        seed=config.seed,
    )
    stack.callback(publisher.close)
    return Parts(
        config=config,
        first_step=first_step,
        policy=policy,
        scorers=scorers,
        learner=learner,
        generation=generation,
        rollouts=RolloutClient(mesh.data.rank, deadline_s=rollout_deadline_s(config, num_held_out)),
        publisher=publisher,
        checkpoints=checkpoints,
        observer=observer,
        num_held_out=num_held_out,
    )


def rollout_deadline_s(config: RunConfig, num_held_out: int) -> float:
    """Seconds that the rollouts of a step, or the evaluation on the held-out problems, may take."""
    draws = config.rollout.groups_per_step * max(1.0, config.rollout.dynamic_sampling.max_draws)
    requests = int((1 + config.rollout.max_staleness) * draws * config.rollout.group_size)
    return patience_s(config, max(requests, num_held_out))


def step_deadline_s(config: RunConfig, num_held_out: int) -> float:
    """Seconds from one batch to the next, seen from a rank that only scores: rollouts, training, a
    publish with its repetitions, evaluations, and before the first step the engines' start.
    """
    publish_s = (1 + config.weight_sync.replacements) * config.weight_sync.timeout_s
    start_s = (1 + config.weight_sync.replacements) * config.rollout.engine.start_timeout_s
    collectives_s = 2 * config.training.collective_timeout_s
    return 3 * rollout_deadline_s(config, num_held_out) + publish_s + start_s + collectives_s


def make_scorers(
    context: RunContext, config: RunConfig, inputs: RunInputs, num_held_out: int
) -> dict[str, Scorer]:
    """{column name: scorer} of the frozen roles that the algorithm needs. All ranks of the job call
    it together.
    """
    if config.algorithm.kl.coefficient == 0:
        return {}
    mesh, everyone = context.mesh, all_ranks()
    place = inputs.reference
    if place is not None and (place.ranks, place.layout) != (mesh.ranks, mesh.layout):
        mesh = context.make_mesh(place)
        # Its ranks wait for the policy's, which wait for rollouts.
        everyone = all_ranks(timeout_s=step_deadline_s(config, num_held_out))
    role = None
    if mesh.is_member:
        model, training = config.reference.model, config.training
        if config.reference.zero_stage is not None:
            training = replace(training, zero_stage=config.reference.zero_stage)
        role = context.role(
            "reference", model if model.path else config.model, training=training, mesh=mesh
        )
    scorer = Scorer(
        role,
        policy=context.mesh,
        mesh=mesh,
        everyone=everyone,
        device=context.device,
        micro_batch_tokens=config.training.micro_batch_tokens,
    )
    return {"reference_logprobs": scorer}
