r"""Exact values of expressions that hold numbers only, such as `\frac{1}{2} + 3 \times (4 - 5)^2`.

Reading takes time linear in the length of the text, at any nesting up to `MAX_DEPTH`; a general
parser of LaTeX takes time that doubles with each level.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

MAX_CHARACTERS = 1000
"""Longer texts are not read: `calculate` returns None for them."""
MAX_DEPTH = 100
"""Texts with deeper nested brackets are not read: `calculate` returns None for them."""
MAX_BITS = 20_000
"""A power whose numerator or denominator would have more bits is not computed."""

TOKEN = re.compile(
    r"\s+|\\[,;:! ]|\\left|\\right"  # spaces and sizes of brackets, which mean nothing
    r"|(?P<number>\d*\.\d*\\overline\{\d+\}|\d+(?:\.\d*)?|\.\d+)"
    r"|(?P<frac>\\[cdt]?frac)"
    r"|(?P<times>\\cdot|\\times|\*)|(?P<over>\\div|/)"
    r"|(?P<sign>[-+])|(?P<power>\^)|(?P<open>[({\[])|(?P<close>[)}\]])"
)
MAX_OPERAND = 10_000
"""Largest exponent, or argument of a factorial or binomial coefficient, that is computed."""
GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
"""A pair of brackets of one kind with up to two more pairs of that kind inside."""
OPERANDS = (
    re.compile(rf"\^(?=\s*[-+]?({GROUP}|\d+))"),
    re.compile(rf"(?=({GROUP}|\d+)\s*!)"),
    re.compile(rf"\\[dt]?binom\s*({GROUP}|\d+)"),
)
CHAIN = re.compile(r"\^\s*\d+\s*\^")
CLOSING = {"(": ")", "{": "}", "[": "]"}
_WORDS = (
    ("+", r"plus|added\s+to"),
    ("-", r"minus|\u2212"),
    ("*", r"times|multiplied\s+by|\\times|\\cdot|\\ast|[\u00d7\u00b7\u22c5]|(?<=\s)[xX](?=\s)"),
    ("/", r"divided\s+by|over|\\div|[\u00f7\u2215]"),
    ("^", r"(?:raised\s+)?to\s+the\s+power(?:\s+of)?|raised\s+to"),
)
_GROUPS = "|".join(f"({words})" for _, words in _WORDS)
IN_WORDS = re.compile(
    r"(?<=[\d)}\]!])\**(\$?),?\s*(?:\\text\s*\{\s*)?(?:" + _GROUPS + r")(?:\s*\})?\s*\1\**"
    r"(?=[-\d(.{\\])"
)
"""Operators between numbers that stand there as words, in LaTeX, or as Unicode characters."""
OF_TWO = re.compile(
    r"\b(sum|difference|product|quotient)\s+of\s+(-?[\d.,]*\d)\s+(?:and|by)\s+(-?[\d.,]*\d)"
)
SIGNS = {"sum": "+", "difference": "-", "product": "*", "quotient": "/"}
AS_POWER = re.compile(r"(?<=[\d)}])\s+(squared|cubed)\b")


def in_signs(text: str) -> str:
    """Replace words and LaTeX commands between numbers in `text`, LaTeX or prose, by signs of
    operators: `67 + 63` for `67 plus 63` and for `the sum of 67 and 63`, `67 * 63` for `67 \\times
    63`. Returns the new text.
    """
    text = IN_WORDS.sub(lambda found: f" {_WORDS[(found.lastindex or 2) - 2][0]} ", text)
    text = OF_TWO.sub(lambda found: f"{found[2]} {SIGNS[found[1]]} {found[3]}", text)
    return AS_POWER.sub(lambda found: "^2" if found[1] == "squared" else "^3", text)


def calculate(text: str) -> Fraction | None:
    r"""The exact value of `text`, made of numbers, `+ - * / ^`, `\times`, `\cdot`, `\div`,
    `\frac{}{}` and brackets; None for any other text, for a division by zero and for a power too
    large to compute.

    Products without a sign are not read, because `1\frac{1}{2}` is 3/2 to one reader and 1/2 to
    another.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        reader = _Reader(_tokens(text))
        value = reader.sum(0)
        return value if reader.kind() == "end" else None
    except (_NotArithmetic, ZeroDivisionError):
        return None


