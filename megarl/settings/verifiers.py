"""Settings of built-in verifiers, and the entries of `environment.mixture`."""

import warnings
from typing import Annotated, Literal

from megarl.settings.code import CodeConfig
from megarl.settings.limits import MOST_TOKENS
from megarl.settings.recipe_paths import CodeText
from megarl.settings.schema import Config, Excludes, Of, Range, require, section

WEIGHT = Range(-1e6, 1e6)
"""Range of a reward function's weight."""


class RegexConfig(Config):
    """The verifier `regex`: right if what a regular expression finds is the reference answer."""

    pattern: str = ""
    r"""Regular expression with at most one group, in the syntax of the package `regex`, such as
    `Answer: (\d+)`. The group of its last match, or else the match, is compared as by
    `exact_match`."""
    answer_is_pattern: Annotated[bool, Excludes("pattern")] = False
    """Instead of `pattern`: the reference answer is the regular expression, and a response in which
    it is found is right."""
    ignore_case: bool = False
    """Upper and lower case are equal, in search and comparison."""
    search_limit_s: Annotated[float, Range(0.001, 3600.0)] = 1.0
    """Most seconds of one search; beyond it the response failed."""


warnings.filterwarnings("ignore", 'Field name "schema"')  # BaseModel has a method of that name


class JsonSchemaConfig(Config):
    """The verifier `json_schema`: right if the response is JSON that a JSON Schema allows."""

    schema: str = ""
    """The schema, as JSON text."""
    schema_column: Annotated[str, Excludes("schema")] = ""
    """Instead of `schema`: column with each row's schema, as an object or JSON text; dots select a
    nested column."""
    value: str = ""
    """If set, the value at this dotted path (`total.price`; numbers count items from 0) must equal
    the reference answer: numbers by value, texts exactly."""


class MathConfig(Config):
    """The verifier `math`: right if the boxed or final expression equals the reference answer, by
    exact arithmetic or at random points.
    """

    allow_unevaluated: bool = False
    """An expression still to be evaluated, such as `67 + 63` for 130, is an answer. Otherwise only
    if the reference answer is one itself."""


class NumericConfig(Config):
    """The verifier `numeric`: right if the last number is within a tolerance of the reference
    answer.
    """

    relative: Annotated[float, Range(0.0, 1.0)] = 1e-6
    """Allowed difference relative to the reference answer: 0.01 is one per cent."""
    absolute: Annotated[float, Range(0.0, 1e12)] = 0.0
    """Allowed difference; the larger of `relative` and `absolute` counts."""
    percent: Literal["unit", "hundredths"] = "unit"
    """What `50%` stands for: with `unit` 50, as for `math`; with `hundredths` 0.5."""


class ChoiceConfig(Config):
    """The verifier `choice`: right if the response names the right label."""

    labels: str = "ABCDEFGHIJ"
    """The labels: capital letters or digits, each once."""

    def check(self) -> None:
        require(
            len(set(self.labels)) == len(self.labels) >= 2
            and all(
                label.isascii() and (label.isupper() or label.isdigit()) for label in self.labels
            ),
            f"ChoiceConfig.labels is '{self.labels}'; set at least two capital letters or digits,"
            " each once, such as 'ABCD'",
        )


class FormatConfig(Config):
    """The verifier `format`: right if the tags are there, each once and in order, such as
    `<think>...</think><answer>...</answer>`, with any content.
    """

    tags: tuple[str, ...] = ("think", "answer")
    """Names of tags, in order. If the prompt ends with the first opening tag, the response goes on
    behind it."""
    alone: bool = False
    """Allow only white space outside of the tags."""

    def check(self) -> None:
        require(
            len(set(self.tags)) == len(self.tags) > 0
            and all(tag.replace("_", "").replace("-", "").isalnum() for tag in self.tags),
            f"FormatConfig.tags is {list(self.tags)}; set one or several names of letters,"
            " digits, _ and -, each once, such as [think, answer]",
        )


CosineReward = Annotated[float, Range(-1e6, 1e6), Of("kind", "cosine")]
TARGETED = Of("kind", "l1_exact", "l1_max")


class LengthConfig(Config):
    """The verifier `length`: a reward by the number of tokens or characters and, but for `linear`,
    by whether the response is correct.
    """

    kind: Literal["linear", "cosine", "l1_exact", "l1_max"] = "linear"
    """`linear`: 1 up to `shortest`, then falling to 0 at `longest`. `cosine`: the reward of
    arXiv:2502.03373. `l1_exact` and `l1_max`: the rewards of arXiv:2503.04697 for a target
    length."""
    unit: Literal["tokens", "characters"] = "tokens"
    """What is counted: generated tokens, or characters, the only unit of a reward server."""
    shortest: Annotated[int, Range(0, MOST_TOKENS), Of("kind", "linear")] = 0
    """Of `linear`: length up to which the reward is 1."""
    longest: Annotated[int, Range(0, MOST_TOKENS), Of("kind", "linear", "cosine")] = 0
    """Of `linear` and `cosine`: length at which the fall or rise ends."""
    verifier: Annotated[str, Of("kind", "cosine", "l1_exact", "l1_max")] = ""
    """Of all kinds but `linear`: the built-in verifier of correctness, such as `math`."""
    correct_start: CosineReward = 2.0
    """Of `cosine`: reward of a correct response of length 0. Defaults are the paper's."""
    correct_end: CosineReward = 1.0
    """Of `cosine`: that of a correct response near `longest`."""
    wrong_start: CosineReward = -10.0
    """Of `cosine`: that of a wrong response of length 0."""
    wrong_end: CosineReward = 0.0
    """Of `cosine`: that of a wrong response near `longest`."""
    exceeded: CosineReward = -10.0
    """Of `cosine`: that of any response of `longest` or more."""
    target: Annotated[int, Range(0, MOST_TOKENS), TARGETED] = 0
    """Of `l1_exact` and `l1_max`: the length to aim at."""
    target_column: Annotated[str, TARGETED, Excludes("target")] = ""
    """Instead of `target`: column with each row's target length."""
    alpha: Annotated[float, Range(0.0, 1e3), TARGETED] = 3e-4
    """Of `l1_exact` and `l1_max`: change of the reward for each token off the target."""
    delta: Annotated[float, Range(0.0, 1.0), Of("kind", "l1_max")] = 0.5
    """Of `l1_max`: reward of a correct response of the target length."""

    def check(self) -> None:
        require(
            self.longest == 0 or self.longest > self.shortest,
            f"LengthConfig.longest is {self.longest}; set it above shortest ({self.shortest})",
        )


class NamedVerifierConfig(Config):
    """An entry of `environment.mixture`: what scores the responses to prompts that name it."""

    verifier: CodeText = "exact_match"
    """A built-in verifier, `path/to/file.py:function`, or the address of a reward server."""
    rewards: Annotated[dict[CodeText, float], WEIGHT] = {}
    """{reward function: weight}, instead of `verifier`: the reward is the weighted sum."""
    answer_after: str = ""
    """`exact_match`, `numeric`, `choice` and `reasoning_gym` read only what follows the last
    occurrence of this marker; empty: the whole response."""
    regex: RegexConfig = section(RegexConfig)
    json_schema: JsonSchemaConfig = section(JsonSchemaConfig)
    math: MathConfig = section(MathConfig)
    numeric: NumericConfig = section(NumericConfig)
    choice: ChoiceConfig = section(ChoiceConfig)
    format: FormatConfig = section(FormatConfig)
    length: LengthConfig = section(LengthConfig)
    code: CodeConfig = section(CodeConfig)
