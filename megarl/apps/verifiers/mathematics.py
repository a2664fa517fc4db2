r"""The verifier `math`: is the final expression of a response equal to the reference answer?

    response --final_expression--> text --plain_number, evaluate, math-verify--> equal or not

Percent is a unit, as dollars are, and units do not count: `50%`, `50\%` and `50 percent` equal 50
and do not equal 0.5. This is the rule of the grader of the MATH data set (arXiv:2103.03874,
`math_equivalence.py`), which removes `\%`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from megarl.apps.verifiers.arithmetic import calculate, in_signs, is_huge
from megarl.apps.verifiers.finished import is_unfinished, to_simplify
from megarl.apps.verifiers.notation import (
    NUMBER_CHARACTERS,
    VULGAR,
    cleaned,
    in_prose,
    latex,
    number_with_unit,
    plain_number,
    rewritten,
)
from megarl.apps.verifiers.textual import (
    CALCULUS,
    INTERVALS,
    NAME,
    RELATION,
    as_intervals,
    compared_as_text,
    outer_brackets,
    same_part,
)
from megarl.environments.config import EnvironmentConfig
from megarl.types import Prompt

FINAL = "####"  # GSM8K's mark of a final answer
MAX_EXPRESSION_CHARACTERS = 1000
"""A longer final expression is not parsed and counts as wrong."""
MAX_RESPONSE_CHARACTERS = 10_000
"""Of a response without a marked answer, only so many characters from its end are searched."""
MAX_DEPTH = 6
"""An expression that nests brackets deeper is not parsed: the time of math-verify's parser doubles
with each level (13 levels of braces take 5 s)."""
TOWERS = re.compile(r"(?:[\^_]\s*[A-Za-z0-9]\s*){5}|!{3}|(?:\|[^|]*){13}|(?:=[^=]*){9}")
"""Nesting without brackets that takes the parser as long, so that it is not parsed either:
x^x^x^x^x^x, x!!!, bars, chains of `=`."""
PLAIN_FORMULA = re.compile(r"\d[\d.\s*^()!+/-]*[*^!][\d.\s*^()!+/-]*")
"""Powers and factorials of numbers outside of formulas, as in prose."""
FORMULA = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]", re.DOTALL)

BEFORE_OPERATOR = re.compile(r"[)\]}]*[ \t]*(?:\*\*|[-+*/^x])[ \t]*[(\[{]*-?\d")
BEHIND_OPERATOR = re.compile(r"\d[)\]}]*[ \t]*(?:\*\*|[-+*/^x])[ \t]*[(\[{]*\Z")
FRACTION = re.compile(r"\\[cdt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|(?=[^\s{]))")
STATED = re.compile(
    r"(?:\banswer(?:\s+is)?|\u7b54\u6848\s*[\u662f\u4e3a\u70ba]?)\s*[:\uff1a]?[\s*]*"
    r"(\$\$?(?!\s)[^$\n]+(?<!\s)\$\$?|\\\(.+?\\\)|\\\[.+?\\\])[ *]*(?:[.\u3002]|$)",
    re.IGNORECASE | re.MULTILINE,
)
"""A formula that a sentence calls the answer: `The answer is $3$.`"""
TAGS = ("<answer>", "</answer>")
EQUALS = re.compile(r"(?<![<>!\\=])=(?!=)")
ROUNDED = re.compile(r"\\(?:approx|simeq|doteq)(?![A-Za-z])|\u2248")
DECIMAL = re.compile(r"[-+]?\d*(?:\.(\d*))?")
LARGEST_ERROR = Fraction(5, 10**6)
"""Largest relative difference between a decimal number and the exact one that it stands for."""
SMALL = 1e-6
"""Values whose size is below this are not equal merely because both are small."""
SENTENCE = re.compile(r"\b(?:is|are|be|equals?|answer|therefore|thus|so)\b", re.IGNORECASE)
"""Words that mark a line as a sentence, which is searched for its answer; a line without them is
the answer."""


def math(config: EnvironmentConfig) -> Callable[[Prompt, str], Awaitable[float]]:
    r"""Make the verifier `math` from the recipe: an async function (prompt, response) that returns
    1.0 if the final expression of the response equals the reference answer mathematically, else 0.

    The final expression is what follows the last `####` or is inside the last `\boxed{}`, whichever
    comes later; without either, a formula that a sentence calls the answer, or what math-verify
    extracts. Of a response with the tags `<answer>` and `</answer>` only the content of the last
    pair is read; if that is a single line without words such as `is` or `answer`, the line is the
    final expression. Plain numbers are compared exactly; words, ratios and the like as text;
    everything else by math-verify. A final percent sign is dropped on both sides. An expression of
    more than 1000 characters counts as wrong. So does one with brackets nested more than 6 deep,
    unless it holds numbers only, and one that has still to be evaluated (`67 + 63`), unless the
    reference answer is such an expression, or with `math.allow_unevaluated`. The function raises
    `ValueError` for a reference answer that is not mathematics.
    """
    parse_marked, parse_response, equal, size = _math_verify()

    def verdict(prompt: Prompt, reference: str, response: str) -> tuple[bool, str]:
        """(Whether `response` equals `reference`, the final expression of `response`)."""
        response, line = in_tags(response)
        found = marked(response, line)
        if found is not None and len(found) > MAX_EXPRESSION_CHARACTERS:
            return False, ""
        expected, number = plain_number(reference), plain_number(found or "")
        if expected is not None and number is not None:
            return expected == number, found or ""
        reference, expression = same_part(reference, cleaned(found or ""))
        expression = without_equals(exact_side(expression, reference, size))
        if INTERVALS.fullmatch(reference):
            expression = as_intervals(expression)
        expected, number = plain_number(reference), plain_number(expression)
        if expected is not None and number is not None:
            return expected == number, expression
        exact = calculate(reference) if expected is None else expected
        value = calculate(expression) if number is None else number
        if exact is not None:
            if value is not None and not near(exact, value, reference + expression):
                return False, expression
            if exact == value:
                return True, expression
            if RELATION.search(expression):
                return False, expression
        by_text = None if found is None else compared_as_text(reference, expression)
        if by_text is not None:
            return by_text, reference
        if number is None and expected is not None:
            number = number_with_unit(expression)
        elif number is not None and expected is None:
            expected = number_with_unit(reference)
        if expected is not None and number is not None:
            return expected == number, expression
        gold = parse_marked(reference if expected is None else latex(expected))
        if not gold:
            raise ValueError(
                f"the reference answer {prompt.answer!r:.200} of row {prompt.index} is not"
                " mathematics; set environment.verifier to 'exact_match' or to a function of your"
                " own"
            )
        if found is not None and outer_brackets(reference, expression):
            return False, expression
        if found is not None:
            return equal(gold, parse_marked(expression)), expression
        given = parse_response(response, reference)
        said = given[-1] if given and isinstance(given[-1], str) else ""
        right = equal(gold, given) and not is_operand(said, response)
        if "frac" not in response:  # math-verify writes a/b so
            said = FRACTION.sub(r"\1/\2", said)
        return right, without_equals(cleaned(said))

    async def verify(prompt: Prompt, response: str) -> float:
        reference = cleaned(final_expression(prompt.answer) or prompt.answer)
        reference = without_equals(exact_side(reference, "", size))
        right, expression = verdict(prompt, reference, response)
        return float(
            right
            and (config.math.allow_unevaluated or is_answer(expression, reference, prompt.text))
        )

    return verify


def _math_verify() -> tuple[
    Callable[[str], list[Any]],
    Callable[[str, str], list[Any]],
    Callable[[list[Any], list[Any]], bool],
    Callable[[str], Fraction | None],
]:
    """math-verify as (parser of a final expression; parser of a response without a marked answer,
    which is also given the reference answer; comparison of what two parsers returned; value of an
    expression as a number, None if it has none).
    """
    import math_verify

    # It says once per process that its time limits are off; ours hold, and its own need signals.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)

    @lru_cache(maxsize=1024)
    def parse(text: str) -> list[Any]:
        return math_verify.parse(text, parsing_timeout=None)  # type: ignore[arg-type]

    def parse_marked(text: str) -> list[Any]:
        if is_deep(text):
            return []
        return parse(f"\\boxed{{{text}}}") or parse(text)

    def parse_response(text: str, reference: str) -> list[Any]:
        def readable(found: re.Match[str]) -> str:
            if len(found[0]) > MAX_EXPRESSION_CHARACTERS or is_deep(found[0]):
                return ""
            if is_huge(found[0]) or CALCULUS.search(found[0]):
                return ""
            if not ROUNDED.search(found[0]):
                return found[0]
            side = exact_side(cleaned(found[0]), reference, size)
            return f"${side}$" if side else ""

        text = in_prose(text[-MAX_RESPONSE_CHARACTERS:])
        text = PLAIN_FORMULA.sub(readable, FORMULA.sub(readable, text))
        return parse(text) if depth(text) <= MAX_DEPTH else []

    def size(text: str) -> Fraction | None:
        number = calculate(text) if (number := plain_number(text)) is None else number
        if number is not None or is_huge(text) or CALCULUS.search(text):
            return number
        value = next(iter(parse_marked(text)), None)
        if not getattr(value, "is_number", False) or not value.is_finite or not value.is_real:  # type: ignore[union-attr]
            return None
        return Fraction(float(value))  # type: ignore[arg-type]

    def equal(gold: list[Any], given: list[Any]) -> bool:
        return (
            bool(given)
            and bool(math_verify.verify(gold, given, timeout_seconds=None))
            and (are_near(gold[0], given[0]))
        )

    return parse_marked, parse_response, equal, size


def exact_side(text: str, reference: str, size: Callable[[str], Fraction | None]) -> str:
    """Remove rounded values from `text`, a LaTeX expression: `1/3 \\approx 0.333` becomes `1/3`. If
    the last, rounded value is the `reference` answer, that value is returned instead. "" if
    neighbouring values differ by more than rounding explains, or one has no value. `size`: function
    from an expression to its value, or None if it has none.
    """
    sides = [cleaned(side) for side in ROUNDED.split(text)]
    if len(sides) == 1:
        return text
    sides = sides[not sides[0] :]
    right = [EQUALS.split(side)[-1].strip() for side in sides]
    for first, second in pairwise(right):
        rounded = DECIMAL.fullmatch(second) or DECIMAL.fullmatch(first)
        values = size(first), size(second)
        if rounded is None or values[0] is None or values[1] is None:
            return ""
        half = Fraction(1, 2 * 10 ** len(rounded[1] or ""))
        if abs(values[0] - values[1]) > half:
            return ""
    last = plain_number(right[-1])
    return sides[-1] if last is not None and last == plain_number(reference) else sides[0]


def are_near(first: Any, second: Any) -> bool:
    """Second check of two sympy values that math-verify calls equal. math-verify rounds to a number
    of decimal places, so that any two small values look equal. False if `first` is below 1e-6 in
    size and the two differ by a relative error of more than 5e-6. True for larger values, and for
    values that are no numbers.
    """
    if not all(getattr(one, "is_number", False) for one in (first, second)):
        return True
    if first.is_Rational and abs(first) >= SMALL:
        return True
    size = abs(complex(first.evalf()))
    return size >= SMALL or abs(complex((first - second).evalf())) <= LARGEST_ERROR * size


def near(exact: Fraction, value: Fraction, text: str) -> bool:
    """Whether the numbers `exact` and `value` count as equal. `text`: the two expressions in which
    they stand, joined; with a decimal point in it, a relative error of 5e-6 is allowed, otherwise
    none.
    """
    if "." not in text:
        return exact == value
    return abs(exact - value) <= LARGEST_ERROR * max(abs(exact), abs(value))


def is_answer(expression: str, reference: str, question: str) -> bool:
    """Whether `expression`, which equals the `reference` answer (both LaTeX), counts as an answer:
    it is a finished value, not one still to be evaluated such as `67 + 63`, or the reference is
    unfinished too. A fraction to be simplified, or a power of ten, that stands in the text
    `question` was only copied, so that it is no answer.
    """
    number = plain_number(expression)
    if number is not None or expression == reference:
        return True
    rational = plain_number(reference) is not None or calculate(reference) is not None
    if is_unfinished(expression, rational=rational):
        return is_unfinished(reference, rational=rational)
    left = to_simplify(expression)
    if not left or to_simplify(reference):
        return True
    said = _squeezed(question)
    return not any(re.search(rf"(?<![\d.]){re.escape(one)}(?![\d.])", said) for one in left)


def is_operand(number: str, response: str) -> bool:
    """Whether `number`, the text of a number, stands in `response` only beside operators, as 8 does
    in `8^{1}`. False for a text that is no plain number.
    """
    number = number.strip("()[]{} ")
    if plain_number(number) is None:
        return False
    text = in_prose(re.sub(r"\\left|\\right", "", response[-MAX_RESPONSE_CHARACTERS:]))
    one = re.escape(number)
    places = list(re.finditer(rf"(?<![\d.]){one}(?!\d|\.\d)", text))
    return bool(places) and all(
        BEFORE_OPERATOR.match(text, place.end()) or BEHIND_OPERATOR.search(text, 0, place.start())
        for place in places
    )


def _squeezed(text: str) -> str:
    """A question with operators as signs, without brackets and spaces."""
    text = FRACTION.sub(r"\1/\2", in_signs(rewritten(text))).replace("**", "^")
    return re.sub(r"[\s{}()$,\\]", "", text)


def without_equals(text: str) -> str:
    """Shorten a chain of equations in `text`, a LaTeX expression, to its result: `67 + 63 = 130`
    becomes `130`, and `x = 67 + 63 = 130` becomes `x = 130`. "" if two exact numbers in the chain
    differ. A text without `=` is returned as it is.
    """
    sides = [side.strip() for side in EQUALS.split(text)]
    if len(sides) == 1:
        return text
    values = {side: plain_number(side) or calculate(side) for side in sides}
    numbers = [side for side in sides if values[side] is not None]
    if len(sides) == 2 and NAME.fullmatch(sides[1]) and not NAME.fullmatch(sides[0]):
        return f"{sides[1]} = {sides[0]}"
    if len(numbers) < 2:
        return text
    if len({values[side] for side in numbers}) > 1:
        return text if "." in text else ""
    last = next((side for side in reversed(numbers) if not is_unfinished(side)), numbers[-1])
    return " = ".join([*(side for side in sides if side not in numbers), last])


def final_expression(text: str) -> str | None:
    r"""The marked answer in `text`: what follows the last `####` on its line, or is inside the last
    `\boxed{}`, whichever comes later. None without either; empty if the last box is not closed.
    """
    hashed, box = text.rfind(FINAL), None
    for box in BOX.finditer(text):
        pass
    if box is not None and box.start() > hashed:
        if not box[1]:  # as in "\boxed 5"
            return re.split(r"[\s$]", text[box.end() :], maxsplit=1)[0]
        start, level = box.end(), 1
        for end in range(start, len(text)):
            level += {"{": 1, "}": -1}.get(text[end], 0)
            if level == 0:
                return text[start:end].strip()
        return ""  # an open box is not an answer
    if hashed >= 0:
        line = text[hashed + len(FINAL) :].strip().split("\n", 1)[0].strip()
        if len(line) <= 3 or re.search(
            rf"[\d\\{VULGAR}]", line
        ):  # else it is a heading, as in "#### Conclusion"
            return line
    return None


def marked(response: str, line: str | None) -> str | None:
    """The final expression of a model's `response`: that behind `####` or in a `\\boxed{}`; else
    `line`, the answer line that `in_tags` found, if it is not None; else the last formula that a
    sentence calls the answer; None without any.
    """
    found = final_expression(response)
    if found is not None or line is not None:
        return line if found is None else found
    stated = STATED.findall(response[-MAX_RESPONSE_CHARACTERS:])
    return stated[-1] if stated else None


def in_tags(response: str) -> tuple[str, str | None]:
    """The part of a model's response in which the answer is looked for. Returns (what the last
    `<answer>` and `</answer>` hold; the same text if it is one line and no sentence, otherwise
    None), or (`response`, None) without such tags.
    """
    end = response.rfind(TAGS[1])
    start = response.rfind(TAGS[0], 0, max(end, 0))
    if start < 0:
        return response, None
    inside = response[start + len(TAGS[0]) : end].strip()
    is_line = (
        bool(inside) and "\n" not in inside and not SENTENCE.search(inside[:NUMBER_CHARACTERS])
    )
    return inside, inside if is_line else None


def depth(text: str) -> int:
    """Number of levels of nested brackets in `text`, whether or not their kinds match; 0 without
    brackets.
    """
    level = deepest = 0
    for sign in text:
        if sign in "{([":
            level += 1
            deepest = max(deepest, level)
        elif sign in "})]":
            level = max(0, level - 1)
    return deepest


def is_deep(text: str) -> bool:
    """Whether the expression `text` (LaTeX) is nested too deep for math-verify to parse it in a
    short time: more than 6 levels of brackets, or as much without brackets, such as x^x^x^x^x^x.
    """
    return depth(text) > MAX_DEPTH or TOWERS.search(text) is not None
