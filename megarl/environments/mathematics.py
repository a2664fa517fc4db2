r"""The verifier `math`: is the final expression of a response equal to the reference answer?

    response --final_expression--> text --plain_number, evaluate, math-verify--> equal or not

Percent is a unit, as dollars are, and units do not count: `50%`, `50\%` and `50 percent` equal 50
and do not equal 0.5. This is the rule of the grader of the MATH data set (arXiv:2103.03874,
`math_equivalence.py`), which removes `\%`.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Awaitable, Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from megarl.environments.arithmetic import evaluate, in_signs, is_huge
from megarl.environments.config import EnvironmentConfig
from megarl.environments.finished import is_unfinished, to_simplify
from megarl.types import Prompt

FINAL = "####"  # GSM8K's mark of a final answer
NUMBER_CHARACTERS = 200  # nothing longer is read as a plain number: reading it could take long
MAX_EXPRESSION_CHARACTERS = 1000
"""A longer final expression is not parsed and counts as no answer."""
MAX_RESPONSE_CHARACTERS = 10_000
"""Of a response without a marked answer, only so many characters from its end are searched."""
MAX_DEPTH = 6
"""An expression that nests brackets deeper is not parsed: the time of math-verify's parser doubles
with each level (13 levels of braces take 5 s)."""
TOWERS = re.compile(r"(?:[\^_]\s*[A-Za-z0-9]\s*){5}|!{3}|(?:\|[^|]*){13}|(?:=[^=]*){9}")
"""Nesting without brackets, which is not parsed either: x^x^x^x^x^x, x!!!, bars, chains of `=`."""
PLAIN_FORMULA = re.compile(r"\d[\d.\s*^()!+/-]*[*^!][\d.\s*^()!+/-]*")
"""Powers and factorials of numbers outside of formulas."""
FORMULA = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]", re.DOTALL)

NUMBER = re.compile(
    r"(?:[$\u20ac\u00a3])?([-+]?)(?:[$\u20ac\u00a3])?(\d{1,3}(?:,\d{3})+|\d+)?(\.\d+)?"
    r"(?:[eE]([-+]?\d{1,3}))?"
)
UNIT = re.compile(r"^(.*\d)\s+([A-Za-z]{2,}(?:\s+[A-Za-z]+)*)$")
# Words that change the number before them, so that it may not be read alone.
NOT_UNITS = re.compile(
    r"\b(?:hundreds?|thousands?|millions?|billions?|trillions?|dozens?|half|quarter|third|pi|sqrt|"
    r"times|plus|minus|over|and|or|to|by|mod)\b",
    re.IGNORECASE,
)
PERCENT = r"\s*(?:\\?%|percent(?:age)?\b|\\text\{\s*(?:\\?%|percent(?:age)?)\s*\})"
FINAL_PERCENT = re.compile(rf"(?<=[\w)}}\].]){PERCENT}(?:\s+points?)?\s*$", re.IGNORECASE)
PERCENT_OF_NUMBER = re.compile(rf"(?<=\d){PERCENT}", re.IGNORECASE)
THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;: ]|~|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
VULGAR = (
    "\u00bc\u00bd\u00be\u2150\u2151\u2152\u2153\u2154\u2155\u2156\u2157\u2158\u2159"
    "\u215a\u215b\u215c\u215d\u215e"
)  # one quarter, a half, ..., seven eighths
MIXED = re.compile(rf"(?:((?<!\d)\d{{1,100}})\s?)?([{VULGAR}])")
SUPERSCRIPTS = re.compile(r"(?<=[\w)}\]])\u207b?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
BARE_POWER = re.compile(r"(?<=\d)\s*\^\s*\{(-?[\d.]+)\}")
BEFORE_OPERATOR = re.compile(r"[)\]}]*[ \t]*(?:\*\*|[-+*/^x])[ \t]*[(\[{]*-?\d")
BEHIND_OPERATOR = re.compile(r"\d[)\]}]*[ \t]*(?:\*\*|[-+*/^x])[ \t]*[(\[{]*\Z")
FRACTION = re.compile(r"\\[cdt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
STARS = re.compile(r"(?<=[\w)}])\s*\*\*\s*(?=[-\w({])")
SIZES = re.compile(r"\\(?:left|right|bigg?|Bigg?|[,;:! ])|\\(?=[{}])|\s")
CHARACTERS = {
    **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # of full width
    "\u221e": "\\infty ", "\u2205": "\\emptyset ", "\u03c0": "\\pi ", "\u2212": "-",
}  # fmt: skip
WRITTEN = str.maketrans(CHARACTERS)
ANSWER = re.compile(r"(answer:)(?=[-\d\\$])", re.IGNORECASE)
ROOT = re.compile(r"\u221a\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]))")
CONSTANT = re.compile(r"\\(?:mathrm|text|operatorname)\s*\{\s*([ei])\s*\}")
UNIT_BEHIND = re.compile(r"(?<=\d)(?:~|\\[,;: ]|\s)+(?=\\(?:text|mathrm)\s*\{)")
EXPONENT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?[eE][-+]?\d{1,2})(?![\w.]\w)")
WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
WRAPPING = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|bm|boldsymbol)\s*\{")
WORDS = re.compile(r"(?=.*[A-Za-z]{2})[A-Za-z]+(?:[\s-]+[A-Za-z]+)*")
PRODUCTS = re.compile(r"[abcxyz]{2,3}|[b-df-hj-np-tv-z]{2,3}")
"""Letters that are read as a product of variables, such as xy or mn."""
KNOWN = frozenset(
    ["pi", "inf", "infinity", "infty", "exp", "log", "ln", "sqrt"]
    + [arc + name for arc in ("", "arc") for name in ("sin", "cos", "tan", "cot", "sec", "csc")]
)
"""Words that are mathematics."""
_PLAIN = "|".join(
    sorted(KNOWN - {"sqrt", "exp", "inf", "infinity", "infty"}, key=len, reverse=True)
)
PLAIN_NAMES = re.compile(rf"(?<![\\A-Za-z])({_PLAIN})(?![A-Za-z])")
"""Names of functions and constants without LaTeX's backslash, such as in `2pi` and `sin x`."""
OPERATORS = re.compile(rf"\\(?:operatorname|mathrm|text)\{{\s*({_PLAIN})\s*\}}")
PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z{])sqrt\s+([A-Za-z0-9]+)")
WITH_BASE = re.compile(r"([-+]?\d[\dA-Fa-f]*)\s*_\s*(?:\{\s*(\d{1,2})\s*\}|(\d{1,2}))")
WITH_FRACTION = re.compile(r"([-+]?)(\d{1,100})\s+(\d{1,100})\s*/\s*(\d{1,100})")
DEGREES = re.compile(r"([-+]?\d[\d.,]*)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})")
DASH = re.compile(r"(?<![\w)}\]])[\u2212\u2013](?=[\d.\\$\u20ac\u00a3])")
LENGTHS = r"(?:[kcdm]?m|in|ft|yd|mi|[km]?g|lbs?|oz|[mc]?[lL]|m?s|sec|min|h|hr|hours?|mph|miles?)"
POWER = r"(?:\s*\^\s*(?:\d|\{\s*-?\d\s*\}))?"
AFTER_NUMBER = re.compile(
    rf"([-+]?\d[\d.,]*)(?:\s*[$\u20ac\u00a3]|\s+{LENGTHS}{POWER}(?:\s*/\s*{LENGTHS}{POWER})?)"
)
"""A number with a currency sign or a unit of measure behind it."""
CHOICE = re.compile(r"\(?([A-H])[).:]+\s+\S")
"""A letter of a multiple choice with what it stands for, as in `D. 5`."""
BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|(?=[^\s{]))")
BRACKETS = {"{": "}", "(": ")"}
CALCULUS = re.compile(r"\\(?:o?i{0,3}nt|lim)(?![A-Za-z])")
"""Integrals and limits, which are not computed: sympy may search for their value without end."""
TAGS = ("<answer>", "</answer>")
EQUALS = re.compile(r"(?<![<>!\\=])=(?!=)")
RELATION = re.compile(
    r"[<>\u2264\u2265\u2260]|\\(?:[lg]e|[lg]eq|[lg]eqslant|[lg]t|neq?)(?![A-Za-z])"
)
LARGEST_ERROR = Fraction(5, 10**6)
"""Largest relative difference between a decimal number and the exact one that it stands for."""
SMALL = 1e-6
"""Exact values below are not equal because both are small."""
SENTENCE = re.compile(r"\b(?:is|are|be|equals?|answer|therefore|thus|so)\b", re.IGNORECASE)
"""Words of a sentence, which is searched for its answer; without them a line is the answer."""


