"""megarl from Python: a configuration, a run, its results; docs/api.md has examples.

    Trainer(recipe, reward=function, data=rows) --steps--> metrics of each step, as a run makes them
    load_recipe(RunConfig, recipe) --train--> Result

A run is a process of its own (under torchrun for several ranks), because it starts engines and
ranks, and ends by ending them. What is given as a Python object is written to files in the run
folder, which the run reads. Nothing here imports torch until checkpoints are looked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from megarl.checks.named_files import check_named_files
from megarl.python.inputs import GivenObjects, Rows
from megarl.python.process import GrowingFile, RunProcess, last_start
from megarl.settings import config as configs
from megarl.settings import presets, recipe_paths
from megarl.settings.combinations import sources
from megarl.settings.config import (
    AnyConfig,
    DistillConfig,
    PreferenceConfig,
    RewardModelConfig,
    RunConfig,
    SftConfig,
)
from megarl.settings.recipe_file import put
from megarl.settings.schema import Config, leaves, require, shortened

C = TypeVar("C", RunConfig, DistillConfig, SftConfig, PreferenceConfig, RewardModelConfig)
Recipe = str | Path | dict[str, Any]
"""A recipe: the path of a YAML file, or nested dicts as YAML has them."""
EVENTS = ("on_start", "on_rollouts", "on_step", "on_evaluation", "on_end")
"""Names of the methods that a callback of `Trainer` may have."""
LOOK_S = 0.1
"""Seconds between two looks at the files of a run."""


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
    def transcripts(self) -> list[dict[str, Any]]:
        """What the model has answered in the last evaluation that `train` made: a dict for each
        problem with `prompt`, `answer`, `response`, `correct`, `reward` and more; empty without
        evaluation. `evaluate` writes its own to a file, whose path is in `summary`.
        """
        kept = [one.transcripts for one in self._read().evaluations if one.transcripts]
        return kept[-1] if kept else []

    @property
    def model(self) -> Path | None:
        """Path of the model in the newest checkpoint, a folder in Hugging Face's format; None
        without a checkpoint.
        """
        from megarl.checkpoints.listing import newest_first

        saved = newest_first(self.folder / "checkpoints")
        return saved[0] / "model" if saved else None

    @property
    def best_model(self) -> Path:
        """Path of the model in the checkpoint that is best by `training.checkpoint.best`. Raises
        `UserError` without one.
        """
        from megarl.checkpoints.listing import checkpoint_of

        return checkpoint_of(self.folder, best=True) / "model"

    def _read(self) -> Any:
        from megarl.observe.summary import read_run

        return read_run(self.folder)


def load_recipe(kind: type[C], recipe: Recipe | C, **changes: Any) -> C:
    """Read a recipe, the path of a YAML file, the name of a recipe that comes with megarl, such as
    "quickstart", nested dicts or another configuration. Returns it as configuration class `kind`, a
    frozen pydantic model of all settings of a command: `RunConfig` (for train, evaluate, sample),
    `DistillConfig`, `SftConfig`, `PreferenceConfig` or `RewardModelConfig`.

    `changes`: values that replace those of the recipe, by key; the parts of a dotted key are joined
    by two underscores, as in `training__optimizer__learning_rate=1e-5`. Raises `ValueError`, which
    names all mistakes, for a file that is no recipe, an unknown setting or a value that is not
    allowed.
    """
    tree, where, beside = _tree_of(recipe, changes)
    return configs.from_tree(kind, tree, where=where, beside=beside)


def _tree_of(
    recipe: Recipe | AnyConfig, changes: dict[str, Any]
) -> tuple[dict[str, Any], str, Path | None]:
    """The settings of a recipe with `changes`, {key: value}, as nested dicts of its own; what the
    recipe is called in messages; and the folder beside which its paths are looked for.
    """
    if isinstance(recipe, str | Path):
        found = configs.written_tree(recipe), str(recipe), recipe_paths.recipe_path(recipe).parent
    else:
        found = presets.spelled_out(_plain(recipe)), "the recipe", None
    for key, value in changes.items():
        put(found[0], key.split("__"), _plain(value))
    return found


def _plain(value: Any) -> Any:
    """A copy of a setting's value as YAML has it: configurations as dicts, paths as texts."""
    if isinstance(value, Config):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def train(config: RunConfig, *, ranks: int = 1) -> Result:
    """Run reinforcement learning with the recipe `config`, as `task: rl` does, in new
    processes, and block until it ends. What the run prints on standard error is passed on.

    Returns a `Result`: the run folder, `summary` (dict of main numbers), `metrics` of each step and
    `model`, the path of the trained model. `ranks`: number of training processes (torchrun's ranks)
    that are started on this machine. Raises `ValueError` with the command's message for a mistake
    in the recipe or the data, `RuntimeError` for any other failure.
    """
    return _run("run", RunConfig, config, ranks)


