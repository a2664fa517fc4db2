"""megarl from Python: a configuration, a run, its results; docs/api.md has examples.

    Trainer(recipe, reward=function, data=rows) --steps--> metrics of each step, as a run makes them
    load_recipe(RunConfig, recipe) --train--> Result

A run is a process of its own (under torchrun for several ranks), because it starts engines and
ranks, and ends by ending them. What is given as a Python object is written to files in the run
folder, which the run reads. Nothing here imports torch until checkpoints are looked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from megarl import config as configs
from megarl import presets, recipe_paths
from megarl.config import (
    AnyConfig,
    DistillConfig,
    PreferenceConfig,
    RewardModelConfig,
    RunConfig,
    SftConfig,
)
from megarl.files import ROOT, new_file
from megarl.recipe_file import put
from megarl.recipe_kind import recipe_kind
from megarl.schema import Config, require, shortened

C = TypeVar("C", RunConfig, DistillConfig, SftConfig, PreferenceConfig, RewardModelConfig)
Recipe = str | Path | dict[str, Any]
"""A recipe: the path of a YAML file, or nested dicts as YAML has them."""
Rows = Iterable[Mapping[str, Any]]
"""Data: a list of dicts, a `datasets.Dataset`, or anything else that yields a dict for each row."""
EVENTS = ("on_start", "on_rollouts", "on_step", "on_evaluation", "on_end")
"""Names of the methods that a callback of `Trainer` may have."""
INPUTS = "inputs"
"""Folder in the run folder with what the caller of `Trainer` has given as Python objects."""
LOOK_S = 0.1
"""Seconds between two looks at the files of a run."""
# A run whose caller is gone (a notebook's kernel, or the thread that has started the run) gets
# SIGTERM, on which it saves a checkpoint and ends.
PROGRAM = """import signal, sys
sys.path.append(sys.argv[1])
from megarl.signals import become
become(int(sys.argv[2]), sys.argv[3:], signal.SIGTERM)"""
BY_VALUE = """# Written by megarl.Trainer: its arguments {names}, functions by value.
import pickle
import sys

