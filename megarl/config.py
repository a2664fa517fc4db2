"""Reading a recipe: YAML and command-line overrides become one frozen configuration, or one error.

    recipe.yaml + ["--training.optimizer.learning_rate", "1e-4"] -> RunConfig

`megarl.recipe` reads YAML and command line, pydantic refuses unknown keys and wrong types with
their dotted path, and each class checks its own ranges. Importing this module imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from megarl import presets, recipe_file, recipe_paths
from megarl.command_config import EvaluationConfig, ReplayConfig, SampleConfig
from megarl.config_checks import (
    check_algorithm,
    check_answers,
    check_distillation,
    check_early_stop,
    check_engines,
    check_mixture,
    check_rewards,
    check_roles,
    check_stops,
    check_tool_variables,
    check_truncation,
    check_warmup,
)
from megarl.data.config import PromptsConfig
from megarl.environments.config import EnvironmentConfig
from megarl.objectives.config import (
    COMPARING,
    WITH_GREEDY_BASELINE,
    ZERO_IF_EQUAL,
    AlgorithmConfig,
    DistillationConfig,
)
from megarl.observe.config import EarlyStopConfig, ObserveConfig
from megarl.rollout.config import ENGINE_STARTS, RolloutConfig
from megarl.schema import MOST_STEPS, OutputText, Range, as_plain, config, require, shortened
from megarl.serve_config import ServeRewardConfig
from megarl.supervised_config import (
    PreferenceConfig,
    RewardModelConfig,
    SftConfig,
    SupervisedConfig,
)
from megarl.trainer.config import (
    CriticConfig,
    ModelConfig,
    ReferenceRoleConfig,
    RewardModelRoleConfig,
    RoleConfig,
    TeacherConfig,
    TrainingConfig,
)
from megarl.weight_sync.config import WeightSyncConfig

if TYPE_CHECKING:
    from pydantic import TypeAdapter

C = TypeVar("C")

RENAMED = {
    "rollout.samples_per_group": "rollout.group_size",
    "training.mini_batches": "training.num_mini_batches",
    "publish.carrier": "weight_sync.transport",
    "publish": "weight_sync",
}
"""{key of older recipes: its present name}; old keys are refused with the new name."""


@config
class RunConfig:
    """A reinforcement-learning run: `megarl train`."""

    folder: OutputText = ""
    """Run folder for the resolved recipe, metrics, transcripts, checkpoints and report."""
    steps: Annotated[int, Range(1, MOST_STEPS)] = 100
    """Training steps of the whole run."""
    epochs: Annotated[float | None, Range(1e-6, 1e6)] = None
    """Passes over the prompts. If set, `steps` becomes `epochs` x number of prompts /
    `rollout.groups_per_step`, rounded up; not for `prompts.sources`. Groups that dynamic sampling
    rejects are not counted, so with it the run passes over the prompts more often."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 1
    """Seed of all random numbers: initial weights, data order, sampling."""
    resume: Literal[True, False, "auto"] = False
    """Continue from the newest complete checkpoint in `folder`; "auto": if there is one, otherwise
    begin a new run. A checkpoint of another layout or ZeRO stage is converted."""
    model: ModelConfig = ModelConfig()
    reference: ReferenceRoleConfig = ReferenceRoleConfig()
    """The frozen model of `algorithm.kl`; used where `algorithm.kl.coefficient` is above 0."""
    critic: CriticConfig = CriticConfig()
    """The value model of PPO; used where `algorithm.advantage` is gae."""
    reward_models: dict[str, RewardModelRoleConfig] = dataclasses.field(default_factory=dict)
    """{name: reward model}. The reward of a response is the environment's reward plus weight x
    score of each model. Set `environment.correct` and `wrong` to 0 if the environment is only to
    say what is correct, or `environment.verifier: none` if nothing is."""
    prompts: PromptsConfig = PromptsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    sample: SampleConfig = SampleConfig()
    replay: ReplayConfig = ReplayConfig()
    early_stop: EarlyStopConfig = EarlyStopConfig()
    observe: ObserveConfig = ObserveConfig()

    def __post_init__(self) -> None:
        require(
            bool(self.folder),
            "folder is empty; set it to where the run may write, for example folder: runs/my-run",
        )
        require(bool(self.model.path), "model.path is empty; set it to a model folder or hub name")
        require(
            self.prompts.names_data, "prompts.source is empty; set it to a data file or hub name"
        )
        check_engines(self, longest_request(self))
        groups, parts = self.rollout.groups_per_step, self.training.num_mini_batches
        require(
            groups % parts == 0,
            f"rollout.groups_per_step is {groups}, not divisible by training.num_mini_batches ="
            f" {parts}; change one of them",
        )
        check_roles(self)
        check_early_stop(self)
        overlong = self.environment.overlong
        require(
            overlong.limit_tokens <= self.rollout.max_new_tokens,
            f"environment.overlong.limit_tokens is {overlong.limit_tokens}, beyond"
            f" rollout.max_new_tokens = {self.rollout.max_new_tokens}; lower it",
        )
        check_stops(self)
        check_tool_variables(self)
        check_answers(self)
        check_mixture(self)
        self.check_learning()

    def check_learning(self) -> None:
        """Raise `ValueError` where nothing can be learned, or the way of learning does not fit the
        rollouts.
        """
        check_rewards(self)
        check_truncation(self)
        check_algorithm(self)

    @property
    def compares_groups(self) -> bool:
        """Whether the policy learns from differences between the rewards of a group, so that a
        group of equal rewards teaches nothing.
        """
        return self.algorithm.advantage in COMPARING

    @property
    def skips_equal_groups(self) -> bool:
        """Whether groups of equal rewards are not computed in training: their advantages are 0, and
        the loss has no term but the policy's, so that the gradient is the same without them.
        """
        algorithm = self.algorithm
        return (
            algorithm.advantage in ZERO_IF_EQUAL
            and algorithm.credit == "response"
            and algorithm.kl.coefficient == 0
            and algorithm.entropy_coefficient == 0
            and not self.reward_models  # which change the rewards afterwards
        )

    @property
    def greedy_baseline(self) -> Literal["", "reward", "tokens"]:
        """What the trainer gets of a greedy response to each prompt: nothing, its reward, or its
        tokens too, so that reward models score it.
        """
        if self.algorithm.advantage not in WITH_GREEDY_BASELINE:
            return ""
        return "tokens" if self.reward_models else "reward"

    @property
    def other_roles(self) -> dict[str, RoleConfig]:
        """{section: settings} of the models beside the policy that the algorithm uses."""
        found: dict[str, RoleConfig] = {}
        if self.algorithm.kl.coefficient > 0:
            found["reference"] = self.reference
        if self.algorithm.advantage == "gae":
            found["critic"] = self.critic
        return found | {f"reward_models.{name}": one for name, one in self.reward_models.items()}


