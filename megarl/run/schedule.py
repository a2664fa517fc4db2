"""When a training loop writes a checkpoint, evaluates and stops."""

from __future__ import annotations

import time
from collections.abc import Mapping

from megarl.errors import UserError
from megarl.parallel.collectives import broadcast_object
from megarl.settings.observe import STEP_METRICS, EarlyStopConfig
from megarl.trainer.context import RunContext


def due(done: int, every: int, last: int) -> bool:
    """Whether a periodic action is to run: after every `every` steps (0: never), and after the
    last.
    """
    return done == last or (every > 0 and done % every == 0)


def save_due(run: RunContext, done: int, last: int) -> bool:
    """Whether to write a checkpoint, by steps, by minutes of rank 0's clock, at the end and, with
    `best`, at evaluations; then sets `run.saved_at`. Collective.
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
    """Whether `metrics` of a step or an evaluation are good enough for `early_stop`; False for
    another kind of metric, or one of a step that trains only critics. Raises `UserError` if it
    is missing otherwise.
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
    """ "eval", "eval_sampled" or, for a step, ""."""
    prefix, slash, _ = name.partition("/")
    return prefix if slash and prefix in ("eval", "eval_sampled") else ""
