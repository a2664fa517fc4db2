"""The verifiers `regex`, `json_schema`, `numeric`, `choice`, `format` and `length`."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.environments import ask, run, verdicts
from support.rollouts import segment
from support.tiny import write_tokenizer

from megarl.apps.verifiers.numeric import numbers
from megarl.data.tokenizer import load_tokenizer
from megarl.environments.codec import Codec
from megarl.environments.judging import Judge
from megarl.environments.response_text import Counted
from megarl.environments.scores import Outcome
from megarl.environments.scoring import Environment
from megarl.environments.verifiers import load_verifier
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.verifiers import (
    ChoiceConfig,
    FormatConfig,
    JsonSchemaConfig,
    LengthConfig,
    NamedVerifierConfig,
    NumericConfig,
    RegexConfig,
)
from megarl.types import Prompt, Segment, Verdict


def house(name: str, settings: Any = None, **others: Any) -> EnvironmentConfig:
    own = {} if settings is None else {name: settings}
    return EnvironmentConfig(verifier=name, **own, **others)


# regex


@pytest.mark.parametrize(("settings", "answer", "response", "right"), [
    (RegexConfig(pattern=r"Answer: (\S+)"), "7", "Answer: 8. Answer: 7", True),
    (RegexConfig(pattern=r"Answer: (\S+)"), "8", "Answer: 8. Answer: 7", False),
    (RegexConfig(pattern=r"Answer: (\S+)"), "7", "answer: 7", False),
    (RegexConfig(pattern=r"Answer: (\S+)", ignore_case=True), "X", "answer: x", True),
    (RegexConfig(pattern=r"\d+"), "12", "5 then 12", True),
    (RegexConfig(pattern=r"[\d,]+"), "1234", "1,234", True),
    (RegexConfig(pattern=r"(a)|b"), "b", "b", False),  # the group took no part
    (RegexConfig(answer_is_pattern=True), r"colou?r (is|was) red", "The color was red", True),
    (RegexConfig(answer_is_pattern=True), r"colou?r", "The colr", False),
])  # fmt: skip
def test_regex(settings: RegexConfig, answer: str, response: str, right: bool) -> None:
    assert ask(house("regex", settings), answer, response) == float(right)


def test_a_catastrophic_pattern_ends() -> None:
    config = house("regex", RegexConfig(pattern=r"(?:a|aa)+b", search_limit_s=0.2))
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"search_limit_s = 0\.2"):
        ask(config, "b", "a" * 5000)
    assert time.monotonic() - begun < 60
    failed, right = verdicts(
        house("regex", RegexConfig(pattern=r"(?:a|aa)+7|7", search_limit_s=0.2)), "a" * 5000, "7"
    )
    assert failed.failure == "error" and "search_limit_s" in failed.detail and right.correct


@pytest.mark.parametrize(("pattern", "says"), [("(", "no regular expression"), ("(a)(b)", "2 groups")])  # fmt: skip
def test_a_wrong_pattern_is_said_before_a_run(pattern: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_verifier(house("regex", RegexConfig(pattern=pattern)))


def test_an_answer_that_is_no_pattern_is_said() -> None:
    with pytest.raises(ValueError, match=r"the answer of row 4 .* no regular expression"):
        ask(house("regex", RegexConfig(answer_is_pattern=True)), "(", "x")


# json_schema

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "total": {"type": "number", "minimum": 0}},
        "required": ["total"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(("response", "right"), [
    ('{"total": 5}', True),
    ('  {"total": 5, "name": "a"}\n', True),
    ('{"total": -5}', False),
    ('{"name": "a"}', False),
    ('{"total": 5, "other": 1}', False),
    ('I think:\n```json\n{"total": 1}\n```\nno:\n```json\n{"total": 2}\n```\nDone.', True),
    ('```json\n{"total": 1}\n```\n```json\n{"total": "x"}\n```', False),
    ('Here: {"total": 5}', False),
    ('{"total": NaN}', False),
    ("", False),
    ("[" * 100_000, False),
    ('{"total": ' + "9" * 100_000 + "}", False),
])  # fmt: skip
def test_json_schema(response: str, right: bool) -> None:
    config = house("json_schema", JsonSchemaConfig(schema=SCHEMA))
    assert ask(config, "", response) == float(right)


@pytest.mark.parametrize(("place", "answer", "response", "right"), [
    ("total", "5", '{"total": 5.0}', True),
    ("total", "1,234", '{"total": 1234}', True),
    ("total", "5", '{"total": "5"}', True),
    ("items.1.name", "pen", '{"items": [{}, {"name": " pen "}]}', True),
    ("items.2.name", "pen", '{"items": [{}, {"name": "pen"}]}', False),
    ("ok", "true", '{"ok": true}', True),
    ("ok", "1", '{"ok": true}', False),
    ("list", "[1, 2]", '{"list": [1, 2]}', True),
    ("total", "null", '{"other": 5}', False),
    ("total", "1e999999999", '{"total": 5}', False),
    ("list", "[1]", '{"list": [true]}', False),
    ("list", '{"a": [0, 2]}', '{"list": {"a": [false, 2.0]}}', False),
    ("list", '{"a": [0, 2]}', '{"list": {"a": [0.0, 2]}}', True),
])  # fmt: skip
def test_a_value_of_the_json(place: str, answer: str, response: str, right: bool) -> None:
    config = house("json_schema", JsonSchemaConfig(schema="{}", value=place))
    assert ask(config, answer, response) == float(right)


def test_a_number_beyond_all_bounds_is_wrong() -> None:
    schema = json.dumps({"type": "number", "multipleOf": 0.01})
    config = house("json_schema", JsonSchemaConfig(schema=schema))
    assert ask(config, "", "1e400") == 0.0 and ask(config, "", "2") == 1.0


def test_many_fences_are_read_in_time() -> None:
    config = house("json_schema", JsonSchemaConfig(schema='{"type": "integer"}'))
    begun = time.process_time()
    assert ask(config, "", "```json\n" * 50_000) == 0.0
    assert ask(config, "", "```json\n5\n```\n" * 50_000 + "```json\n") == 1.0
    assert time.process_time() - begun < 5
    for closed in (
        "```json\r\n5\r\n```\r\n",
        "\t``` json \n5\n ``` ",
        "```json\n5\n```\n```\n6\n```",
    ):
        assert ask(config, "", closed) == 1.0
    for unread in ("```json\n5\n``", "```json\n```json\n5\n```", "```json\n```\n5"):
        assert ask(config, "", unread) == 0.0


def test_a_schema_of_each_row() -> None:
    config = house("json_schema", JsonSchemaConfig(schema_column="meta.schema"))
    for schema in ({"type": "integer"}, '{"type": "integer"}'):
        assert ask(config, "", "5", meta={"schema": schema}) == 1.0
        assert ask(config, "", '"5"', meta={"schema": schema}) == 0.0
    with pytest.raises(ValueError, match=r"no column 'meta.schema'; set json_schema.schema_column"):
        ask(config, "", "5", other=1)
    with pytest.raises(ValueError, match=r"row 4, column 'meta.schema' is no JSON Schema"):
        ask(config, "", "5", meta={"schema": {"type": "no such"}})


def test_a_schema_fetches_nothing() -> None:
    """An address in a schema is an error, not a request to the server that is there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/s"
        config = house("json_schema", JsonSchemaConfig(schema=json.dumps({"$ref": address})))
        with pytest.raises(ValueError, match=f"refers to '{address}', which is not in it"):
            ask(config, "", "5")
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("schema", [
    {"$ref": "#/nothing"},
    {"allOf": [{"not": {"$ref": "#/$defs/b"}}], "$defs": {"a": {}}},
    {"$schema": "http://json-schema.org/draft-07/schema#", "not": {"$ref": "other.json"}},
    {"$dynamicRef": "#nothing"},
])  # fmt: skip
def test_a_schema_that_refers_to_nothing_is_an_error(schema: Any) -> None:
    config = house("json_schema", JsonSchemaConfig(schema=json.dumps(schema)))
    with pytest.raises(
        ValueError, match=r"json_schema\.schema refers to '.*', which is not in it"
    ) as raised:
        ask(config, "", "5")
    assert "\n" not in str(raised.value)
    column = house("json_schema", JsonSchemaConfig(schema_column="s"))
    with pytest.raises(ValueError, match=r"row 4, column 's' refers to"):
        ask(column, "", "5", s=schema)


