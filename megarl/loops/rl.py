"""Reinforcement learning: prompts become rollouts, rewards, advantages; the policy learns; new
weights go to the engines. The same code on every rank of the policy.

Synchronous training is `rollout.max_staleness: 0` of this loop, not a second loop: the rollout
service decides what may start, the loop only takes, trains, publishes and releases.
`megarl.loops.rl_setup` builds what the loop works with.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.config import RunConfig
from megarl.loops.rl_setup import Parts, ServingParts, build
from megarl.loops.schedule import due
from megarl.observe.report import write_report
from megarl.observe.summary import summary
from megarl.trainer.context import RunInputs, open_run
from megarl.types import StepBatch, StepReport


def main(config: RunConfig, inputs: RunInputs) -> int:
    """`megarl train`: run RL training; rank 0 prints a summary as one JSON object."""
    started_at = time.monotonic()
    with open_run(config, inputs) as context:
        parts = build(context, config, inputs)
        if isinstance(parts, Parts):
            run(parts)
        else:
            serve(parts)
        is_main = context.is_main
    if is_main:
        folder = Path(config.folder)
        write_report(folder, title=folder.name)
        seconds = round(time.monotonic() - started_at, 1)
        print(json.dumps(summary(folder) | {"seed": config.seed, "run_s": seconds}), flush=True)
    return 0


def run(parts: Parts) -> None:
    """Train from step `parts.first_step` until `config.steps` steps are done."""
    config, policy, rollouts = parts.config, parts.policy, parts.rollouts
    is_colocated = config.rollout.placement == "colocated"
    parts.publisher.publish(version=parts.first_step)
    evaluate(parts, parts.first_step)
    if parts.observer is not None:
        rollouts.start()

    for step in range(parts.first_step, config.steps):
        started_at = time.monotonic()
        batch = rollouts.take(step)
        taken_at = time.monotonic()
        if is_colocated:
            parts.generation.sleep()
            policy.engine.reload()
        report = train(parts, batch)
        if is_colocated:
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
            evaluate(parts, step + 1)


def train(parts: Parts, batch: StepBatch) -> StepReport:
    """Compute the columns that other roles provide for the batch, then train the policy on the
    batch.
    """
    packed, columns = parts.policy.pack_step(batch), {}
    for name, scorer in parts.scorers.items():
        columns[name] = scorer.score(batch, packed, temperature=parts.config.rollout.temperature)
    return parts.learner.train(batch, packed, columns)


def serve(parts: ServingParts) -> None:
    """Loop of a rank that only roles other than the policy use: in each step, score the samples
    that the policy's ranks send.
    """
    for _ in range(parts.first_step, parts.config.steps):
        for scorer in parts.scorers.values():
            scorer.score(None, (), temperature=parts.config.rollout.temperature)


def observe(parts: Parts, report: StepReport, transcripts: list[dict[str, Any]]) -> None:
    """On rank 0, write the metrics and transcripts of a step."""
    if parts.observer is not None:
        parts.observer.transcripts(report.step, transcripts)
        parts.observer.step(report)


def evaluate(parts: Parts, step: int) -> None:
    """Evaluate the weights after `step` steps on the held-out problems. All ranks call it and wait:
    a rank that went on would run into the timeout of its next collective.
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
            parts.observer.evaluation(step, named, shown)
