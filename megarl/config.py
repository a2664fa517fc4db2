"""Reading a recipe: YAML and command-line overrides become one frozen configuration, or one error.

    recipe.yaml + ["--training.optimizer.learning_rate", "1e-4"] -> RunConfig

pydantic reads the YAML and refuses unknown keys and wrong types with their dotted path, tyro reads
the command line, and each class checks its own ranges. Importing this module does not import torch.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TypeVar

import yaml

from megarl.data.config import DemonstrationsConfig, PromptsConfig
from megarl.environments.config import EnvironmentConfig
from megarl.objectives.config import AlgorithmConfig
from megarl.observe.config import ObserveConfig
from megarl.rollout.config import RolloutConfig
from megarl.schema import as_plain, config, require, require_range
from megarl.trainer.config import ModelConfig, RoleConfig, TrainingConfig
from megarl.weight_sync.config import WeightSyncConfig

C = TypeVar("C")

RENAMED = {
    "rollout.samples_per_group": "rollout.group_size",
    "training.mini_batches": "training.num_mini_batches",
    "publish.carrier": "weight_sync.transport",
    "publish": "weight_sync",
}
"""{key of older recipes: its present name}; old keys are refused with the new name."""


@config
class EvaluationConfig:
    """Held-out problems, scored by the run's own verifier before, during and after training."""

    prompts: PromptsConfig = PromptsConfig(shuffle=False)
    """Source of the problems; empty for no evaluation. All of them are asked, in any order."""
    every: int = 0
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    sampled_too: bool = False
    """Also draw one sample of each problem at the rollout temperature."""

    def __post_init__(self) -> None:
        require_range("evaluation.every", self.every, 0)
        require_range("evaluation.temperature", self.temperature, 0.0)


@config
class RunConfig:
    """A reinforcement-learning run: `megarl train`."""

    folder: str = ""
    """Run folder for the resolved recipe, metrics, transcripts, checkpoints and report."""
    steps: int = 100
    """Training steps of the whole run."""
    seed: int = 1
    """Seed of all random numbers: initial weights, data order, sampling."""
    resume: bool = False
    """Continue from the newest complete checkpoint in `folder`."""
    model: ModelConfig = ModelConfig()
    reference: RoleConfig = RoleConfig()
    """The frozen model of `algorithm.kl`; used where `algorithm.kl.coefficient` is above 0."""
    prompts: PromptsConfig = PromptsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TrainingConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    observe: ObserveConfig = ObserveConfig()

    def __post_init__(self) -> None:
        require(
            bool(self.folder),
            "folder is empty; set it to where the run may write, for example folder: runs/my-run",
        )
        require(bool(self.model.path), "model.path is empty; set it to a model folder or hub name")
        require(
            bool(self.prompts.source), "prompts.source is empty; set it to a data file or hub name"
        )
        require_range("steps", self.steps, 1)
        require_range("seed", self.seed, 0, 2**31 - 1)
        start_s, wait_s = self.rollout.engine.start_timeout_s, self.training.collective_timeout_s
        require(
            wait_s >= start_s,
            f"training.collective_timeout_s is {wait_s:g}, but the ranks wait for engines that may"
            f" take rollout.engine.start_timeout_s = {start_s:g}; raise the one or lower the other",
        )
        needed_s = 2 * self.weight_sync.timeout_s + 30  # connecting, receiving, settling
        require(
            wait_s >= needed_s,
            f"training.collective_timeout_s is {wait_s:g}, but the ranks wait for publishes that"
            f" may take {needed_s:g} s; raise it to that, or lower weight_sync.timeout_s",
        )
        groups, parts = self.rollout.groups_per_step, self.training.num_mini_batches
        require(
            groups % parts == 0,
            f"rollout.groups_per_step is {groups}, not divisible by training.num_mini_batches ="
            f" {parts}; change one of them",
        )
        require(
            self.reference == RoleConfig() or self.algorithm.kl.coefficient > 0,
            "reference has settings, but algorithm.kl.coefficient is 0, so that no reference is"
            " used; leave them out, or set algorithm.kl.coefficient above 0",
        )
        require(
            bool(self.reference.model.path) or self.reference.model == ModelConfig(),
            "reference.model has settings but no path, so that they would do nothing; set"
            " reference.model.path, or leave reference.model out",
        )
        overlong = self.environment.overlong
        require(
            overlong.limit_tokens <= self.rollout.max_new_tokens,
            f"environment.overlong.limit_tokens is {overlong.limit_tokens}, beyond"
            f" rollout.max_new_tokens = {self.rollout.max_new_tokens}; lower it",
        )
        require(
            not self.environment.answer_after or self.environment.verifier == "exact_match",
            "environment.answer_after is for the verifier 'exact_match', but environment.verifier"
            f" is '{self.environment.verifier}', which finds the answer by itself; remove"
            " answer_after",
        )
        require(
            self.algorithm.advantage in ("reinforce_plus_plus", "reinforce_plus_plus_tokens")
            or self.rollout.group_size > 1,
            f"algorithm.advantage '{self.algorithm.advantage}' compares the samples of a group, but"
            " rollout.group_size is 1; raise it or use 'reinforce_plus_plus'",
        )


