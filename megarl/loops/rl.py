"""Reinforcement learning: prompts become rollouts, rewards, advantages; the policy learns; new
weights go to the engines. The same code on every rank of the policy.

Synchronous training is `rollout.max_staleness: 0` of this loop, not a second loop: the rollout
service decides what may start, the loop only takes, trains, publishes and releases. `megarl
distill` is this loop too, with another way to train (`megarl.loops.distill`).
`megarl.loops.rl_setup` builds what the loop works with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megarl import console
from megarl.activity.spans import activity, step_begins
from megarl.config import RunConfig, made_with
from megarl.environments.user_code import function_of
from megarl.errors import UserError
from megarl.loops.rl_setup import Parts, ServingParts, TrainingParts, build
from megarl.loops.schedule import due, reached, save_due
from megarl.observe.live_report import LiveReport
from megarl.observe.summary import summary
from megarl.parallel.collectives import barrier, broadcast_object, gather_objects
from megarl.signals import graceful
from megarl.trainer.context import RunInputs, open_context
from megarl.trainer.policy import PolicyGradient
from megarl.types import StepBatch, StepReport

TrainStep = Callable[[TrainingParts, StepBatch], StepReport]
"""Trains the roles of a rank on the batch of one step."""


@dataclass(frozen=True)
class Method:
    """What a command does with the rollouts of a step: the two functions in which `megarl train`
    and `megarl distill`, which share the loop of this module, differ.
    """

    train: TrainStep
    """Trains the policy on one batch and returns the step's report. All ranks of the policy call
    the function together, in every step."""
    serve: Callable[[ServingParts, int], None]
    """The part of a rank that holds other roles, but no part of the policy: it computes its roles'
    columns of the batch that `train` trains on. The number is the step, from 0. All such ranks call
    the function together, in every step."""


def main(config: RunConfig, inputs: RunInputs) -> int:
    """`megarl train`; see `run_command`."""
    return run_command(config, inputs, method_of(config))


def run_command(config: RunConfig, inputs: RunInputs, method: Method) -> int:
    """Train on rollouts; rank 0 prints a summary as one JSON object. Returns the exit code."""
    with open_context(config, inputs) as context:
        if not context.is_finished():
            assert isinstance(context.config, RunConfig)
            parts = build(context, context.config, inputs)
            if isinstance(parts, Parts):
                run(parts, method)
            else:
                serve(parts, method)
        is_main = context.is_main
    if is_main:
        folder = Path(config.folder)
        LiveReport(folder).write()
        found = summary(folder) | {"seed": config.seed, "run_s": round(console.elapsed_s(), 1)}
        console.result(json.dumps(found))
    return 0


def run(parts: Parts, method: Method) -> None:
    """Train until `config.steps` steps are done. A signal ends the run after the last finished
    step, with a checkpoint of it; raises `EndedBySignal` then.
    """
    with graceful() as stop:
        parts.rollouts.stop = stop
        done, saved = train_steps(parts, method)
        if done < parts.config.steps and done > saved:
            save(parts, done)
        tell(parts, "end", done)
        parts.checkpoints.finish()
        if done == parts.config.steps:
            return
        if parts.rollouts.is_early_stop():
            return
        stop.end(done, is_main=parts.observer is not None)


def train_steps(parts: Parts, method: Method) -> tuple[int, int]:
    """Train from step `parts.first_step`; returns (steps done, steps done at the newest
    checkpoint). The run was interrupted if these are fewer than `config.steps`. Raises `UserError`
    if no step has changed the weights.
    """
    config, rollouts = parts.config, parts.rollouts
    is_colocated = config.rollout.placement == "colocated"
    saved = parts.first_step
    with console.phase("first publish of the weights"):
        publish(parts, parts.first_step)
    first = parts.first_step
    stop_again(parts)
    evaluates = first == 0 or due(first, config.evaluation.every, config.steps)
    with console.phase("first evaluation") if parts.num_held_out else nullcontext():
        if evaluates and not _evaluate(parts, first):
            return first, saved
    if parts.observer is not None:
        rollouts.start(parts.publisher.receipts)

    for step in range(parts.first_step, config.steps):
        started_at = time.monotonic()
        step_begins(step + 1, step)
        batch = rollouts.take(step, partial(publish, parts, step))
        if batch is None:
            return step, saved
        taken_at = time.monotonic()
        if is_colocated:
            parts.generation.sleep()
            for role in parts.trained:
                role.engine.reload()
        if batch.warning and parts.observer is not None:
            console.say(f"megarl: warning: {batch.warning}")
        record_batch(parts, batch, step)
        tell(parts, "train", step)
        with activity(f"training of step {step + 1}", kind="train"):
            report = method.train(parts, batch)
        if not isinstance(report, StepReport):
            raise UserError(
                f"algorithm.method: {config.algorithm.method} has returned"
                f" {type(report).__name__} in step {step + 1}; return the step's StepReport"
            )
        if is_colocated:
            lend_memory(parts)
        trained_at = time.monotonic()
        sent = publish(parts, step + 1)
        rollouts.release(step, parts.publisher.receipts)
        ended_at = time.monotonic()

        train_s = trained_at - taken_at
        times = {
            "time/wait_s": taken_at - started_at,
            "time/train_s": train_s,
            "time/step_s": ended_at - started_at,
            "tokens/trained_per_s": report.metrics["tokens/trained"] / max(train_s, 1e-9),
        }
        observe(parts, replace(report, metrics=report.metrics | sent | times), batch.transcripts)
        if step + 1 == config.steps:
            parts.learner.empty_steps.end(step, len(batch.rewards), batch.metrics)
        if save_due(parts.context, step + 1, config.steps):
            save(parts, step + 1)
            saved = step + 1
        if due(step + 1, config.evaluation.every, config.steps) and not _evaluate(parts, step + 1):
            return step + 1, saved
    return config.steps, saved


def lend_memory(parts: Parts) -> None:
    """Offload the trained roles of every rank, and then wake the colocated engines. All ranks of
    the policy call it together.
    """
    for role in parts.trained:
        role.engine.offload()
    # The engines map their weights at once, on the GPUs of all ranks.
    barrier(parts.context.mesh.world)
    parts.generation.wake()


def save(parts: Parts, done: int) -> None:
    """Write the checkpoint after `done` steps. All ranks of the policy call it together."""
    record_batch(parts, None, done)
    cursor = parts.rollouts.cursor(done)
    is_writer = parts.context.mesh.sample.rank == 0
    groups = parts.rollouts.unused(done) if is_writer else ()
    # Last: the ranks that are told wait for this one in a collective from then on.
    tell(parts, "save", done)
    parts.checkpoints.save(
        step=done,
        next_ordinal=cursor.first,
        used=cursor.beyond,
        algorithm=parts.algorithm_state(),
        groups=groups,
        made_with=made_with(parts.config),
    )


def record_batch(parts: Parts, batch: StepBatch | None, done: int) -> None:
    """With `observe.batches`, wait until the batches so far are on the disk and begin to write
    `batch`. Raises `UserError` on every rank, after `done` steps, if one could not be written. All
    ranks of the policy call it together.
    """
    if not parts.config.observe.batches:
        return
    problem = parts.batches.flush() if parts.batches is not None else ""
    problems = gather_objects(problem, parts.context.mesh.world)
    if said := next(filter(None, problems), ""):
        tell(parts, "abort", done)
        raise UserError(said)
    if batch is not None and parts.batches is not None:
        parts.batches.write(batch)


def publish(parts: Parts, version: int) -> dict[str, float]:
    """Send the policy's weights to every engine; returns metrics. An engine that does not answer
    is late after `weight_sync.timeout_s`. All ranks of the policy call it together.
    """
    timeout_s = parts.config.weight_sync.timeout_s
    what = f"publication of weights {version}"
    with activity(what, kind="publish", of="engines", deadline_s=timeout_s):
        return parts.publisher.publish(version=version)


Order = Literal["train", "save", "end", "abort"]


def tell(parts: TrainingParts, order: Order, step: int) -> None:
    """Let the ranks that hold no part of the policy, if there are any, do the same; see
    `serve`.
    """
    if parts.serving is not None:
        parts.serving.give(order, step)


def policy_gradient_step(parts: TrainingParts, batch: StepBatch) -> StepReport:
    """Compute the columns that other roles provide for the batch, then train policy and critic on
    the batch.
    """
    policy, learner, critic, step = parts.policy, parts.learner, parts.critic, batch.step
    assert isinstance(learner, PolicyGradient)
    packed, columns = policy.pack_step(batch), {}
    scores = parts.rewards.scores(batch, packed)
    batch = parts.rewards.rewarded(batch, scores, data=policy.mesh.data, device=policy.device)
    if parts.reference is not None:
        columns["reference_logprobs"] = parts.reference.score(
            batch, packed, temperature=parts.config.rollout.temperature
        )
    if critic is not None:
        columns["values"] = critic.values(batch, packed)
    columns = learner.prepare(batch, packed, columns)
    if critic is None:
        return learner.train(batch, packed, columns)
    critic.start(step, columns.get("returns"))
    if step < parts.config.critic.warmup_steps:
        report = StepReport(step, batch.metrics | {"tokens/trained": 0.0})
    else:
        report = learner.train(batch, packed, columns)
    return replace(report, metrics=report.metrics | critic.finish(step))


def work(parts: ServingParts, step: int) -> None:
    """A step of a rank without a part of the policy: its roles score, and the critic learns."""
    parts.rewards.scores(None, ())
    if parts.reference is not None:
        parts.reference.score(None, (), temperature=parts.config.rollout.temperature)
    if parts.critic is not None:
        parts.critic.values(None, ())
        parts.critic.start(step, None)
        parts.critic.finish(step)


METHODS: dict[str, TrainStep] = {"policy_gradient": policy_gradient_step}
"""{name in `algorithm.method`: function that trains on a step's batch}"""


def method_of(config: RunConfig) -> Method:
    """What `megarl train` does with the rollouts of a step."""
    return Method(function_of(config.algorithm.method, METHODS, "algorithm.method"), work)


def serve(parts: ServingParts, method: Method) -> None:
    """The RL loop of a training rank that holds no part of the policy: in each step its roles work
    on the samples that the policy's ranks send.

    After a signal the loop goes on until rank 0 ends it, because the policy's ranks finish their
    step.
    """
    with graceful() as stop:
        while True:
            order, step = parts.serving.next()
            if order == "end":
                parts.checkpoints.finish()
            if order in ("end", "abort"):
                break
            if order == "save":
                parts.checkpoints.save(step=step, next_ordinal=0)
                continue
            step_begins(step + 1, step)
            method.serve(parts, step)
        if step < parts.config.steps and stop:
            stop.end(step, is_main=False)


def refuse_lost(parts: TrainingParts, done: int) -> None:
    """End the run with `UserError` on every rank if another run owns its folder by now. All ranks
    of the policy call it together, after `done` steps and before anything is written.
    """
    if lost := parts.context.lost_folder():
        tell(parts, "abort", done)
        raise UserError(lost)


def observe(parts: Parts, report: StepReport, transcripts: list[dict[str, Any]]) -> None:
    """On rank 0, write the metrics and transcripts of a step. All ranks of the policy call it
    together. Raises `UserError` on each of them if another run owns the run folder.
    """
    refuse_lost(parts, report.step + 1)
    if parts.observer is not None:
        parts.observer.transcripts(report.step, transcripts)
        metrics = report.metrics | parts.checkpoints.take_times()
        parts.observer.step(replace(report, metrics=metrics))
        parts.report.refresh()
        stop_early(parts, report.step + 1, report.metrics)


def _evaluate(parts: Parts, step: int) -> bool:
    """Evaluate the weights after `step` steps on the held-out problems. All ranks call it and wait:
    a rank that went on would run into the timeout of its next collective. Returns False if the run
    was interrupted.
    """
    config = parts.config.evaluation
    if not parts.num_held_out:
        return True
    kinds = {"eval": config.temperature}
    if config.sampled_too:
        kinds["eval_sampled"] = parts.config.rollout.temperature
    for name, temperature in kinds.items():
        if is_evaluated(parts, step, name):
            continue
        with activity(f"evaluation '{name}' after step {step}", kind="evaluate"):
            found = parts.rollouts.evaluate(temperature, name, partial(publish, parts, step))
        if found is None:
            return False
        metrics, transcripts = found
        refuse_lost(parts, step)
        shown = transcripts if name == "eval" else []
        if parts.observer is not None:
            named = {f"{name}/{key}": value for key, value in metrics.items()}
            parts.observer.evaluation(step, named, shown)
            parts.report.refresh()
            stop_early(parts, step, named)
    return True


def is_evaluated(parts: Parts, step: int, name: str) -> bool:
    """Whether a run that goes on after `step` steps was killed after this evaluation of them, which
    then counts. All ranks call it together.
    """
    if step != parts.first_step or step == 0:
        return False
    found = parts.observer.evaluated(step, name) if parts.observer is not None else None
    if parts.observer is not None and found is not None:
        stop_early(parts, step, found)
    return broadcast_object(found is not None, parts.context.mesh.world)


def stop_again(parts: Parts) -> None:
    """On rank 0 of a run that goes on, end it if the last step of its checkpoint has stopped it
    early: it was started again, or killed between that checkpoint and its end.
    """
    if parts.observer is not None and parts.first_step > 0:
        metrics = parts.observer.trained(parts.first_step)
        if parts.config.early_stop.metric in metrics:
            stop_early(parts, parts.first_step, metrics)


def stop_early(parts: Parts, done: int, metrics: Mapping[str, float]) -> None:
    """On rank 0, end the run after `done` steps if the metric of `early_stop` is good enough."""
    early = parts.config.early_stop
    if done < parts.config.steps and reached(early, metrics):
        console.say(f"early stop after {done} steps: {early.metric} is {metrics[early.metric]:.4g}")
        parts.rollouts.stop_early()