@config
class DistillConfig(RunConfig):
    """A run of on-policy distillation: `megarl distill`. It has the settings of `megarl train` but
    those of rewards: `algorithm`, `reference`, `critic` and `reward_models` stay as they are.
    """

    teacher: TeacherConfig = TeacherConfig()
    distillation: DistillationConfig = DistillationConfig()

    def __post_init__(self) -> None:
        check_distillation(self)
        RunConfig.__post_init__(self)  # slots make a new class, which super() misses

    def check_learning(self) -> None:
        """Does nothing. `RunConfig.check_learning` refuses settings under which no sample has an
        advantage; in distillation every token has a loss, which compares it with the teacher.
        """

    @property
    def compares_groups(self) -> bool:
        """False: the loss of a response does not depend on other responses to its prompt."""
        return False

    @property
    def skips_equal_groups(self) -> bool:
        """False: the loss of a response does not depend on its reward."""
        return False

    @property
    def other_roles(self) -> dict[str, RoleConfig]:
        """{section: settings} of the models beside the policy."""
        return {"teacher": self.teacher}


AnyConfig = RunConfig | SupervisedConfig
"""The configuration of a command that trains."""

__all__ = ["PreferenceConfig", "RewardModelConfig", "ServeRewardConfig", "SftConfig"]
"""The configurations of other modules that commands name as `megarl.config`'s."""


