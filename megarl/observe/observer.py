"""Where a run reports: files in the run folder, viewers, and progress on the terminal.

Files: `metrics.jsonl` (one line per step), `evaluations.jsonl` (metrics and transcripts of each),
`transcripts.jsonl` (some groups of each step), `provenance.jsonl` (a line for each start: steps
done, code, machine, command) and `tensorboard/`.

Steps count from 1 in all of them: an evaluation at step n is of the weights after n steps, 0 before
training.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megarl.observe.provenance import made_by
from megarl.observe.rotated import RotatedFile
from megarl.observe.sinks import MetricsFile, finite, open_sinks, read_records
from megarl.settings.observe import ObserveConfig
from megarl.system import console
from megarl.system.files import new_file
from megarl.types import StepReport

METRICS, EVALUATIONS, TRANSCRIPTS = "metrics.jsonl", "evaluations.jsonl", "transcripts.jsonl"
PROVENANCE = "provenance.jsonl"
"""Names of the files in the run folder."""


class Observer(contextlib.AbstractContextManager):
    """Made once, on rank 0; a context manager.

    Args:
        config: which viewers and how many transcripts.
        folder: the run folder; created if missing.
        total_steps: steps of the whole run.
        first_step: steps already done; lines of later steps, beyond the last checkpoint, are
            removed. With 0 the files start empty.
        resolved: the recipe as plain data, for viewers that show it.
    """

    def __init__(
        self,
        config: ObserveConfig,
        folder: Path,
        *,
        total_steps: int,
        first_step: int = 0,
        resolved: dict[str, Any] | None = None,
    ) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._config, self._folder = config, folder
        # Sinks first: where one cannot be opened, no file has been changed.
        self._sinks = open_sinks(config, folder, first_step, resolved or {})
        self._metrics = MetricsFile(folder / METRICS, keep_until_step=first_step)
        self._transcripts = RotatedFile(
            folder / TRANSCRIPTS,
            keep_until_step=first_step,
            most_bytes=int(config.transcripts_gib * 2**30),
        )
        # A new run evaluates at step 0 itself.
        self._evaluations = MetricsFile(folder / EVALUATIONS, keep_until_step=first_step or -1)
        self._progress = ProgressBar(total_steps, first_step) if config.progress else None
        add_start(folder / PROVENANCE, first_step)

    def step(self, report: StepReport) -> None:
        number = report.step + 1
        self._metrics.write(number, report.metrics)
        self._sink(number, report.metrics)
        if self._progress is not None:
            self._progress.step(number, report.metrics)

    def evaluation(
        self, step: int, metrics: dict[str, float], transcripts: list[dict[str, Any]]
    ) -> None:
        """Write an evaluation of the weights after `step` steps; it may take several calls.

        Args:
            step: steps done; 0 is before training.
            metrics: named `eval/...`, or `eval_sampled/...` at the temperature of training.
            transcripts: a dict for each problem: prompt, answer, response, correct, reward, tokens.

        Raises:
            ValueError: a metric's name does not begin with `eval`.
        """
        if wrong := [name for name in metrics if not name.startswith("eval")]:
            raise ValueError(
                "metrics of an evaluation are named eval/... or eval_<kind>/..., but these are"
                f" not: {wrong}"
            )
        self._evaluations.write(step, {**metrics, "transcripts": transcripts})
        self._sink(step, metrics)
        if self._progress is not None:
            self._progress.evaluation(step, metrics)

    def evaluated(self, step: int, name: str) -> dict[str, float] | None:
        """The metrics `name`/... of the newest evaluation after `step` steps, of this process or of
        one before a resume; None without one.
        """
        records = [
            {key: value for key, value in record.items() if key.startswith(f"{name}/")}
            for record in read_records(self._folder / EVALUATIONS)
            if record["step"] == step
        ]
        return next(filter(None, reversed(records)), None)

    def trained(self, step: int) -> dict[str, float]:
        """The finite metrics of training step `step` (from 1), of this process or of one before a
        resume; empty without such a step.
        """
        lines = [row for row in read_records(self._folder / METRICS) if row.pop("step") == step]
        return {
            name: value for row in lines[-1:] for name, value in row.items() if value is not None
        }

    def transcripts(self, step: int, groups: list[dict[str, Any]]) -> None:
        """Write some groups of a step, which counts from 0. A group is a dict of JSON data: ordinal
        (position of its prompt in training), prompt, answer (text) and rollouts (dicts).
        """
        for group in groups[: self._config.transcripts_per_step]:
            self._transcripts.write(step + 1, group)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
        for sink in (self._metrics, self._evaluations, self._transcripts, *self._sinks):
            sink.close()
        self._sinks = []

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sink(self, step: int, metrics: Mapping[str, float]) -> None:
        """NaN and infinite values are left out; only the JSON files have them, as null."""
        numbers = {name: value for name, value in finite(metrics).items() if value is not None}
        for sink in self._sinks:
            sink.write(step, numbers)


def add_start(path: Path, done: int) -> None:
    """Add to `provenance.jsonl` a line on a start after `done` steps, with 0 to a new file. Whole
    lines stay, also damaged ones. Raises `OSError`.
    """
    before = path.read_bytes() if done and path.exists() else b""
    line = json.dumps({"step": done} | finite(made_by()), ensure_ascii=False) + "\n"
    with new_file(path) as file:
        file.write(before[: before.rfind(b"\n") + 1] + line.encode(errors="backslashreplace"))


class ProgressBar:
    """A bar on a terminal, otherwise a line at most every 5 seconds, on standard error."""

    def __init__(self, total_steps: int, first_step: int) -> None:
        self._total, self._last_line = total_steps, float("-inf")
        terminal = console.terminal()
        self._bar = None
        if terminal is not None:
            how = {"file": terminal, "unit": "step", "dynamic_ncols": True}
            self._bar = tqdm(total=total_steps, initial=first_step, **how)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(shown_metrics(metrics, separator=", "), refresh=False)
            self._bar.update()
            return
        now = time.monotonic()
        # Without a terminal a line every 5 s, and always one of the last step.
        if now - self._last_line >= 5.0 or step >= self._total:
            self._last_line = now
            since = f"[{console.elapsed_s():.0f} s]"
            console.say(f"step {step}/{self._total}  {shown_metrics(metrics)}  {since}")

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = "  ".join(
            f"{name} {value:.4g}"
            for name, value in metrics.items()
            if value or (value is not None and not name.endswith("verifier/failures"))
        )
        # Without disturbing the bar.
        if self._bar is not None:
            self._bar.clear()
        console.say(f"evaluation after {step} steps  {numbers}")
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


_SHOWN = (
    ("reward/mean", "reward {:+.3f}"),
    ("accuracy", "accuracy {:.1%}"),
    ("length/mean", "length {:.1f}"),
    ("length/truncated_share", "cut off {:.0%}"),
    ("loss", "loss {:.4f}"),
    ("tokens/generated_per_s", "{:,.0f} tokens/s"),
    ("tokens/trained_per_s", "{:,.0f} tokens/s"),
)
"""(metric, text format)"""


def shown_metrics(metrics: Mapping[str, float | None], *, separator: str = "  ") -> str:
    """The main metrics of a step in one line, without missing ones."""
    # A policy gradient's loss says nothing about progress.
    hidden = {"loss"} if "reward/mean" in metrics else set()
    hidden |= {"tokens/trained_per_s"} if "tokens/generated_per_s" in metrics else set()
    if (metrics.get("length/truncated_share") or 0) <= 0.005:  # which reads 0%
        hidden.add("length/truncated_share")
    return separator.join(
        template.format(metrics[name])
        for name, template in _SHOWN
        if name not in hidden and metrics.get(name) is not None
    )