@pytest.mark.parametrize("schema", [
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#"}}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$anchor": "x", "type": "integer"}}},
    {"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "integer"}}},
    {"$id": "http://a/b", "$ref": "c", "$defs": {"a": {"$id": "c", "type": "integer"}}},
    {"type": "integer", "properties": {"$ref": {"type": "string"}}},
    {"type": "integer", "default": {"$ref": "#/nothing"}, "enum": [5, {"$ref": "#/nothing"}]},
    {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a",
     "definitions": {"a": {"type": "integer"}}},
])  # fmt: skip
def test_a_schema_may_refer_to_itself(schema: Any) -> None:
    config = house("json_schema", JsonSchemaConfig(schema=json.dumps(schema)))
    assert ask(config, "", "5") == 1.0 and ask(config, "", '"5"') == 0.0


@pytest.mark.parametrize("schema", ["{", "5", '{"type": "no such"}'])
def test_a_wrong_schema_is_said_before_a_run(schema: str) -> None:
    with pytest.raises(ValueError, match=r"json_schema.schema is no JSON Schema"):
        load_verifier(house("json_schema", JsonSchemaConfig(schema=schema)))


# numeric


@pytest.mark.parametrize(("text", "values"), [
    ("1,234.50", ["1234.5"]),
    ("-$5 and $-5", ["-5", "-5"]),
    ("1.5e3 2E-2", ["1500", "0.02"]),
    ("1.5 \\times 10^{3}, 2 x 10^-2", ["1500", "0.02"]),
    ("50%", ["50"]),
    ("3/4", ["3/4"]),
    ("2 2/3, -1 1/2, 2\\frac{2}{3}", ["8/3", "-3/2", "8/3"]),
    ("-\\frac{3}{4}", ["-3/4"]),
    (".5", ["0.5"]),
    ("3-4", ["3", "4"]),
    ("x2 and 3rd", ["3"]),
    ("1/0", [None]),
    ("9" * 500, [None]),
    ("\u22125", ["-5"]),
    ("1,23", ["1", "23"]),
    ("1e999", ["1"]),
    ("25 m^2", ["25"]),
    ("5 s^-1 or 6 s^{-12}", ["5", "6"]),
    ("4 m^ 2, 4 m ^ 2", ["4", "4"]),
    ("10^3, 10^{-2}", ["1000", "0.01"]),
    ("-2^10", ["-1024"]),
    ("1,000^2 and 0.5 ^ 2", ["1000000", "0.25"]),
    ("0^-1 9^999", [None, None]),
    ("45^\\circ", ["45"]),
    ("50%^2 **5**", ["50", "5"]),
])  # fmt: skip
def test_numbers_in_text(text: str, values: list[str | None]) -> None:
    if text == "1e999":  # three digits of exponent are read, more are not
        assert next(numbers(text)) == Fraction(10) ** 999
        return
    assert list(numbers(text)) == [None if one is None else Fraction(one) for one in values]


@given(st.decimals(-(10**9), 10**9, places=3))
def test_any_number_is_read_as_python_writes_it(value: Any) -> None:
    for form in ("{}", "{:,}", "it is {}.", "**{}**", "= {} apples"):
        assert next(numbers(form.format(value))) == Fraction(value)


@pytest.mark.parametrize(("settings", "answer", "response", "right"), [
    (NumericConfig(), "3.14", "5 steps give 3.14", True),
    (NumericConfig(), "3.14", "3.14 after 5", False),
    (NumericConfig(relative=0.01), "3.14", "3.1415", True),
    (NumericConfig(relative=0.01), "3.14", "3.19", False),
    (NumericConfig(absolute=0.5), "0", "0.5", True),
    (NumericConfig(absolute=0.5), "0", "-0.51", False),
    (NumericConfig(relative=0.0), "0.1", "1/10", True),
    (NumericConfig(), "50%", "0.5", False),
    (NumericConfig(percent="hundredths"), "50%", "0.5", True),
    (NumericConfig(), "6.02e23", "6.02 \\times 10^{23}", True),
    (NumericConfig(), "5", "no number", False),
    (NumericConfig(), "5", "5" * 1_000_000, False),
    (NumericConfig(), "5", "1," * 500_000 + " 5", True),
])  # fmt: skip
def test_numeric(settings: NumericConfig, answer: str, response: str, right: bool) -> None:
    begun = time.monotonic()
    assert ask(house("numeric", settings), answer, response) == float(right)
    assert time.monotonic() - begun < 60


def test_numeric_behind_a_marker_reads_the_first_number() -> None:
    config = house("numeric", answer_after="####")
    assert ask(config, "5", "1 #### 5 of 7") == 1.0
    assert ask(config, "7", "1 #### 5 of 7") == 0.0
    assert ask(config, "5", "5") == 0.0
    with pytest.raises(ValueError, match="is not one number"):
        ask(config, "5 or 6", "5")


# choice

CHOSEN = [
    "The answer is (B).", "B", "(B)", "B.", "\\boxed{B}", "\\boxed{\\text{B}}", "\\boxed{(B)}",
    "Answer: B", "**Answer:** B", "answer: **B**", "The correct answer is B because A is wrong.",
    "Let me see. A is wrong.\nSo the answer is **(B)**.", "B. Paris", "**B) Paris**",
    "The correct option is B", "Final answer: B.", "the answer is (b)", "\\boxed{b}",
    "The answer is A. No, wait: the answer is B.", "I think $\\boxed{A}$, rather $\\boxed{B}$",
    "The answer must be B", "Answer: option B", "The answer is therefore B.",
    "Reasons, reasons.\n\nB", "The answer is $B$.", "The answer is: \\textbf{B}",
    "The best choice is [B]",
]  # fmt: skip
NOT_CHOSEN = [
    "", "The answer is A or B.", "The answer is A and B", "Answer: A/B", "\\boxed{A, B}",
    "\\boxed{A} or \\boxed{C}", "The answer is (A) or (B)", "B or C", "A. Rome\nB. Paris",
    "The answer is C.", "Because B is true, C.", "The answer is Berlin", "Bees", "b",
    "The answer is not known", "Both B and C are right. The answer is C", "\\boxed{}", "\\boxed{",
    "The answer is B or C", "Answer: B, C", "Answer: B & C", "The answer is Z",
]  # fmt: skip


@pytest.mark.parametrize("response", CHOSEN)
def test_a_label_that_is_chosen(response: str) -> None:
    assert ask(house("choice"), "B", response) == 1.0
    assert ask(house("choice"), "A", response) == 0.0


@pytest.mark.parametrize("response", NOT_CHOSEN)
def test_a_label_that_is_not_chosen(response: str) -> None:
    assert ask(house("choice"), "B", response) == 0.0


def test_words_that_are_labels() -> None:
    assert ask(house("choice"), "A", "The answer is A because it is.") == 1.0
    assert ask(house("choice"), "A", "The answer is A") == 1.0
    assert ask(house("choice"), "A", "The answer is a good one") == 0.0
    assert ask(house("choice"), "A", "The answer is A good one") == 0.0


def test_labels_of_ones_own_and_a_marker() -> None:
    digits = house("choice", ChoiceConfig(labels="1234"), answer_after="####")
    assert ask(digits, "2", "3 words #### 2") == 1.0
    assert ask(digits, "2", "#### 3") == ask(digits, "2", "2") == 0.0
    with pytest.raises(ValueError, match=r"none of choice.labels 'AB'"):
        ask(house("choice", ChoiceConfig(labels="AB")), "C", "C")
    begun = time.monotonic()
    for text in ("answer is " * 100_000, "(" * 10**6, "\\boxed{" * 10**5, "B\n" * 10**5 + "C"):
        assert ask(house("choice"), "B", text) == 0.0
    assert time.monotonic() - begun < 60


# format


@pytest.mark.parametrize(("response", "loose", "alone"), [
    ("<think>a</think><answer>b</answer>", 1, 1),
    (" <think></think>\n<answer>b</answer>\n", 1, 1),
    ("x<think>a</think> <answer>b</answer>", 1, 0),
    ("<think>a</think> so <answer>b</answer>", 1, 0),
    ("<think>a</think><answer>b</answer> bye", 1, 0),
    ("<answer>b</answer><think>a</think>", 0, 0),
    ("<think>a</think><answer>b", 0, 0),
    ("<think>a</think><think>a</think><answer>b</answer>", 0, 0),
    ("<think>a<answer>b</answer></think>", 0, 0),
    ("<Think>a</Think><answer>b</answer>", 0, 0),
    ("", 0, 0),
])  # fmt: skip
def test_format(response: str, loose: int, alone: int) -> None:
    assert ask(house("format"), "", response) == loose
    assert ask(house("format", FormatConfig(alone=True)), "", response) == alone


def test_the_template_may_write_the_first_tag() -> None:
    rest = "a</think><answer>b</answer>"
    assert ask(house("format"), "", rest) == 0.0
    assert ask(house("format"), "", rest, text="user: 1\nassistant: <think>\n") == 1.0
    assert ask(house("format"), "", f"<think>{rest}", text="<think>") == 0.0


# length


def counted(text: str, number: int) -> Counted:
    return Counted.of(text, number)


@pytest.mark.parametrize(("tokens", "reward"), [(0, 1.0), (10, 1.0), (15, 0.5), (20, 0.0), (99, 0.0)])  # fmt: skip
def test_a_linear_reward(tokens: int, reward: float) -> None:
    config = house("length", LengthConfig(shortest=10, longest=20))
    assert ask(config, "", counted("x", tokens)) == reward


@pytest.mark.parametrize(("response", "tokens", "reward"), [
    ("7", 0, 2.0), ("7", 50, 1.5), ("8", 0, -10.0), ("8", 50, -5.0), ("7", 100, -10.0),
    ("8", 150, -10.0), ("7", 25, 1.0 + (1 + math.cos(math.pi / 4)) / 2),
])  # fmt: skip
def test_the_cosine_reward(response: str, tokens: int, reward: float) -> None:
    """With the paper's defaults: short right responses are best, short wrong ones are worst."""
    config = house("length", LengthConfig(kind="cosine", longest=100, verifier="exact_match"))
    found = ask(config, "7", counted(response, tokens))
    assert found["reward"] == pytest.approx(reward) and found["correct"] is (response == "7")


@pytest.mark.parametrize(("kind", "response", "tokens", "reward"), [
    ("l1_exact", "7", 1000, 1.0), ("l1_exact", "7", 1500, 0.85), ("l1_exact", "8", 500, -0.15),
    ("l1_max", "7", 1000, 0.5), ("l1_max", "7", 0, 0.8), ("l1_max", "7", 9000, 0.0),
    ("l1_max", "8", 0, 0.0),
])  # fmt: skip
def test_the_rewards_of_a_target_length(
    kind: Any, response: str, tokens: int, reward: float
) -> None:
    said, settings = counted(response, tokens), {"kind": kind, "verifier": "exact_match"}
    fixed = house("length", LengthConfig(target=1000, **settings))
    column = house("length", LengthConfig(target_column="n.gold", **settings))
    for config in (fixed, column):
        assert ask(config, "7", said, n={"gold": 1000})["reward"] == pytest.approx(reward)
    with pytest.raises(ValueError, match=r"target length 'x'"):
        ask(column, "7", said, n={"gold": "x"})


async def judged(config: EnvironmentConfig, response: str) -> Outcome:
    """The outcome of a text without a number of tokens, as a reward server asks for it."""
    judge = Judge(config, None, None)
    try:
        return await judge.judge(Prompt(0, "", [1], "7"), response)
    finally:
        await judge.close()


def test_tokens_are_those_of_the_engine(tmp_path: Any) -> None:
    """A worker process counts the token ids that it is sent; text alone has no tokens."""
    write_tokenizer(tmp_path)
    codec = Codec.of(load_tokenizer(str(tmp_path)))
    settings = LengthConfig(shortest=0, longest=10)
    config = EnvironmentConfig(rewards={"exact_match": 1.0, "length": 0.5}, length=settings)

    end = 1  # end of sequence: a token without text
    ids = np.array([*codec.encode("7"), end], np.int32)

    async def score(environment: Environment) -> list[Verdict]:
        prompt, long = Prompt(0, "", [1], "7"), np.repeat(ids, 2)
        return [await environment.score(prompt, one, len(one), False) for one in (ids, long)]

    short, long = run(config, score, codec=codec)
    assert short.reward == pytest.approx(1.0 + 0.5 * 0.8) and short.correct
    assert long.reward == pytest.approx(0.5 * 0.6) and not long.correct
    assert long.metrics == {"reward/exact_match": 0.0, "reward/length": pytest.approx(0.6)}
    outcome = asyncio.run(asyncio.wait_for(judged(house("length", settings), "7"), 60))
    assert outcome.failure == "error" and "length.unit to 'characters'" in outcome.detail
    (text,) = verdicts(house("length", settings), "7")
    assert text.reward == pytest.approx(0.5)  # of 5 tokens, which is told


def test_tokens_of_a_session_are_those_that_the_model_generated(tmp_path: Any) -> None:
    """The answer of a session is a text of its own; the model has generated 55 tokens for it. A
    reward server beside the verifier, for which the text is decoded, changes nothing.
    """
    write_tokenizer(tmp_path)
    codec = Codec.of(load_tokenizer(str(tmp_path)))
    (tmp_path / "own.py").write_text(
        "from megarl.environments.session import Answer, Observation\n"
        "class Own:\n"
        "    def start(self, prompt): return Observation('')\n"
        "    def step(self, text, token_ids): return Answer('7')\n"
    )
    own = LengthConfig(shortest=10, longest=100)
    short = np.array(codec.encode("7"), np.int32)
    part = segment(short)
    prompt = Prompt(0, "", [1], "7")

    async def of_session(environment: Environment) -> Segment | Verdict:
        await environment.start()
        await environment.begin("a", prompt)
        return await environment.step("a", prompt, part, num_tokens=55)

    async def of_text(environment: Environment) -> list[Verdict]:
        return [await environment.score(prompt, one, 55, False) for one in ("7", short)]

    config = EnvironmentConfig(session=f"{tmp_path}/own.py:Own", verifier="length", length=own)
    verdict = run(config, of_session, codec=codec)
    assert isinstance(verdict, Verdict) and verdict.reward == pytest.approx(0.5)
    mixed = EnvironmentConfig(rewards={"exact_match": 1.0, "length": 1.0}, length=own)
    for one in run(mixed, of_text, codec=codec):
        assert one.reward == pytest.approx(1.5) and one.correct


def test_a_function_of_ones_own_gets_a_plain_text(tmp_path: Any) -> None:
    (tmp_path / "own.py").write_text(
        "def score(prompt, response):\n    return float(type(response) is str)\n"
    )
    assert verdicts(EnvironmentConfig(verifier=f"{tmp_path}/own.py:score"), "")[0].reward == 1.0


# together, and refused


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"regex": RegexConfig(pattern="a")}, "environment.regex has settings, but the verifier 'regex' is not used"),
    ({"verifier": "regex"}, "environment.regex.pattern is empty; set"),
    ({"verifier": "json_schema"}, "environment.json_schema.schema and .* empty"),
    ({"verifier": "length"}, "environment.length.longest is 0; set"),
    ({"verifier": "length", "length": LengthConfig(kind="l1_max")}, "length.target and length.target_column are not set"),
    ({"verifier": "length", "length": LengthConfig(kind="cosine", longest=5)}, "length.verifier is ''.* math"),
    ({"verifier": "math", "numeric": NumericConfig(relative=0.5)}, r"\(math is\)"),
    ({"mixture": {"a": NamedVerifierConfig()}, "numeric": NumericConfig(relative=0.5)}, "outside of environment.mixture"),
    ({"mixture": {"a": NamedVerifierConfig(choice=ChoiceConfig(labels="XY"))}}, "environment.mixture.a: environment.choice has settings"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "says"), REFUSED, ids=range(len(REFUSED)))
def test_settings_that_nothing_reads_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EnvironmentConfig(**settings)


@pytest.mark.parametrize(("make", "says"), [
    (lambda: ChoiceConfig(labels="AA"), "each once"),
    (lambda: ChoiceConfig(labels="A"), "at least two"),
    (lambda: FormatConfig(tags=()), "set one or several"),
    (lambda: FormatConfig(tags=("<a>",)), "letters, digits"),
    (lambda: LengthConfig(kind="cosine", shortest=5), "LengthConfig.shortest is 5"),
    (lambda: LengthConfig(shortest=5, longest=5), "set it above"),
])  # fmt: skip
def test_settings_that_do_not_fit_each_other(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_a_length_verifier_must_be_one_of_the_house() -> None:
    config = house("length", LengthConfig(kind="cosine", longest=5, verifier="own"))
    with pytest.raises(ValueError, match=r"length.verifier is 'own'; set one of .*exact_match"):
        load_verifier(config)
