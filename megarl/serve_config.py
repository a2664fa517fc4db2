"""The recipe of `megarl serve-reward`: what is served, and where."""

from __future__ import annotations

from typing import Annotated, Literal

from megarl.data.config import TemplateName
from megarl.environments.config import EnvironmentConfig, RewardServerConfig
from megarl.schema import MOST_TOKENS, PathText, Range, config, require
from megarl.trainer.config import ModelConfig


@config
class ServedModelConfig:
    """A reward model that is served, in one process."""

    model: ModelConfig = ModelConfig()
    """A sequence classifier with one label, such as `megarl reward-model` trains, and its
    tokenizer."""
    template: TemplateName = "none"
    """How prompts are read: `none` adds the tokenizer's first special tokens to them, `rendered`
    does not, because the client's chat template has written them."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Data type of forward passes."""
    micro_batch_tokens: Annotated[int, Range(1, MOST_TOKENS)] = 16384
    """Maximum number of tokens processed at once."""

    def __post_init__(self) -> None:
        require(
            self.template != "chat",
            "reward_model.template is 'chat', but the prompts of a request are texts, which the"
            " client's template has written already; set 'rendered', or 'none' for plain text",
        )
        require(
            not self.model.from_scratch,
            "reward_model.model.from_scratch is true, but random weights judge nothing; leave it"
            " out",
        )


OF_TRAINING = (
    "correct",
    "wrong",
    "unscored",
    "require_stop",
    "overlong",
    "max_failure_share",
    "start_limit_s",
)
"""Settings of `environment` that turn a score into a reward, and so belong to the client's recipe.
"""


@config
class ServeRewardConfig:
    """A reward server: `megarl serve-reward`."""

    folder: PathText = ""
    """Folder of the log (`run.log`): what verifiers and libraries print."""
    num_threads: Annotated[int, Range(1, 4096)] = 1
    """CPU threads of the reward model."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """The verifier or reward functions to serve."""
    reward_model: ServedModelConfig = ServedModelConfig()
    """The reward model to serve, instead of `environment`."""
    server: RewardServerConfig = RewardServerConfig()

    def __post_init__(self) -> None:
        require(
            bool(self.folder),
            "folder is empty; set it to where the log may be written, for example folder:"
            " runs/serve_reward",
        )
        environment, plain = self.environment, EnvironmentConfig()
        require(
            not environment.session,
            "environment.session is set, but a reward server scores single responses; set"
            " environment.verifier instead",
        )
        for name in OF_TRAINING:
            require(
                getattr(environment, name) == getattr(plain, name),
                f"environment.{name} is set, but a reward server answers with scores; set it in the"
                " recipe of the training run that asks the server",
            )
        if self.reward_model.model.path:
            require(
                environment == plain,
                "reward_model.model.path and environment are both set, but one server serves one of"
                " them; start two, and name both in environment.rewards of the training recipe",
            )
        else:
            require(
                self.reward_model == ServedModelConfig(),
                "reward_model has settings but no model.path, so that they would do nothing; set"
                " reward_model.model.path, or leave reward_model out",
            )