def distill(config: DistillConfig, *, ranks: int = 1) -> Result:
    """Run on-policy distillation with the recipe `config`, as `task: distill` does: the policy
    samples responses and learns from the teacher's distributions at their tokens. Runs in new
    processes, and blocks until it ends.

    Returns a `Result`: the run folder, `summary` (dict of main numbers), `metrics` of each step and
    `model`, the path of the trained model. `ranks`: number of training processes (torchrun's ranks)
    that are started on this machine. Raises `ValueError` with the command's message for a mistake
    in the recipe or the data, `RuntimeError` for any other failure.
    """
    return _run("run", DistillConfig, config, ranks)


def sft(config: SftConfig, *, ranks: int = 1) -> Result:
    """Run supervised fine-tuning on demonstrations with the recipe `config`, as `task: sft` does,
    in new processes, and block until it ends.

    Returns a `Result`: the run folder, `summary` (dict of main numbers), `metrics` of each step and
    `model`, the path of the trained model. `ranks`: number of training processes (torchrun's ranks)
    that are started on this machine. Raises `ValueError` with the command's message for a mistake
    in the recipe or the data, `RuntimeError` for any other failure.
    """
    return _run("run", SftConfig, config, ranks)


def preference(config: PreferenceConfig, *, ranks: int = 1) -> Result:
    """Train on preferences without a reward model (DPO, KTO and others) with the recipe `config`,
    as `task: preference` does, in new processes, and block until it ends.

    Returns a `Result`: the run folder, `summary` (dict of main numbers), `metrics` of each step and
    `model`, the path of the trained model. `ranks`: number of training processes (torchrun's ranks)
    that are started on this machine. Raises `ValueError` with the command's message for a mistake
    in the recipe or the data, `RuntimeError` for any other failure.
    """
    return _run("run", PreferenceConfig, config, ranks)


def reward_model(config: RewardModelConfig, *, ranks: int = 1) -> Result:
    """Train a reward model on preference pairs with the recipe `config`, as `task: reward_model`
    does, in new processes, and block until it ends.

    Returns a `Result`: the run folder, `summary` (dict of main numbers), `metrics` of each step and
    `model`, the path of the trained model. `ranks`: number of training processes (torchrun's ranks)
    that are started on this machine. Raises `ValueError` with the command's message for a mistake
    in the recipe or the data, `RuntimeError` for any other failure.
    """
    return _run("run", RewardModelConfig, config, ranks)


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


