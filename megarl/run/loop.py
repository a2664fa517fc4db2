"""Reinforcement learning: prompts become rollouts, rewards, advantages; the policy learns; new
weights go to the engines. The same code on every rank of the policy.

Synchronous training is `rollout.max_staleness: 0` of this loop: the rollout service decides which
rollouts may start; the loop takes a batch, trains, publishes, and says that the step is done.
`task: distill` trains in another way (`megarl.run.distill`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megarl.environments.user_code import function_of
from megarl.errors import UserError
from megarl.observe.live_report import LiveReport
from megarl.observe.summary import summary
from megarl.parallel.collectives import barrier, broadcast_object, gather_objects
from megarl.run.build import Parts, ServingParts, TrainingParts, build
from megarl.run.schedule import due, reached, save_due
from megarl.settings.config import RunConfig, made_with
from megarl.system import console
from megarl.system.signals import graceful
from megarl.system.spans import activity, step_begins
from megarl.trainer.context import RunInputs, open_context
from megarl.trainer.policy import PolicyGradient
from megarl.types import StepBatch, StepReport

TrainStep = Callable[[TrainingParts, StepBatch], StepReport]
"""Trains on a rank's batch of one step. Collective over the policy's ranks."""


@dataclass(frozen=True)
class Method:
    """What a command does in each step; `task: rl` and `task: distill` differ in these functions
    alone.
    """

    train: TrainStep
    serve: Callable[[ServingParts, int], None]
    """The part of step n, from 0, on a rank of other models only: what they compute for `train`.
    Collective over such ranks.
    """


def main(config: RunConfig, inputs: RunInputs) -> int:
    """`task: rl` on this rank; returns the exit code."""
    return run_command(config, inputs, method_of(config))


def run_command(config: RunConfig, inputs: RunInputs, method: Method) -> int:
    """Train on rollouts until `config.steps`; rank 0 prints a summary as JSON. Collective. Raises
    `EndedBySignal` after a signal.
    """
    with open_context(config, inputs) as context:
        if not context.is_finished():
            assert isinstance(context.config, RunConfig)
            parts = build(context, context.config, inputs)
            if isinstance(parts, Parts):
                run(parts, method)
            else:
                serve_roles(parts, method)
        is_main = context.is_main
    if is_main:
        folder = Path(config.folder)
        LiveReport(folder).write()
        result = summary(folder) | {"seed": config.seed, "run_s": round(console.elapsed_s(), 1)}
        console.result(json.dumps(result))
    return 0


def run(parts: Parts, method: Method) -> None:
    """The RL loop of a rank of the policy. A signal ends it with a checkpoint of the last finished
    step, and `EndedBySignal`. Collective over the policy's ranks.
    """
    with graceful() as stop:
        parts.rollouts.stop = stop
        done, saved = train_steps(parts, method)
        if done < parts.config.steps and done > saved:
            save(parts, done)
        tell(parts, "end", done)
        parts.checkpoints.finish()
        if done == parts.config.steps or parts.rollouts.is_early_stop():
            return
        stop.end(done, is_main=parts.observer is not None)


def train_steps(parts: Parts, method: Method) -> tuple[int, int]:
    """Returns (steps done, steps done at the newest checkpoint), fewer than `config.steps` after a
    signal or an early stop. Raises `UserError` if no step has changed the weights. Collective
    over the policy's ranks.
    """
    config, rollouts = parts.config, parts.rollouts
    is_colocated = config.rollout.placement == "colocated"
    first = saved = parts.first_step
    with console.phase("first publish of the weights"):
        publish(parts, first)
    stop_again(parts)
    evaluates = first == 0 or due(first, config.evaluation.every, config.steps)
    with console.phase("first evaluation") if parts.num_held_out else nullcontext():
        if evaluates and not _evaluate(parts, first):
            return first, saved
    if parts.observer is not None:
        rollouts.start(parts.publisher.receipts)

    for step in range(first, config.steps):
        started_at = time.monotonic()
        step_begins(step + 1, step)
        batch = rollouts.take(step)
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
        report = train_step(parts, method, batch)
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


def train_step(parts: TrainingParts, method: Method, batch: StepBatch) -> StepReport:
    """Train one step. The report's metrics are the rollouts', "tokens/trained" and the method's.
    Collective over the policy's ranks.

    Raises `UserError` if the method returns no `StepReport`, and after `training.max_empty_steps`
    steps without samples.
    """
    # A copy, to which models and functions add: the recorded batch is being written meanwhile.
    batch = replace(batch, metrics=dict(batch.metrics))
    parts.learner.guard.begin(f"step {batch.step + 1}")
    parts.learner.empty_steps.count(batch.step, len(batch.rewards), batch.metrics)
    with activity(f"training of step {batch.step + 1}", kind="train"):
        report = method.train(parts, batch)
    if not isinstance(report, StepReport):
        raise UserError(
            f"algorithm.method: {parts.config.algorithm.method} has returned"
            f" {type(report).__name__} in step {batch.step + 1}; return the step's StepReport"
        )
    tokens = {"tokens/trained": float(batch.response_tokens.sum())}
    return replace(report, metrics=batch.metrics | tokens | report.metrics)


def lend_memory(parts: Parts) -> None:
    """Move master weights and optimizer state to the host, then wake the engines that share the
    GPUs. Collective over the policy's ranks.
    """
    for role in parts.trained:
        role.engine.offload()
    # The engines map their weights at once, on the GPUs of all ranks.
    barrier(parts.context.mesh.world)
    parts.generation.wake()


def save(parts: Parts, done: int) -> None:
    """Begin to write the checkpoint after `done` steps, with the finished rollouts that no step has
    used yet. Collective over the policy's ranks. Raises `OSError` or `UserError`.
    """
    record_batch(parts, None, done)  # waits until all earlier batches are on the disk
    cursor = parts.rollouts.cursor(done)
    is_writer = parts.context.mesh.sample.rank == 0  # one of the ranks with the same samples
    groups = parts.rollouts.unused(done) if is_writer else ()
    # Only now: ranks without a part of the policy then wait for this rank in a collective.
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
    """Begin to write `batch` for `megarl replay`, once earlier ones are on the disk (None: only
    wait). Raises `UserError` on all ranks of the policy, which call it together.
    """
    if not parts.config.observe.batches:
        return
    problem = parts.batches.flush() if parts.batches is not None else ""
    problems = gather_objects(problem, parts.context.mesh.world)
    if failure := next(filter(None, problems), ""):
        tell(parts, "abort", done)
        raise UserError(failure)
    if batch is not None and parts.batches is not None:
        parts.batches.write(batch)


def publish(parts: Parts, version: int) -> dict[str, float]:
    """Send the policy's weights to every engine; returns metrics. Collective over the policy's
    ranks. Raises `RuntimeError` on all if an engine is late or holds other weights.
    """
    timeout_s = parts.config.weight_sync.timeout_s
    name = f"publication of weights {version}"
    with activity(name, kind="publish", of="engines", deadline_s=timeout_s):
        return parts.publisher.publish(version=version)


Order = Literal["train", "save", "end", "abort"]


def tell(parts: TrainingParts, order: Order, step: int) -> None:
    """Rank 0 tells ranks without a part of the policy to "train" step n from 0, "save" after n
    steps, "end", or "abort" without waiting for a checkpoint.
    """
    if parts.serving is not None:
        parts.serving.give(order, step)


def policy_gradient_step(parts: TrainingParts, batch: StepBatch) -> StepReport:
    """One step of `task: rl`: other models compute their values, rewards become advantages, then
    policy and critics learn. Collective over the policy's ranks.
    """
    policy, learner, step = parts.policy, parts.learner, batch.step
    assert isinstance(learner, PolicyGradient)
    packed, columns = policy.pack_step(batch), {}
    scores = parts.rewards.scores(batch, packed)
    batch = parts.rewards.rewarded(batch, scores, data=policy.mesh.data, device=policy.device)
    if parts.reference is not None:
        columns["reference_logprobs"] = parts.reference.score(
            batch, packed, temperature=parts.config.rollout.temperature
        )
    for critic in parts.critics:
        columns["values" + critic.suffix] = critic.values(batch, packed)
    columns = learner.prepare(batch, packed, columns)
    for critic in parts.critics:
        critic.start(columns.get("returns" + critic.suffix))
    # Once all have their returns: nothing of another critic waits for one that learns.
    for critic in parts.critics:
        critic.learn(step)
    if step < parts.config.warmup_steps:
        report = StepReport(step, batch.metrics | {"tokens/trained": 0.0})
    else:
        report = learner.train(batch, packed, columns)
    for critic in parts.critics:
        report = replace(report, metrics=report.metrics | critic.finish(step))
    return report


def work_as_role(parts: ServingParts, step: int) -> None:
    """`policy_gradient_step` on ranks without a part of the policy. Collective over these."""
    parts.rewards.scores(None, ())
    if parts.reference is not None:
        parts.reference.score(None, (), temperature=parts.config.rollout.temperature)
    for critic in parts.critics:
        critic.values(None, ())
    for critic in parts.critics:
        critic.start(None)
    for critic in parts.critics:
        critic.learn(step)
    for critic in parts.critics:
        critic.finish(step)


METHODS: dict[str, TrainStep] = {"policy_gradient": policy_gradient_step}
"""{name in `algorithm.method`: function}"""


def method_of(config: RunConfig) -> Method:
    """`algorithm.method` on ranks of the policy, a key of `METHODS` or FILE.py:NAME. Raises
    `ValueError` if there is no such function.
    """
    return Method(function_of(config.algorithm.method, METHODS, "algorithm.method"), work_as_role)


def serve_roles(parts: ServingParts, method: Method) -> None:
    """Loop of a rank without a part of the policy: obeys rank 0 until "end" or "abort". Raises
    `EndedBySignal` if a signal ended the run early.
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
    """Raise `UserError` on every rank if another run owns the folder. Collective over the policy's
    ranks.
    """
    if lost := parts.context.lost_folder():
        tell(parts, "abort", done)
        raise UserError(lost)


