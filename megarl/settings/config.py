"""Reads a recipe: YAML and command-line overrides become one frozen configuration, or one error.

    recipe.yaml + ["--training.optimizer.learning_rate", "1e-4"] -> RunConfig

Imports no torch.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ValidationError

from megarl.settings import presets, recipe_file, recipe_paths
from megarl.settings.data import DemonstrationsConfig, PreferencesConfig
from megarl.settings.limits import MOST_STEPS
from megarl.settings.objectives import (
    AlgorithmConfig,
    DistillationConfig,
    PreferenceLossConfig,
    RewardLossConfig,
)
from megarl.settings.observe import ObserveConfig
from megarl.settings.recipe_paths import OutputText
from megarl.settings.rl import RunConfig, check_best, check_warmup
from megarl.settings.rollout import ENGINE_STARTS
from megarl.settings.schema import (
    Config,
    Needs,
    Of,
    Range,
    Without,
    leaves,
    problems,
    replace,
    require,
    section,
    shortened,
)
from megarl.settings.serve import ServeRewardConfig
from megarl.settings.training import (
    POLICY_TOKENS,
    WITH_PATH,
    AnyRunConfig,
    CriticConfig,
    ModelConfig,
    ReferenceLora,
    ReferenceRoleConfig,
    RewardModelRoleConfig,
    RoleConfig,
    TeacherConfig,
    TrainedModel,
    TrainingConfig,
)

C = TypeVar("C", bound=Config)


TEACHER_ALONE = Without(
    why="which task: distill does not use: the policy learns from its teacher alone"
)


class DistillConfig(RunConfig):
    """The recipe of `task: distill`: the policy learns from a teacher's distributions on its own
    responses. `algorithm`, `reference`, `critic`, `critics` and `reward_models` must be left out.
    """

    task: Literal["distill"] = "distill"  # pyright: ignore[reportIncompatibleVariableOverride]
    reference: Annotated[ReferenceRoleConfig, TEACHER_ALONE] = section(ReferenceRoleConfig)
    critic: Annotated[CriticConfig, TEACHER_ALONE] = section(CriticConfig)
    critics: Annotated[dict[str, CriticConfig], TEACHER_ALONE] = {}
    reward_models: Annotated[dict[str, RewardModelRoleConfig], TEACHER_ALONE] = {}
    algorithm: Annotated[AlgorithmConfig, TEACHER_ALONE] = section(AlgorithmConfig)
    training: Annotated[
        TrainingConfig, Without("logprobs", why="which computes no divergences")
    ] = section(TrainingConfig)
    teacher: Annotated[
        TeacherConfig,
        Needs("set it to a model with the tokenizer of model.path", "model.path"),
        Without("model.from_scratch", why="but random weights teach nothing"),
    ] = section(TeacherConfig)
    distillation: DistillationConfig = section(DistillationConfig)

    @property
    def group_filter(self) -> str:
        """`rollout.filter`, by default "all", since a response's loss does not depend on others."""
        return self.rollout.filter or "all"

    @property
    def skips_equal_groups(self) -> bool:
        """False: the loss does not depend on rewards."""
        return False

    @property
    def other_roles(self) -> dict[str, RoleConfig]:
        """The teacher alone."""
        return {"teacher": self.teacher}


NEEDS_SOURCE = Needs("set it to a data file or hub name", "source")


