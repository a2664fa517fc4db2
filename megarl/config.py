"""Reading a recipe: YAML and command-line overrides become one frozen configuration, or one error.

    recipe.yaml + ["--training.optimizer.learning_rate", "1e-4"] -> RunConfig

`megarl.recipe_file` reads YAML and command line; pydantic refuses unknown keys and wrong types with
their dotted path, and each class checks its own ranges. Importing this module imports no torch.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ValidationError

from megarl import presets, recipe_paths
from megarl.config_checks import check_run_settings, check_warmup
from megarl.data.config import PromptsConfig
from megarl.environments.config import EnvironmentConfig
from megarl.limits import MOST_STEPS
from megarl.objectives.config import (
    COMPARING,
    WITH_GREEDY_BASELINE,
    ZERO_IF_EQUAL,
    AlgorithmConfig,
    DistillationConfig,
)
from megarl.observe.config import EarlyStopConfig, ObserveConfig
from megarl.recipe_paths import PathText
from megarl.rollout.config import ENGINE_STARTS, RolloutConfig
from megarl.schema import (
    Config,
    Excludes,
    Needs,
    Of,
    Range,
    Without,
    dotted,
    is_own,
    leaves,
    problems,
    replace,
    require,
    section,
    shortened,
)
from megarl.serve_config import ServeRewardConfig
from megarl.supervised_config import (
    PreferenceConfig,
    RewardModelConfig,
    SftConfig,
    SupervisedConfig,
)
from megarl.trainer.config import (
    AnyRunConfig,
    CriticConfig,
    ModelConfig,
    ReferenceRoleConfig,
    RewardModelRoleConfig,
    RoleConfig,
    TeacherConfig,
    TrainedModel,
    TrainingConfig,
)
from megarl.weight_sync.config import WeightSyncConfig

C = TypeVar("C", bound=Config)


class EvaluationConfig(Config):
    """Held-out problems, scored by the run's own verifier before, during and after training."""

    prompts: PromptsConfig = section(PromptsConfig, shuffle=False)
    """Source of the problems; empty for no evaluation. All of them are asked, in any order."""
    every: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    temperature: Annotated[float, Range(0.01, 2.0, or_zero=True)] = 0.0
    """Sampling temperature; 0 is greedy."""
    sampled_too: bool = False
    """Also draw one sample of each problem at the rollout temperature."""
    samples: Annotated[int, Range(1, 10_000)] = 1
    """Of `megarl eval`: samples of each problem at the rollout temperature, for avg@n, pass@k and
    maj@n; 1 for none, unless `sampled_too` is set."""
    models: tuple[PathText, ...] = ()
    """Of `megarl eval`: model folders or hub names, one after another; empty for `model.path`."""
    sources: tuple[PathText, ...] = ()
    """Of `megarl eval`: further data sets, read as `prompts` is."""


class SampleConfig(Config):
    """Of `megarl sample`: how many responses to each prompt, and which of them are written."""

    samples: Annotated[int, Range(1, 10_000)] = 8
    """Responses to each of `prompts`, at `rollout.temperature`."""
    keep: Literal["best", "all", "pairs"] = "best"
    """`best`: of each prompt the response with the highest reward; `all`: every response, with its
    reward; `pairs`: the best and the worst response, where their rewards differ. Empty responses
    are left out, and so are responses that were cut off at the token limit, but as the worst."""
    min_reward: Annotated[float | None, Range(-1e9, 1e9)] = None
    """Leave out what has less reward than this; of `pairs` the chosen response must have it."""
    shown: Annotated[int, Range(1, 10_000)] = 4
    """Of `megarl rollout`: number of rollouts that are printed, each of another prompt."""