def math(config: EnvironmentConfig) -> Callable[[Prompt, str], Awaitable[float]]:
    r"""A verifier that returns 1.0 if the final expression of the response is mathematically equal
    to the reference answer, else 0.0.

    The final expression is what follows the last `####` or is inside the last `\boxed{}`, whichever
    comes later; without either, it is what math-verify extracts. Of a response with the tags
    `<answer>` and `</answer>` only what the last pair holds is read, where a line that is no
    sentence is the final expression. Plain numbers are compared
    exactly, everything else by math-verify. A final percent sign is dropped on both sides. An
    expression longer than `MAX_EXPRESSION_CHARACTERS` or nested deeper than `MAX_DEPTH` counts as
    wrong, unless it holds numbers only. `compared_as_text` says what else is not parsed. An
    expression that has still to be evaluated (`megarl.environments.finished`) counts as wrong,
    unless the reference answer is one, or with `math.allow_unevaluated`. The
    verifier raises if the reference answer is not a mathematical expression.
    """
    parse_marked, parse_response, equal = _math_verify()

    def verdict(prompt: Prompt, reference: str, response: str) -> tuple[bool, str]:
        """(whether the response equals the reference answer, its final expression)."""
        response, line = in_tags(response)
        found = final_expression(response)
        found = line if found is None else found
        if found is not None and len(found) > MAX_EXPRESSION_CHARACTERS:
            return False, ""
        expected, number = plain_number(reference), plain_number(found or "")
        if expected is not None and number is not None:
            return expected == number, found or ""
        expression = without_equals(cleaned(found or ""))
        number = plain_number(expression)
        if expected is not None and number is not None:
            return expected == number, expression
        exact = evaluate(reference) if expected is None else expected
        value = evaluate(expression) if number is None else number
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
        gold = parse_marked(reference if expected is None else _latex(expected))
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
        given = parse_response(response)
        said = given[-1] if given and isinstance(given[-1], str) else ""
        right = equal(gold, given) and not is_operand(said, response)
        if "frac" not in response:  # math-verify writes a/b so
            said = FRACTION.sub(r"\1/\2", said)
        return right, without_equals(cleaned(said))

    async def verify(prompt: Prompt, response: str) -> float:
        reference = without_equals(cleaned(final_expression(prompt.answer) or prompt.answer))
        right, expression = verdict(prompt, reference, response)
        return float(
            right
            and (config.math.allow_unevaluated or is_answer(expression, reference, prompt.text))
        )

    return verify


