"""When a training loop writes a checkpoint, evaluates and stops."""

from __future__ import annotations

import time
from collections.abc import Mapping

from megarl.errors import UserError
from megarl.parallel.collectives import broadcast_object
from megarl.settings.observe import STEP_METRICS, EarlyStopConfig
from megarl.trainer.context import RunContext


def due(done: int, every: int, last: int) -> bool:
    """Whether a periodic action (checkpoint, evaluation) is to run after `done` of `last` steps:
    after every `every` steps (0: not periodically), and always after the last step.
    """
    return done == last or (every > 0 and done % every == 0)


def save_due(run: RunContext, done: int, last: int) -> bool:
    """Whether a checkpoint is to be written after `done` of `last` steps: by the recipe's
    `training.checkpoint.every` (steps) or `minutes`, and after the last step; with `best` also
    before each evaluation, whose weights may be the best. `run`: the opened run with recipe and
    mesh; if a checkpoint is due, its `saved_at` is set to now. All ranks of the run's mesh call it
    together and get the same answer, since the clock is rank 0's.
    """
    config, evaluates = run.config.training.checkpoint, run.config.evaluation.every
    is_due = due(done, config.every, last) or bool(config.best and due(done, evaluates, last))
    if not is_due and config.minutes > 0:
        is_late = time.monotonic() - run.saved_at >= 60.0 * config.minutes
        is_due = broadcast_object(is_late, run.mesh.world)
    if is_due:
        run.saved_at = time.monotonic()
    return is_due


def reached(config: EarlyStopConfig, metrics: Mapping[str, float]) -> bool:
    """Whether `metrics`, {name: value} of a step or of an evaluation, are good enough to end the
    run by the recipe's section `early_stop` (`config`). False if the section names no metric, or
    one of another kind: names from evaluations begin with "eval/" or "eval_sampled/", those from
    steps do not. If a metric of the right kind is missing: False for megarl's own metrics of steps,
    which a step that trains only critics lacks; `UserError` for any other metric.
    """
    name = config.metric
    if not name or _kind(name) not in {_kind(key) for key in metrics}:
        return False
    if (value := metrics.get(name)) is None:
        if name in STEP_METRICS:  # a step in which only the critic has learnt has fewer
            return False
        raise UserError(
            f"early_stop.metric is {name!r}, which no {_kind(name) or 'step'} has; set it to one of"
            f" {', '.join(sorted(metrics))}"
        )
    if config.at_least is not None:
        return value >= config.at_least
    return config.at_most is not None and value <= config.at_most


def _kind(name: str) -> str:
    """The kind of evaluation that a metric belongs to, "eval" or "eval_sampled"; "" for a step."""
    kind, found, _ = name.partition("/")
    return kind if found and kind in ("eval", "eval_sampled") else ""
