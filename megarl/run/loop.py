"""Reinforcement learning: prompts become rollouts, rewards, advantages; the policy learns; new
weights go to the engines. The same code on every rank of the policy.

Synchronous training is `rollout.max_staleness: 0` of this loop, not a second loop: the rollout
service decides which rollouts may start; the loop takes a batch, trains on it, sends the new
weights to the engines, and tells the service that the step is done. `task: distill` is this loop
too, with another way to train (`megarl.run.distill`). `megarl.run.build` builds what the
loop works with.
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
"""Function of (objects of this rank, batch of one step) -> report with metrics: trains the policy,
and critics if there are any, on the batch. All ranks of the policy call it together."""


@dataclass(frozen=True)
class Method:
    """What a command does with the rollouts of each step, as two functions that the RL loop calls:
    `train(parts, batch)` on ranks of the policy, which returns a `StepReport` (metrics), and
    `serve(parts, step)` on ranks that have only other models. `task: rl` and `task: distill`
    differ in these functions alone.
    """

    train: TrainStep
    """Trains the policy on one batch and returns the step's report. All ranks of the policy call
    the function together, in every step."""
    serve: Callable[[ServingParts, int], None]
    """The part of a step on a rank that has a reference, critic, reward model or teacher, but no
    part of the policy: it computes, for each token of the batch that `train` gets, what its model
    adds to it, such as log-probs or values. The number is the step, from 0. All such ranks call the
    function together, in every step."""


def main(config: RunConfig, inputs: RunInputs) -> int:
    """The command `task: rl` on this rank: train the policy by reinforcement learning until
    `config.steps` steps are done. All ranks call it together. `config` is the checked recipe,
    `inputs` what the checks before a run have loaded: tokenizer, layout of the ranks and, on rank
    0, the prompts. Returns the exit code, 0; rank 0 prints a summary as one JSON object on stdout.
    """
    return run_command(config, inputs, method_of(config))


def run_command(config: RunConfig, inputs: RunInputs, method: Method) -> int:
    """Train on rollouts until `config.steps` steps are done, on this rank; all ranks call it
    together. Sets up torch.distributed, models and engines, and closes them at the end. `config` is
    the checked recipe, `inputs` what the checks before a run have loaded (tokenizer, layout of the
    ranks and, on rank 0, the prompts), `method` the functions that do a step's training. Returns
    the exit code, 0; rank 0 prints a summary as one JSON object on stdout. Errors are raised, and
    `EndedBySignal` after a signal.
    """
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
    """The RL loop of a rank of the policy: train until `config.steps` steps are done, or a metric
    is good enough for an early stop. All ranks of the policy call it together. `parts`: this rank's
    models, engines, rollouts and checkpoints, as `build` returns them; `method`: the functions that
    do a step's training. A signal ends the run after the last finished step, with a checkpoint of
    that step; `EndedBySignal` is raised then.
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
    """Train from step `parts.first_step` on, with rollouts, evaluations and checkpoints. All ranks
    of the policy call it together. `parts`: this rank's models, engines, rollouts and checkpoints;
    `method`: the functions that do a step's training. Returns (steps done, steps done at the newest
    checkpoint); fewer steps than `config.steps` if a signal or an early stop has ended the run.
    Raises `UserError` if no step has changed the weights.
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
    """Train for one step on `batch`, the samples that this rank has of the step. `method`: the
    recipe's `algorithm.method`. Returns the step's report, with the metrics of the rollouts and
    "tokens/trained" (the number of response tokens) added, unless the method has set them. All
    ranks of the policy call it together.

    Raises `UserError` if the method does not return a `StepReport`, and after
    `training.max_empty_steps` steps in a row without samples.
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
    """Move master weights and optimizer state of every trained model in `parts` (this rank's models
    and engines) from the GPU to the host, and then wake the inference engines that share the
    trainer's GPUs. All ranks of the policy call it together.
    """
    for role in parts.trained:
        role.engine.offload()
    # The engines map their weights at once, on the GPUs of all ranks.
    barrier(parts.context.mesh.world)
    parts.generation.wake()


