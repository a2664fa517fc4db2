"""The page: prompts become rollouts, rewards, advantages; the policy learns; new weights go out. The same on every rank.

Synchronous training is `rollout.max_staleness: 0` of this code, not a second loop: the rollout service decides what may
start, the loop only takes, trains, publishes and releases.
"""

from __future__ import annotations

import time
from dataclasses import replace

from megarl.parts import Parts


def run(parts: Parts) -> None:
    """Train from the policy's step to `config.steps`."""
    config, policy, rollouts = parts.config, parts.policy, parts.rollouts
    parts.publisher.publish(version=policy.step)
    evaluate(parts)
    parts.start_rollouts()

    for step in range(policy.step, config.steps):
        begun = time.monotonic()
        batch = rollouts.take(step)
        taken = time.monotonic()
        parts.begin_training()
        report = policy.train(batch)
        parts.end_training()
        trained = time.monotonic()
        sent = parts.publisher.publish(version=step + 1)
        rollouts.release(step)
        ended = time.monotonic()

        seconds = {"time/wait_s": taken - begun, "time/train_s": trained - taken, "time/step_s": ended - begun}
        rate = {"tokens/trained_per_s": report.metrics["tokens/trained"] / max(trained - taken, 1e-9)}
        parts.observe(replace(report, metrics=report.metrics | sent | seconds | rate), batch.transcripts)
        if due(step + 1, config.training.checkpoint.every, config.steps):
            parts.checkpoints.save(step=step + 1, next_ordinal=rollouts.cursor(step + 1))
        if due(step + 1, config.evaluation.every, config.steps):
            evaluate(parts)


def due(done: int, every: int, last: int) -> bool:
    """Whether something that happens every `every` steps (0: only at the end) happens after `done` steps."""
    return done == last or (every > 0 and done % every == 0)


def evaluate(parts: Parts) -> None:
    """Held-out problems at the current weights. Every rank waits for the answers, so that none waits in a collective."""
    config = parts.config.evaluation
    if parts.held_out is None:
        return
    kinds = {"eval": config.temperature}
    if config.sampled_too:
        kinds["eval_sampled"] = parts.config.rollout.temperature
    for name, temperature in kinds.items():
        metrics, transcripts = parts.rollouts.evaluate(parts.held_out, temperature, name)
        shown = transcripts if name == "eval" else []
        if parts.observer is not None:
            parts.observer.evaluation(parts.policy.step, {f"{name}/{key}": value for key, value in metrics.items()}, shown)