def is_huge(text: str) -> bool:
    """Whether the expression `text` (LaTeX) may take too long to compute: it has a power, factorial
    or binomial coefficient whose exponent or argument exceeds 10,000 or contains a power, factorial
    or binomial coefficient of numbers that `calculate` cannot compute, or a chain of powers
    (2^3^4). An exponent with letters, as in e^{x^2}, is not huge.
    """
    text = re.sub(r"\\left|\\right", "", text.replace("**", "^"))
    if CHAIN.search(text):
        return True
    for operand in (found[1] for pattern in OPERANDS for found in pattern.finditer(text)):
        value = calculate(operand)
        if value is None:
            if re.search(r"[\^!]|\\[dt]?binom", operand) and not re.search(
                r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", operand)
            ):
                return True
        elif abs(value) > MAX_OPERAND:
            return True
    return False


class _NotArithmetic(Exception):
    """Raised if the text is not an expression that this module reads."""


def _tokens(text: str) -> list[tuple[str, str]]:
    """(kind, text) of each token."""
    found: list[tuple[str, str]] = []
    place = 0
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None:
            raise _NotArithmetic
        if match.lastgroup is not None:
            found.append((match.lastgroup, match[0]))
        place = match.end()
    return found


class TokenReader:
    """Reads the tokens of an expression one after the other. `tokens`: (kind, text) of each, with
    kinds that the caller's tokenizer defines, such as "sign". After the last token follows one of
    the kind "end".
    """

    def __init__(self, tokens: Sequence[tuple[str, str]]) -> None:
        self._tokens, self._place = [*tokens, ("end", "")], 0

    def kind(self) -> str:
        """The kind of the next token, without consuming it; "end" after the last."""
        return self._tokens[self._place][0]

    def take(self) -> str:
        """Consume the next token; returns its text."""
        self._place += 1
        return self._tokens[self._place - 1][1]


class _Reader(TokenReader):
    """A recursive-descent parser. `depth` in its methods is the number of open brackets."""

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.kind() == "sign":
            sign = self.take()
            term = self._product(depth)
            value = value + term if sign == "+" else value - term
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while self.kind() in ("times", "over"):
            kind = self.kind()
            self.take()
            factor = self._signed(depth)
            value = value * factor if kind == "times" else value / factor
        return value

    def _signed(self, depth: int) -> Fraction:
        negative = False
        while self.kind() == "sign":
            negative ^= self.take() == "-"
        value = self._power(depth)
        return -value if negative else value

    def _power(self, depth: int) -> Fraction:
        base = self._atom(depth)
        if self.kind() != "power":
            return base
        self.take()
        exponent = self._atom(depth)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator != 1 or bits * abs(exponent) > MAX_BITS or self.kind() == "power":
            raise _NotArithmetic
        return base**exponent.numerator

    def _atom(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise _NotArithmetic
        kind = self.kind()
        if kind == "number":
            return _number(self.take())
        if kind == "frac":
            self.take()
            return self._brackets("{", depth) / self._brackets("{", depth)
        if kind == "open":
            return self._brackets("", depth)
        raise _NotArithmetic

    def _brackets(self, required: str, depth: int) -> Fraction:
        """The value in brackets; `required` is the opening bracket, or empty for any."""
        opening = self.take()
        if opening not in CLOSING or (required and opening != required):
            raise _NotArithmetic
        value = self.sum(depth + 1)
        if self.take() != CLOSING[opening]:
            raise _NotArithmetic
        return value


def _number(text: str) -> Fraction:
    """The value of a decimal number, whose last digits may repeat, as in `0.1\\overline{6}`."""
    first, _, repeated = text.partition("\\overline")
    digits = repeated.strip("{}")
    if not digits:
        return Fraction(text)
    places = len(first.partition(".")[2])
    return Fraction(f"0{first}0") + Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
