"""The recipe of `megarl serve-reward`: what is served, and where."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from megarl.data.config import TemplateName, TemplateVariables
from megarl.environments.config import EnvironmentConfig, RewardServerConfig
from megarl.rollout.config import EngineConfig
from megarl.schema import (
    LONGEST_WAIT_S,
    MOST_TOKENS,
    OutputText,
    PathText,
    Range,
    config,
    require,
)
from megarl.trainer.config import ModelConfig


@config
class ServedModelConfig:
    """A reward model that is served, by torch in this process or by a vLLM engine."""

    model: ModelConfig = ModelConfig()
    """A sequence classifier with one label, such as `megarl reward-model` trains, and its
    tokenizer."""
    template: TemplateName = "none"
    """How prompts are read: `none` adds the tokenizer's first special tokens to them, `rendered`
    does not, because the client's chat template has written them."""
    max_tokens: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Most tokens of a prompt with its response; a longer text is a failure and never cut. 0: as
    many as the model has positions."""
    backend: Literal["torch", "vllm"] = "torch"
    """What runs the model: torch, in a thread of this process, or vLLM, which needs seconds to
    start, batches by itself and knows tensor parallelism. Both give the same scores."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """`backend: torch` only: data type of forward passes."""
    micro_batch_tokens: Annotated[int, Range(1, MOST_TOKENS)] = 16384
    """`backend: torch` only: maximum number of tokens processed at once."""
    engine: EngineConfig = EngineConfig()
    """`backend: vllm` only: data type, tensor-parallel degree and memory of the engine."""
    time_limit_s: Annotated[float, Range(0.1, LONGEST_WAIT_S)] = 60.0
    """`backend: vllm` only: seconds until a text without a score counts as a failure."""

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
        other = {
            "torch": ("vllm", ("engine", "time_limit_s")),
            "vllm": ("torch", ("precision", "micro_batch_tokens")),
        }
        backend, names = other[self.backend]
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in names:
            require(
                getattr(self, name) == defaults[name],
                f"reward_model.{name} is set, which only reward_model.backend '{backend}' uses;"
                f" set that backend, or leave reward_model.{name} out",
            )


@config
class JudgeConfig:
    """A language model that reads a prompt with a response and writes a verdict, from which the
    score is read. A vLLM engine runs it.
    """

    model: ModelConfig = ModelConfig()
    """A causal language model and its tokenizer."""
    engine: EngineConfig = EngineConfig()
    """Data type, tensor-parallel degree and memory of the engine."""
    template: str = ""
    """What the judge reads, with the fields `{prompt}`, `{response}`, `{answer}` (the reference
    answer) and `{fields.NAME}` (column NAME of the prompt's row). `{response}` is required. Other
    braces are doubled: `{{` and `}}`."""
    template_file: PathText = ""
    """A text file with the template, instead of `template`."""
    chat: bool = True
    """Wrap the text, as a message of the user, in the tokenizer's chat template."""
    template_variables: TemplateVariables = dataclasses.field(default_factory=dict)
    """With `chat`, variables that the chat template reads; see `prompts.template_variables`."""
    system: str = ""
    """The chat's system message; empty for none."""
    verdict: str = ""
    """Regular expression with one group, searched in what the judge has written: the last match
    counts. Its group is a number, or one of `choices`."""
    choices: Annotated[dict[str, float], Range(-1e9, 1e9)] = dataclasses.field(default_factory=dict)
    """{verdict: score}, for example `{"yes": 1.0, "no": 0.0}`, regardless of upper and lower case.
    Without `verdict`, the last of these words that the judge has written counts."""
    lowest: Annotated[float | None, Range(-1e9, 1e9)] = None
    """The number that becomes score 0; a number below it is a failure. None: numbers are scores as
    they are."""
    highest: Annotated[float | None, Range(-1e9, 1e9)] = None
    """The number that becomes score 1; a number above it is a failure."""
    max_new_tokens: Annotated[int, Range(1, MOST_TOKENS)] = 512
    """Most tokens that the judge writes."""
    require_stop: bool = True
    """A text that was cut off at `max_new_tokens` has no verdict. Set false where the verdict comes
    first and the rest does not matter."""
    temperature: Annotated[float, Range(0.01, 2.0, or_zero=True)] = 0.0
    """Sampling temperature; 0 is greedy."""
    samples: Annotated[int, Range(1, 1024)] = 1
    """Verdicts on each response; the score is the mean of those that can be read."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Seed of sampling. The same request gets the same seeds, whatever else is under way."""
    max_tokens: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Most tokens of what the judge reads and writes together; a longer one is a failure and never
    cut. 0: as many as the model has positions."""
    time_limit_s: Annotated[float, Range(0.1, LONGEST_WAIT_S)] = 120.0
    """Seconds until a response without all its verdicts counts as a failure."""

    def __post_init__(self) -> None:
        if not self.model.path:
            return  # `ServeRewardConfig` refuses settings without a model
        require(
            not self.model.from_scratch,
            "judge.model.from_scratch is true, but random weights judge nothing; leave it out",
        )
        require(
            bool(self.template) != bool(self.template_file),
            "judge.template and judge.template_file are both"
            f" {'set' if self.template else 'empty'}; set one of them, for example template:"
            " 'Is {response} the answer to {prompt}? Say yes or no.'",
        )
        require(
            self.chat or not self.system,
            "judge.system is set, but judge.chat is false, without which there is no system"
            " message; write it into the template",
        )
        require(
            self.chat or not self.template_variables,
            "judge.template_variables is set, but judge.chat is false, with which no chat template"
            " writes; set chat to true or leave the variables out",
        )
        require(
            bool(self.verdict or self.choices),
            "judge.verdict and judge.choices are both empty, so that no score could be read; set"
            " verdict to a regular expression with one group, or choices such as"
            ' {"yes": 1.0, "no": 0.0}',
        )
        self._check_range()
        require(
            self.samples == 1 or self.temperature > 0,
            f"judge.samples is {self.samples}, but judge.temperature is 0, with which all verdicts"
            " on a response are the same; set temperature above 0, for example to 0.7",
        )

    def _check_range(self) -> None:
        """Raise `ValueError` unless `choices`, `lowest` and `highest` fit together."""
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
        if self.lowest is None or self.highest is None:
            return
        require(
            not self.choices,
            "judge.lowest and judge.highest are set, but judge.choices says already what a verdict"
            " is worth; leave one of them out",
        )
        require(
            self.lowest < self.highest,
            f"judge.lowest is {self.lowest:g} and judge.highest is {self.highest:g}; set highest"
            " above lowest",
        )


OF_TRAINING = (
    "correct",
    "wrong",
    "unscored",
    "require_stop",
    "overlong",
    "max_failure_share",
    "start_limit_s",
    "mixture",
)
"""Settings of `environment` that turn a score into a reward, or choose a prompt's verifier, and so
belong to the client's recipe.
"""


@config
class ServeRewardConfig:
    """A reward server: `megarl serve-reward`."""

    folder: OutputText = ""
    """Folder of the log (`run.log`): what verifiers and libraries print."""
    num_threads: Annotated[int, Range(0, 4096)] = 0
    """CPU threads of a reward model that torch runs; 0: OMP_NUM_THREADS of the environment, or all
    cores. Of a vLLM engine see `engine.num_threads`."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """The verifier or reward functions to serve."""
    reward_model: ServedModelConfig = ServedModelConfig()
    """The reward model to serve, instead of `environment`."""
    judge: JudgeConfig = JudgeConfig()
    """The language model that judges, instead of `environment` and `reward_model`."""
    server: RewardServerConfig = RewardServerConfig()

    def __post_init__(self) -> None:
        require(
            bool(self.folder),
            "folder is empty; set it to where the log may be written, for example folder:"
            " runs/serve_reward",
        )
        environment, plain = self.environment, EnvironmentConfig()
        require(
            not environment.has_sessions,
            "environment.session or environment.tools is set, but a reward server scores single"
            " responses; set environment.verifier instead",
        )
        require(
            environment.verifier != "none",
            "environment.verifier is 'none', so that every score would be 0; set a verifier, or"
            " leave environment out and set reward_model or judge",
        )
        for name in OF_TRAINING:
            require(
                getattr(environment, name) == getattr(plain, name),
                f"environment.{name} is set, but a reward server answers with scores; set it in the"
                " recipe of the training run that asks the server",
            )
        models = {"reward_model": self.reward_model, "judge": self.judge}
        for name, section in models.items():
            require(
                bool(section.model.path) or section == type(section)(),
                f"{name} has settings but no model.path, so that they would do nothing; set"
                f" {name}.model.path, or leave {name} out",
            )
        found = [f"{name}.model.path" for name, section in models.items() if section.model.path]
        found += ["environment"] if environment != plain else []
        require(
            len(found) <= 1,
            f"{' and '.join(found)} are both set, but one server serves one of them; start two, and"
            " name both in environment.rewards of the training recipe",
        )
