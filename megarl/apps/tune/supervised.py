"""The loop of a run on a fixed data set: steps, checkpoints, evaluations, and an end by a signal.

    Task.take(step's rows) -> batch -> Task.train(batch) -> metrics

A task says what is trained and on what, and makes a `StepLoss` of each batch. Tasks are in
`megarl.apps.tune.sft`, `.preference` and `.reward_model`.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from megarl.errors import UserError
from megarl.observe.live_report import LiveReport
from megarl.observe.summary import read_run
from megarl.parallel.collectives import broadcast_object
from megarl.parallel.mesh import ProcessMesh
from megarl.run.schedule import due, save_due
from megarl.settings.config import SupervisedConfig
from megarl.system import console
from megarl.system.signals import graceful
from megarl.system.spans import activity, step_begins
from megarl.trainer.context import DataRows, RunContext, RunInputs, open_context
from megarl.trainer.finite import StepGuard
from megarl.trainer.prefixes import balance_of
from megarl.trainer.role import Role
from megarl.trainer.step import MicroBatchLoss, StepMetrics, computed_tokens, train_mini_batches
from megarl.types import MicroBatch, Samples, StepReport

Batch = TypeVar("Batch")


class StepLoss(ABC):
    """Base class of the loss of one batch and its metrics. The constructor divides the batch among
    the ranks; `micro_batches` are this rank's part. The caller calls `loss` for each of them, which
    also adds to the sums `metrics`, then `reduced` once. All ranks create the object and call every
    method together.
    """

    def __init__(
        self, role: Role, samples: Samples, sums: Sequence[str], *, together: int = 1
    ) -> None:
        """`samples`: the token sequences of the batch, the same on every rank, of which each
        `together` consecutive ones stay in one packed sequence. `sums`: names of the sums over the
        batch from which the metrics are made.
        """
        self.role, self.metrics = role, StepMetrics(role.device, sums)
        self.num_tokens = len(samples.token_ids)
        """Number of tokens of the whole batch, prompts included."""
        self.micro_batches = pack_share(samples, role, together=together)
        """This rank's micro-batches."""

    @abstractmethod
    def loss(self, micro: MicroBatch, guard: StepGuard | None) -> torch.Tensor:
        """Compute the loss of `micro`, one of `micro_batches`, and add to the sums `metrics`.
        Returns a scalar to differentiate on this rank. Its gradients, summed over micro-batches and
        over data- and sequence-parallel ranks, are the gradient of the batch's loss. `guard`:
        object that records whether the values in the loss are finite; None in an evaluation.
        """

    @abstractmethod
    def reduced(self) -> dict[str, float]:
        """The metrics of the batch over all ranks, {name: number}, such as `loss` and `accuracy`;
        the same on every rank.
        """


class Task(ABC):
    """Base class of what the training loop `run_supervised` trains on a fixed data set: a model
    (`role`), its data (`take` gives a step's batch) and its loss (`train` takes an optimizer step,
    `evaluate` computes metrics of held-out rows). A subclass implements `batch`, which makes a
    batch of rows, and `begin`, which gives the loss of a batch. All ranks create the object and
    call every method together.
    """

    def __init__(self, role: Role, rows: DataRows | None, allowed_skips: int) -> None:
        """`role`: the model to train. `rows`: the data set, on rank 0, which alone reads it.
        `allowed_skips`: how many steps may be skipped because their values are not finite.
        """
        self.role, self._rows = role, rows
        self._guard = StepGuard(role, allowed=allowed_skips)
        self._held_out: Any = None
        """All rows to evaluate on, as one batch, whose metrics are means over all rows however many
        a step has; None without such rows."""

    @abstractmethod
    def batch(self, rows: Sequence[Any]) -> Any:
        """Make the batch of a step from `rows` of the data set. Only rank 0 calls it, and then
        broadcasts the batch.
        """

    @abstractmethod
    def begin(self, batch: Any) -> StepLoss:
        """Return the loss of `batch`, which is the same on every rank, over this rank's share."""

    def take(self, first: int, count: int, *, stops: bool) -> Any:
        """Broadcast the batch of `count` rows from position `first` of the training order; None if
        rank 0 passes `stops`, to end the run.
        """
        batch = None
        if self._rows is not None and not stops:
            batch = self.batch([self._rows.at(first + number) for number in range(count)])
        return broadcast_object(batch, self.role.mesh.world)

    def train(self, batch: Any, step: int) -> StepReport:
        """Take one optimizer step on `batch`, which `take` returned, and return the step's number
        and metrics, {name: number}. `step` counts from 0. Raises `UserError` if the model is not
        finite.
        """
        return supervised_step(self.role, lambda: self.begin(batch), step, self._guard)

    def evaluate(self) -> dict[str, float]:
        """{"eval/NAME": value} of metrics on the rows that are not trained on, the same on every
        rank; {} without such rows.
        """
        if self._held_out is None:
            return {}
        return {f"eval/{name}": value for name, value in self.evaluated(self._held_out).items()}

    @torch.no_grad()
    def evaluated(self, batch: Any) -> dict[str, float]:
        """Compute the metrics of a batch without training on it: {name: number}, over all ranks.
        `batch`: what the method `batch` returns, the same on every rank. All ranks call it
        together.
        """
        work = self.begin(batch)
        for micro in work.micro_batches:
            work.loss(micro, None)
        return work.reduced()


