"""Settings of those built-in verifiers that have some, and of the entries of
`environment.mixture`.
"""

import warnings
from typing import Annotated, Literal

from megarl.settings.code import CodeConfig
from megarl.settings.limits import MOST_TOKENS
from megarl.settings.recipe_paths import CodeText
from megarl.settings.schema import Config, Excludes, Of, Range, require, section

WEIGHT = Range(-1e6, 1e6)
"""Range of the weight of a reward function."""


class RegexConfig(Config):
    """The verifier `regex`: a response is right if what a regular expression finds in it equals the
    reference answer.
    """

    pattern: str = ""
    r"""Regular expression with at most one group, in the syntax of the package `regex`, for example
    `Answer: (\d+)`. The group of its last match, or without a group the whole match, is compared
    with the reference answer as `exact_match` compares."""
    answer_is_pattern: Annotated[bool, Excludes("pattern")] = False
    """Used instead of `pattern`: each row's reference answer is the regular expression, and a
    response in which it is found is right."""
    ignore_case: bool = False
    """Take upper and lower case as equal, in the search and in the comparison."""
    search_limit_s: Annotated[float, Range(0.001, 3600.0)] = 1.0
    """Most seconds of one search; beyond it the response counts as a failure."""


warnings.filterwarnings("ignore", 'Field name "schema"')  # BaseModel has a method of that name


class JsonSchemaConfig(Config):
    """The verifier `json_schema`: a response is right if it is JSON that a JSON Schema allows."""

    schema: str = ""
    """The schema, as the text of its JSON."""
    schema_column: Annotated[str, Excludes("schema")] = ""
    """Used instead of `schema`: column with the schema of each row, as an object or as the text of
    its JSON. A name with dots selects a nested column."""
    value: str = ""
    """If set, the value at this dotted path of the response's JSON (`total.price`; numbers count
    the items of lists, from 0) must also equal the reference answer: numbers by value, texts
    exactly."""


class MathConfig(Config):
    """The verifier `math`: a response is right if its boxed or final expression equals the
    reference answer, by exact arithmetic or at random points.
    """

    allow_unevaluated: bool = False
    """Take an expression that has still to be evaluated, such as `67 + 63` for 130, as an answer.
    Otherwise it is one only if the reference answer is such an expression itself."""


class NumericConfig(Config):
    """The verifier `numeric`: a response is right if its last number is within a tolerance of the
    reference answer.
    """

    relative: Annotated[float, Range(0.0, 1.0)] = 1e-6
    """Largest allowed difference, relative to the size of the reference answer: 0.01 is one per
    cent."""
    absolute: Annotated[float, Range(0.0, 1e12)] = 0.0
    """Largest allowed difference for any reference answer; the larger of `relative` and `absolute`
    counts."""
    percent: Literal["unit", "hundredths"] = "unit"
    """What `50%` stands for: with `unit` 50, as for the verifier `math`; with `hundredths` 0.5."""


class ChoiceConfig(Config):
    """The verifier `choice`: a response is right if it names the right label of a multiple
    choice.
    """

    labels: str = "ABCDEFGHIJ"
    """The labels that there are: capital letters or digits, each once."""

    def check(self) -> None:
        require(
            len(set(self.labels)) == len(self.labels) >= 2
            and all(one.isascii() and (one.isupper() or one.isdigit()) for one in self.labels),
            f"ChoiceConfig.labels is '{self.labels}'; set at least two capital letters or digits,"
            " each once, such as 'ABCD'",
        )


class FormatConfig(Config):
    """The verifier `format`: a response is right if it has the tags that are set, each once and in
    order, such as `<think>...</think><answer>...</answer>`; its content does not matter.
    """

    tags: tuple[str, ...] = ("think", "answer")
    """Names of tags, in the order in which `<name>` and `</name>` must occur, each exactly once. If
    the prompt ends with the first opening tag, the response goes on behind it."""
    alone: bool = False
    """Allow nothing but spaces and line breaks outside of the tags."""

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
    """The verifier `length`: a reward that depends on how many tokens or characters a response has
    and, but for `linear`, on whether it is correct.
    """

    kind: Literal["linear", "cosine", "l1_exact", "l1_max"] = "linear"
    """`linear`: 1 up to `shortest`, then falling to 0 at `longest`. `cosine`: the reward of
    arXiv:2502.03373. `l1_exact` and `l1_max`: the rewards of arXiv:2503.04697 for a target
    length."""
    unit: Literal["tokens", "characters"] = "tokens"
    """What is counted. Tokens are those that the model generated; a reward server, which receives
    text, counts characters only."""
    shortest: Annotated[int, Range(0, MOST_TOKENS), Of("kind", "linear")] = 0
    """Of `linear`: length up to which the reward is 1."""
    longest: Annotated[int, Range(0, MOST_TOKENS), Of("kind", "linear", "cosine")] = 0
    """Of `linear` and `cosine`: length at which the falling or rising ends."""
    verifier: Annotated[str, Of("kind", "cosine", "l1_exact", "l1_max")] = ""
    """Of all kinds but `linear`: the built-in verifier that says whether the response is correct,
    such as `math`."""
    correct_start: CosineReward = 2.0
    """Of `cosine`: reward of a correct response of length 0. The defaults of these settings are
    those of the paper."""
    correct_end: CosineReward = 1.0
    """Of `cosine`: reward that a correct response approaches at `longest`."""
    wrong_start: CosineReward = -10.0
    """Of `cosine`: reward of a wrong response of length 0."""
    wrong_end: CosineReward = 0.0
    """Of `cosine`: reward that a wrong response approaches at `longest`."""
    exceeded: CosineReward = -10.0
    """Of `cosine`: reward of any response of `longest` or more."""
    target: Annotated[int, Range(0, MOST_TOKENS), TARGETED] = 0
    """Of `l1_exact` and `l1_max`: the length that responses should have."""
    target_column: Annotated[str, TARGETED, Excludes("target")] = ""
    """Used instead of `target`: column with the target length of each row."""
    alpha: Annotated[float, Range(0.0, 1e3), TARGETED] = 3e-4
    """Of `l1_exact` and `l1_max`: change of the reward for each token of difference to the
    target."""
    delta: Annotated[float, Range(0.0, 1.0), Of("kind", "l1_max")] = 0.5
    """Of `l1_max`: reward of a correct response of the target length."""

    def check(self) -> None:
        require(
            self.longest == 0 or self.longest > self.shortest,
            f"LengthConfig.longest is {self.longest}; set it above shortest ({self.shortest})",
        )


class NamedVerifierConfig(Config):
    """One entry of `environment.mixture`, the table of verifiers for a mixture of data: a verifier,
    or several weighted reward functions, that scores the responses to those prompts which name this
    entry.
    """

    verifier: CodeText = "exact_match"
    """A built-in verifier, `path/to/file.py:function`, or the address of a reward server."""
    rewards: Annotated[dict[CodeText, float], WEIGHT] = {}
    """{reward function: weight}, used instead of `verifier`: the reward is the weighted sum."""
    answer_after: str = ""
    """`exact_match`, `numeric` and `choice` read only the text after the last occurrence of this
    marker; if empty, the whole response."""
    regex: RegexConfig = section(RegexConfig)
    json_schema: JsonSchemaConfig = section(JsonSchemaConfig)
    math: MathConfig = section(MathConfig)
    numeric: NumericConfig = section(NumericConfig)
    choice: ChoiceConfig = section(ChoiceConfig)
    format: FormatConfig = section(FormatConfig)
    length: LengthConfig = section(LengthConfig)
    code: CodeConfig = section(CodeConfig)
