"""The verifier `math`: what it reads, what percent means, and that nothing holds it up."""

from __future__ import annotations

import asyncio
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.apps.verifiers.expression import parse_expression
from megarl.apps.verifiers.notation import plain_number
from megarl.apps.verifiers.values import exact_value
from megarl.environments.verifiers import Verifier, load_verifier
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.verifiers import MathConfig
from megarl.types import Prompt

ROOT = Path(__file__).resolve().parents[2]
PAIRS = ROOT / "tests" / "support" / "answer_pairs.txt"
_PAGE = (ROOT / "docs" / "reference_rewards.md").read_text()
SECTIONS = _PAGE.partition("### Equal answers")[2].partition("\n## ")[0]
SECTIONS += (ROOT / "docs" / "howto" / "builtin_verifiers.md").read_text()
SECTIONS += (ROOT / "tests" / "support" / "answer_tables.md").read_text()
"""What the documentation says of the answers that are right and wrong."""


@pytest.fixture(scope="module")
def math() -> Verifier:
    return load_verifier(EnvironmentConfig(verifier="math"))


def ask(math: Verifier, answer: str, response: str) -> float:
    return asyncio.run(math(Prompt(4, "", [], answer), response))  # type: ignore[arg-type]


PERCENT = ["50%", "50\\%", "50 percent", "50 \\%", "$50\\%$", "50\\text{ percent}", "**50%**"]


@pytest.mark.parametrize("written", PERCENT)
def test_percent_is_a_unit(written: str, math: Verifier) -> None:
    """50% is 50 and is not 0.5, on either side and in every place."""
    for form in ("#### {}", "\\boxed{{{}}}", "So it is {}."):
        assert ask(math, "50", form.format(written)) == 1.0, form
        assert ask(math, "50%", form.format(written)) == 1.0, form
        assert ask(math, "0.5", form.format(written)) == 0.0, form
    assert ask(math, written, "#### 50") == ask(math, written, "It is 50.") == 1.0
    assert ask(math, written, "#### 0.5") == ask(math, written, "It is 0.5.") == 0.0


def continued(levels: int) -> str:
    return f"1+\\frac{{1}}{{{continued(levels - 1)}}}" if levels else "1"


def test_numbers_are_computed_at_any_depth(math: Verifier) -> None:
    value, text = Fraction(1), continued(40)
    for _ in range(40):
        value = 1 + 1 / value
    answer = f"{value.numerator}/{value.denominator}"
    assert ask(math, text, f"\\boxed{{{answer}}}") == ask(math, text, f"#### {text}") == 1.0
    assert ask(math, "5", f"\\boxed{{{text}}}") == ask(math, text, "\\boxed{5}") == 0.0


STALLS = [
    "(a+b+c+d)^{40}", "((x+1)^{50})^{50}", "(x+1)^{10^9}", "(x^{99}+y^{99})^{99}", "(a+b)(c+d)" * 60,
    "2^{2^{2^{2^{2^{2}}}}}", "9^9^9", "10^{10^{10}}", "1.0000001^{10^{12}}", "2**" * 100 + "2",
    "+".join(f"\\sqrt{{{n}}}" for n in range(2, 62)), "\\sqrt[60]{2}+\\sqrt[59]{3}",
    "(\\sqrt{2}+\\sqrt{3})^{60}+(\\sqrt{5}+\\sqrt{7})^{60}", "\\sqrt{10^{10^{10}}}",
    "\\sqrt{2+" * 40 + "x" + "}" * 40, "\\sqrt{\\sqrt{10^{9999}}}", "e^{" * 30 + "x" + "}" * 30,
    "10000!", "100000000!", "((5!)!)!", "(10^9)!", "5" + "!" * 300, "x!!!!!!",
    "\\binom{10000}{5000}", "\\binom{10^8}{10^7}", "\\binom{" * 20 + "9" + "}{2}" * 20,
    "9" * 900, "9" * 5000, "0.\\overline{" + "142857" * 100 + "}", "1e999+" * 100 + "1", "1/" * 300 + "3",
    "(" * 55 + "x" + ")" * 55, "({{" * 25 + "x" + "}})" * 25, "|" * 60 + "x" + "|" * 60,
    "x^" * 40 + "x", "\\frac{1}{" * 50 + "x" + "}" * 50, "\\sin(" * 40 + "x" + ")" * 40,
    "\\sin(10^{10^5})", "\\pm " * 100 + "5", "+".join(["\\pm x"] * 100),
    ",".join(f"\\sqrt{{{n}}}" for n in range(90)), "\\prod_{k=1}^{10^9} k", "\\int_0^1 x^x dx",
]  # fmt: skip
"""Expressions that take a computer algebra system longer than any limit."""


