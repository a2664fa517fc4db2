"""megarl from Python: a configuration, a run, its results; docs/api.md has examples.

    Trainer(recipe, reward=function, data=rows) --steps--> metrics of each step, as a run makes them
    load_recipe(RunConfig, recipe) --train--> Result

A run is a process of its own, since it starts engines and ranks, and ends by ending them. Python
objects go to files in the run folder. Nothing here imports torch until checkpoints are looked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from megarl.python.inputs import GivenObjects, Rows
from megarl.python.process import GrowingFile, RunProcess, last_start
from megarl.run.named_files import check_named_files
from megarl.settings import config as configs
from megarl.settings import presets, recipe_paths
from megarl.settings.config import (
    AnyConfig,
    DistillConfig,
    PreferenceConfig,
    RewardModelConfig,
    RunConfig,
    SftConfig,
)
from megarl.settings.limits import POLL_S
from megarl.settings.recipe_file import put
from megarl.settings.rl import longest_request, sources
from megarl.settings.schema import Config, leaves, require, shortened

C = TypeVar("C", RunConfig, DistillConfig, SftConfig, PreferenceConfig, RewardModelConfig)
Recipe = str | Path | dict[str, Any]
"""The path of a YAML file, or nested dicts."""
EVENTS = ("on_start", "on_rollouts", "on_step", "on_evaluation", "on_end")
"""Methods that a callback of `Trainer` may have."""


@dataclass(frozen=True)
class Result:
    """What a run has produced; returned by `train` and the other commands, and by `open_run`."""

    folder: Path
    """The run folder, as the recipe has it."""
    summary: dict[str, Any]
    """Main numbers of the run, or results of an evaluation."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """For each step a dict with `step`, from 1. Raises `ValueError` if the folder has none."""
        return self._read().metrics

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """For each evaluation of `train` a dict with `step`, the steps done, 0 before training."""
        return [{"step": row.step, **row.metrics} for row in self._read().evaluations]

    @property
    def transcripts(self) -> list[dict[str, Any]]:
        """Of the last evaluation of `train`: a dict for each problem with `prompt`, `answer`,
        `response`, `correct`, `reward` and more. `evaluate` writes its own to a file named in
        `summary`.
        """
        kept = [row.transcripts for row in self._read().evaluations if row.transcripts]
        return kept[-1] if kept else []

    @property
    def model(self) -> Path | None:
        """The model of the newest checkpoint, in Hugging Face's format; None without one."""
        from megarl.checkpoints.listing import newest_first

        saved = newest_first(self.folder / "checkpoints")
        return saved[0] / "model" if saved else None

    @property
    def best_model(self) -> Path:
        """The model that is best by `training.checkpoint.best`. Raises `UserError` without one."""
        from megarl.checkpoints.listing import checkpoint_of

        return checkpoint_of(self.folder, best=True) / "model"

    def _read(self) -> Any:
        from megarl.observe.summary import read_run

        return read_run(self.folder)


def load_recipe(kind: type[C], recipe: Recipe | C, **changes: Any) -> C:
    """Read a recipe (path, name such as "quickstart", nested dicts or configuration) as
    configuration class `kind`: `RunConfig`, `DistillConfig`, `SftConfig`, `PreferenceConfig` or
    `RewardModelConfig`.

    `changes`: values of settings, such as `training__optimizer__learning_rate=1e-5`. Raises
    `ValueError`, which names all mistakes.
    """
    tree, where, beside = _tree_of(recipe, changes)
    return configs.from_tree(kind, tree, where=where, beside=beside)


def _tree_of(
    recipe: Recipe | AnyConfig, changes: dict[str, Any]
) -> tuple[dict[str, Any], str, Path | None]:
    """(settings with `changes`, the recipe's name in messages, the folder beside which its paths
    are looked for).
    """
    if isinstance(recipe, str | Path):
        written = configs.written_tree(recipe), str(recipe), recipe_paths.recipe_path(recipe).parent
    else:
        written = presets.spelled_out(_plain(recipe)), "the recipe", None
    for key, value in changes.items():
        put(written[0], key.split("__"), _plain(value))
    return written


