"""Settings of single verifiers, and the named verifiers of a mixture of data."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

from megarl.environments.code_config import CodeConfig
from megarl.schema import MOST_TOKENS, CodeText, Range, config, require

if TYPE_CHECKING:
    from megarl.environments.config import EnvironmentConfig

WEIGHT = Range(-1e6, 1e6)
"""Range of the weight of a reward function."""


@config
class RegexConfig:
    """The verifier `regex`: what a regular expression finds in the response is the answer."""

    pattern: str = ""
    r"""Regular expression with at most one group, in the syntax of the package `regex`, for example
    `Answer: (\d+)`. The group of its last match, or without a group the whole match, is compared
    with the reference answer as `exact_match` compares."""
    answer_is_pattern: bool = False
    """Used instead of `pattern`: each row's reference answer is the regular expression, and a
    response in which it is found is right."""
    ignore_case: bool = False
    """Take upper and lower case as equal, in the search and in the comparison."""
    search_limit_s: Annotated[float, Range(0.001, 3600.0)] = 1.0
    """Most seconds of one search; beyond it the response counts as a failure."""

    def __post_init__(self) -> None:
        require(
            not (self.pattern and self.answer_is_pattern),
            "regex.pattern is set beside regex.answer_is_pattern, with which each row's answer is"
            " the pattern; set one of the two",
        )


@config
class JsonSchemaConfig:
    """The verifier `json_schema`: the response is JSON that a JSON Schema allows."""

    schema: str = ""
    """The schema, as the text of its JSON."""
    schema_column: str = ""
    """Used instead of `schema`: column with the schema of each row, as an object or as the text of
    its JSON. A name with dots selects a nested column."""
    value: str = ""
    """If set, the value at this place of the response (`total.price`; numbers count the items of
    lists, from 0) must also equal the reference answer: numbers by value, texts to the letter."""

    def __post_init__(self) -> None:
        require(
            not (self.schema and self.schema_column),
            "json_schema.schema is set beside json_schema.schema_column; set one of the two",
        )


@config
class MathConfig:
    """The verifier `math`: the final expression equals the reference answer."""

    allow_unevaluated: bool = False
    """Take an expression that has still to be evaluated, such as `67 + 63` for 130, as an answer.
    Otherwise it is one only if the reference answer is such an expression itself."""


@config
class NumericConfig:
    """The verifier `numeric`: a number of the response is near the reference answer."""

    relative: Annotated[float, Range(0.0, 1.0)] = 1e-6
    """Largest difference, as a share of the reference answer's size."""
    absolute: Annotated[float, Range(0.0, 1e12)] = 0.0
    """Largest difference that is allowed for any reference answer; the larger of the two counts."""
    percent: Literal["unit", "hundredths"] = "unit"
    """What `50%` is: with `unit` 50, as for the verifier `math`; with `hundredths` 0.5."""


@config
class ChoiceConfig:
    """The verifier `choice`: the label of a multiple choice."""

    labels: str = "ABCDEFGHIJ"
    """The labels that there are: capital letters or digits, each once."""

    def __post_init__(self) -> None:
        require(
            len(set(self.labels)) == len(self.labels) >= 2
            and all(one.isascii() and (one.isupper() or one.isdigit()) for one in self.labels),
            f"choice.labels is '{self.labels}'; set at least two capital letters or digits, each"
            " once, such as 'ABCD'",
        )


@config
class FormatConfig:
    """The verifier `format`: whether the response has its tags."""

    tags: tuple[str, ...] = ("think", "answer")
    """Names of tags, in the order in which `<name>` and `</name>` must occur, each exactly once. If
    the prompt ends with the first opening tag, the response goes on behind it."""
    alone: bool = False
    """Allow nothing but spaces and line breaks outside of the tags."""

    def __post_init__(self) -> None:
        require(
            len(set(self.tags)) == len(self.tags) > 0
            and all(tag.replace("_", "").replace("-", "").isalnum() for tag in self.tags),
            f"format.tags is {list(self.tags)}; set one or several names of letters, digits, _ and"
            " -, each once, such as [think, answer]",
        )