@pytest.mark.parametrize("text", STALLS, ids=lambda text: text[:20])
def test_no_response_holds_the_verifier_up(text: str, math: Verifier) -> None:
    for form in ("\\boxed{{{}}}", "#### {}", "It is ${}$.", "It is {}."):
        for answer in ("5", "x+1", "1, 2"):
            assert ask(math, answer, form.format(text)) == 0.0


def test_what_cannot_be_computed_equals_itself(math: Verifier) -> None:
    for text in ("9^{9^{9^{9}}}", "(10^9)!", "\\binom{10^8}{10^7}", "x^{x+9^{9^{9^{9}}}}"):
        assert ask(math, text, f"\\boxed{{{text}}}") == 1.0
        assert ask(math, text, "#### 5") == 0.0


WHOLE = [
    ("2 2/3", "8/3", "2 3 2/3"), ("1 1/2", "1.5", "1 2 1/2"), ("-1 1/2", "-3/2", "1 -1 3/2"),
    ("11 5/6", "71/6", "11 6 5/6"), ("2\u2154", "8/3", "2 2/3"), ("\u00bd", "1/2", "1 2"),
    ("2 and 2/3", "8/3", "2 2/3"), ("2 and a half", "5/2", "2 1/2"), ("two thirds", "2/3", "2 3"),
    ("three quarters", "3/4", "3 4"), ("minus 5", "-5", "5"), ("negative 5", "-5", "5"),
    ("between 3 and 5", "", "3 4 5"), ("3 to 4", "3:4", "3 4"), ("3-4", "", "3 4 -4 -1"),
    ("3\u20134", "", "3 4 -4"), ("3:30", "3:30", "3 30"), ("12/25/2020", "", "12 25 2020"),
    ("1,234,567.5", "1234567.5", "1 567.5"), ("1.5 x 10^3", "1500", "1.5 10 3 1000"),
    ("3 x 4", "", "3 4 12"), ("5 million", "5000000", "5"), ("2 dozen", "24", "2"),
    ("5 feet 10 inches", "", "5 10"), ("5k", "", "5"), ("2^10", "", "2 10"),
    ("3 or 4", "", "3 4"), ("3 or 4 or 5", "", "3 4 5"), ("3, 4, or 5", "", "3 4 5"),
    ("either 5 or 7", "", "5 7"), ("5 or maybe 7", "", "5 7"), ("5, maybe 7", "", "5 7"),
    ("5 (or maybe 7)", "", "5 7"), ("5 apples or 7 apples", "", "5 7"), ("not 4", "", "4"),
    ("not equal to 4", "", "4"), ("more than 4", "", "4"), ("x = 5", "5", "-5"),
]  # fmt: skip
"""(a number or several in a sentence, the number that it is, numbers that stand in it)"""


@pytest.mark.parametrize(("text", "right", "wrong"), WHOLE)
def test_a_number_is_read_whole(text: str, right: str, wrong: str, math: Verifier) -> None:
    for form in (
        "The answer is {}.",
        "So she needs {} cups.",
        "#### {}",
        "\\boxed{{{}}}",
        "**{}**",
    ):
        assert not right or ask(math, right, form.format(text)) == 1.0, form
        assert [ask(math, one, form.format(text)) for one in wrong.split()].count(0.0) == len(
            wrong.split()
        ), form