def observe(parts: Parts, report: StepReport, transcripts: list[dict[str, Any]]) -> None:
    """Write a step's metrics and transcripts on rank 0, and stop early if due. Collective over the
    policy's ranks. Raises `UserError` if another run owns the folder.
    """
    refuse_lost(parts, report.step + 1)
    if parts.observer is not None:
        parts.observer.transcripts(report.step, transcripts)
        metrics = report.metrics | parts.checkpoints.take_times()
        parts.observer.step(replace(report, metrics=metrics))
        parts.report.refresh()
        stop_early(parts, report.step + 1, report.metrics)


def _evaluate(parts: Parts, step: int) -> bool:
    """Evaluate the weights; False if the run was interrupted. All ranks wait, or the next
    collective would time out.
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
            evaluated = parts.rollouts.evaluate(temperature, name)
        if evaluated is None:
            if parts.observer is not None:
                console.say(
                    f"the evaluation after step {step} was interrupted; --resume auto makes it"
                )
            return False
        metrics, transcripts = evaluated
        refuse_lost(parts, step)
        shown = transcripts if name == "eval" else []
        if parts.observer is not None:
            named = {f"{name}/{key}": value for key, value in metrics.items()}
            parts.observer.evaluation(step, named, shown)
            parts.checkpoints.evaluated(step, named)
            parts.report.refresh()
            stop_early(parts, step, named)
    return True


def is_evaluated(parts: Parts, step: int, name: str) -> bool:
    """Whether a resumed run's folder has this evaluation already; rank 0 then checks it for an
    early stop. Collective over the policy's ranks.
    """
    if step != parts.first_step or step == 0:
        return False
    metrics = parts.observer.evaluated(step, name) if parts.observer is not None else None
    if parts.observer is not None and metrics is not None:
        stop_early(parts, step, metrics)
    return broadcast_object(metrics is not None, parts.context.mesh.world)


def stop_again(parts: Parts) -> None:
    """Stop a resumed run whose last step was good enough for an early stop."""
    if parts.observer is not None and parts.first_step > 0:
        metrics = parts.observer.trained(parts.first_step)
        if parts.config.early_stop.metric in metrics:
            stop_early(parts, parts.first_step, metrics)


def stop_early(parts: Parts, done: int, metrics: Mapping[str, float]) -> None:
    """On rank 0, end the run after this step if `metrics` are good enough. Raises `UserError` as
    `reached`.
    """
    early = parts.config.early_stop
    if done < parts.config.steps and reached(early, metrics):
        console.say(f"early stop after {done} steps: {early.metric} is {metrics[early.metric]:.4g}")
        parts.rollouts.stop_early()