class HeldOutConfig(Config):
    """How often a run on a fixed data set is evaluated on held-out rows."""

    every: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Steps between evaluations; 0: only before the first and after the last step."""


class SupervisedConfig(AnyRunConfig):
    """Settings of all runs on a fixed data set: `task: sft`, `preference` and `reward_model`."""

    samples_per_step: Annotated[int, Range(1, 2**20)] = 64
    """Rows of one optimizer step, over all ranks."""
    model: TrainedModel = section(ModelConfig)
    training: Annotated[
        TrainingConfig,
        Without("num_mini_batches", "epochs_per_step", why="which has no meaning on a data set"),
        Without("lora.publish", why="but training on a data set has no engines to publish to"),
    ] = section(TrainingConfig)
    evaluation: HeldOutConfig = section(HeldOutConfig)
    observe: ObserveConfig = section(ObserveConfig)

    def check(self) -> None:
        check_best(self)


class SftEvaluationConfig(HeldOutConfig):
    """Evaluation by the loss on held-out demonstrations."""

    demonstrations: DemonstrationsConfig = section(DemonstrationsConfig, shuffle=False)
    """Source of the demonstrations, which are all used; empty: no evaluation."""


class SftConfig(SupervisedConfig):
    """The recipe of `task: sft`: supervised fine-tuning on demonstrations."""

    task: Literal["sft"] = "sft"
    demonstrations: Annotated[DemonstrationsConfig, NEEDS_SOURCE] = section(DemonstrationsConfig)
    evaluation: SftEvaluationConfig = section(SftEvaluationConfig)


class PreferenceEvaluationConfig(HeldOutConfig):
    """Evaluation by loss and accuracy on held-out preferences."""

    preferences: PreferencesConfig = section(PreferencesConfig, shuffle=False)
    """Source of the preferences, which are all used; empty: no evaluation."""

    def check(self) -> None:
        empty = PreferencesConfig(), PreferencesConfig(shuffle=False)
        require(
            bool(self.preferences.source) or self.preferences in empty,
            "PreferenceEvaluationConfig.preferences has settings, but no source; leave it out, or"
            " set PreferenceEvaluationConfig.preferences.source",
        )


class ReferenceConfig(Config):
    """The frozen model of a preference method, which scores every response before the first step
    and is then released.
    """

    model: Annotated[ModelConfig, WITH_PATH, POLICY_TOKENS] = section(ModelConfig)
    """The model; with an empty path `model`, as it is before training."""
    lora: ReferenceLora = "start"
    """With `training.lora.adapter`, and no `model.path` here: `start` is the model with the adapter
    that the run starts from, `base` the model without adapters."""
    cache: OutputText = ""
    """Folder of its log-probs, in a file named by the digest of data and weights, which runs of
    other losses can share; empty: `reference` in the run folder."""


NO_MARGINS = "which only task: reward_model uses"


class PreferenceConfig(SupervisedConfig):
    """The recipe of `task: preference`: DPO, KTO and others, without a reward model."""

    task: Literal["preference"] = "preference"
    loss: PreferenceLossConfig = section(PreferenceLossConfig)
    reference: Annotated[
        ReferenceConfig, Of("loss.has_reference", why="but loss.method uses no reference", fix="")
    ] = section(ReferenceConfig)
    preferences: Annotated[
        PreferencesConfig, NEEDS_SOURCE, Without("margin_column", why=NO_MARGINS)
    ] = section(PreferencesConfig)
    evaluation: Annotated[
        PreferenceEvaluationConfig, Without("preferences.margin_column", why=NO_MARGINS)
    ] = section(PreferenceEvaluationConfig)

    def check(self) -> None:
        super().check()
        used = self.preferences.response_column or self.evaluation.preferences.response_column
        require(
            not used or self.loss.method == "kto",
            f"response_column of preferences or evaluation.preferences is '{used}', but loss.method"
            f" '{self.loss.method}' needs pairs; set loss.method to 'kto', or name the columns of"
            " the two responses",
        )


PAIRS_ONLY = (
    "but a reward model learns from pairs; name the columns of the two responses, or train with"
    " task: preference and KTO"
)


class RewardModelConfig(SupervisedConfig):
    """The recipe of `task: reward_model`, which trains a model to score texts on pairs of
    responses.
    """

    task: Literal["reward_model"] = "reward_model"
    loss: RewardLossConfig = section(RewardLossConfig)
    preferences: Annotated[
        PreferencesConfig, NEEDS_SOURCE, Without("response_column", why=PAIRS_ONLY)
    ] = section(PreferencesConfig)
    evaluation: Annotated[
        PreferenceEvaluationConfig, Without("preferences.response_column", why=PAIRS_ONLY)
    ] = section(PreferenceEvaluationConfig)


AnyConfig = RunConfig | SupervisedConfig
"""The configuration of a run that trains."""

__all__ = ["ServeRewardConfig"]
"""Also named as one of this module."""


def with_steps(config: C, num_rows: int) -> C:
    """A copy whose `steps` follow from `epochs` for `num_rows` rows of data; without `epochs` the
    same. Raises `ValueError` for too many steps, or a critic's warm-up that lasts for all.
    """
    assert isinstance(config, AnyConfig)
    if config.epochs is None:
        return config
    is_rl = isinstance(config, RunConfig)
    per_step = config.rollout.groups_per_step if is_rl else config.samples_per_step
    # Without the rounding, 0.1 epochs of 10 rows would be a row more than 1.
    steps = max(1, math.ceil(round(config.epochs * num_rows / per_step, 9)))
    require(
        steps <= MOST_STEPS,
        f"epochs is {config.epochs:g}, which is {steps} steps for {num_rows} rows; set fewer, so"
        f" that there are at most {MOST_STEPS} steps",
    )
    changed = replace(config, steps=steps)
    if isinstance(changed, RunConfig):
        check_warmup(changed)
    return changed


def made_with(config: RunConfig) -> str:
    """Digest (32 hexadecimal digits) of the settings that determine a finished rollout and how old
    its weights may be. A resumed run keeps its checkpoint's rollouts only if it is the same.
    """
    rollout = config.rollout.model_dump(exclude=NO_MATTER)
    is_penalised = config.algorithm.truncated == "penalise"
    kinds = config.group_filter, config.greedy_baseline, is_penalised
    environment = config.environment.model_dump(exclude={"agent": {"at_once"}})
    plain = [rollout, environment, config.prompts.model_dump(), kinds]
    text = json.dumps(plain, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


NO_MATTER = {*("engine", "num_engines", "placement", "request_timeout_s"), "max_open_groups"}
"""Settings of `rollout` that do not change a finished rollout."""


def patience_s(config: RunConfig, num_requests: int) -> float:
    """Seconds that `num_requests` generation requests together may take:
    `rollout.request_timeout_s` x (2 + full batches of all engines).
    """
    at_once = config.rollout.num_engines * config.rollout.engine.max_num_sequences
    return config.rollout.request_timeout_s * (2 + num_requests // at_once)


def silence_s(config: RunConfig) -> float:
    """Seconds without an engine step or verdict after which the run is stuck: what a hung engine,
    its restarts, a slow verifier and an agent may take, plus a minute.
    """
    engine, environment = config.rollout.engine, config.environment
    restart_s = engine.stall_timeout_s + ENGINE_STARTS * engine.start_timeout_s
    verdict_s = 2 * environment.time_limit_s  # a call may be made again
    own_s = environment.start_limit_s + environment.agent.longest_s
    return restart_s + own_s + verdict_s + 60.0


TASKS: dict[str, type[AnyConfig]] = {
    "rl": RunConfig,
    "sft": SftConfig,
    "preference": PreferenceConfig,
    "reward_model": RewardModelConfig,
    "distill": DistillConfig,
}
"""{`task` of a recipe: its configuration class}"""


def task_class(tree: dict[str, Any], where: str) -> type[AnyConfig]:
    """The configuration class of a recipe's nested dicts by `task`. Raises `ValueError` if that is
    missing or unknown; `where` says in the message where the dicts come from.
    """
    task, tasks = tree.get("task"), ", ".join(TASKS)
    require(
        task is not None,
        f"{where} does not say what it is; add a line such as `task: rl` at its top, with one of"
        f" {tasks} (only recipes of megarl serve-reward have none)",
    )
    require(
        isinstance(task, str) and task in TASKS,
        f"{where}: task is {shortened(repr(task))}; set it to one of {tasks}",
    )
    return TASKS[str(task)]


def read(
    kind: type[C] | Callable[[dict[str, Any]], type[C]],
    file: str | Path,
    overrides: Sequence[str] = (),
    say: Callable[[str], object] = str,
) -> C:
    """Read the YAML recipe `file` as class `kind`, or as the class that `kind` returns for its
    nested dicts, changed by the command line's words `overrides`. `say` gets a line for each path
    found only in the recipe's folder, and for a `file` that is the name of a recipe of megarl.
    Raises `ValueError` with file, line, dotted key and problem.
    """
    path, lines = recipe_paths.recipe_path(file, say), {}
    tree = presets.spelled_out(recipe_file.read_tree(path, lines))
    where = f"recipe {path}"
    kind = kind if isinstance(kind, type) else kind(tree)
    if overrides:
        changed = recipe_file.override(tree, kind, [presets.long_word(word) for word in overrides])
        sections = {key.rpartition(".")[0] for key in changed}
        leaves = [key for key in changed if key not in sections]
        inside = tuple(leaf + mark for leaf in leaves for mark in ".[")
        lines = {
            key: line
            for key, line in lines.items()
            if key not in changed and not key.startswith(inside)
        }
        where += f" with {' '.join(overrides)}"
    return from_tree(kind, tree, where=where, beside=path.parent, say=say, lines=lines)


def written_tree(file: str | Path) -> dict[str, Any]:
    """The settings that a recipe spells out, as nested dicts. `file`: a path, or the name of a
    recipe of megarl. Raises `ValueError` with file and line.
    """
    return presets.spelled_out(recipe_file.read_tree(recipe_paths.recipe_path(file)))


HANDED = "MEGARL_CONFIG"
"""The environment variable with the configuration that a launcher has read for its ranks."""


def handed(config: AnyConfig) -> dict[str, str]:
    """{`HANDED`: `config` as JSON}; empty where that is too long for a variable, so that each rank
    reads the recipe.
    """
    text = json.dumps(config.model_dump())
    return {HANDED: text} if len(text) < 100_000 else {}


def take_handed() -> AnyConfig | None:
    """The configuration that this rank's launcher has read, if it is a rank of one; once."""
    text = os.environ.pop(HANDED, "")
    if not text or "RANK" not in os.environ:
        return None
    try:
        tree = json.loads(text)
    except ValueError:
        raise ValueError(
            f"{HANDED} holds no JSON; unset it, since only a launcher sets it"
        ) from None
    return from_tree(task_class(tree, HANDED), tree, where=HANDED)