def supervised_step(
    role: Role, begin: Callable[[], StepLoss], step: int, guard: StepGuard
) -> StepReport:
    """Take one optimizer step of the model `role`. `begin`: returns the object that computes the
    loss of the step's batch. `step` counts from 0. `guard` skips a step whose values are not
    finite. Raises `UserError` if it has skipped too many, or if a weight is not finite afterwards.
    Returns the step's number and metrics, {name: number}. All ranks call it together.
    """
    guard.begin(f"step {step + 1}")
    started_at = time.monotonic()
    work = begin()
    packed = [work.micro_batches]

    def loss_of(number: int, at_start: bool) -> MicroBatchLoss:
        return lambda micro: work.loss(micro, guard)

    _, rates = train_mini_batches(role, packed, loss_of, guard, work.metrics, num_mini_batches=1)
    metrics = work.reduced() | computed_tokens(packed, role) | rates
    seconds = time.monotonic() - started_at
    metrics |= {"tokens/trained_per_s": work.num_tokens / seconds, "time/step_s": seconds}
    return StepReport(step, metrics)


def pack_share(samples: Samples, role: Role, *, together: int = 1) -> list[MicroBatch]:
    """Divide `samples`, token sequences that are the same on every rank, among the data-parallel
    ranks, balanced by cost, and return this rank's micro-batches (packed sequences). `role`: the
    model, which gives the parallel layout and the token budget of a micro-batch. Each `together`
    consecutive samples, such as the two of a pair, stay in one packed sequence; the number of
    samples is a multiple of `together`. Does not communicate.
    """
    mesh, training = role.mesh, role.training
    even = balance_of(samples, training.share_prefix, role.windows, together=together)
    budget = training.micro_batch_tokens * mesh.sequence.size
    dealt = even.split(mesh.data.size, budget)
    packed = even.rows_in_step(dealt, budget)

    def whole(units: Sequence[int]) -> list[int]:
        return [unit * together + part for unit in units for part in range(together)]

    share = samples.select(whole(dealt[mesh.data.rank]))
    return role.pack(share, [whole(units) for units in packed[mesh.data.rank]])


MakeTask = Callable[[RunContext], Task]


def run_supervised(config: SupervisedConfig, inputs: RunInputs, make: MakeTask) -> int:
    """Train a model on a fixed data set until `config.steps`, from a resumed checkpoint or the
    model's own weights. Every trainer rank calls it; rank 0 prints a summary as one JSON object.
    `inputs`: tokenizer, data set and so on, from the checks before a run. `make`: function that
    creates the task (model, data and loss) from the run's context. Returns the exit code 0. Raises
    `EndedBySignal` if a signal ends the run.
    """
    with open_context(config, inputs) as context:
        if not context.is_finished():
            train_task(context, make)
        is_main = context.is_main
    if is_main:
        folder = Path(config.folder)
        LiveReport(folder).write()
        console.result(json.dumps(supervised_summary(folder, config.seed)))
    return 0