COPIES = [
    ("Expand (x+1)(x-1).", "x^2-1", "(x-1)(x+1)"), ("Expand $(a+b)^2$.", "a^2+2ab+b^2", "(b+a)^2"),
    ("Simplify $\\frac{x^2-1}{x-1}$.", "x+1", "\\frac{x^2-1}{x-1}"), ("Factor $x^2-1$.", "(x-1)(x+1)", "x^2-1"),
    ("Simplify $\\sqrt{12}$.", "2\\sqrt{3}", "\\sqrt{12}"), ("Solve $2x=10$.", "10", "2x=10"),
    ("Compute $2^{-1}$.", "1/2", "2^{-1}"), ("Write $2x+y=3$ with y alone.", "y=3-2x", "2x+y=3"),
]  # fmt: skip


@pytest.mark.parametrize(("question", "answer", "copy"), COPIES)
def test_the_expression_of_the_question_is_no_answer(
    question: str, answer: str, copy: str, math: Verifier
) -> None:
    for text, score in ((copy, 0.0), (answer, 1.0)):
        prompt = Prompt(4, question, [], answer)
        assert asyncio.run(math(prompt, f"\\boxed{{{text}}}")) == score  # type: ignore[arg-type]


def answer_pairs() -> list[tuple[str, str, bool]]:
    """(reference, response, whether it is right) of each pair in `answer_pairs.txt`."""
    found, reference = [], ""
    for line in PAIRS.read_text(encoding="utf-8").partition("\n#")[2].splitlines():
        mark, _, text = line.strip().partition(" ")
        if mark == "ref:":
            reference = text.replace("<newline>", "\n")
        elif mark in ("+", "-"):
            found.append((reference, f"\\boxed{{{text}}}", mark == "+"))
        elif mark in (">+", ">-"):
            found.append((reference, text.replace("<newline>", "\n"), mark == ">+"))
    return found


def test_the_verdicts_of_all_labelled_pairs(math: Verifier) -> None:
    pairs = [*answer_pairs(), ("7", "#### " + "9" * 5000, False)]
    assert len(pairs) > 600 and 0.3 < sum(right for *_, right in pairs) / len(pairs) < 0.7
    wrong = [pair for pair in pairs if ask(math, *pair[:2]) != float(pair[2])]
    assert wrong == []


def test_the_tables_of_the_documentation_are_true(math: Verifier) -> None:
    rows = re.findall(r"^\| (`.*) \| (.*) \| (.*) \|$", SECTIONS, re.MULTILINE)
    asked = [
        (re.findall("`(.*?)`", reference)[0], f"\\boxed{{{text}}}", right)
        for reference, *cells in rows
        for cell, right in zip(cells, (1.0, 0.0), strict=True)
        for text in re.findall("`(.*?)`", cell)
    ]
    assert len(rows) > 30 and len(asked) > 150
    assert [pair for pair in asked if ask(math, *pair[:2]) != pair[2]] == []


@pytest.mark.parametrize(
    "question", ["Write $0.\\overline{3}$ as a fraction.", "What is 0.\\dot{3}?"]
)
def test_a_decimal_that_repeats_is_no_answer_to_itself(question: str, math: Verifier) -> None:
    prompt = Prompt(4, question, [], "\\frac{1}{3}")
    asked = ["0.\\overline{3}", "0.\\dot{3}", "\\frac{1}{3}"]
    scores = [asyncio.run(math(prompt, f"\\boxed{{{text}}}")) for text in asked]  # type: ignore[arg-type]
    assert scores == [0.0, 0.0, 1.0]


def test_unevaluated_expressions_may_be_allowed() -> None:
    config = EnvironmentConfig(verifier="math", math=MathConfig(allow_unevaluated=True))
    lenient = load_verifier(config)
    assert ask(lenient, "130", "So 67 + 63 is it.") == ask(lenient, "120", "\\boxed{5!}") == 1.0
    assert ask(lenient, "130", "\\boxed{67 + 62}") == 0.0


