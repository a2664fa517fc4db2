"""The recipes of runs on a fixed data set: `megarl sft`, `megarl preference` and `megarl
reward-model`.
"""

from typing import Annotated

from megarl.data.config import DemonstrationsConfig, PreferencesConfig
from megarl.limits import MOST_STEPS
from megarl.objectives.config import PreferenceLossConfig, RewardLossConfig
from megarl.observe.config import ObserveConfig
from megarl.recipe_paths import OutputText
from megarl.schema import Config, Needs, Of, Range, Without, require, section
from megarl.trainer.config import (
    WITH_PATH,
    AnyRunConfig,
    ModelConfig,
    ReferenceLora,
    TrainedModel,
    TrainingConfig,
)

NEEDS_SOURCE = Needs("set it to a data file or hub name", "source")


class HeldOutConfig(Config):
    """When a run on a data set is evaluated."""

    every: Annotated[int, Range(0, MOST_STEPS)] = 0
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""


class SupervisedConfig(AnyRunConfig):
    """What all runs on a fixed data set have in common."""

    samples_per_step: Annotated[int, Range(1, 2**20)] = 64
    """Rows of one optimizer step, over all ranks: demonstrations, or preferences (each of two
    responses)."""
    model: TrainedModel = section(ModelConfig)
    training: Annotated[
        TrainingConfig,
        Without("num_mini_batches", "epochs_per_step", why="which has no meaning on a data set"),
        Without("lora.publish", why="but training on a data set has no engines to publish to"),
    ] = section(TrainingConfig)
    evaluation: HeldOutConfig = section(HeldOutConfig)
    observe: ObserveConfig = section(ObserveConfig)


class SftEvaluationConfig(HeldOutConfig):
    """Demonstrations that are not trained on, whose loss is measured."""

    demonstrations: DemonstrationsConfig = section(DemonstrationsConfig, shuffle=False)
    """Source of the demonstrations; empty for no evaluation. All of them are used."""


class SftConfig(SupervisedConfig):
    """A supervised fine-tuning run: `megarl sft`."""

    demonstrations: Annotated[DemonstrationsConfig, NEEDS_SOURCE] = section(DemonstrationsConfig)
    evaluation: SftEvaluationConfig = section(SftEvaluationConfig)


class PreferenceEvaluationConfig(HeldOutConfig):
    """Preferences that are not trained on, on which loss and accuracy are measured."""

    preferences: PreferencesConfig = section(PreferencesConfig, shuffle=False)
    """Source of the preferences; empty for no evaluation. All of them are used."""

    def check(self) -> None:
        empty = PreferencesConfig(), PreferencesConfig(shuffle=False)
        require(
            bool(self.preferences.source) or self.preferences in empty,
            "PreferenceEvaluationConfig.preferences has settings, but no source; leave it out, or"
            " set PreferenceEvaluationConfig.preferences.source",
        )


class ReferenceConfig(Config):
    """The frozen model that a preference method compares with. It scores every response once,
    before the first step, and is then released.
    """

    model: Annotated[ModelConfig, WITH_PATH] = section(ModelConfig)
    """The model; with an empty path `model`, as it is before training."""
    lora: ReferenceLora = "start"
    """With `training.lora.adapter`, and no `model.path` here: whether the reference is the model
    with the adapter that the run starts from (start), or the model without adapters (base)."""
    cache: OutputText = ""
    """Folder in which its log-probs are kept, in a file whose name is the digest of the data and of
    the model's weights; empty: `reference` in the run folder. Runs that differ in their loss can
    share one."""


NO_MARGINS = "which only megarl reward-model uses"


class PreferenceConfig(SupervisedConfig):
    """Training on preferences without a reward model: `megarl preference`."""

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
        used = self.preferences.response_column or self.evaluation.preferences.response_column
        require(
            not used or self.loss.method == "kto",
            f"response_column of preferences or evaluation.preferences is '{used}', but loss.method"
            f" '{self.loss.method}' needs pairs; set loss.method to 'kto', or name the columns of"
            " the two responses",
        )


PAIRS_ONLY = (
    "but a reward model learns from pairs; name the columns of the two responses, or train with"
    " megarl preference and KTO"
)


class RewardModelConfig(SupervisedConfig):
    """Training a reward model on preferences: `megarl reward-model`."""

    loss: RewardLossConfig = section(RewardLossConfig)
    preferences: Annotated[
        PreferencesConfig, NEEDS_SOURCE, Without("response_column", why=PAIRS_ONLY)
    ] = section(PreferencesConfig)
    evaluation: Annotated[
        PreferenceEvaluationConfig, Without("preferences.response_column", why=PAIRS_ONLY)
    ] = section(PreferenceEvaluationConfig)