def _math_verify() -> tuple[Callable[[str], list[Any]], Callable[[str], list[Any]], Any]:
    """math-verify as (parser of a final expression, parser of a response without a marked answer,
    comparison of what two parsers returned).
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

    def parse_response(text: str) -> list[Any]:
        def unless_endless(found: re.Match[str]) -> str:
            endless = is_deep(found[0]) or is_huge(found[0]) or CALCULUS.search(found[0])
            return "" if endless else found[0]

        text = in_prose(text[-MAX_RESPONSE_CHARACTERS:])
        text = PLAIN_FORMULA.sub(unless_endless, FORMULA.sub(unless_endless, text))
        return parse(text) if depth(text) <= MAX_DEPTH else []

    def equal(gold: list[Any], given: list[Any]) -> bool:
        return (
            bool(given)
            and bool(math_verify.verify(gold, given, timeout_seconds=None))
            and (are_near(gold[0], given[0]))
        )

    return parse_marked, parse_response, equal


def are_near(first: Any, second: Any) -> bool:
    """Whether two values that math-verify takes for equal are: it compares digits behind the point,
    of which small values have few.
    """
    if not all(getattr(one, "is_number", False) for one in (first, second)):
        return True
    if first.is_Rational and abs(first) >= SMALL:
        return True
    size = abs(complex(first.evalf()))
    return size >= SMALL or abs(complex((first - second).evalf())) <= LARGEST_ERROR * size


def near(exact: Fraction, value: Fraction, text: str) -> bool:
    """Whether two numbers, written in `text`, may stand for each other: both exact ones must be
    equal, a decimal number may be rounded.
    """
    if "." not in text:
        return exact == value
    return abs(exact - value) <= LARGEST_ERROR * max(abs(exact), abs(value))


def is_answer(expression: str, reference: str, question: str) -> bool:
    """Whether an expression that equals the reference answer is a finished value, or the reference
    answer is none either. A fraction to be simplified or a power of ten that stands in the question
    was not computed.
    """
    number = plain_number(expression)
    if number is not None or expression == reference:
        return True
    rational = plain_number(reference) is not None or evaluate(reference) is not None
    if is_unfinished(expression, rational=rational):
        return is_unfinished(reference, rational=rational)
    left = to_simplify(expression)
    if not left or to_simplify(reference):
        return True
    said = _squeezed(question)
    return not any(re.search(rf"(?<![\d.]){re.escape(one)}(?![\d.])", said) for one in left)


def outer_brackets(first: str, second: str) -> bool:
    """Whether two lists stand in brackets that mean different things: a pair or an open interval
    `(1, 2)`, a closed interval `[1, 2]`, a set `\\{1, 2\\}`.
    """
    ends = []
    for text in (first, second):
        bare = SIZES.sub("", text)
        if not ("," in bare and bare[:1] in "([{" and bare[-1:] in ")]}"):
            return False
        ends.append((bare[0], bare[-1]))
    return ends[0] != ends[1]


def is_operand(number: str, response: str) -> bool:
    """Whether a number stands in a response only beside operators, as 8 does in `8^{1}`."""
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
    text = FRACTION.sub(r"\1/\2", in_signs(text)).replace("**", "^")
    return re.sub(r"[\s{}()$,\\]", "", text)


def without_equals(text: str) -> str:
    """An expression in which one side stands for all that are numbers and equal: `130` for
    `67 + 63 = 130`, and `x = 130` for `x = 67 + 63 = 130`. Empty if two exact numbers differ.
    """
    sides = [side.strip() for side in EQUALS.split(text)]
    if len(sides) == 1:
        return text
    values = {side: plain_number(side) or evaluate(side) for side in sides}
    numbers = [side for side in sides if values[side] is not None]
    if len(numbers) < 2:
        return text
    if len({values[side] for side in numbers}) > 1:
        return text if "." in text else ""
    last = next((side for side in reversed(numbers) if not is_unfinished(side)), numbers[-1])
    return " = ".join([*(side for side in sides if side not in numbers), last])


def final_expression(text: str) -> str | None:
    r"""The text after the last `####` or inside the last `\boxed{}`, whichever comes later; None
    without either.
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
        if len(line) <= 1 or re.search(
            rf"[\d\\{VULGAR}]", line
        ):  # else it is a heading, as in "#### Conclusion"
            return line
    return None


