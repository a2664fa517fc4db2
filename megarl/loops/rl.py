"""Reinforcement learning: prompts become rollouts, rewards, advantages; the policy learns; new
weights go to the engines. The same code on every rank.

Synchronous training is `rollout.max_staleness: 0` of this loop, not a second loop: the rollout
service decides what may start, the loop only takes, trains, publishes and releases.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.checkpoints.checkpoint import Checkpoints
from megarl.cluster.ray_cluster import RolloutClient
from megarl.cluster.rollouts import Generation, start_generation
from megarl.config import RunConfig, longest_request, patience_s
from megarl.loops.schedule import due
from megarl.observe.observer import Observer
from megarl.observe.report import write_report
from megarl.observe.summary import summary
from megarl.parallel.collectives import broadcast_object
from megarl.trainer.context import RunInputs, open_run
from megarl.trainer.policy import Policy
from megarl.types import StepReport
from megarl.weight_sync.families import parameter_table
from megarl.weight_sync.publisher import Publisher


def main(config: RunConfig, inputs: RunInputs) -> int:
    """`megarl train`: run, and print a summary as one JSON object from rank 0."""
    started_at = time.monotonic()
    with build(config, inputs) as parts:
        run(parts)
        is_main = parts.observer is not None
    if is_main:
        folder = Path(config.folder)
        write_report(folder, title=folder.name)
        seconds = round(time.monotonic() - started_at, 1)
        print(json.dumps(summary(folder) | {"seed": config.seed, "run_s": seconds}), flush=True)
    return 0


@dataclass
class Parts:
    """What the loop works with, on this rank."""

    config: RunConfig
    policy: Policy
    generation: Generation
    rollouts: RolloutClient
    publisher: Publisher
    checkpoints: Checkpoints
    observer: Observer | None
    """On rank 0."""
    num_held_out: int
    """Held-out problems; 0 where the recipe has none."""


def run(parts: Parts) -> None:
    """Train from the policy's step to `config.steps`."""
    config, policy, rollouts = parts.config, parts.policy, parts.rollouts
    parts.publisher.publish(version=policy.step)
    evaluate(parts)
    if parts.observer is not None:
        rollouts.start()

    for step in range(policy.step, config.steps):
        started_at = time.monotonic()
        batch = rollouts.take(step)
        taken_at = time.monotonic()
        parts.generation.sleep()
        policy.engine.reload()
        report = policy.train(batch)
        policy.engine.offload()
        parts.generation.wake()
        trained_at = time.monotonic()
        sent = parts.publisher.publish(version=step + 1)
        rollouts.release(step)
        ended_at = time.monotonic()

        train_s = trained_at - taken_at
        times = {
            "time/wait_s": taken_at - started_at,
            "time/train_s": train_s,
            "time/step_s": ended_at - started_at,
            "tokens/trained_per_s": report.metrics["tokens/trained"] / max(train_s, 1e-9),
        }
        observe(parts, replace(report, metrics=report.metrics | sent | times), batch.transcripts)
        if due(step + 1, config.training.checkpoint.every, config.steps):
            parts.checkpoints.save(step=step + 1, next_ordinal=rollouts.cursor(step + 1))
        if due(step + 1, config.evaluation.every, config.steps):
            evaluate(parts)


def observe(parts: Parts, report: StepReport, transcripts: list[dict[str, Any]]) -> None:
    """Write down a step; rank 0 only."""
    if parts.observer is not None:
        parts.observer.transcripts(report.step, transcripts)
        parts.observer.step(report)


def evaluate(parts: Parts) -> None:
    """Held-out problems at the current weights. Every rank waits for the answers, so that none
    waits in a collective.
    """
    config = parts.config.evaluation
    if not parts.num_held_out:
        return
    kinds = {"eval": config.temperature}
    if config.sampled_too:
        kinds["eval_sampled"] = parts.config.rollout.temperature
    for name, temperature in kinds.items():
        metrics, transcripts = parts.rollouts.evaluate(temperature, name)
        shown = transcripts if name == "eval" else []
        if parts.observer is not None:
            named = {f"{name}/{key}": value for key, value in metrics.items()}
            parts.observer.evaluation(parts.policy.step, named, shown)


@contextmanager
def build(config: RunConfig, inputs: RunInputs) -> Iterator[Parts]:
    """Build what the loop needs, yield it, and take it down, also after an error."""
    with open_run(config, inputs) as context:
        mesh, stack, on_cpu = context.mesh, context.stack, context.device.type == "cpu"
        # Engines take longest to start: they load while this process builds the policy.
        generation = start_generation(config, inputs.stop_token_ids, mesh, stack, on_cpu=on_cpu)
        policy = Policy(
            model=config.model,
            training=config.training,
            algorithm=config.algorithm,
            temperature=config.rollout.temperature,
            mesh=mesh,
            device=context.device,
            total_steps=config.steps,
            seed=config.seed,
        )
        stack.callback(policy.engine.destroy)
        checkpoints = context.checkpoints(policy.engine)
        progress = context.resume(checkpoints)
        policy.step, ordinal = (progress.step, progress.next_ordinal) if progress else (0, 0)
        observer = context.observe(policy.step)
        generation.start_service(inputs, policy.step, ordinal)
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
        num_held_out = broadcast_object(len(inputs.held_out or ()), mesh.world)
        draws = config.rollout.groups_per_step * max(1.0, config.rollout.dynamic_sampling.max_draws)
        requests = int((1 + config.rollout.max_staleness) * draws * config.rollout.group_size)
        deadline_s = patience_s(config, max(requests, num_held_out))
        yield Parts(
            config=config,
            policy=policy,
            generation=generation,
            rollouts=RolloutClient(mesh.data.rank, deadline_s=deadline_s),
            publisher=publisher,
            checkpoints=checkpoints,
            observer=observer,
            num_held_out=num_held_out,
        )