sys.path += [path for path in {paths!r} if path not in sys.path]
({names},) = pickle.loads({pickled!r})
"""


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
        from megarl.checkpoints.progress import newest_first

        saved = newest_first(self.folder / "checkpoints")
        return saved[0] / "model" if saved else None

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
        **changes: Any,
    ) -> None:
        for one in callbacks:
            known = any(hasattr(one, event) for event in EVENTS)
            require(known, f"the callback {one!r:.80} has no method {', '.join(EVENTS)}; give one")
        self.callbacks, self.ranks = callbacks, ranks
        self._told: dict[str, int] = {}
        tree, where, beside = _tree_of(recipe, changes)
        kind = type(recipe) if isinstance(recipe, AnyConfig) else recipe_kind(tree)
        of_data = next(
            name
            for name in ("demonstrations", "preferences", "prompts")
            if name in kind.model_fields
        )
        given = _Inputs(tree)
        algorithm = {"advantage": advantage, "loss": loss}
        given.functions({"reward": reward}, {"reward": "environment.verifier"})
        given.functions(algorithm, {name: f"algorithm.{name}" for name in algorithm})
        given.rows("data", data, f"{of_data}.source")
        given.rows("evaluation_data", evaluation_data, f"evaluation.{of_data}.source")
        self.config = configs.from_tree(kind, tree, where=where, beside=beside)
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
        files = [_Growing(folder / name, self._told) for name in (EVALUATIONS, METRICS)]
        before = _last_start(folder)
        with _Command(configs.COMMANDS[type(self.config)], self.config, self.ranks) as run:
            is_over = False
            while not is_over:
                is_over = run.is_over(LOOK_S)
                # From its start on the run's files have what counts of an earlier one, and grow.
                if (start := _last_start(folder)) == before and not is_over:
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
        self._result = run.result()
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


class _Inputs:
    """What the caller gives as Python objects: named in the settings `tree`, and written to files
    of the run folder that are named by their content. So a file never changes, and a resumed run
    knows by the name whether it has the same one.
    """

    def __init__(self, tree: dict[str, Any]) -> None:
        self._tree, self._files = tree, dict[Path, bytes]()
        folder = str(tree.get("folder", ""))
        with contextlib.suppress(ValueError):  # which reading the recipe tells with its key
            folder = recipe_paths.expanded(folder)
        self._folder = Path(folder).absolute() / INPUTS

    def functions(self, given: dict[str, Callable[..., Any] | None], keys: dict[str, str]) -> None:
        """Set settings to functions that run in one process, where those that are copied share
        their globals. `given`: {argument of `Trainer`: function, or None to leave the setting};
        `keys`: {argument: key of the setting}.
        """
        copied: dict[str, Callable[..., Any]] = {}
        for name, function in given.items():
            if function is None:
                continue
            said = f"{name} is {shortened(repr(function))}, which is no function"
            require(callable(function), f"{said}; set {keys[name]} for a name")
            if found := _importable(function):
                put(self._tree, keys[name].split("."), found)
            else:
                copied[name] = function
        if copied:
            names, pickled = ", ".join(copied), _pickled(copied)
            content = BY_VALUE.format(names=names, paths=_folders(), pickled=pickled)
            file = self._add("-".join([*copied, "{}.py"]), content.encode())
            for name in copied:
                put(self._tree, keys[name].split("."), f"{file}:{name}")

    def rows(self, name: str, given: Rows | None, key: str) -> None:
        """Set the setting `key` to a file of rows, the argument `name` of `Trainer`; None: leave
        it.
        """
        if given is not None:
            lines = [_json_line(row, f"{name}[{n}]") for n, row in enumerate(given)]
            put(self._tree, key.split("."), self._add(f"{name}-{{}}.jsonl", b"".join(lines)))

    def _add(self, name: str, content: bytes) -> str:
        digest = hashlib.blake2b(content, digest_size=6).hexdigest()
        path = self._folder / name.format(digest)
        self._files[path] = content
        return str(path)

    def write(self) -> None:
        """Write the files that are not there. Raises `ValueError` if that is not possible."""
        try:
            for path, content in self._files.items():
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with new_file(path) as file:
                        os.fchmod(file.fileno(), 0o600)  # a function may use a password
                        file.write(content)
        except OSError as error:
            raise ValueError(
                f"{self._folder} cannot be written ({error.strerror}); set folder to a folder of"
                " your own"
            ) from None


def _importable(function: Any) -> str:
    """`path/to/file.py:name`, under which other processes find a function that stands at the top of
    a file of its own; "" for any other: of `__main__`, of a package, inside of another function.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "__main__")
    file, name = getattr(module, "__file__", None) or "", getattr(function, "__qualname__", "")
    # A file of a package may import its neighbours by a dot, which needs the package.
    is_alone = module is not sys.modules["__main__"] and getattr(module, "__package__", None) == ""
    is_there = name.isidentifier() and getattr(module, name, None) is function
    path = os.path.abspath(file)
    return f"{path}:{name}" if is_alone and is_there and file.endswith(".py") else ""


def _pickled(functions: dict[str, Callable[..., Any]]) -> bytes:
    """cloudpickle's bytes of the list of `functions`. Raises `ValueError` if that is impossible."""
    import cloudpickle

    try:
        return cloudpickle.dumps([*functions.values()])
    except Exception as error:
        said = shortened(f"{type(error).__name__}: {error}", 300)
        found = ", ".join(getattr(one, "__qualname__", str(one)) for one in functions.values())
        raise ValueError(
            f"{', '.join(functions)}: {found} cannot be sent to the processes of a run ({said});"
            " make what it uses inside of it, or import it from a .py file"
        ) from None


def _folders() -> list[str]:
    """The folders from which this process imports, as absolute paths."""
    return [os.path.abspath(path) for path in sys.path]


def _json_line(row: Any, name: str) -> bytes:
    """A row of data as a line of JSON; `name` is what messages call it."""
    fix = "give a list of dicts of texts, numbers and lists"
    require(isinstance(row, Mapping), f"{name} is {type(row).__name__}, not a dict; {fix}")
    try:
        return f"{json.dumps(dict(row), ensure_ascii=False, allow_nan=False)}\n".encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be written as JSON ({error}); {fix}") from None


