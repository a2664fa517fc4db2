r"""Whether a final expression (LaTeX) is a finished value, such as `\frac{1}{2}` or
`3 + 2\sqrt{5}`, or has still to be evaluated, such as `67 + 63`.

An expression is unfinished if it holds an operation on explicit rational numbers: a sum, product or
power, a quotient that is a whole number (`26/2`) or written with a sign of division, a factorial, a
binomial coefficient, a root that is a whole number. Notations of one number are finished: fractions
of whole numbers, mixed numbers, powers of ten and scientific notation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd

from megarl.apps.verifiers.arithmetic import TokenReader

MAX_CHARACTERS = 1000
"""Expressions with more characters are not read and count as unfinished."""
MAX_DEPTH = 50
"""Expressions whose brackets are nested deeper count as unfinished."""
MAX_RADICAND = 10**15
"""Roots of larger numbers are not computed; up to here floating point finds exact ones."""

FUNCTIONS = (
    r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|exp|gcd|lcm|max|min|det|dim|deg|arg|lim|sum"
    r"|prod|i?i?int"
)
TOKEN = re.compile(
    # Spaces, sizes of brackets, degrees, percent and currencies, which mean nothing here
    r"\s+|\\[,;:! ]|~|\\(?:left|right|q?quad|displaystyle)(?![A-Za-z])"
    r"|\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\circ|\u00b0|\\?[%$]|[\u20ac\u00a3]"
    r"|(?P<separator>\\(?:begin|end)\s*\{[A-Za-z*]+\}|\\(?:text|mathrm|mbox)\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)"
    r"|\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{[^{}]*\}"
    r"|(?P<repeating>\d*\.\d*\\(?:overline|dot)\{\d+\})"
    r"|(?P<number>(?:\d{1,3}(?:(?:,|\{,\}|\\,|\ )\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?![\d.]))?)"
    r"|(?P<frac>\\[cdt]?frac(?![A-Za-z]))|(?P<binom>\\[dt]?binom(?![A-Za-z]))"
    r"|(?P<root>\\sqrt(?![A-Za-z])|\u221a)"
    rf"|(?P<function>\\operatorname\{{[a-z]+\}}|(?:\\|(?<![A-Za-z\\]))(?:{FUNCTIONS})(?![A-Za-z]))"
    r"|(?P<times>\\(?:cdot|times|ast)(?![A-Za-z])|[*\u00d7\u00b7\u22c5])"
    r"|(?P<divided>\\div(?![A-Za-z])|\u00f7)|(?P<over>/)"
    r"|(?P<sign>[-+\u2212]|\\(?:pm|mp)(?![A-Za-z]))|(?P<power>\^)|(?P<below>_)"
    r"|(?P<factorial>!)|(?P<set>\\\{)|(?P<open>[({\[])|(?P<close>\\\}|[)}\]])"
    r"|(?P<name>\\[A-Za-z]+|[^\W\d_])|(?P<other>\\\\|.)",
    re.DOTALL,
)
OPERATORS = ("times", "divided", "over")
BEGINNINGS = frozenset(
    ["number", "repeating", "frac", "binom", "root", "function", "set", "open", "name"]
)
BARE_ARGUMENT = re.compile(
    r"(\\[cdt]?(?:frac|binom)\s*(?:\{[^{}]*\})?|\\sqrt|\u221a)\s*(\d)(?![.])"
)
"""An argument of one digit without braces, as in `\\frac12`."""
WITH_FRACTION = re.compile(r"(\d+)\s+(\d+)\s*/\s*(\d+)")
COMPUTED = re.compile(
    rf"\\(?:sqrt|pi|[dt]?binom|[lr]?vert|[lr]floor|[lr]ceil|b?mod|p?mod|{FUNCTIONS})(?![A-Za-z])"
    rf"|\\operatorname|[\u221a|!\u230a\u2308\u03c0]|(?<![A-Za-z\\])(?:[ei]\s*\^|(?:{FUNCTIONS})\s*[({{\\])"
)
"""Signs of a computation, such as roots and functions, which no notation of a rational number
holds."""


class _Unfinished(Exception):
    """Raised where an operation on explicit numbers is found."""


class _Quotient(Fraction):
    """A fraction of two numbers."""


class _Ten(Fraction):
    """A power of ten, or a number in scientific notation; its value is not computed."""


def is_unfinished(text: str, *, rational: bool = False) -> bool:
    """Whether the expression `text` (LaTeX) has still to be evaluated, such as `67 + 63`. With
    `rational`, its value is known to be a rational number; an expression with roots, functions or
    constants then counts as unfinished too.
    """
    return _read(text) is None or (rational and COMPUTED.search(text) is not None)


def to_simplify(text: str) -> Sequence[str]:
    """The parts of the finished expression `text` (LaTeX) that could be simplified, as normalised
    text: fractions not in lowest terms (`26/2`), powers of ten (`10^3`), numbers in scientific
    notation (`1.5*10^3`) and repeating decimals (`0.overline3`). Empty without such parts, and for
    an expression that is unfinished.
    """
    return _read(text) or ()


@lru_cache(maxsize=1024)
def _read(text: str) -> tuple[str, ...] | None:
    """The parts of `text` that could be simplified, of a finished expression; None for one that is
    unfinished.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = WITH_FRACTION.sub(r"\1\\frac{\2}{\3}", text.replace("**", "^"))
    for _ in range(2):
        text = BARE_ARGUMENT.sub(r"\1{\2}", text)
    found = TOKEN.finditer(text)
    reader = _Reader([(one.lastgroup, one[0]) for one in found if one.lastgroup is not None])
    try:
        reader.read(0)
    except _Unfinished:
        return None
    return tuple(reader.to_simplify)


