"""Where metrics are written: `metrics.jsonl`, and copies to viewers.

To add a viewer, write a function like `tensorboard` and name it in `open_sinks`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import UserError, require
from megarl.settings.observe import ObserveConfig
from megarl.system.console import say
from megarl.system.files import UNFINISHED, new_file, parse_json


@dataclass(frozen=True)
class Sink:
    """A viewer that gets copies of the metrics."""

    write: Callable[[int, Mapping[str, float]], None]
    """Of a step, from 1 (0: an evaluation before training), not decreasing; values are finite."""
    close: Callable[[], None]


Recipe = Mapping[str, Any]
"""With all defaults, as nested dicts."""


def finite(value: Any) -> Any:
    """`value` as JSON data: NaN and infinities as None, numpy and torch numbers and arrays as
    Python's, tuples as lists.
    """
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return finite(value.tolist())
    return float(value) if math.isfinite(value) else None


def read_records(path: Path, *, numbers: bool = False) -> Iterator[dict[str, Any]]:
    """The lines of a JSON-lines file as dicts with `step`; none if it does not exist. A last line
    without newline, which a killed process leaves, is skipped.

    `numbers`: check values too. Raises `ValueError`, with how to delete the line, for one that does
    not fit.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return
            fix = f"delete the line: sed -i {number}d {shlex.quote(str(path))}"
            try:
                record = parse_json(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not JSON ({error}); {fix}") from None
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise ValueError(f"{path}, line {number} has no whole number `step`; {fix}")
            wrong = [name for name, value in record.items() if numbers and not _fits(name, value)]
            if wrong:
                raise ValueError(f"{path}, line {number} has a wrong value of {wrong[0]}; {fix}")
            yield record


def _fits(name: str, value: Any) -> bool:
    """Whether a metric named `name` can have `value`."""
    if name == "transcripts":
        return isinstance(value, list) and all(isinstance(item, dict) for item in value)
    is_whole = isinstance(value, int) and abs(value) < 2**63
    return value is None or isinstance(value, float) or is_whole


class MetricsFile:
    """Appends to a JSON-lines file, flushed at once.

    Args:
        path: created with its folder if missing.
        keep_until_step: records of later steps are removed, in one atomic rename. None keeps all
            complete lines.

    Raises:
        ValueError: the existing file is not JSON objects with a `step`.
    """

    def __init__(self, path: Path, *, keep_until_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _remove_later(path, keep_until_step)
        self._path = path
        # A broken decoder can leave a lone surrogate in a transcript: it becomes its JSON escape.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append `{"step": step, **metrics}`; non-finite floats become null. Raises `OSError` with
        the path.
        """
        record = {"step": step} | finite(metrics) | {"step": step}
        try:
            self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:  # such as a full disk; the message does not say where
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        self._file.close()


def _remove_later(path: Path, until_step: int | None) -> None:
    whole = path.read_bytes().rpartition(b"\n")
    if whole[2]:
        say(f"megarl: {path}: cutting off a torn line of {len(whole[2])} bytes")
    for left in path.parent.glob(f"{path.name}.*{UNFINISHED}"):
        left.unlink(missing_ok=True)  # of a process that was killed here
    with new_file(path) as file:
        for record in read_records(path):
            if until_step is None or record["step"] <= until_step:
                line = json.dumps(record, ensure_ascii=False) + "\n"
                file.write(line.encode(errors="backslashreplace"))


def tensorboard(config: ObserveConfig, folder: Path, first_step: int, recipe: Recipe) -> Sink:
    """What an earlier process logged of steps after `first_step` is hidden."""
    from torch.utils.tensorboard import SummaryWriter

    hidden = first_step + 1 if first_step else 0
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=hidden, flush_secs=10)

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, float(value), step)

    return Sink(write, writer.close)


WANDB_ID = "wandb_id.txt"
"""File with the id of the W&B run, in which a resumed run goes on."""


def wandb(config: ObserveConfig, folder: Path, first_step: int, recipe: Recipe) -> Sink:
    """The API key comes from the environment. W&B drops what is logged at a step that it has
    already: steps that a killed run logged beyond its checkpoint stay.
    """
    import wandb  # pyright: ignore[reportMissingImports]

    id_file, known = folder / WANDB_ID, {}
    if first_step and id_file.is_file():
        known = {"id": id_file.read_text().strip(), "resume": "allow"}
    labels = {"project": config.wandb_project, "name": folder.name or None, "config": dict(recipe)}
    run = wandb.init(**labels, **known)
    id_file.write_text(f"{run.id}\n")
    return Sink(lambda step, metrics: run.log(dict(metrics), step=step), run.finish)


MLFLOW_ID = "mlflow_id.txt"
"""File with the id of the MLflow run, in which a resumed run goes on."""
REFUSED = re.compile(r"[^\w./: -]")
"""MLflow refuses a step with these in a name; "_" is sent instead."""


def mlflow(config: ObserveConfig, folder: Path, first_step: int, recipe: Recipe) -> Sink:
    """MLFLOW_TRACKING_URI says where. After a resume MLflow shows both values of a step that a
    killed run logged beyond its checkpoint.

    Raises `UserError` if MLflow fails here; if later, training goes on without it.
    """
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
    from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]
    from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

    id_file, name, lost = folder / MLFLOW_ID, config.mlflow_experiment, False
    try:
        client = MlflowClient()
        if first_step and id_file.is_file():
            run = id_file.read_text().strip()
            client.update_run(run, status="RUNNING")
        else:
            known = client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else client.create_experiment(name)
            run = client.create_run(experiment, run_name=folder.name or None).info.run_id
            params = [Param(REFUSED.sub("_", key), str(value)) for key, value in _leaves(recipe)]
            client.log_batch(run, params=params)
            id_file.write_text(f"{run}\n")
    except MlflowException as error:
        raise UserError(
            f"observe.mlflow_experiment is {name!r}, but MLflow fails ({error}); set"
            " MLFLOW_TRACKING_URI in the environment, or observe.mlflow_experiment to ''"
        ) from error

    def attempt(call: Callable[..., Any], *arguments: Any) -> None:
        nonlocal lost
        try:
            if not lost:
                call(run, *arguments)
        except MlflowException as error:
            lost = True
            say(f"megarl: warning: this run's metrics no longer go to MLflow, which fails: {error}")

    def write(step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        attempt(
            client.log_batch,
            [Metric(REFUSED.sub("_", key), value, now_ms, step) for key, value in metrics.items()],
        )

    return Sink(write, lambda: attempt(client.set_terminated))


def _leaves(tree: Recipe, before: str = "") -> Iterator[tuple[str, Any]]:
    """("section.key", value) of all that is no dict in nested dicts."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def trackio(config: ObserveConfig, folder: Path, first_step: int, recipe: Recipe) -> Sink:
    """TRACKIO_DIR, TRACKIO_SERVER_URL or TRACKIO_SPACE_ID says where. A resumed run goes on in the
    newest run named as its folder, with both values of repeated steps.
    """
    import trackio  # pyright: ignore[reportMissingImports]

    run = trackio.init(
        config.trackio_project,
        name=folder.name or None,
        config=dict(recipe),
        resume="allow" if first_step else "never",
        embed=False,
    )
    return Sink(lambda step, metrics: run.log(dict(metrics), step=step), run.finish)


def open_sinks(config: ObserveConfig, folder: Path, first_step: int, recipe: Recipe) -> list[Sink]:
    """Raises `ImportError` without a viewer's package, and as `mlflow`."""
    asked = {
        wandb: config.wandb_project,
        mlflow: config.mlflow_experiment,
        trackio: config.trackio_project,
        tensorboard: config.tensorboard,
    }
    return [make(config, folder, first_step, recipe) for make, is_on in asked.items() if is_on]


def check_viewers(config: ObserveConfig) -> None:
    """Raise `ValueError` if a package is missing that the configured metrics need."""
    for is_set, package, setting, off in (
        (config.tensorboard, "tensorboard", "observe.tensorboard", "false"),
        (config.wandb_project, "wandb", "observe.wandb_project", '""'),
        (config.mlflow_experiment, "mlflow", "observe.mlflow_experiment", '""'),
        (config.trackio_project, "trackio", "observe.trackio_project", '""'),
    ):
        require(
            not is_set or importlib.util.find_spec(package) is not None,
            f"{setting} asks for the package {package}, which is not installed; `pip install"
            f" {package}`, or set {setting} to {off}",
        )