def save(parts: Parts, done: int) -> None:
    """Begin to write the checkpoint after `done` steps into the run folder: the trained models, the
    position in the data, and finished rollouts that are not used yet. Files are written while
    training goes on. All ranks of the policy call it together. `parts`: this rank's models,
    rollouts and checkpoints. Errors of writing are raised (`OSError`, `UserError`).
    """
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
    """Begin to write `batch` (this rank's samples of a step) into the run folder, from which
    `megarl replay` trains again, after waiting until earlier batches are on the disk; None: only
    wait. Does nothing unless the recipe sets `observe.batches`. All ranks of the policy call it
    together. Raises `UserError` on all of them if a batch could not be written; `done` is the
    number of steps done.
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
    """Send the policy's weights to every inference engine, as weight version `version` (the number
    of steps done). All ranks of the policy call it together; blocks until the engines have them.
    Returns metrics such as `publish/bytes` {name: number}. `parts`: the objects of this rank,
    as `megarl.run.build` made them. Raises `RuntimeError` on every rank if an engine
    does not answer in time or holds other weights than were sent.
    """
    timeout_s = parts.config.weight_sync.timeout_s
    what = f"publication of weights {version}"
    with activity(what, kind="publish", of="engines", deadline_s=timeout_s):
        return parts.publisher.publish(version=version)


Order = Literal["train", "save", "end", "abort"]


def tell(parts: TrainingParts, order: Order, step: int) -> None:
    """On rank 0, send an order to the ranks that hold no part of the policy: "train" step `step`
    (from 0), "save" a checkpoint after `step` steps, "end" the run, or "abort" it without waiting
    for a checkpoint. Does nothing if there are no such ranks; does not block.
    """
    if parts.serving is not None:
        parts.serving.give(order, step)


def policy_gradient_step(parts: TrainingParts, batch: StepBatch) -> StepReport:
    """One step of `task: rl` on a rank of the policy: reward models, reference and critics
    compute their values for each token of `batch` (this rank's samples of the step), rewards become
    advantages, then policy and critics are trained; only critics while these warm up. All ranks of
    the policy call it together. `parts`: this rank's models. Returns the step's number and metrics
    {name: number}, the same on each rank.
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
    """One step of `task: rl` on a rank that has no part of the policy: its reward models,
    reference and critics compute their values for the samples that the policy's ranks send, send
    them back, and the critics are trained. All such ranks call it together. `parts`: this rank's
    models. `step`: number of the step, from 0.
    """
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
"""{name in `algorithm.method`: function that trains on the batch of one step}"""


def method_of(config: RunConfig) -> Method:
    """The functions that `task: rl` calls in each step. On ranks of the policy it is the
    training step that the recipe's `algorithm.method` names, a key of `METHODS` or the user's own
    FILE.py:NAME; on other ranks `work_as_role`, which computes for the policy's ranks. Raises
    `ValueError` if the file has no such function.
    """
    return Method(function_of(config.algorithm.method, METHODS, "algorithm.method"), work_as_role)


def serve(parts: ServingParts, method: Method) -> None:
    """The RL loop of a training rank that has no part of the policy, but of a reference, critic,
    reward model or teacher (`parts`). It waits for orders of rank 0 until the run ends, and calls
    `method.serve` for each step or writes a checkpoint. All such ranks call it together.

    After a signal the loop goes on until rank 0 ends it, because the policy's ranks finish their
    step; then `EndedBySignal` is raised.
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
    """End the run with `UserError` on every rank if another run has become the owner of the run
    folder. All ranks of the policy call it together, after `done` steps and before anything is
    written to the folder.
    """
    if lost := parts.context.lost_folder():
        tell(parts, "abort", done)
        raise UserError(lost)


def observe(parts: Parts, report: StepReport, transcripts: list[dict[str, Any]]) -> None:
    """After a training step, rank 0 writes its metrics and transcripts to the run folder, and ends
    the run if a metric is good enough for an early stop. `report`: the step's number and metrics,
    the same on every rank; `transcripts`: on rank 0, dicts of prompts with their responses as text.
    All ranks of the policy call it together. Raises `UserError` on each of them if another run owns
    the run folder.
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
            found = parts.rollouts.evaluate(temperature, name)
        if found is None:
            if parts.observer is not None:
                console.say(
                    f"the evaluation after step {step} was interrupted; --resume auto makes it"
                )
            return False
        metrics, transcripts = found
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
    """Whether the run folder already has the results of the evaluation `name` ("eval" or
    "eval_sampled") after `step` steps, so that a run resumed from the checkpoint of that step need
    not repeat it. If so, rank 0 checks these results for an early stop. Always False in a new run
    and for other steps. All ranks of the policy call it together and get the same answer.
    """
    if step != parts.first_step or step == 0:
        return False
    found = parts.observer.evaluated(step, name) if parts.observer is not None else None
    if parts.observer is not None and found is not None:
        stop_early(parts, step, found)
    return broadcast_object(found is not None, parts.context.mesh.world)


def stop_again(parts: Parts) -> None:
    """In a run resumed from a checkpoint, end the run if the training metrics of the checkpoint's
    last step are good enough for an early stop. A run that has stopped early therefore stops at
    once when it is started again. Does nothing on ranks other than rank 0.
    """
    if parts.observer is not None and parts.first_step > 0:
        metrics = parts.observer.trained(parts.first_step)
        if parts.config.early_stop.metric in metrics:
            stop_early(parts, parts.first_step, metrics)


def stop_early(parts: Parts, done: int, metrics: Mapping[str, float]) -> None:
    """On rank 0, end the run on all ranks after the present step if `metrics` {name: value},
    measured after `done` steps, are good enough by the recipe's section `early_stop`. Raises
    `UserError` if `metrics` lack the metric that the section names, though they are of its kind (of
    an evaluation or of a step); only megarl's own metrics of steps may be missing.
    """
    early = parts.config.early_stop
    if done < parts.config.steps and reached(early, metrics):
        console.say(f"early stop after {done} steps: {early.metric} is {metrics[early.metric]:.4g}")
        parts.rollouts.stop_early()