def in_tags(response: str) -> tuple[str, str | None]:
    """(what the last `<answer>` and `</answer>` hold, the same if it is one line and no sentence,
    otherwise None); (response, None) without such tags.
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


@lru_cache(maxsize=1024)  # all rollouts of a group have one reference answer
def cleaned(text: str) -> str:
    r"""A final expression without what does not change its value: Markdown's `**`, `$` or `\(`
    around it, a final percent sign, brackets that are doubled. Characters such as ½ and ², and
    names such as pi and sin, become LaTeX.
    """
    text = re.sub(r"^[*`\s]+|(?<!\^)[*`\s]+$", "", text)
    for before, after in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = text[len(before) : -len(after)]
        if text.startswith(before) and text.endswith(after) and inner and before not in inner:
            text = inner.strip()
    if (wrapped := WRAPPING.match(text)) and (wrapped.end() - 1, len(text) - 1) in pairs(text):
        text = text[wrapped.end() : -1].strip()
    text = FINAL_PERCENT.sub("", text.removesuffix(".").rstrip())
    text = CONSTANT.sub(r"\1", STARS.sub("^", text.translate(WRITTEN)))
    text = ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", text)
    text = UNIT_BEHIND.sub(" ", text.replace("\\varnothing", "\\emptyset"))
    text = SUPERSCRIPTS.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = MIXED.sub(lambda found: _latex(_mixed(found)), DASH.sub("-", text))
    text = text.replace("\u2212", "-").replace("\u00b0", "^\\circ")
    text = OPERATORS.sub(r"\\\1 ", in_signs(text))
    text = PLAIN_ROOT.sub(r"\\sqrt{\1}", PLAIN_NAMES.sub(r"\\\1 ", text)).rstrip()
    if degrees := DEGREES.fullmatch(text):
        return degrees[1]
    if parts := WITH_FRACTION.fullmatch(text):
        whole, over, under = (int(part) for part in parts.groups()[1:])
        if over < under:
            return parts[1] + _latex(whole + Fraction(over, under))
    return without_doubled(text)


def compared_as_text(reference: str, expression: str) -> bool | None:
    """Whether two expressions are equal that must not be parsed as products: words, whose letters
    would commute; numbers in a base (1011_2), whose base must be equal; a letter of a multiple
    choice; numbers too large to compute; integrals and limits. None if they are none of these.
    """
    words = _plain_words(reference)
    if words is not None:
        return words == _plain_words(expression)
    bases = WITH_BASE.fullmatch(reference), WITH_BASE.fullmatch(expression)
    if bases != (None, None):
        first, second = (base and (base[1].upper(), int(base[2] or base[3])) for base in bases)
        return first == second
    choice = CHOICE.match(WRAPPED.sub(r"\1", expression))
    if choice and re.fullmatch("[A-H]", reference):
        return choice[1] == reference
    if any(is_huge(one) or CALCULUS.search(one) for one in (reference, expression)):
        return re.sub(r"\s", "", reference) == re.sub(r"\s", "", expression)
    return None


def _plain_words(text: str) -> list[str] | None:
    """The words of a text that holds nothing else, in lower case; None for other texts, for
    products of variables and for names of functions and constants.
    """
    text = WRAPPED.sub(r"\1", text).strip().removesuffix(".")
    if not WORDS.fullmatch(text) or PRODUCTS.fullmatch(text):
        return None
    words = re.split(r"[\s-]+", text.lower())
    return None if KNOWN & set(words) else words


def number_with_unit(text: str) -> Fraction | None:
    """The value of a number with a unit of measure or a currency sign behind it, such as 5 for
    `5 cm^2`; None for other texts.
    """
    found = AFTER_NUMBER.fullmatch(text)
    return plain_number(found[1]) if found else None


def in_prose(text: str) -> str:
    """A response without a marked answer, with its numbers written as math-verify reads them."""
    text = in_signs(
        THIN_SPACE.sub("", PERCENT_OF_NUMBER.sub("", ANSWER.sub(r"\1 ", text.translate(WRITTEN))))
    )
    text = MIXED.sub(lambda found: str(_mixed(found)), BARE_POWER.sub(r"^(\1)", text))
    return without_doubled(EXPONENT.sub(lambda found: _latex(Fraction(found[0])), text))


def _mixed(found: re.Match[str]) -> Fraction:
    """The value of a match of `MIXED`, such as 3/2 for 1½."""
    over, under = unicodedata.normalize("NFKC", found[2]).split("\u2044")
    return Fraction(found[1] or 0) + Fraction(int(over), int(under or 1))


def plain_number(text: str) -> Fraction | None:
    """The value of a text that is a plain number, otherwise None. A sign, `$`, `%`, thousands
    separators, an exponent (5e3), a final full stop and a unit are allowed.
    """
    if len(text) > NUMBER_CHARACTERS:
        return None
    text = THIN_SPACE.sub(",", text.replace("\\$", "$").replace("{,}", ",").replace("\\!", ""))
    text = text.replace("\u2212", "-").strip()
    if len(text) > 2 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()
    text = FINAL_PERCENT.sub("", text.removesuffix(".").rstrip())
    unit = UNIT.match(text)
    if unit and not NOT_UNITS.search(unit[2]):
        text = unit[1]
    match = NUMBER.fullmatch(re.sub(r"^([-+]?[$\u20ac\u00a3])\s+", r"\1", text))
    if not match or not (match[2] or match[3]):
        return None
    digits = f"{match[1]}{(match[2] or '0').replace(',', '')}{match[3] or ''}"
    return Fraction(f"{digits}e{match[4] or 0}")


def pairs(text: str) -> list[tuple[int, int]]:
    """(opening, closing) positions of all brackets that match, in the order of their closings. A
    bracket without a partner is passed over.
    """
    found: list[tuple[int, int]] = []
    opened: list[int] = []
    for place, sign in enumerate(text):
        if sign in BRACKETS:
            opened.append(place)
        elif sign in BRACKETS.values():
            while opened and BRACKETS[text[opened[-1]]] != sign:
                opened.pop()
            if opened:
                found.append((opened.pop(), place))
    return found


def depth(text: str) -> int:
    """How deep the brackets of `text` are nested, whether or not their kinds match; 0 without."""
    level = deepest = 0
    for sign in text:
        if sign in "{([":
            level += 1
            deepest = max(deepest, level)
        elif sign in "})]":
            level = max(0, level - 1)
    return deepest


def is_deep(text: str) -> bool:
    """Whether the expression is nested too deep to be parsed in time."""
    return depth(text) > MAX_DEPTH or TOWERS.search(text) is not None


def without_doubled(text: str) -> str:
    """`text` without brackets that stand directly inside a pair of the same kind, such as the inner
    ones of `((5))`.
    """
    found = set(pairs(text))
    doubled = {
        place
        for opening, closing in found
        if text[opening - 1 : opening] == text[opening] and (opening - 1, closing + 1) in found
        for place in (opening, closing)
    }
    return "".join(sign for place, sign in enumerate(text) if place not in doubled)


def _latex(number: Fraction) -> str:
    if number.denominator == 1:
        return str(number.numerator)
    return f"\\frac{{{number.numerator}}}{{{number.denominator}}}"
