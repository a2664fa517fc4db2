"""megarl from Python: a configuration, a run, its results; docs/api.md has examples.

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
from megarl.recipe_paths import recipe_path
from megarl.schema import Config, require

C = TypeVar("C", RunConfig, DistillConfig, SftConfig, PreferenceConfig, RewardModelConfig)


@dataclass(frozen=True)
class Result:
    """What a run has produced: `folder` (its run folder), `summary` (a dict of main numbers), and,
    read from the folder when asked for, `metrics` (a dict for each training step), `evaluations` (a
    dict for each evaluation) and `model` (path of the newest model). Returned by `train` and the
    other functions for commands, and by `open_run`.
    """

    folder: Path
    """Path of the run folder, as the recipe has it."""
    summary: dict[str, Any]
    """What the command printed as JSON: the main numbers of the run, or the results of an
    evaluation. Of `open_run` the main numbers of the run, computed from its files."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each training step, in order, each a dict {name: number or None} with
        `step`, which counts from 1. Raises `ValueError` if the folder has no metrics.
        """
        return self._read().metrics

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The metrics of each evaluation that `train` made, in order, each a dict {name: number or
        None} with `step`, the number of steps done; 0 is before training.
        """
        return [{"step": one.step, **one.metrics} for one in self._read().evaluations]

    @property
    def model(self) -> Path | None:
        """Path of the model in the newest checkpoint, a folder in Hugging Face's format; None
        without a checkpoint.
        """
        from megarl.checkpoints.progress import newest_first

        saved = newest_first(self.folder / "checkpoints")
        return saved[0] / "model" if saved else None

    def _read(self) -> Any:
        from megarl.observe.summary import read_run

        return read_run(self.folder)


def load_recipe(kind: type[C], path: str | Path, **changes: Any) -> C:
    """Read the YAML recipe at `path`, or the one of that name which comes with megarl, such as
    "quickstart", as configuration class `kind`, a frozen pydantic model of all settings of a
    command: `RunConfig` (for train, evaluate, sample), `DistillConfig`, `SftConfig`,
    `PreferenceConfig` or `RewardModelConfig`. Returns an object of that class.

    `changes`: values that replace those of the recipe, by key; the parts of a dotted key are joined
    by two underscores, as in `training__optimizer__learning_rate=1e-5`. Raises `ValueError`, which
    names all mistakes, for a file that is no recipe, an unknown setting or a value that is not
    allowed.
    """
    tree = configs.written_tree(path)
    for key, value in changes.items():
        put(tree, key.split("__"), value.model_dump() if isinstance(value, Config) else value)
    return configs.from_tree(kind, tree, where=str(path), beside=recipe_path(path).parent)


def train(config: RunConfig, *, ranks: int = 1) -> Result:
    """Run reinforcement learning with the recipe `config`, as `megarl train` does, in new
    processes, and block until it ends. What the run prints on standard error is passed on.

    Returns a `Result`: the run folder, `summary` (dict of main numbers), `metrics` of each step and
    `model`, the path of the trained model. `ranks`: number of training processes (torchrun's ranks)
    that are started on this machine. Raises `ValueError` with the command's message for a mistake
    in the recipe or the data, `RuntimeError` for any other failure.
    """
    return _run("train", RunConfig, config, ranks)


def distill(config: DistillConfig, *, ranks: int = 1) -> Result:
    """Run on-policy distillation with the recipe `config`, as `megarl distill` does: the policy
    samples responses and learns from the teacher's distributions at their tokens. Runs in new
    processes, and blocks until it ends.

    Returns a `Result`: the run folder, `summary` (dict of main numbers), `metrics` of each step and
    `model`, the path of the trained model. `ranks`: number of training processes (torchrun's ranks)
    that are started on this machine. Raises `ValueError` with the command's message for a mistake
    in the recipe or the data, `RuntimeError` for any other failure.
    """
    return _run("distill", DistillConfig, config, ranks)


def sft(config: SftConfig, *, ranks: int = 1) -> Result:
    """Run supervised fine-tuning on demonstrations with the recipe `config`, as `megarl sft` does,
    in new processes, and block until it ends.

    Returns a `Result`: the run folder, `summary` (dict of main numbers), `metrics` of each step and
    `model`, the path of the trained model. `ranks`: number of training processes (torchrun's ranks)
    that are started on this machine. Raises `ValueError` with the command's message for a mistake
    in the recipe or the data, `RuntimeError` for any other failure.
    """
    return _run("sft", SftConfig, config, ranks)