def _last_start(folder: Path) -> bytes:
    """The newest line of provenance.jsonl, JSON with `step`, the steps done at a start; or b""."""
    from megarl.observe.observer import PROVENANCE

    with contextlib.suppress(FileNotFoundError):
        return b"".join((folder / PROVENANCE).read_bytes().split(b"\n")[-2:-1])
    return b""


class _Growing:
    """A JSON-lines file of a run folder that a run is about to write. `told`: {name of the file:
    number of its lines that the caller has been told}; a file that is not there gets the number of
    the lines that the run keeps of an earlier one.
    """

    def __init__(self, path: Path, told: dict[str, int]) -> None:
        from megarl.observe.sinks import read_records

        self._path, self._told, self._at = path, told, 0
        self._old = [row["step"] for row in read_records(path)]

    def read(self, done: float) -> list[dict[str, Any]]:
        """The lines that have been added since the last call, each as a dict with `step`. `done`:
        the steps that the run had done as it started, whose lines it has kept; infinity for all.
        """
        lines, known = list[bytes](), 0
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._at)
            lines = [line for line in file if line.endswith(b"\n")]
        if self._at == 0:
            # A run that has done no step makes the evaluation before training again.
            kept = sum(step <= (done or -1) for step in self._old)
            known = min(kept, self._told.get(self._path.name, kept))
            self._told[self._path.name] = known
        self._at += sum(map(len, lines))
        return [json.loads(line) for line in lines[known:]]


class _Command:
    """A command of megarl in a process of its own, whose standard error is passed on: a context
    manager. At the end of the block a process that still runs is told to save and end, and waited
    for.
    """

    def __init__(self, command: str, config: AnyConfig, ranks: int) -> None:
        self._command, self._folder, self._said = command, Path(config.folder), ""
        self._place = tempfile.TemporaryDirectory(prefix="megarl-")
        recipe, self._printed = (Path(self._place.name, one) for one in ("recipe.yaml", "printed"))
        recipe.write_text(configs.dump(config), encoding="utf-8")
        launcher = ["megarl.parallel.torchrun", "--nproc-per-node", str(ranks), "-m"]
        words = [*(launcher if ranks > 1 else []), "megarl", command, str(recipe)]
        # -P: a file beside the caller's must not hide a library.
        before = ["-P", "-c", PROGRAM, str(ROOT), str(os.getpid()), sys.executable, "-m"]
        with self._printed.open("wb") as printed:
            self._process = subprocess.Popen(
                [sys.executable, *before, *words],
                stdout=printed,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                # A notebook or terminal interrupts its whole group; the caller passes that on once.
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        for line in self._process.stderr or ():
            sys.stderr.write(line)
            self._said = line.strip() if line.startswith("megarl: error") else self._said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(KeyboardInterrupt):  # once more: the run ends at once
                self._process.wait()
        self._reader.join()
        self._summary = self._printed.read_bytes()
        self._place.cleanup()

    def is_over(self, within_s: float | None) -> bool:
        """Whether the process has ended, waiting for that at most so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return self._process.returncode is not None

    def result(self) -> Result:
        """What the command has produced, after the block. Raises `ValueError` for a mistake of the
        user and `RuntimeError` for any other failure.
        """
        code = self._process.returncode
        if code == 2:
            said = self._said.removeprefix("megarl: error: ")
            raise ValueError(said.replace("(torchrun --nproc-per-node)", "(the argument ranks)"))
        if code != 0:
            raise RuntimeError(self._said or f"megarl {self._command} ended with exit code {code}")
        return Result(self._folder, json.loads(self._summary))


def _run(command: str, kind: type[AnyConfig], config: AnyConfig, ranks: int) -> Result:
    require(
        isinstance(config, kind),
        f"megarl {command} needs a {kind.__name__}, found {type(config).__name__}",
    )
    with _Command(command, config, ranks) as run:
        run.is_over(None)
    return run.result()