class _Reader(TokenReader):
    """A recursive-descent reader that takes everything it does not know for one value. `depth` is
    the number of open brackets. Its methods return the explicit number that was read, without its
    sign, or None for any other value; they raise `_Unfinished`.
    """

    def __init__(self, tokens: Sequence[tuple[str, str]]) -> None:
        super().__init__(tokens)
        self.to_simplify: list[str] = []

    def _skips(self, kind: str) -> bool:
        """Whether tokens of a kind come next, which are passed over."""
        start = self._place
        while self.kind() == kind:
            self.take()
        return self._place > start

    def read(self, depth: int) -> Fraction | None:
        """Read the tokens of an expression up to a closing bracket or, outside of brackets, to the
        end. `depth`: number of open brackets. Returns the number without its sign if the part that
        was read is one number, such as `-5`, else None. Raises `_Unfinished` for an operation on
        numbers, which has still to be computed.
        """
        if depth > MAX_DEPTH:
            raise _Unfinished
        found: list[Fraction | None] = []
        while self.kind() != "end" and not (depth and self.kind() == "close"):
            if self.kind() in BEGINNINGS or self.kind() == "sign":
                found.append(self._sum(depth))
            else:
                self.take()
                found.append(None)
        return found[0] if len(found) == 1 else None

    def _sum(self, depth: int) -> Fraction | None:
        terms: list[Fraction | None] = []
        while not terms or self.kind() == "sign":
            self._skips("sign")
            terms.append(self._product(depth))
        if sum(term is not None for term in terms) > 1:
            raise _Unfinished
        return terms[0] if len(terms) == 1 else None

    def _product(self, depth: int) -> Fraction | None:
        number: Fraction | None = None
        has_others, operator = False, ""
        while self.kind() in BEGINNINGS or self.kind() in OPERATORS:
            if self.kind() in OPERATORS:
                operator = self.kind()
                self.take()
                self._skips("sign")
                continue
            factor = self._power(depth)
            if factor is None:
                has_others = True
            elif operator == "divided" and number is not None:
                raise _Unfinished
            elif operator in ("divided", "over") and (has_others or number is None):
                has_others = True  # a denominator, as in 2 pi/3
            else:
                number = factor if number is None else self._joined(number, factor, operator)
            operator = ""
        return None if has_others else number

    def _joined(self, first: Fraction, second: Fraction, operator: str) -> Fraction:
        """Two numbers in one notation, such as a mixed number."""
        if operator == "over" and not isinstance(first, _Ten):
            return self._quotient(first, second, may_be_whole=False)
        plain = not isinstance(first, _Quotient | _Ten)
        if plain and operator == "times" and isinstance(second, _Ten):
            self.to_simplify[-1] = f"{first}*{self.to_simplify[-1]}"
            return second
        if plain and operator == "" and isinstance(second, _Quotient) and second < 1:
            return first + second
        raise _Unfinished

    def _quotient(self, over: Fraction, under: Fraction, *, may_be_whole: bool) -> Fraction:
        if over.denominator != 1 or under.denominator != 1 or under == 0:
            raise _Unfinished
        if isinstance(over, _Quotient | _Ten) or isinstance(under, _Quotient):
            raise _Unfinished
        value = _Quotient(over, under)
        if value.denominator == 1 and not may_be_whole:
            raise _Unfinished
        if gcd(over.numerator, under.numerator) != 1 or value.denominator == 1:
            self.to_simplify.append(f"{over}/{under}")
        return value

    def _power(self, depth: int) -> Fraction | None:
        may_be_ten = self.kind() == "number"
        base = self._atom(depth)
        while self.kind() in ("power", "below", "factorial"):
            kind = self.kind()
            self.take()
            if kind == "factorial":
                if base is not None:
                    raise _Unfinished
                continue
            sign = "-" if self._skips("sign") else ""
            above = self._atom(depth) if self.kind() in BEGINNINGS else None
            if kind == "power" and base is not None and above is not None:
                if may_be_ten and base == 10 and above.denominator == 1 and above > 1 - bool(sign):
                    base, may_be_ten = _Ten(10), False
                    self.to_simplify.append(f"10^{sign}{above}")
                    continue
                if above.denominator == 1:
                    raise _Unfinished
            base = None
        return base

    def _atom(self, depth: int) -> Fraction | None:
        kind, text = self.kind(), self.take()
        if kind == "number":
            return Fraction(re.sub(r"\{,\}|\\,|[, ]", "", text))
        if kind == "repeating":
            self.to_simplify.append(re.sub(r"[\\{}\s]", "", text))
        if kind in ("frac", "binom"):
            over, under = self._argument(depth), self._argument(depth)
            if over is None or under is None:
                return None
            if kind == "binom":
                raise _Unfinished
            return self._quotient(over, under, may_be_whole=True)
        if kind == "root":
            degree = self._argument(depth) if self._tokens[self._place][1] == "[" else Fraction(2)
            if _is_power(self._argument(depth), degree):
                raise _Unfinished
        elif kind == "function":
            while self.kind() in ("below", "power"):
                self.take()
                self._argument(depth)
            if self.kind() in BEGINNINGS:
                self._power(depth)
        elif kind in ("open", "set"):
            inside = self.read(depth + 1)
            if isinstance(inside, _Ten) and text != "{":
                inside = Fraction(10)  # no longer part of a number in scientific notation
            if self.kind() == "close":
                self.take()
            return inside if kind == "open" else None
        return None

    def _argument(self, depth: int) -> Fraction | None:
        self._skips("sign")
        return self._atom(depth) if self.kind() in BEGINNINGS else None


def _is_power(number: Fraction | None, degree: Fraction | None) -> bool:
    """Whether the root of a rational number is rational."""
    if number is None or degree is None or not 2 <= degree <= 10:
        return False
    return all(
        part < MAX_RADICAND and round(part ** (1 / degree)) ** degree == part
        for part in (number.numerator, number.denominator)
    )
