"""`megarl replay`: train again on the batches that a run has recorded, and compare the two runs.

    RUN/batches/ --read--> StepBatch --train--> weights, metrics --compare--> RUN

No engine, no environment and no Ray is started. The rollouts are the recorded ones, so that the
replay of any run reaches the same weights bit by bit: also of a run whose rollouts depended on
time, because they were asynchronous or used tools, and of one that was killed and resumed. A
difference means that training itself cannot be repeated, or that settings were changed at a resume.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from megarl.apps.runs.command_checks import steps_to_replay
from megarl.checkpoints.listing import newest_first
from megarl.checkpoints.manifest import DIGESTS
from megarl.errors import UserError
from megarl.observe.live_report import LiveReport
from megarl.observe.observer import METRICS
from megarl.observe.sinks import read_records
from megarl.parallel.collectives import broadcast_object
from megarl.rollout.batch_files import batch_of
from megarl.run import distill, loop
from megarl.run.build import TrainingParts, build_training
from megarl.run.loop import Method, refuse_lost, serve_roles, tell, train_step
from megarl.run.schedule import save_due
from megarl.settings.config import DistillConfig, RunConfig
from megarl.settings.limits import MOST_STEPS
from megarl.settings.schema import replace
from megarl.system import console
from megarl.system.signals import Stop, graceful
from megarl.system.spans import step_begins
from megarl.trainer.context import RunInputs, open_context

NOT_COMPARED = ("tokens/trained_per_s", "tokens/generated_per_s")
"""Metrics, beside those whose names begin with `time/`, that are not the same when a run is
repeated."""


def main(config: RunConfig, inputs: RunInputs) -> int:
    """Train again on the recorded batches of the run folder `config.replay.run`, on every trainer
    rank; rank 0 prints `differences` as one JSON object. `inputs`: of `check_replay`. Returns the
    exit code: 1 on rank 0 if anything differs, otherwise 0.
    """
    method = distill.METHOD if isinstance(config, DistillConfig) else loop.method_of(config)
    run, steps = Path(config.replay.run), steps_to_replay(config)
    # The run has counted skipped and empty steps anew after each resume.
    training = replace(config.training, max_skipped_steps=MOST_STEPS, max_empty_steps=MOST_STEPS)
    config = replace(config, training=training)
    with open_context(config, inputs) as context:
        if not context.is_finished():
            timeout_s = 2 * config.training.collective_timeout_s
            parts = build_training(context, config, inputs, timeout_s)
            if isinstance(parts, TrainingParts):
                with graceful() as stop:
                    train_again(parts, method, run, steps, stop)
            else:
                serve_roles(parts, method)
        is_main = context.is_main
    if not is_main:
        return 0
    folder = Path(config.folder)
    LiveReport(folder).write()
    differing = differences(run, folder, steps)
    if not differing["checkpoints_compared"]:
        kept = [path.name for path in newest_first(run / "checkpoints")]
        console.say(
            "only metrics were compared: run and replay have no checkpoint of the same step; those"
            f" of the run are {', '.join(kept) or 'gone'}"
        )
    console.result(json.dumps(differing))
    return int(bool(differing["steps_that_differ"] or differing["checkpoints_that_differ"]))


def train_again(parts: TrainingParts, method: Method, run: Path, steps: int, stop: Stop) -> None:
    """Train on the first `steps` recorded batches of the run folder `run`, from the step at which
    the replay was resumed, and save checkpoints. Once `stop` is true, the present step is finished
    and saved, and `EndedBySignal` raised. Raises `UserError` for a damaged batch. All ranks of the
    policy call it together.
    """
    world, data = parts.context.mesh.world, parts.context.mesh.data
    for step in range(parts.first_step, steps):
        if broadcast_object(bool(stop), world):
            break
        step_begins(step + 1, step)
        try:
            batch = batch_of(run, step, data.rank, data.size)
        except ValueError as error:
            raise UserError(f"{error}; set replay.steps to {step} to end before it") from None
        tell(parts, "train", step)
        started_at = time.monotonic()
        report = train_step(parts, method, batch)
        train_s = time.monotonic() - started_at
        refuse_lost(parts, step + 1)
        if parts.observer is not None:
            metrics = report.metrics | {"time/train_s": train_s}
            parts.observer.step(replace(report, metrics=metrics))
            parts.report.refresh()
        if save_due(parts.context, step + 1, steps):
            _save(parts, step + 1)
    else:
        step = steps
    if parts.first_step < step < steps:
        _save(parts, step)
    tell(parts, "end", step)
    parts.checkpoints.finish()
    if step < steps:
        stop.end(step, is_main=parts.observer is not None)


def _save(parts: TrainingParts, done: int) -> None:
    """Write the checkpoint after `done` steps. All ranks of the policy call it together."""
    tell(parts, "save", done)
    parts.checkpoints.save(step=done, next_ordinal=0, algorithm=parts.algorithm_state())


def differences(run: Path, replayed: Path, steps: int) -> dict[str, Any]:
    """What differs between the run folders `run` and `replayed` in their first `steps` steps:
    metrics but for times, as {step: first metric that differs, with both values}, at most 5, and
    the weights of checkpoints that both still have.
    """
    by_step = {record["step"]: record for record in read_records(replayed / METRICS)}
    first: dict[int, str] = {}
    for record in read_records(run / METRICS):
        other = by_step.get(record["step"], {})
        if record["step"] > steps or not other:
            continue
        for name, value in record.items():
            compared = not name.startswith("time/") and name not in NOT_COMPARED
            if compared and name in other and other[name] != value:
                first.setdefault(record["step"], f"{name}: {value} and {other[name]}")
    originals, own_checkpoints = run / "checkpoints", replayed / "checkpoints"
    saved = sorted(path.name for path in own_checkpoints.glob("step_*"))
    compared = [name for name in saved if (originals / name).is_dir()]
    differing = [
        name for name in compared if _weights(originals / name) != _weights(own_checkpoints / name)
    ]
    return {
        "run": str(run),
        "steps": len(by_step),
        "steps_that_differ": {str(step): names for step, names in sorted(first.items())[:5]},
        "checkpoints_compared": compared,
        "checkpoints_that_differ": differing,
    }


def _weights(checkpoint: Path) -> dict[str, str]:
    """{file: digest} of the weights of a checkpoint."""
    files = json.loads((checkpoint / DIGESTS).read_text())["files"]
    return {
        name: digest
        for name, digest in files.items()
        if name.startswith(("model/", "adapter/")) and name.endswith(".safetensors")
    }