class ReplayConfig(Config):
    """Of `megarl replay`: the run whose batches are trained on again."""

    run: PathText = ""
    """Its run folder; `megarl replay RUN` sets it."""
    steps: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Steps to train again, from the first one; 0 for all that the run has finished."""


OF_ONE_SOURCE = Excludes("prompts.sources", "with which a run has steps")
OF_KL = Of("algorithm.kl.coefficient")


class RunConfig(AnyRunConfig):
    """A reinforcement-learning run: `megarl train`."""

    epochs: Annotated[float | None, Range(1e-6, 1e6), OF_ONE_SOURCE] = None
    """Passes over the prompts. If set, `steps` becomes `epochs` x number of prompts /
    `rollout.groups_per_step`, rounded up; not for `prompts.sources`. Groups that dynamic sampling
    rejects are not counted, so with it the run passes over the prompts more often."""
    model: TrainedModel = section(ModelConfig)
    reference: Annotated[ReferenceRoleConfig, OF_KL] = section(ReferenceRoleConfig)
    """The frozen model of `algorithm.kl`; used where `algorithm.kl.coefficient` is above 0."""
    critic: Annotated[CriticConfig, Of("algorithm.advantage", "gae")] = section(CriticConfig)
    """The value model of PPO; used where `algorithm.advantage` is gae."""
    reward_models: dict[str, RewardModelRoleConfig] = {}
    """{name: reward model}. The reward of a response is the environment's reward plus weight x
    score of each model. Set `environment.correct` and `wrong` to 0 if the environment is only to
    say what is correct, or `environment.verifier: none` if nothing is."""
    prompts: PromptsConfig = section(PromptsConfig)
    environment: EnvironmentConfig = section(EnvironmentConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    training: TrainingConfig = section(TrainingConfig)
    weight_sync: WeightSyncConfig = section(WeightSyncConfig)
    evaluation: EvaluationConfig = section(EvaluationConfig)
    sample: SampleConfig = section(SampleConfig)
    replay: ReplayConfig = section(ReplayConfig)
    early_stop: EarlyStopConfig = section(EarlyStopConfig)
    observe: ObserveConfig = section(ObserveConfig)

    def check(self) -> None:
        check_run_settings(self, longest_request(self))

    @property
    def group_filter(self) -> str:
        """Which groups dynamic sampling keeps: `rollout.filter`, or its usual value. A group of
        equal rewards teaches nothing where an advantage compares the samples of a group.
        """
        usual = "differing" if self.algorithm.advantage in COMPARING else "all"
        return self.rollout.filter or usual

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
            and not is_own(algorithm.loss)  # which may have a gradient there
            and not is_own(algorithm.method)
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


TEACHER_ALONE = Without(
    why="which megarl distill does not use: the policy learns from its teacher alone"
)


class DistillConfig(RunConfig):
    """A run of on-policy distillation: `megarl distill`. It has the settings of `megarl train` but
    those of rewards: `algorithm`, `reference`, `critic` and `reward_models` stay as they are.
    """

    reference: Annotated[ReferenceRoleConfig, TEACHER_ALONE] = section(ReferenceRoleConfig)
    critic: Annotated[CriticConfig, TEACHER_ALONE] = section(CriticConfig)
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
        """`rollout.filter`, or `all`: the loss of a response does not depend on other ones."""
        return self.rollout.filter or "all"

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
    found = replace(config, steps=steps)
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
    rollout = config.rollout.model_dump(exclude=NO_MATTER)
    kinds = config.group_filter, config.greedy_baseline
    plain = [rollout, config.environment.model_dump(), config.prompts.model_dump(), kinds]
    text = json.dumps(plain, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


NO_MATTER = {
    *("engine", "num_engines", "placement", "request_timeout_s"),
    "max_open_groups",
}
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


COMMANDS: dict[type[Config], str] = {
    RunConfig: "train",
    DistillConfig: "distill",
    SftConfig: "sft",
    PreferenceConfig: "preference",
    RewardModelConfig: "reward-model",
    ServeRewardConfig: "serve-reward",
}
"""{configuration: the command whose recipes it is}"""


def read(
    kind: type[C],
    file: str | Path,
    overrides: Sequence[str] = (),
    say: Callable[[str], object] = str,
) -> C:
    """Read a YAML recipe, and settings `--section.key value` of a command line, as configuration
    class `kind`. `say`: see `from_tree`.

    Raises `ValueError` with file, line, dotted key and problem for mistakes in either.
    """
    from megarl.recipe_file import override

    path, lines = Path(recipe_paths.expanded(str(file))), {}
    tree = written_tree(path, lines)
    where = f"recipe {path}"
    if overrides:
        changed = override(tree, kind, [presets.long_word(word) for word in overrides])
        leaves = [one for one in changed if not any(two.startswith(f"{one}.") for two in changed)]
        inside = tuple(leaf + mark for leaf in leaves for mark in ".[")
        lines = {
            key: line
            for key, line in lines.items()
            if key not in changed and not key.startswith(inside)
        }
        where += f" with {' '.join(overrides)}"
    return from_tree(kind, tree, where=where, beside=path.parent, say=say, lines=lines)


def written_tree(file: str | Path, lines: dict[str, int] | None = None) -> dict[str, Any]:
    """The settings that a recipe file spells out, as nested dicts, without defaults. To `lines` the
    line of each dotted key is added.
    """
    from megarl.recipe_file import read_tree

    return presets.spelled_out(read_tree(Path(recipe_paths.expanded(str(file))), lines))


def from_tree(
    kind: type[C],
    tree: Any,
    *,
    where: str,
    beside: Path | None = None,
    say: Callable[[str], object] = str,
    lines: dict[str, int] | None = None,
) -> C:
    """Convert nested dicts to configuration class `kind`, with all of its checks.

    Raises `ValueError`; `where` names the dicts' origin in the message, `lines` of each dotted key
    its line there. `beside`: folder of the recipe, in which relative paths are looked for that are
    not in the working folder; `say` is told of those that are there.
    """
    folder = recipe_paths.Beside(beside)
    try:
        found = kind.model_validate(presets.filled_in(tree), context=folder)
    except ValidationError as error:
        from megarl.recipe_file import hint

        unknown = unknown_keys(kind, tree) if kind in COMMANDS else []
        for other, name in COMMANDS.items() if unknown else ():
            require(
                unknown_keys(other, tree),
                f"{where} is for megarl {name}; megarl {COMMANDS[kind]} has no key"
                f" {', '.join(unknown[:5])}",
            )
        said = [in_line(one, lines or {}) for one in problems(error, partial(hint, kind))]
        raise ValueError(f"{where}: {shortened('; '.join(said), 2000)}") from None
    settings = list(leaves(found.model_dump()))
    for name, path, said in folder.found:
        # Of a list of paths, the setting's name stands before the item's number.
        same = [key for key, value in settings if f".{name}" in f".{key}" and value == path]
        say(f"{same[0] if same else name}: {said}")
        settings = [one for one in settings if one[0] not in same[:1]]
    return found


def in_line(said: str, lines: dict[str, int]) -> str:
    """A mistake with the recipe's line of the first setting that it names before its advice."""
    words = re.findall(r"[\w.\[\]]+", said.partition(";")[0])
    keys = [word for word in words if word in lines and (word == words[0] or "." in word)]
    return f"line {lines[keys[0]]}: {said}" if keys else said


def unknown_keys(kind: type[Config], tree: Any) -> list[str]:
    """The dotted keys of nested dicts that configuration class `kind` has not."""
    try:
        kind.model_validate(tree)
    except ValidationError as error:
        return [dotted(one["loc"]) for one in error.errors() if one["type"] == "extra_forbidden"]
    return []


def dump(value: Config) -> str:
    """A configuration as YAML, with all defaults; `read` gives the same configuration back."""
    from megarl import recipe_file

    return recipe_file.dump_yaml(value.model_dump())