def _plain(value: Any) -> Any:
    """A copy as YAML has it: configurations as dicts, paths as texts."""
    if isinstance(value, Config):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def train(config: RunConfig, *, ranks: int = 1) -> Result:
    """Run reinforcement learning in new processes, and block until it ends.

    `ranks`: training processes on this machine. Raises `ValueError` for a mistake in recipe or
    data, `RuntimeError` for any other failure.
    """
    return _run("run", RunConfig, config, ranks)


def distill(config: DistillConfig, *, ranks: int = 1) -> Result:
    """Run on-policy distillation; as `train`."""
    return _run("run", DistillConfig, config, ranks)


def sft(config: SftConfig, *, ranks: int = 1) -> Result:
    """Run supervised fine-tuning on demonstrations; as `train`."""
    return _run("run", SftConfig, config, ranks)


def preference(config: PreferenceConfig, *, ranks: int = 1) -> Result:
    """Train on preferences without a reward model (DPO, KTO and others); as `train`."""
    return _run("run", PreferenceConfig, config, ranks)


def reward_model(config: RewardModelConfig, *, ranks: int = 1) -> Result:
    """Train a reward model on preference pairs; as `train`."""
    return _run("run", RewardModelConfig, config, ranks)


def sample(config: RunConfig) -> Result:
    """Generate responses and write the best ones, all, or pairs to a data file, as `megarl sample`;
    `summary["data"]` is its path. Raises as `train`.
    """
    return _run("sample", RunConfig, config, 1)


def evaluate(config: RunConfig) -> Result:
    """Score models on held-out problems, as `megarl eval`. `summary["results"]` has a dict for each
    model and data set: `model`, `data`, metrics and, for several samples a problem, `sampled`.
    Raises as `train`.
    """
    return _run("eval", RunConfig, config, 1)


def open_run(folder: str | Path) -> Result:
    """Read a run folder, also of a run that goes on. Raises `ValueError` if it has no metrics."""
    from megarl.observe.summary import summary

    return Result(Path(folder), summary(Path(folder)))


class KeptEngines:
    """Ray and engines that stay from one run to the next: give one object to several trainers. They
    end with the `with` block, with `close`, or with this process.

        with KeptEngines() as engines:
            first = Trainer(recipe, engines=engines).train()
            second = Trainer(recipe, engines=engines, folder="runs/second", reward=other).train()

    One run at a time uses them, and all have the same settings of model and engines.
    """

    def __init__(self) -> None:
        self._keeper: RunProcess | None = None
        self._settings = dict[str, object]()
        self._used_by = ""

    def refuse(self, config: AnyConfig) -> None:
        """Raise `ValueError` if a run of `config` cannot use these engines."""
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
        """For one run: yields the variables by which its process finds Ray and the engines. Raises
        `ValueError` if another run uses them.
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
                if keeper.is_over(POLL_S / 2):
                    keeper.close()
                    keeper.summary()
        except BaseException:
            keeper.close()
            raise
        return keeper

    def close(self) -> None:
        """End Ray and the engines; the next run starts others."""
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
"""Sections and settings on which a run's engines depend."""


def _engine_settings(config: RunConfig) -> dict[str, object]:
    """{setting: value} of all that decides which engines a run needs: `ENGINE_SETTINGS`, and two
    that depend on several settings, "prompts.template" and "the most tokens of a sequence".
    """
    values = {
        name: value
        for name, value in leaves(config.model_dump(mode="json"))
        if any(f"{name}.".startswith(f"{section}.") for section in ENGINE_SETTINGS)
    }
    # These say what ends a response.
    templates = {f"{row.template} {row.template_variables or ''}" for _, row in sources(config)}
    tokens = longest_request(config)
    return values | {
        "prompts.template": ", ".join(sorted(map(str.strip, templates))),
        "the most tokens of a sequence": tokens,
    }


