"""The recipes of runs on a fixed data set: `megarl sft`, `megarl preference` and `megarl
reward-model`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from megarl.data.config import DemonstrationsConfig, PreferencesConfig
from megarl.objectives.config import PreferenceLossConfig, RewardLossConfig
from megarl.observe.config import ObserveConfig
from megarl.schema import MOST_STEPS, OutputText, Range, config, require
from megarl.trainer.config import (
    ModelConfig,
    ReferenceLora,
    TrainingConfig,
    check_reference_lora,
)


@config
class HeldOutConfig:
    """When a run on a data set is evaluated."""

    every: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""


@config
class SupervisedConfig:
    """What all runs on a fixed data set have in common."""

    folder: OutputText = ""
    """Run folder for the resolved recipe, metrics and checkpoints."""
    steps: Annotated[int, Range(1, MOST_STEPS)] = 100
    """Training steps of the whole run."""
    epochs: Annotated[float | None, Range(1e-6, 1e6)] = None
    """Passes over the data, used instead of `steps`; the last step is filled up from the next
    pass."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 1
    resume: Literal[True, False, "auto"] = False
    """Continue from the newest complete checkpoint in `folder`; "auto": if there is one, otherwise
    begin a new run. A checkpoint of another layout or ZeRO stage is converted."""
    samples_per_step: Annotated[int, Range(1, 2**20)] = 64
    """Rows of one optimizer step, over all ranks: demonstrations, or preferences (each of two
    responses)."""
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: HeldOutConfig = HeldOutConfig()
    observe: ObserveConfig = ObserveConfig()

    def __post_init__(self) -> None:
        require(
            bool(self.folder),
            "folder is empty; set it to where the run may write, for example folder: runs/my-run",
        )
        require(bool(self.model.path), "model.path is empty; set it to a model folder or hub name")
        for name in ("num_mini_batches", "epochs_per_step"):
            require(
                getattr(self.training, name) == 1,
                f"training.{name} has no meaning in training on a data set; set it to 1",
            )
        require(
            self.training.lora.publish == "merged",
            "training.lora.publish is 'adapter', but training on a data set has no engines to"
            " publish to; leave it out",
        )


@config
class SftEvaluationConfig(HeldOutConfig):
    """Demonstrations that are not trained on, whose loss is measured."""

    demonstrations: DemonstrationsConfig = DemonstrationsConfig(shuffle=False)
    """Source of the demonstrations; empty for no evaluation. All of them are used."""


@config
class SftConfig(SupervisedConfig):
    """A supervised fine-tuning run: `megarl sft`."""

    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    evaluation: SftEvaluationConfig = SftEvaluationConfig()

    def __post_init__(self) -> None:
        SupervisedConfig.__post_init__(self)  # slots make a new class, which super() misses
        require(
            bool(self.demonstrations.source),
            "demonstrations.source is empty; set it to a data file or hub name",
        )


@config
class PreferenceEvaluationConfig(HeldOutConfig):
    """Preferences that are not trained on, on which loss and accuracy are measured."""

    preferences: PreferencesConfig = PreferencesConfig(shuffle=False)
    """Source of the preferences; empty for no evaluation. All of them are used."""


@config
class ReferenceConfig:
    """The frozen model that a preference method compares with. It scores every response once,
    before the first step, and is then released.
    """

    model: ModelConfig = ModelConfig()
    """The model; with an empty path `model`, as it is before training."""
    lora: ReferenceLora = "start"
    """With `training.lora.adapter`, and no `model.path` here: whether the reference is the model
    with the adapter that the run starts from (start), or the model without adapters (base)."""
    cache: OutputText = ""
    """Folder in which its log-probs are kept, in a file whose name is the digest of the data and of
    the model's weights; empty: `reference` in the run folder. Runs that differ in their loss can
    share one."""

    def __post_init__(self) -> None:
        check_reference_lora(self.lora, self.model)


@config
class PreferenceConfig(SupervisedConfig):
    """Training on preferences without a reward model: `megarl preference`."""

    loss: PreferenceLossConfig = PreferenceLossConfig()
    reference: ReferenceConfig = ReferenceConfig()
    preferences: PreferencesConfig = PreferencesConfig()
    evaluation: PreferenceEvaluationConfig = PreferenceEvaluationConfig()

    def __post_init__(self) -> None:
        SupervisedConfig.__post_init__(self)  # slots make a new class, which super() misses
        _check_preferences(self.preferences, self.evaluation.preferences)
        require(
            self.loss.has_reference or self.reference == ReferenceConfig(),
            f"reference has settings, but loss.method '{self.loss.method}' uses no reference; leave"
            " them out",
        )
        require(
            bool(self.reference.model.path) or self.reference.model == ModelConfig(),
            "reference.model has settings but no path, so that they would do nothing; set"
            " reference.model.path, or leave reference.model out",
        )
        for name, section in (
            ("preferences", self.preferences),
            ("evaluation.preferences", self.evaluation.preferences),
        ):
            require(
                not section.margin_column,
                f"{name}.margin_column is set, which only megarl reward-model uses; leave it out",
            )
            require(
                not section.response_column or self.loss.method == "kto",
                f"{name}.response_column is set, but loss.method '{self.loss.method}' needs pairs;"
                " set loss.method to 'kto', or name the columns of the two responses",
            )


@config
class RewardModelConfig(SupervisedConfig):
    """Training a reward model on preferences: `megarl reward-model`."""

    loss: RewardLossConfig = RewardLossConfig()
    preferences: PreferencesConfig = PreferencesConfig()
    evaluation: PreferenceEvaluationConfig = PreferenceEvaluationConfig()

    def __post_init__(self) -> None:
        SupervisedConfig.__post_init__(self)  # slots make a new class, which super() misses
        _check_preferences(self.preferences, self.evaluation.preferences)
        for name, section in (
            ("preferences", self.preferences),
            ("evaluation.preferences", self.evaluation.preferences),
        ):
            require(
                not section.response_column,
                f"{name}.response_column is set, but a reward model learns from pairs; name the"
                " columns of the two responses, or train with megarl preference and KTO",
            )


def _check_preferences(training: PreferencesConfig, held_out: PreferencesConfig) -> None:
    """Raise `ValueError` unless there are data to train on."""
    require(bool(training.source), "preferences.source is empty; set it to a data file or hub name")
    require(
        bool(held_out.source)
        or held_out in (PreferencesConfig(), PreferencesConfig(shuffle=False)),
        "evaluation.preferences has settings but no source; set it, or leave them out",
    )