@config
class SftConfig:
    """A supervised fine-tuning run: `megarl sft`."""

    folder: str = ""
    """Run folder for the resolved recipe, metrics and checkpoints."""
    steps: int = 100
    seed: int = 1
    resume: bool = False
    """Continue from the newest complete checkpoint in `folder`."""
    samples_per_step: int = 64
    """Demonstrations of one optimizer step, over all ranks."""
    model: ModelConfig = ModelConfig()
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    training: TrainingConfig = TrainingConfig()
    observe: ObserveConfig = ObserveConfig()

    def __post_init__(self) -> None:
        require(
            bool(self.folder),
            "folder is empty; set it to where the run may write, for example folder: runs/my-sft",
        )
        require(bool(self.model.path), "model.path is empty; set it to a model folder or hub name")
        require(
            bool(self.demonstrations.source),
            "demonstrations.source is empty; set it to a data file or hub name",
        )
        require_range("steps", self.steps, 1)
        require_range("samples_per_step", self.samples_per_step, 1)
        require(
            self.training.num_mini_batches == 1,
            "training.num_mini_batches has no meaning in fine-tuning; set it to 1",
        )


def longest_request(config: RunConfig) -> int:
    """Tokens of the longest prompt, held-out ones included, and the longest response together."""
    held_out = config.evaluation.prompts
    prompt = max(
        config.prompts.max_prompt_tokens, held_out.max_prompt_tokens if held_out.source else 0
    )
    return prompt + config.rollout.max_new_tokens


def patience_s(config: RunConfig, num_requests: int) -> float:
    """Deadline in seconds for `num_requests` requests, each of which may take its own deadline.

    Accounts for the number of requests that the engines process at the same time.
    """
    at_once = config.rollout.num_engines * config.rollout.engine.max_num_sequences
    return config.rollout.request_timeout_s * (2 + num_requests // at_once)


class _Loader(yaml.SafeLoader):
    """YAML loader that reads floats as YAML 1.2 does: PyYAML reads `1e-4` as a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)


def read(kind: type[C], recipe: str | Path) -> C:
    """Read a YAML recipe as configuration class `kind`.

    Raises `ValueError` with the file, the dotted key and the problem.
    """
    path = Path(recipe)
    require(
        path.is_file(),
        f"recipe {path} does not exist; pass the path of a .yaml file (see launch/recipes/)",
    )
    try:
        tree = yaml.load(path.read_text(), Loader=_Loader)  # noqa: S506 - _Loader is a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"recipe {path} is not YAML: {error}") from None
    refuse_renamed(tree, where=f"recipe {path}")
    return from_tree(kind, tree or {}, where=str(path))


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


def from_tree(kind: type[C], tree: object, *, where: str) -> C:
    """Convert nested dicts to configuration class `kind`, with all of its checks.

    Raises `ValueError`; `where` names the dicts' origin in the message.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        lines = []
        for issue in error.errors():
            place = ".".join(str(part) for part in issue["loc"]) or "(top level)"
            if issue["type"] == "unexpected_keyword_argument":
                lines.append(f"{place}: unknown key{_suggestion(kind, issue['loc'])}")
            elif issue["type"] == "value_error":
                lines.append(str(issue.get("ctx", {}).get("error", issue["msg"])))
            else:
                lines.append(f"{place}: {issue['msg'].lower()}, found {issue['input']!r}")
        raise ValueError(f"{where}: " + "; ".join(lines)) from None


def _suggestion(kind: type, loc: tuple[int | str, ...]) -> str:
    """Hint for an unknown key at `loc`: the closest known key, or all known keys."""
    import dataclasses
    import difflib
    import typing

    for part in loc[:-1]:
        kind = typing.get_type_hints(kind)[str(part)]
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    close = difflib.get_close_matches(str(loc[-1]), known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known keys: {', '.join(known)}"


def load(kind: type[C], recipe: str | Path, overrides: list[str]) -> C:
    """Read `recipe` as configuration class `kind` and apply overrides `--section.key value`.

    Raises `ValueError` for mistakes in the recipe. tyro prints help and mistakes in overrides, and
    exits.
    """
    base = read(kind, recipe)
    if not overrides:
        return base
    for word in overrides:
        key = word.removeprefix("--").partition("=")[0].replace("-", "_")
        for old, new in RENAMED.items():
            if word.startswith("--") and (key == old or key.startswith(f"{old}.")):
                raise ValueError(f"{word}: {old} is now {new}; write the new name")
    import tyro

    return tyro.cli(
        kind,
        args=overrides,
        default=base,
        prog="megarl",
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff,),
    )


def dump(value: object) -> str:
    """A configuration as YAML, with all defaults; `read` gives the same configuration back."""
    return yaml.safe_dump(as_plain(value), sort_keys=False, allow_unicode=True)
