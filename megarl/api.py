"""megarl from Python: a configuration, a run, its results; see docs/api.md.

A run is a process of its own (under torchrun for several ranks), because it starts engines and
ranks, and ends by ending them. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megarl import config as configs
from megarl.config import (
    AnyConfig,
    DistillConfig,
    PreferenceConfig,
    RewardModelConfig,
    RunConfig,
    SftConfig,
)
from megarl.recipe_file import put
from megarl.schema import Config

C = TypeVar("C", RunConfig, DistillConfig, SftConfig, PreferenceConfig, RewardModelConfig)

KINDS: dict[str, type[AnyConfig]] = {
    "train": RunConfig,
    "distill": DistillConfig,
    "sft": SftConfig,
    "preference": PreferenceConfig,
    "reward-model": RewardModelConfig,
    "eval": RunConfig,
    "sample": RunConfig,
}


@dataclass(frozen=True)
class Result:
    """A run that has ended, or a run folder that is there."""

    folder: Path
    """The run folder."""
    summary: dict[str, Any]
    """What the command printed: the main numbers of the run, or the results of an evaluation."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step, in order; `step` counts from 1."""
        return self._read().metrics

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The metrics of each evaluation of `train`, in order; `step` 0 is before training."""
        return [{"step": one.step, **one.metrics} for one in self._read().evaluations]

    @property
    def model(self) -> Path | None:
        """The model of the newest checkpoint, a Hugging Face folder; None without a checkpoint."""
        from megarl.checkpoints.progress import newest_first

        saved = newest_first(self.folder / "checkpoints")
        return saved[0] / "model" if saved else None

    def _read(self) -> Any:
        from megarl.observe.summary import read_run

        return read_run(self.folder)


def load_recipe(kind: type[C], path: str | Path, **changes: Any) -> C:
    """Read the recipe `path` as `RunConfig` (train, eval, sample), `DistillConfig`,
    `SftConfig`, `PreferenceConfig` or `RewardModelConfig`.

    `changes`: values by key, the parts of a dotted key joined by two underscores, as in
    `training__optimizer__learning_rate=1e-5`. Raises `ValueError` for mistakes.
    """
    tree = configs.written_tree(path)
    for key, value in changes.items():
        put(tree, key.split("__"), value.model_dump() if isinstance(value, Config) else value)
    return configs.from_tree(kind, tree, where=str(path), beside=Path(path).parent)


def train(config: RunConfig, *, ranks: int = 1) -> Result:
    """Run `megarl train` on `ranks` ranks of this machine and wait for its end.

    Raises `ValueError` with the command's message for a mistake in the recipe or the data,
    `RuntimeError` for any other failure.
    """
    return _run("train", config, ranks)


def distill(config: DistillConfig, *, ranks: int = 1) -> Result:
    """Run `megarl distill` as `train` runs `megarl train`."""
    return _run("distill", config, ranks)


def sft(config: SftConfig, *, ranks: int = 1) -> Result:
    """Run `megarl sft` as `train` runs `megarl train`."""
    return _run("sft", config, ranks)


def preference(config: PreferenceConfig, *, ranks: int = 1) -> Result:
    """Run `megarl preference` as `train` runs `megarl train`."""
    return _run("preference", config, ranks)


def reward_model(config: RewardModelConfig, *, ranks: int = 1) -> Result:
    """Run `megarl reward-model` as `train` runs `megarl train`."""
    return _run("reward-model", config, ranks)


def sample(config: RunConfig) -> Result:
    """Run `megarl sample`; `summary["data"]` is the file with the data set."""
    return _run("sample", config, 1)


def evaluate(config: RunConfig) -> Result:
    """Run `megarl eval`; `summary["results"]` has an entry for each model and data set."""
    return _run("eval", config, 1)


def open_run(folder: str | Path) -> Result:
    """The results of a run folder that is there. Raises `ValueError` if it is not one of a run."""
    from megarl.observe.summary import summary

    return Result(Path(folder), summary(Path(folder)))


def _run(command: str, config: AnyConfig, ranks: int) -> Result:
    wanted = KINDS[command]
    if not isinstance(config, wanted):
        raise ValueError(
            f"megarl {command} needs a {wanted.__name__}, found {type(config).__name__}"
        )
    with tempfile.TemporaryDirectory(prefix="megarl-") as place:
        path = Path(place) / "recipe.yaml"
        path.write_text(configs.dump(config), encoding="utf-8")
        start = [sys.executable, "-m"]
        if ranks > 1:
            start += ["megarl.parallel.torchrun", "--nproc-per-node", str(ranks), "-m"]
        arguments = [*start, "megarl", command, str(path)]
        printed = Path(place) / "stdout"
        with printed.open("w") as to:
            process = subprocess.Popen(
                arguments, encoding="utf-8", errors="replace", stdout=to, stderr=subprocess.PIPE
            )
        assert process.stderr is not None
        said = ""
        try:
            for line in process.stderr:
                sys.stderr.write(line)
                said = line.strip() if line.startswith("megarl: error") else said
            code = process.wait()
        except BaseException:  # Ctrl-C: the run saves a checkpoint and ends by itself
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            process.wait()
            raise
        out = printed.read_text(encoding="utf-8")
    if code == 2:
        raise ValueError(said.removeprefix("megarl: error: "))
    if code != 0:
        raise RuntimeError(said or f"megarl {command} ended with exit code {code}")
    return Result(Path(config.folder), json.loads(out))