@config
class LengthConfig:
    """The verifier `length`: a reward that depends on how long the response is."""

    kind: Literal["linear", "cosine", "l1_exact", "l1_max"] = "linear"
    """`linear`: 1 up to `shortest`, then falling to 0 at `longest`. `cosine`: the reward of
    arXiv:2502.03373. `l1_exact` and `l1_max`: the rewards of arXiv:2503.04697 for a target
    length."""
    unit: Literal["tokens", "characters"] = "tokens"
    """What is counted. Tokens are those that the model generated; a reward server, which receives
    text, counts characters only."""
    shortest: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Of `linear`: length up to which the reward is 1."""
    longest: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Of `linear` and `cosine`: length at which the falling or rising ends."""
    verifier: str = ""
    """Of all kinds but `linear`: the verifier of the house that says whether the response is
    correct, such as `math`."""
    correct_start: Annotated[float, Range(-1e6, 1e6)] = 2.0
    """Of `cosine`: reward of a correct response of length 0. The defaults of these settings are
    those of the paper."""
    correct_end: Annotated[float, Range(-1e6, 1e6)] = 1.0
    """Of `cosine`: reward that a correct response approaches at `longest`."""
    wrong_start: Annotated[float, Range(-1e6, 1e6)] = -10.0
    """Of `cosine`: reward of a wrong response of length 0."""
    wrong_end: Annotated[float, Range(-1e6, 1e6)] = 0.0
    """Of `cosine`: reward that a wrong response approaches at `longest`."""
    exceeded: Annotated[float, Range(-1e6, 1e6)] = -10.0
    """Of `cosine`: reward of any response of `longest` or more."""
    target: Annotated[int, Range(0, MOST_TOKENS)] = 0
    """Of `l1_exact` and `l1_max`: the length that responses should have."""
    target_column: str = ""
    """Used instead of `target`: column with the target length of each row."""
    alpha: Annotated[float, Range(0.0, 1e3)] = 3e-4
    """Of `l1_exact` and `l1_max`: reward for each token of difference to the target."""
    delta: Annotated[float, Range(0.0, 1.0)] = 0.5
    """Of `l1_max`: reward of a correct response of the target length."""

    def __post_init__(self) -> None:
        bounded, targeted = self.kind in ("linear", "cosine"), self.kind.startswith("l1")
        plain = {field.name: field.default for field in dataclasses.fields(type(self))}
        for uses, names in (
            (self.kind == "linear", ("shortest",)),
            (bounded, ("longest",)),
            (self.kind != "linear", ("verifier",)),
            (
                self.kind == "cosine",
                ("correct_start", "correct_end", "wrong_start", "wrong_end", "exceeded"),
            ),
            (targeted, ("target", "target_column", "alpha")),
            (self.kind == "l1_max", ("delta",)),
        ):
            for name in names:
                require(
                    uses or getattr(self, name) == plain[name],
                    f"length.{name} is {getattr(self, name)!r}, which length.kind '{self.kind}'"
                    " does not use; leave it out, or set another kind",
                )
        require(
            self.longest == 0 or self.longest > self.shortest,
            f"length.longest is {self.longest}; set it above length.shortest ({self.shortest})",
        )
        require(
            not (self.target and self.target_column),
            f"length.target is {self.target} beside length.target_column; set one of the two",
        )


@config
class NamedVerifierConfig:
    """A verifier, or several reward functions, for those prompts of a mixture that name it."""

    verifier: CodeText = "exact_match"
    """As `environment.verifier`."""
    rewards: Annotated[dict[CodeText, float], WEIGHT] = dataclasses.field(default_factory=dict)
    """As `environment.rewards`."""
    answer_after: str = ""
    """As `environment.answer_after`."""
    regex: RegexConfig = RegexConfig()
    json_schema: JsonSchemaConfig = JsonSchemaConfig()
    math: MathConfig = MathConfig()
    numeric: NumericConfig = NumericConfig()
    choice: ChoiceConfig = ChoiceConfig()
    format: FormatConfig = FormatConfig()
    length: LengthConfig = LengthConfig()
    code: CodeConfig = CodeConfig()


SECTIONS = ("regex", "json_schema", "math", "numeric", "choice", "format", "length", "code")
"""Names of verifiers whose settings are a section of the same name."""
MARKED = ("exact_match", "numeric", "choice")
"""Verifiers that read `answer_after`."""


def names_used(config: EnvironmentConfig) -> list[str]:
    """The verifiers and reward functions that a configuration uses, also the one that `length` asks
    whether a response is correct; none where a mixture scores.
    """
    if config.mixture:
        return []
    names = list(config.rewards) or [config.verifier]
    return [*names, config.length.verifier] if "length" in names else names


def compares_answers(config: EnvironmentConfig) -> list[str]:
    """The verifiers of the house that are used and compare with the reference answer."""
    needs_none = {"none", "format", "length", "code"} | (
        set() if config.json_schema.value else {"json_schema"}
    )
    return [name for name in names_used(config) if ":" not in name and name not in needs_none]


def check_settings(config: EnvironmentConfig) -> None:
    """Raise `ValueError` for settings of a verifier that is not used, and for a verifier without
    the settings that it needs.
    """
    names = names_used(config)
    for section in SECTIONS:
        settings = getattr(config, section)
        require(
            section in names or settings == type(settings)(),
            f"{section} has settings, but the verifier '{section}' is not used"
            f"{_instead(config, names)}; leave them out, or use the verifier '{section}'",
        )
    for name, is_set, fix in (
        (
            "regex",
            config.regex.pattern or config.regex.answer_is_pattern,
            "regex.pattern is empty; set a regular expression with one group around the answer, or"
            " regex.answer_is_pattern",
        ),
        (
            "json_schema",
            config.json_schema.schema or config.json_schema.schema_column,
            "json_schema.schema and json_schema.schema_column are empty; set one of the two",
        ),
    ):
        require(name not in names or bool(is_set), fix)
    length = config.length
    if "length" not in names:
        return
    require(
        length.longest > 0 or length.kind.startswith("l1"),
        "length.longest is 0; set the length at which the reward of length stops to change",
    )
    require(
        bool(length.target or length.target_column) or not length.kind.startswith("l1"),
        f"length.kind is '{length.kind}', but length.target and length.target_column are not set;"
        " set one of the two",
    )
    require(
        length.kind == "linear" or length.verifier not in ("", "none", "length", "format"),
        f"length.kind is '{length.kind}', which needs to know whether a response is correct, but"
        f" length.verifier is '{length.verifier}'; set a verifier that compares answers, such as"
        " math",
    )


def _instead(config: EnvironmentConfig, names: list[str]) -> str:
    if config.mixture:
        return " outside of environment.mixture (settings belong to its entries)"
    return f" ({', '.join(filter(None, names))} is)" if names else " (a session scores)"