OPERATIONS: dict[str, tuple[list[str], Callable[[Fraction, int], Fraction]]] = {
    "plus": (["{} + {}"], operator.add),
    "minus": (["{} - {}", "{} \u2212 {}"], operator.sub),
    "times": (["{} * {}", "{} \u00d7 {}", "{} \u00b7 {}", "{} \\times {}", "{} x {}"],
     operator.mul),
    "divided by": (["{} / {}", "{} \u00f7 {}", "{} \\div {}", "\\frac{{{}}}{{{}}}"],
     operator.truediv),
    "to the power of": (["{}^{}", "{} ** {}", "{}^{{{}}}"], operator.pow),
}  # fmt: skip
"""{operation in words: (ways to write it, function)}"""


def arithmetic(random: Random) -> tuple[str, str, Fraction]:
    """(expression, the same in words, its value) of a random question without a remainder."""
    name = random.choice(list(OPERATIONS))
    ways, function = OPERATIONS[name]
    a, b, c = random.randint(2, 99), random.randint(1, 4), random.randint(0, 99)
    if name == "divided by":
        a *= b
    text, words = random.choice(ways).format(a, b), f"{a} {name} {b}"
    value = function(Fraction(a), b)
    if name in ("plus", "minus", "times") and random.random() < 0.4:
        left, right = random.choice([("(", ")"), ("\\left(", "\\right)"), ("[", "]")])
        return f"{left}{text}{right} + {c}", f"{words}, plus {c}", value + c
    return text if " x " in text else text.replace(" ", ""), words, value


REPEATED = [
    "{}", "The answer is {}.", "So {} is undefined.", "\\boxed{{{}}}", "#### {}", "Answer: {}", "${}$", "The answer is ${}$.",
    "\\[ {} \\]", "<answer>{}</answer>", "**{}**", "It equals {}", "x = {}", "\\boxed{{x = {}}}", "$\\boxed{{({})}}$",
    "\\boxed{{\\text{{{}}}}}", "Final answer: \\({}\\)", "{} =", "What is {}?", "= {}",
]  # fmt: skip


def test_answers_that_repeat_the_question_are_wrong(math: Verifier) -> None:
    random, rewarded = Random(7), []
    for number in range(2000):
        text, words, value = arithmetic(random)
        response = REPEATED[number % len(REPEATED)].format(random.choice([text, text, words]))
        prompt = Prompt(number, f"What is {text}?", [], str(value))
        if asyncio.run(math(prompt, response)) != 0.0:  # type: ignore[arg-type]
            rewarded.append((str(value), response))
        if number % 10 == 0:
            assert ask(math, str(value), f"\\boxed{{{text} = {value}}}") == 1.0, (text, value)
    assert not rewarded, rewarded


expressions = st.recursive(
    st.integers(0, 20).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map("".join),
        inner.map("({})".format),
        inner.map("-({})".format),
        inner.map("({})^2".format),
    ),
    max_leaves=8,
)


@given(expressions)
def test_arithmetic_is_that_of_python(text: str) -> None:
    python = text.replace("^", "**")
    for digits in range(20, -1, -1):
        python = python.replace(f"{digits}", f"F{chr(97 + digits)}")
    names = {f"F{chr(97 + digits)}": Fraction(digits) for digits in range(21)}
    try:
        expected = eval(python, names)
    except ZeroDivisionError:
        expected = None
    tree = parse_expression(text)
    assert tree is not None and exact_value(tree) == expected


@pytest.mark.parametrize(("text", "value"), [("5e3", 5000), ("1.5E-2", Fraction(3, 200)), ("e3", None)])  # fmt: skip
def test_exponents_of_plain_numbers(text: str, value: Fraction | None) -> None:
    assert plain_number(text) == value


@pytest.mark.parametrize(("answer", "response", "right"), [
    ("1234", "1,234", True), ("1,234", "1234", True), ("1234567", "$1,234,567", False),
    ("$1,234", "$1234", True), ("1234.5", "1,234.5", True), ("123", "12,3", False),
    ("1,2", "12", False), ("1,234 apples", "1234 apples", False),
])  # fmt: skip
def test_exact_match_reads_thousands_commas(answer: str, response: str, right: bool) -> None:
    verify = load_verifier(EnvironmentConfig())
    assert ask(verify, answer, response) == float(right)