def with_steps(config: C, num_rows: int) -> C:
    """A configuration whose `steps` follow from `epochs`, if those are set, for a data set of
    `num_rows` rows. Raises `ValueError` for more steps than a run may have.
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
    found = dataclasses.replace(config, steps=steps)
    if isinstance(found, RunConfig):
        check_warmup(found)
    return found


def longest_request(config: RunConfig) -> int:
    """Tokens of the longest prompt, held-out ones included, and the longest response together."""
    held_out = config.evaluation.prompts
    prompt = max(
        config.prompts.max_prompt_tokens, held_out.max_prompt_tokens if held_out.names_data else 0
    )
    return prompt + config.rollout.max_new_tokens


def made_with(config: RunConfig) -> str:
    """Fingerprint of the settings that finished rollouts, and how old they may be, depend on beside
    model, data and seed.
    """
    rollout = as_plain(config.rollout)
    rollout = {name: value for name, value in rollout.items() if name not in NO_MATTER}
    kinds = config.compares_groups, config.greedy_baseline
    plain = [rollout, as_plain(config.environment), as_plain(config.prompts), kinds]
    text = json.dumps(plain, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


NO_MATTER = (
    "engine",
    "num_engines",
    "engines_per_relay",
    "placement",
    "request_timeout_s",
    "max_open_groups",
)
"""Settings of `rollout` that a finished rollout does not depend on."""


def patience_s(config: RunConfig, num_requests: int) -> float:
    """Deadline in seconds for `num_requests` requests, each of which may take its own deadline.

    Accounts for the number of requests that the engines process at the same time.
    """
    at_once = config.rollout.num_engines * config.rollout.engine.max_num_sequences
    return config.rollout.request_timeout_s * (2 + num_requests // at_once)


def silence_s(config: RunConfig) -> float:
    """Seconds in which neither an engine makes a step nor a response is judged, after which
    something must be wrong: an engine hangs and is found out, its replacement is started as often
    as it may be, and the slowest verdict comes after that.
    """
    engine, environment = config.rollout.engine, config.environment
    restart_s = engine.stall_timeout_s + ENGINE_STARTS * engine.start_timeout_s
    verdict_s = 2 * environment.time_limit_s  # a call may be made again
    return restart_s + environment.start_limit_s + verdict_s + 60.0


def read(
    kind: type[C],
    file: str | Path,
    overrides: Sequence[str] = (),
    say: recipe_paths.Say = str,
) -> C:
    """Read a YAML recipe, and settings of a command line, as configuration class `kind`. `say`: see
    `from_tree`.

    Raises `ValueError` with the file, the dotted key and the problem.
    """
    path = Path(recipe_paths.expanded(str(file)))
    tree = presets.spelled_out(recipe_file.read_tree(path))
    refuse_renamed(tree, where=f"recipe {path}")
    refuse_other(kind, tree, where=f"recipe {path}")
    where = str(path)
    if overrides:
        tree = recipe_file.override(tree, kind, [presets.long_word(word) for word in overrides])
        where = f"{path} with {' '.join(overrides)}"
    return from_tree(kind, tree, where=where, beside=path.parent, say=say)


def written_tree(file: str | Path) -> dict[str, Any]:
    """The settings that a recipe file spells out, as nested dicts, without defaults."""
    return presets.spelled_out(recipe_file.read_tree(Path(recipe_paths.expanded(str(file)))))


def refuse_renamed(tree: object, *, where: str) -> None:
    """Raise `ValueError` with the new name for every old key of `RENAMED` in nested dicts."""
    found = []
    for old, new in RENAMED.items():
        node, *inner = tree, *old.split(".")
        for part in inner[:-1]:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and inner[-1] in node:
            found.append(f"{old} is now {new}")
    require(not found, f"{where}: {'; '.join(found)}; write the new name")


COMMANDS: dict[type, str] = {
    RunConfig: "train",
    DistillConfig: "distill",
    SftConfig: "sft",
    PreferenceConfig: "preference",
    RewardModelConfig: "reward-model",
    ServeRewardConfig: "serve-reward",
}
"""{configuration: the command whose recipes it is}"""


def refuse_other(kind: type, tree: dict[str, Any], *, where: str) -> None:
    """Raise `ValueError` if nested dicts are the recipe of another command than that of `kind`."""
    strange = unknown_keys(tree, kind)
    meant = [name for other, name in COMMANDS.items() if not unknown_keys(tree, other)]
    require(
        not strange or not meant or kind not in COMMANDS,
        f"{where} is for megarl {' or '.join(meant[:1])}; megarl {COMMANDS.get(kind)} has no key"
        f" {', '.join(strange[:5])}",
    )


def unknown_keys(tree: dict[str, Any], kind: type, before: str = "") -> list[str]:
    """The dotted keys of nested dicts that configuration class `kind` has not."""
    found, fields = [], recipe_file.fields_of(kind)
    for key, value in tree.items():
        if key not in fields:
            found.append(f"{before}{key}")
        elif isinstance(value, dict) and dataclasses.is_dataclass(fields[key]):
            found += unknown_keys(value, fields[key], f"{before}{key}.")
    return found


def from_tree(
    kind: type[C],
    tree: object,
    *,
    where: str,
    beside: Path | None = None,
    say: recipe_paths.Say = str,
) -> C:
    """Convert nested dicts to configuration class `kind`, with all of its checks.

    Raises `ValueError`; `where` names the dicts' origin in the message. `beside`: folder of the
    recipe, in which relative paths are looked for that are not in the working folder; `say` is told
    of those that are there.
    """
    from pydantic import ValidationError

    try:
        tree = presets.filled_in(presets.spelled_out(tree) if isinstance(tree, dict) else tree)
        tree = recipe_paths.with_paths(tree, kind, beside, say)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    try:
        return _adapter(kind).validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        lines = []
        for issue in error.errors():
            place = ".".join(str(part) for part in issue["loc"])
            if issue["type"] == "unexpected_keyword_argument":
                lines.append(f"{place}: unknown key{recipe_file.suggestion(kind, issue['loc'])}")
            elif issue["type"] == "value_error":
                # The check of a class names itself; the class may be used in several places.
                said = str(issue.get("ctx", {}).get("error", issue["msg"]))
                lines.append(CLASS_NAME.sub(f"{place}." if place else "", said))
            else:
                found = shortened(repr(issue["input"]))
                lines.append(f"{place or '(top level)'}: {issue['msg'].lower()}, found {found}")
        raise ValueError(f"{where}: {shortened('; '.join(lines), 2000)}") from None


CLASS_NAME = re.compile(r"\b[A-Z]\w*Config\.")
"""The name of a configuration class before a setting's, in the message of a check."""


@functools.cache
def _adapter(kind: type[C]) -> TypeAdapter[C]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def load(kind: type[C], file: str | Path, overrides: list[str], say: recipe_paths.Say = str) -> C:
    """Read recipe `file` as configuration class `kind` and apply overrides `--section.key value`.
    `say`: see `from_tree`.

    Raises `ValueError` for mistakes in recipe and overrides.
    """
    for word in overrides:
        key = word.removeprefix("--").partition("=")[0].replace("-", "_")
        for old, new in RENAMED.items():
            if word.startswith("--") and (key == old or key.startswith(f"{old}.")):
                raise ValueError(f"{word}: {old} is now {new}; write the new name")
    return read(kind, file, overrides, say)


def dump(value: object) -> str:
    """A configuration as YAML, with all defaults; `read` gives the same configuration back."""
    return recipe_file.dump(as_plain(value))
