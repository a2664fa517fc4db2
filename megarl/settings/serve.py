"""The recipe of `megarl serve-reward`: what is served, and where."""

from typing import Annotated, Literal

from megarl.settings.data import TemplateVariables
from megarl.settings.environments import EnvironmentConfig, RewardServerConfig
from megarl.settings.limits import LONGEST_WAIT_S, MOST_TOKENS
from megarl.settings.recipe_paths import OutputText, PathText
from megarl.settings.rollout import EngineConfig
from megarl.settings.schema import Config, Excludes, Needs, Of, Range, Without, require, section
from megarl.settings.training import JUDGES_NOTHING, ModelConfig


class ServedModelConfig(Config):
    """A reward model, run by vLLM."""

    model: Annotated[ModelConfig, JUDGES_NOTHING] = section(ModelConfig)
    """A sequence classifier with one label, such as `task: reward_model` trains, and its
    tokenizer."""
    template: Literal["none", "rendered"] = "none"
    """How prompts, which are texts, are read: `none` adds the tokenizer's first special tokens;
    `rendered` does not, as the client's chat template has."""
    max_tokens: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Most tokens of a prompt with its response; a longer text is a failure, never cut. 0: as many
    as the model has positions."""
    engine: EngineConfig = section(EngineConfig)
    """Data type, tensor-parallel degree and memory of the engine."""
    time_limit_s: Annotated[float, Range(0.1, LONGEST_WAIT_S)] = 60.0
    """Seconds until a text without a score is a failure."""


ONE_VERDICT = "but judge.temperature is 0, with which all verdicts on a response are the same"


class JudgeConfig(Config):
    """A language model, run by vLLM, that writes a verdict on a response."""

    model: Annotated[ModelConfig, JUDGES_NOTHING] = section(ModelConfig)
    """A causal language model and its tokenizer."""
    engine: EngineConfig = section(EngineConfig)
    """Data type, tensor-parallel degree and memory of the engine."""
    template: str = ""
    """What the judge reads, with `{prompt}`, `{response}` (required), `{answer}` (the reference
    answer) and `{fields.NAME}` (a column of the prompt's row). Other braces are doubled."""
    template_file: Annotated[PathText, Excludes("template")] = ""
    """A text file with the template, instead of `template`."""
    chat: bool = True
    """Wrap the text, as the user's message, in the tokenizer's chat template."""
    template_variables: Annotated[TemplateVariables, Of("chat")] = {}
    """With `chat`: variables of the chat template, such as `{enable_thinking: false}`."""
    system: Annotated[str, Of("chat", fix="write it into the template")] = ""
    """The chat's system message; empty for none."""
    verdict: str = ""
    """Regular expression with one group, a number or one of `choices`; its last match in the
    judge's text counts."""
    choices: Annotated[dict[str, float], Range(-1e9, 1e9), Excludes("lowest")] = {}
    """{verdict: score}, such as `{"yes": 1.0, "no": 0.0}`, in upper or lower case. Without
    `verdict`, the last of these words counts."""
    lowest: Annotated[float | None, Range(-1e9, 1e9)] = None
    """The number that becomes score 0; a lower one is a failure. null: numbers are scores."""
    highest: Annotated[float | None, Range(-1e9, 1e9)] = None
    """The number that becomes score 1; a higher one is a failure."""
    max_new_tokens: Annotated[int, Range(1, MOST_TOKENS)] = 512
    """Most tokens that the judge writes."""
    require_stop: bool = True
    """A text cut off at `max_new_tokens` has no verdict. Set it to false where the verdict comes
    first."""
    temperature: Annotated[float, Range(0.01, 2.0, or_zero=True)] = 0.0
    """Sampling temperature; 0 is greedy."""
    samples: Annotated[int, Range(1, 1024), Of("temperature", why=ONE_VERDICT)] = 1
    """Verdicts on each response, of which the mean of the readable ones is the score."""
    max_tokens: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Most tokens that the judge reads and writes; a longer text is a failure, never cut. 0: as
    many as the model has positions."""
    time_limit_s: Annotated[float, Range(0.1, LONGEST_WAIT_S)] = 120.0
    """Seconds until a response without all its verdicts is a failure."""

    def check(self) -> None:
        if not self.model.path:
            return  # `ServeRewardConfig` refuses settings without a model
        require(
            self.template or self.template_file,
            "judge.template and judge.template_file are both empty; set one of them, for example"
            " template: 'Is {response} the answer to {prompt}? Say yes or no.'",
        )
        require(
            self.verdict or self.choices,
            "judge.verdict and judge.choices are both empty, so that no score could be read; set"
            " verdict to a regular expression with one group, or choices such as"
            ' {"yes": 1.0, "no": 0.0}',
        )
        folded = {choice.casefold().strip() for choice in self.choices}
        require(
            len(folded) == len(self.choices) and "" not in folded,
            "judge.choices has an empty text, or two that differ only in upper and lower case or"
            " spaces; set different ones",
        )
        require(
            (self.lowest is None) == (self.highest is None),
            "judge.lowest and judge.highest: one is set without the other; set both, or none for"
            " numbers that are scores as they are",
        )
        require(
            self.lowest is None or self.highest is None or self.lowest < self.highest,
            f"judge.lowest is {self.lowest} and judge.highest is {self.highest}; set highest above"
            " lowest",
        )


OF_TRAINING = Without(
    *("correct", "wrong", "unscored", "on_failure", "require_stop", "overlong"),
    *("max_failure_share", "start_limit_s", "mixture"),
    why="which is for the recipe of the training run that asks the server, whose rewards it makes"
    " of scores, or whose verifiers it chooses",
)
SINGLE = Without("session", "tools", why="but a reward server scores single responses")
NO_MODEL = "but no model.path, so that they would do nothing"


class ServeRewardConfig(Config):
    """The recipe of `megarl serve-reward`, which scores responses of training runs by HTTP."""

    folder: Annotated[OutputText, Needs("set it to where the log may be: runs/serve")] = ""
    """Folder of the log (`run.log`)."""
    environment: Annotated[EnvironmentConfig, SINGLE, OF_TRAINING] = section(EnvironmentConfig)
    """The verifier or reward functions to serve."""
    reward_model: Annotated[ServedModelConfig, Of("reward_model.model.path", why=NO_MODEL)] = (
        ServedModelConfig()
    )
    """The reward model to serve, instead of `environment`."""
    judge: Annotated[JudgeConfig, Of("judge.model.path", why=NO_MODEL)] = section(JudgeConfig)
    """The judging language model to serve, instead of `environment` and `reward_model`."""
    server: RewardServerConfig = section(RewardServerConfig)

    def check(self) -> None:
        require(
            self.environment.verifier != "none",
            "environment.verifier is 'none', so that every score would be 0; set a verifier, or"
            " leave environment out and set reward_model or judge",
        )
        names = [
            name for name in ("reward_model", "judge", "environment") if not self.is_default(name)
        ]
        require(
            len(names) <= 1,
            f"{' and '.join(names)} are both set, but one server serves one of them; start two, and"
            " name both in environment.rewards of the training recipe",
        )
