"""Where metrics are written. `metrics.jsonl` is always written; viewers get copies.

To add a viewer, write a class with `write(step, metrics)` and `close()` and add a line to `SINKS`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from megarl.console import say
from megarl.files import parse_json
from megarl.observe.config import ObserveConfig


class Sink(Protocol):
    """A destination of metrics, for example TensorBoard."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of step `step`."""
        ...

    def close(self) -> None:
        """Finish writing."""
        ...


def finite(value: Any) -> Any:
    """`value` as JSON data: NaN and infinities as None, numpy and torch numbers as Python's."""
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
    """Iterate over the lines of a JSON-lines file, such as metrics.jsonl, as {name: value}. A file
    that does not exist has none.

    A last line without newline is skipped: a killed process leaves one. With `numbers`, as in files
    of metrics, every value must be a number or null, and `transcripts` a list of objects. Raises
    `ValueError`, which names the line and how to delete it, for a line that is not a JSON object
    with an integer `step`, or has another value than `numbers` allows.
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
        return isinstance(value, list) and all(isinstance(one, dict) for one in value)
    is_whole = isinstance(value, int) and abs(value) < 2**63
    return value is None or isinstance(value, float) or is_whole


class MetricsFile:
    """A JSON-lines file with one object per step, flushed after each.

    Args:
        path: the file; created with its folder if missing.
        keep_until_step: records of later steps are dropped, in one atomic rename, because a
            resumed run writes them again. None keeps all complete lines.

    Raises:
        ValueError: the existing file is not JSON objects with a `step`.
    """

    def __init__(self, path: Path, *, keep_until_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _keep(path, keep_until_step)
        # A lone surrogate, which a broken decoder can leave in a transcript, becomes its JSON
        # escape.
        self._path = path
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append `{"step": step, **metrics}`; non-finite floats become null. Raises `OSError`, with
        the path, if the file cannot be written.
        """
        record = {"step": step} | finite(metrics) | {"step": step}
        try:
            self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:  # such as a full disk; the message does not say where
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def _keep(path: Path, until_step: int | None) -> None:
    """Rewrite `path` without records after `until_step` and without an incomplete last line."""
    whole = path.read_bytes().rpartition(b"\n")
    if whole[2]:
        say(f"megarl: {path}: cutting off a torn line of {len(whole[2])} bytes")
    kept = path.with_name(path.name + ".kept")
    with kept.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
        for record in read_records(path):
            if until_step is None or record["step"] <= until_step:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    kept.replace(path)


class TensorBoardSink:
    """Writes metrics for TensorBoard.

    Args:
        folder: log folder.
        first_step: steps done; TensorBoard hides what an earlier process logged of later ones.

    Raises:
        ValueError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path, *, first_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"observe.tensorboard is true, but TensorBoard cannot be imported ({error}); "
                "`pip install tensorboard`, or set observe.tensorboard to false"
            ) from error
        self._writer = SummaryWriter(
            str(folder), purge_step=first_step + 1 if first_step else 0, flush_secs=10
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write each metric as a TensorBoard scalar of its name, at step `step`. A metric whose
        value is None is left out.
        """
        for name, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        """Write what is still buffered to the log folder and close its file."""
        self._writer.close()


WANDB_ID = "wandb_id.txt"
"""File in the run folder with the id of the W&B run."""


class WandbSink:
    """Sends metrics to Weights & Biases; the API key comes from the environment.

    Args:
        project: name of the project.
        config: the resolved recipe, shown beside the run.
        name: display name of the run; empty for a generated one.
        id_file: where the id of the W&B run is kept, so that a resumed run goes on in the same one;
            None for a run of its own.
        first_step: steps done. With 0 a new W&B run begins.

    W&B drops what is logged at a step that it has already: after a resume the steps that a killed
    run had logged beyond its checkpoint stay as they were.

    Raises:
        ValueError: the package wandb is not installed.
    """

    def __init__(
        self,
        project: str,
        config: Mapping[str, Any],
        *,
        name: str = "",
        id_file: Path | None = None,
        first_step: int = 0,
    ) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError(
                f"observe.wandb_project is {project!r}, but the package wandb cannot be imported"
                f' ({error}); `pip install wandb`, or set observe.wandb_project to ""'
            ) from error
        known = {}
        if id_file is not None and first_step and id_file.is_file():
            known = {"id": id_file.read_text().strip(), "resume": "allow"}
        self._run = wandb.init(project=project, config=dict(config), name=name or None, **known)
        if id_file is not None:
            id_file.write_text(f"{self._run.id}\n")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log `metrics` at `step`; steps must not decrease."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload what is left and finish the run."""
        self._run.finish()


SINKS: dict[str, Callable[[ObserveConfig, Path, int, Mapping[str, Any]], Sink | None]] = {
    "tensorboard": lambda config, folder, first_step, recipe: (
        TensorBoardSink(folder / "tensorboard", first_step=first_step)
        if config.tensorboard
        else None
    ),
    "wandb": lambda config, folder, first_step, recipe: (
        WandbSink(
            config.wandb_project,
            recipe,
            name=folder.name,
            id_file=folder / WANDB_ID,
            first_step=first_step,
        )
        if config.wandb_project
        else None
    ),
}
"""{name: function of (config, run folder, first step, resolved recipe)} that makes a viewer's sink,
or None where the config does not ask for it."""


def open_sinks(
    config: ObserveConfig, folder: Path, first_step: int, recipe: Mapping[str, Any]
) -> list[Sink]:
    """Every sink that `config` asks for; if one fails, those already open are closed."""
    with contextlib.ExitStack() as opened:
        sinks: list[Sink] = []
        for make in SINKS.values():
            sink = make(config, folder, first_step, recipe)
            if sink is not None:
                opened.callback(sink.close)
                sinks.append(sink)
        opened.pop_all()
        return sinks