class Trainer:
    """A training run from Python: any recipe, with Python objects, callbacks, and metrics while it
    goes on.

    `train` runs it to its end; `steps` yields metrics. Each call is a new run in processes of its
    own, or with `resume: auto` continues the one in the folder. `config` is the configuration.

    Args:
        recipe: path of a YAML file, nested dicts, or a configuration object.
        reward: instead of `environment.verifier`, a function of a form in docs/rewards.md. One at
            the top of an imported file is named by its path, another one pickled by value.
        data, evaluation_data: rows, as a list of dicts or a `datasets.Dataset`, instead of the
            `source` of `prompts` (`demonstrations`, `preferences`).
        advantage, loss: as `reward`, instead of `algorithm.advantage` and `algorithm.loss`.
        callbacks: objects with any of the methods on_start(config), on_rollouts(step, groups),
            on_step(row), on_evaluation(row) and on_end(result), called in this process. An
            exception in one ends the run, with a checkpoint.
        ranks: training processes on this machine.
        engines: whose Ray and engines are used; without it a run starts its own.
        changes: settings, by key: `training__optimizer__learning_rate=1e-5`.

    Raises:
        ValueError: a mistake in the recipe, or an object that cannot be written.
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
        for callback in callbacks:
            known = any(hasattr(callback, event) for event in EVENTS)
            require(
                known, f"the callback {callback!r:.80} has no method {', '.join(EVENTS)}; give one"
            )
        self.callbacks, self.ranks, self.engines = callbacks, ranks, engines
        self._told: dict[str, int] = {}
        tree, where, beside = _tree_of(recipe, changes)
        config_class = configs.task_class(tree, where)
        of_data = next(
            name
            for name in ("demonstrations", "preferences", "prompts")
            if name in config_class.model_fields
        )
        objects = GivenObjects(tree)
        algorithm = {"advantage": advantage, "loss": loss}
        objects.functions({"reward": reward}, {"reward": "environment.verifier"})
        objects.functions(algorithm, {name: f"algorithm.{name}" for name in algorithm})
        objects.rows("data", data, f"{of_data}.source")
        objects.rows("evaluation_data", evaluation_data, f"evaluation.{of_data}.source")
        self.config = configs.from_tree(config_class, tree, where=where, beside=beside)
        if engines is not None:
            engines.refuse(self.config)
        check_named_files(self.config, skip=objects.keys)
        objects.write()

    def train(self) -> Result:
        """Run to the end. Raises `ValueError` for a mistake in recipe or data, `RuntimeError` for
        any other failure. An interrupt ends the run with a checkpoint.
        """
        for _ in self.steps():
            pass
        return self._result

    def steps(self) -> Generator[dict[str, Any], None, None]:
        """Start the run, and yield the metrics of each step, a dict with `step` from 1, as the run
        writes them; it does not wait for the caller.

        A resumed run begins after its checkpoint, and with rows that an earlier loop has not
        yielded. Leaving the loop ends the run with a checkpoint of the step under way. Raises as
        `train`.
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
                is_over = run.is_over(POLL_S / 2)
                # From its start on the run's files have what counts of an earlier one, and grow.
                if (start := last_start(folder)) == before and not is_over:
                    continue
                done = json.loads(start)["step"] if start != before else math.inf
                rows = [row for file in files for row in file.read(done)]
                for row in sorted(rows, key=lambda row: (row["step"], "transcripts" in row)):
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
        for callback in self.callbacks:
            if method := getattr(callback, event, None):
                method(*values)

    def _tell_rollouts(self, folder: Path, step: int) -> None:
        from megarl.observe.observer import TRANSCRIPTS
        from megarl.observe.rotated import parts_of
        from megarl.observe.sinks import read_records

        if not any(hasattr(callback, "on_rollouts") for callback in self.callbacks):
            return
        newest = folder / TRANSCRIPTS
        full = [file.path for file in parts_of(newest) if file.first <= step <= file.last]
        groups = [group for path in [*full, newest] for group in read_records(path)]
        self._tell("on_rollouts", step, [group for group in groups if group["step"] == step])


def _run(command: str, kind: type[AnyConfig], config: AnyConfig, ranks: int) -> Result:
    require(
        isinstance(config, kind),
        f"megarl {command} needs a {kind.__name__}, found {type(config).__name__}",
    )
    with RunProcess(command, config, ranks=ranks) as run:
        run.is_over(None)
    return Result(Path(config.folder), run.summary())