def from_tree(
    kind: type[C],
    tree: Any,
    *,
    where: str,
    beside: Path | None = None,
    say: Callable[[str], object] = str,
    lines: dict[str, int] | None = None,
) -> C:
    """Convert a recipe's nested dicts to a configuration of class `kind`, with presets filled in.
    Raises `ValueError` that lists all mistakes.

    Args:
        where: what messages call the recipe, such as its path.
        beside: the recipe's folder, in which relative paths are looked up too.
        say: gets a line for each path that is only there.
        lines: {dotted key: line of the file}, for messages.
    """
    folder = recipe_paths.Beside(beside)
    try:
        config = kind.model_validate(presets.filled_in(tree), context=folder)
    except ValidationError as error:
        texts = problems(error, partial(recipe_file.hint, kind))
        message = "; ".join(in_line(text, lines or {}) for text in texts)
        raise ValueError(f"{where}: {shortened(message, 2000)}") from None
    settings = list(leaves(config.model_dump()))
    for name, path, message in folder.paths:
        # Of a list of paths, the setting's name stands before the item's number.
        same = [key for key, value in settings if f".{name}" in f".{key}" and value == path]
        say(f"{same[0] if same else name}: {message}")
        settings = [setting for setting in settings if setting[0] not in same[:1]]
    return config


def in_line(said: str, lines: dict[str, int]) -> str:
    """`said` with "line N: " before it, the line in `lines` of the first setting that stands before
    a ";" in it; unchanged without one.
    """
    words = re.findall(r"[\w.\[\]]+", said.partition(";")[0])
    keys = [word for word in words if word in lines and (word == words[0] or "." in word)]
    return f"line {lines[keys[0]]}: {said}" if keys else said


def dump(value: Config) -> str:
    """A configuration as YAML text with all defaults, which `read` reads back."""
    return recipe_file.dump_yaml(value.model_dump())