def supervised_summary(folder: Path, seed: int) -> dict[str, Any]:
    """What a finished supervised run in `folder` reports, as a dict for JSON: its first and last
    loss (`loss_first`, `loss_last`), its number of `steps`, the metrics of its last evaluation
    (`eval/NAME`), its `seed`, and the seconds since this process started (`run_s`).
    """
    run = read_run(folder)
    steps = [record for record in run.metrics if record.get("loss") is not None]
    last = run.evaluations[-1].metrics if run.evaluations else {}
    return {
        "loss_first": steps[0]["loss"] if steps else None,
        "loss_last": steps[-1]["loss"] if steps else None,
        "steps": len(steps),
        **last,
        "seed": seed,
        "run_s": round(console.elapsed_s(), 1),
    }


def refuse_lost_folder(context: RunContext) -> None:
    """Raise `UserError` on every rank if another run has become the owner of the run folder since
    this run started. All ranks call it together, before anything is written to the folder.
    """
    if lost := context.lost_folder():
        raise UserError(lost)


def train_task(context: RunContext, make: MakeTask) -> None:
    """Train from step 0, or from the checkpoint that the run resumes, until the recipe's `steps`
    are done; evaluate and save on the way. All ranks call it together. `make`: creates the task
    (model, data and loss) from `context`. A signal ends the run after the present step: a
    checkpoint is written and `EndedBySignal` raised.
    """
    config = context.config
    assert isinstance(config, SupervisedConfig)
    with console.phase("model and optimizer"), activity("model and optimizer", kind="load"):
        task = make(context)
        checkpoints = context.checkpoints(task.role.engine)
        progress = context.resume(checkpoints)
    first = saved = progress.step if progress else 0
    begun = progress.next_ordinal if progress else 0
    observer, report = context.observe(first), LiveReport(context.folder)
    size, every = config.samples_per_step, config.evaluation.every

    def evaluate(done: int) -> None:
        with activity(f"evaluation after step {done}", kind="evaluate"):
            metrics = task.evaluate()
        refuse_lost_folder(context)
        if observer is not None and metrics:
            observer.evaluation(done, metrics, [])
            checkpoints.evaluated(done, metrics)

    # A run may have been killed between a checkpoint and the evaluation of its weights.
    known = observer.evaluated(first, "eval") if observer is not None else None
    lacks = broadcast_object(known is None, context.mesh.world)
    if first == 0 or (lacks and due(first, every, config.steps)):
        evaluate(first)
    with graceful() as stop:
        for step in range(first, config.steps):
            # From where the checkpoint's run had come, whatever its rows a step.
            ordinal = begun + (step - first) * size
            step_begins(step + 1, step)
            batch = task.take(ordinal, size, stops=bool(stop))
            if batch is None:
                if step > saved:
                    checkpoints.save(step=step, next_ordinal=ordinal)
                checkpoints.finish()
                stop.end(step, is_main=observer is not None)
            with activity(f"training of step {step + 1}", kind="train"):
                step_report = task.train(batch, step)
            refuse_lost_folder(context)
            if observer is not None:
                metrics = step_report.metrics | checkpoints.take_times()
                observer.step(replace(step_report, metrics=metrics))
                report.refresh()
            if save_due(context, step + 1, config.steps):
                checkpoints.save(step=step + 1, next_ordinal=ordinal + size)
                saved = step + 1
            if due(step + 1, every, config.steps):
                evaluate(step + 1)
        checkpoints.finish()


def all_batches(
    rows: Any, pick: Callable[..., Any], size: int, mesh: ProcessMesh, make: Callable[..., Batch]
) -> list[Batch]:
    """All of rank 0's data set `rows` (None: no rows) as batches of at least `size` rows, fewer
    only if there are fewer, on every rank. `pick`: its method that gives a row; `make`: batch of a
    list of rows, called on rank 0 alone. All ranks call it together.
    """
    num_rows, batches = 0 if rows is None else len(rows), list[Batch]()
    for first, last in broadcast_object(chunks(num_rows, size), mesh.world):
        own: Any = make([pick(rows, number) for number in range(first, last)]) if num_rows else None
        batches.append(broadcast_object(own, mesh.world))
    return batches


def chunks(num_rows: int, at_least: int) -> list[tuple[int, int]]:
    """Divide `num_rows` rows into chunks of about equal size, each of `at_least` rows or more:
    [(first row, first row of the next chunk), ...]. One chunk if there are fewer rows; an empty
    list for none.
    """
    count = max(1, num_rows // at_least) if num_rows else 0
    return [
        (num_rows * number // count, num_rows * (number + 1) // count) for number in range(count)
    ]