def preference(config: PreferenceConfig, *, ranks: int = 1) -> Result:
    """Train on preferences without a reward model (DPO, KTO and others) with the recipe `config`,
    as `megarl preference` does, in new processes, and block until it ends.

    Returns a `Result`: the run folder, `summary` (dict of main numbers), `metrics` of each step and
    `model`, the path of the trained model. `ranks`: number of training processes (torchrun's ranks)
    that are started on this machine. Raises `ValueError` with the command's message for a mistake
    in the recipe or the data, `RuntimeError` for any other failure.
    """
    return _run("preference", PreferenceConfig, config, ranks)


def reward_model(config: RewardModelConfig, *, ranks: int = 1) -> Result:
    """Train a reward model on preference pairs with the recipe `config`, as `megarl reward-model`
    does, in new processes, and block until it ends.

    Returns a `Result`: the run folder, `summary` (dict of main numbers), `metrics` of each step and
    `model`, the path of the trained model. `ranks`: number of training processes (torchrun's ranks)
    that are started on this machine. Raises `ValueError` with the command's message for a mistake
    in the recipe or the data, `RuntimeError` for any other failure.
    """
    return _run("reward-model", RewardModelConfig, config, ranks)


def sample(config: RunConfig) -> Result:
    """Generate responses to the recipe's prompts and write the best ones, all, or pairs of best and
    worst, to a data file for fine-tuning, as `megarl sample` does, in a new process; blocks until
    it ends. Returns a `Result` with the dict `summary`, whose "data" is the path of that file.
    Raises `ValueError` for a mistake in the recipe or the data, `RuntimeError` for any other
    failure.
    """
    return _run("sample", RunConfig, config, 1)


def evaluate(config: RunConfig) -> Result:
    """Score models on the recipe's held-out problems, as `megarl eval` does, in a new process;
    blocks until it ends. Returns a `Result` whose `summary["results"]` is a list with a dict for
    each model and data set: `model`, `data`, metrics such as `accuracy` and, for several samples a
    problem, `sampled` (a dict with `pass@k` and so on). Raises `ValueError` for a mistake in the
    recipe or the data, `RuntimeError` for any other failure.
    """
    return _run("eval", RunConfig, config, 1)


def open_run(folder: str | Path) -> Result:
    """Read a run folder that exists, of a training run that has ended or goes on. Returns a
    `Result` with `summary` (dict of main numbers, computed from the files), `metrics` of each step,
    `evaluations` and `model`, the path of the newest model. Raises `ValueError` if the folder has
    no metrics of a run.
    """
    from megarl.observe.summary import summary

    return Result(Path(folder), summary(Path(folder)))


def _run(command: str, kind: type[AnyConfig], config: AnyConfig, ranks: int) -> Result:
    require(
        isinstance(config, kind),
        f"megarl {command} needs a {kind.__name__}, found {type(config).__name__}",
    )
    with (
        tempfile.TemporaryDirectory(prefix="megarl-") as place,
        tempfile.TemporaryFile() as printed,
    ):
        recipe = Path(place) / "recipe.yaml"
        recipe.write_text(configs.dump(config), encoding="utf-8")
        launcher = ["megarl.parallel.torchrun", "--nproc-per-node", str(ranks), "-m"]
        words = [*(launcher if ranks > 1 else []), "megarl", command, str(recipe)]
        pipes: Any = {"stdout": printed, "stderr": subprocess.PIPE, "encoding": "utf-8"}
        process = subprocess.Popen([sys.executable, "-m", *words], errors="replace", **pipes)
        said = ""
        try:
            for line in process.stderr or ():
                sys.stderr.write(line)
                said = line.strip() if line.startswith("megarl: error") else said
            code = process.wait()
        except BaseException:  # Ctrl-C: the run saves a checkpoint and ends by itself
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            process.wait()
            raise
        if code == 2:
            raise ValueError(said.removeprefix("megarl: error: "))
        if code != 0:
            raise RuntimeError(said or f"megarl {command} ended with exit code {code}")
        printed.seek(0)
        return Result(Path(config.folder), json.load(printed))