class KeptEngines:
    """Ray and inference engines that stay from one run to the next: give one object to several
    trainers, or call a trainer's `train` again. They start with the first run, also where that is
    left early, and end with the `with` block, with `close`, or with this process.

        with KeptEngines() as engines:
            first = Trainer(recipe, engines=engines).train()
            second = Trainer(recipe, engines=engines, folder="runs/second", reward=other).train()

    One run at a time uses them. All runs must have the same settings of model and engines
    (`ENGINE_SETTINGS`, and the most tokens of a sequence).
    """

    def __init__(self) -> None:
        self._keeper: RunProcess | None = None
        self._settings = dict[str, object]()
        self._used_by = ""

    def refuse(self, config: AnyConfig) -> None:
        """Raise `ValueError` if a run of the recipe `config` cannot use these engines."""
        require(
            isinstance(config, RunConfig),
            f"engines is given, but a run of task: {config.task} has no engines; leave it out",
        )
        assert isinstance(config, RunConfig)
        require(
            config.rollout.placement == "disaggregated",
            "engines that stay hold memory of the GPUs that a colocated trainer shares; set"
            " rollout.placement to disaggregated, or leave engines out",
        )
        if self._keeper is not None and self._keeper.is_over(0):  # Ray was ended from outside
            self.close()
        there = self._settings if self._keeper is not None else _engine_settings(config)
        others = [
            f"{name} ({shortened(str(there.get(name)))} there, {shortened(str(value))} here)"
            for name, value in _engine_settings(config).items()
            if there.get(name) != value
        ]
        require(
            not others,
            f"the engines that stay were started with other settings: {', '.join(others)}; set"
            " these as there, or call close() of the engines first",
        )

    @contextmanager
    def lent(self, config: AnyConfig) -> Iterator[Mapping[str, str]]:
        """A context manager for one run of the recipe `config`: yields the environment variables
        {name: value} with which the run's process finds Ray and the engines. Starts Ray if it does
        not run. Raises `ValueError` if another run uses the engines, or has started others.
        """
        require(
            not self._used_by,
            f"the engines are in use by the run in {self._used_by}; end its loop first",
        )
        self.refuse(config)
        if self._keeper is None:
            self._keeper = self._started(config)
        self._used_by = config.folder
        try:
            yield json.loads(self._keeper.printed())
        finally:
            self._used_by = ""

    def _started(self, config: AnyConfig) -> RunProcess:
        """Start the process that keeps Ray, and wait until Ray runs."""
        assert isinstance(config, RunConfig)
        self._settings = _engine_settings(config)
        keeper = RunProcess("run", config, module="megarl.rollout.keeper")
        try:
            while not keeper.printed().endswith(b"\n"):
                if keeper.is_over(LOOK_S):
                    keeper.close()
                    keeper.summary()
        except BaseException:
            keeper.close()
            raise
        return keeper

    def close(self) -> None:
        """End Ray and the engines; a second call does nothing. The next run starts others."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


ENGINE_SETTINGS = (
    *("model", "rollout.engine", "rollout.num_engines", "rollout.placement", "rollout.sampling"),
    *("rollout.stop", "training.lora"),
)
"""Sections and keys of a recipe that say which engines its run has."""


def _engine_settings(config: RunConfig) -> dict[str, object]:
    """{dotted key: value} of the settings that say which engines a run of `config` has, with a
    name in place of a key for what several keys decide.
    """
    found = {
        name: value
        for name, value in leaves(config.model_dump(mode="json"))
        if any(f"{name}.".startswith(f"{one}.") for one in ENGINE_SETTINGS)
    }
    # These say what ends a response.
    templates = {f"{part.template} {part.template_variables or ''}" for _, part in sources(config)}
    tokens = configs.longest_request(config)
    return found | {
        "prompts.template": ", ".join(sorted(map(str.strip, templates))),
        "the most tokens of a sequence": tokens,
    }


class Trainer:
    """A training run from Python: any recipe, with reward, data, advantage and loss as Python
    objects, metrics while it goes on, and callbacks. `train` runs it to its end; `steps` yields the
    metrics of each step. Each call is a new run in processes of its own, or with `resume: auto` the
    continuation of the one in the run folder. `config` is the run's configuration, for `evaluate`
    too.

    Args:
        recipe: path of a YAML file, nested dicts as YAML has them, or a configuration object. Of a
            file or dicts the command is found by the keys: `teacher` is for distillation,
            `demonstrations` for fine-tuning, and so on.
        reward: instead of `environment.verifier`, a function of one of the forms in
            docs/rewards.md. One at the top of an imported file is named by its path; anything else,
            such as one that is defined in a notebook, is pickled by value into the run folder.
        data, evaluation_data: rows to train on and held-out rows, as a list of dicts or a
            `datasets.Dataset`, instead of the `source` of `prompts` (`demonstrations`,
            `preferences`); they are written to the run folder as JSON lines.
        advantage, loss: as `reward`, instead of `algorithm.advantage` and `algorithm.loss`.
        callbacks: objects with any of the methods on_start(config), on_rollouts(step, groups),
            on_step(row), on_evaluation(row) and on_end(result), called in this process by `steps`
            and `train`. An exception in one ends the run, with a checkpoint.
        ranks: number of training processes on this machine.
        engines: a `KeptEngines`, whose Ray and inference engines are used and stay after the run;
            without it a run starts its own.
        changes: values of single settings, by key: `training__optimizer__learning_rate=1e-5`.

    Raises:
        ValueError: a mistake in the recipe, or an object that cannot be written to a file. Nothing
            is written then.
    """

    def __init__(
        self,
        recipe: Recipe | AnyConfig,
        *,
        reward: Callable[..., Any] | None = None,
        data: Rows | None = None,
        evaluation_data: Rows | None = None,
        advantage: Callable[..., Any] | None = None,
        loss: Callable[..., Any] | None = None,
        callbacks: Sequence[Any] = (),
        ranks: int = 1,
        engines: KeptEngines | None = None,
        **changes: Any,
    ) -> None:
        for one in callbacks:
            known = any(hasattr(one, event) for event in EVENTS)
            require(known, f"the callback {one!r:.80} has no method {', '.join(EVENTS)}; give one")
        self.callbacks, self.ranks, self.engines = callbacks, ranks, engines
        self._told: dict[str, int] = {}
        tree, where, beside = _tree_of(recipe, changes)
        config_class = configs.task_class(tree, where)
        of_data = next(
            name
            for name in ("demonstrations", "preferences", "prompts")
            if name in config_class.model_fields
        )
        given = GivenObjects(tree)
        algorithm = {"advantage": advantage, "loss": loss}
        given.functions({"reward": reward}, {"reward": "environment.verifier"})
        given.functions(algorithm, {name: f"algorithm.{name}" for name in algorithm})
        given.rows("data", data, f"{of_data}.source")
        given.rows("evaluation_data", evaluation_data, f"evaluation.{of_data}.source")
        self.config = configs.from_tree(config_class, tree, where=where, beside=beside)
        if engines is not None:
            engines.refuse(self.config)
        check_named_files(self.config, skip=given.keys)
        given.write()

    def train(self) -> Result:
        """Run to the end, and block until then. Returns the `Result`. Raises `ValueError` with the
        command's message for a mistake in the recipe or the data, `RuntimeError` for any other
        failure. An interrupt ends the run with a checkpoint.
        """
        for _ in self.steps():
            pass
        return self._result

    def steps(self) -> Generator[dict[str, Any], None, None]:
        """Start the run, and yield the metrics of each step as soon as the run has written them: a
        dict {name: number or None} with `step`, which counts from 1. Of a resumed run these are the
        steps after its checkpoint; before them come rows that an earlier loop of this trainer was
        left without. The run does not wait for the caller between two steps. Leaving the loop
        early, by `break`, an exception or an interrupt, ends the run once the step under way is
        done and its checkpoint saved; no process is left. Raises as `train` does.
        """
        from megarl.observe.observer import EVALUATIONS, METRICS

        self._tell("on_start", self.config)
        folder = Path(self.config.folder)
        files = [GrowingFile(folder / name, self._told) for name in (EVALUATIONS, METRICS)]
        before = last_start(folder)
        engines = self.engines
        with (
            engines.lent(self.config) if engines is not None else nullcontext({}) as environment,
            RunProcess("run", self.config, ranks=self.ranks, environment=environment) as run,
        ):
            is_over = False
            while not is_over:
                is_over = run.is_over(LOOK_S)
                # From its start on the run's files have what counts of an earlier one, and grow.
                if (start := last_start(folder)) == before and not is_over:
                    continue
                done = json.loads(start)["step"] if start != before else math.inf
                found = [row for file in files for row in file.read(done)]
                for row in sorted(found, key=lambda row: (row["step"], "transcripts" in row)):
                    name = EVALUATIONS if "transcripts" in row else METRICS
                    self._told[name] += 1
                    if name == EVALUATIONS:
                        self._tell("on_evaluation", row)
                        continue
                    self._tell_rollouts(folder, row["step"])
                    self._tell("on_step", row)
                    yield row
        self._result = Result(folder, run.summary())
        self._tell("on_end", self._result)

    def _tell(self, event: str, *values: Any) -> None:
        for one in self.callbacks:
            if method := getattr(one, event, None):
                method(*values)

    def _tell_rollouts(self, folder: Path, step: int) -> None:
        """Call `on_rollouts` with what the run has written of the rollouts of a step."""
        from megarl.observe.observer import TRANSCRIPTS
        from megarl.observe.rotated import parts_of
        from megarl.observe.sinks import read_records

        if not any(hasattr(one, "on_rollouts") for one in self.callbacks):
            return
        newest = folder / TRANSCRIPTS
        full = [part.path for part in parts_of(newest) if part.first <= step <= part.last]
        found = [one for path in [*full, newest] for one in read_records(path)]
        self._tell("on_rollouts", step, [one for one in found if one["step"] == step])


def _run(command: str, kind: type[AnyConfig], config: AnyConfig, ranks: int) -> Result:
    require(
        isinstance(config, kind),
        f"megarl {command} needs a {kind.__name__}, found {type(config).__name__}",
    )
    with RunProcess(command, config, ranks=ranks) as run:
        run.is_over(None)
    return Result(Path(config.folder), run.summary())
