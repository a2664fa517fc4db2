r"""Comparison of final answers as text, because math-verify would read them as products, quotients
or numbers without end: words, numbers in a base, ratios, times of day, letters of a multiple
choice.
"""

from __future__ import annotations

import re
from fractions import Fraction

from megarl.apps.verifiers.arithmetic import calculate, is_huge
from megarl.apps.verifiers.notation import KNOWN, SPACE, TIME, WRAPPED, plain_number

CALCULUS = re.compile(r"\\(?:o?i{0,3}nt|lim)(?![A-Za-z])")
"""Integrals and limits, which are not computed: sympy may search for their value without end."""
WORDS = re.compile(r"(?=.*[A-Za-z]{2})[A-Za-z]+(?:[\s-]+[A-Za-z]+)*")
PRODUCTS = re.compile(r"[abcxyz]{2,3}|[b-df-hj-np-tv-z]{2,3}")
"""Letters that are read as a product of variables, such as xy or mn."""
BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
WITH_BASE = re.compile(
    r"\(?([-+]?\d[\dA-Fa-f]*)\)?\s*_\s*"
    rf"(?:\{{?\s*\(?(\d{{1,2}})\)?\s*\}}?|\{{?(?:\\(?:text|mathrm)\s*\{{)?({'|'.join(BASES)})\}}*)"
)
CHOICE = re.compile(
    rf"\(?([A-H])[).:]+(?:\s|~|\\[,;: ]){SPACE}(?!(?:and|or)\b|\(?[A-H](?![A-Za-z]))(\S.*)",
    re.DOTALL,
)
"""A letter of a multiple choice with what it stands for, as in `D. 5`."""
LETTER = re.compile(r"\(?([A-H])[).:]*")
SIZES = re.compile(r"\\(?:left|right|bigg?|Bigg?|[,;:! ])|\\(?=[{}])|\s")
RELATION = re.compile(
    r"([<>\u2264\u2265\u2260]|\\(?:[lg]e|[lg]eq|[lg]eqslant|[lg]t|neq?)(?![A-Za-z]))"
)
INTERVALS = re.compile(r"[(\[].*,.*[)\]]", re.DOTALL)
OR = re.compile(r"\\text\s*\{\s*or\s*\}|\\(?:lor|vee)(?![A-Za-z])|\bor\b")
NAME = re.compile(r"\s*(?:[A-Za-z]|\\(?!infty|pi)[a-z]+)(?:_(?:\w|\{\w+\}))?\s*")
"""The name of a variable."""


def same_part(reference: str, expression: str) -> tuple[str, str]:
    """Make two answers comparable of which one or both are a choice with its value, such as `D. 5`.
    Returns (reference answer, expression of a response), both LaTeX. If the other is only a letter,
    both are reduced to letters; if it is only a value, both to values. Two such choices with the
    same letter are reduced to values, with different letters to letters. Other texts are returned
    as they are.
    """
    texts = [WRAPPED.sub(r"\1", text) for text in (reference, expression)]
    choices = [CHOICE.fullmatch(text) for text in texts]
    if choices == [None, None]:
        return reference, expression
    letters = [
        LETTER.fullmatch(text) or choice for text, choice in zip(texts, choices, strict=True)
    ]
    if all(letters) and (not all(choices) or letters[0][1] != letters[1][1]):  # type: ignore[index]
        return letters[0][1], letters[1][1]  # type: ignore[index]
    first, second = (
        choice[2] if choice else text
        for choice, text in zip(choices, (reference, expression), strict=True)
    )
    return first, second


def compared_as_text(reference: str, expression: str) -> bool | None:
    """Compare final expressions (LaTeX) of kinds that math-verify would misread or compute without
    end: words, whose letters would be factors; numbers in a base (1011_2), whose base must be
    equal; ratios and times of day; numbers too large to compute; integrals and limits. Returns
    whether the two are equal, or None if they are of no such kind and have to be parsed.
    """
    words = _plain_words(reference)
    if words is not None:
        return words == _plain_words(expression)
    bases = WITH_BASE.fullmatch(reference), WITH_BASE.fullmatch(expression)
    if bases != (None, None):
        first, second = (
            base and (base[1].upper(), int(base[2] or 2 + BASES.index(base[3]))) for base in bases
        )
        return first == second
    in_proportion = _same_ratio(reference, expression)
    if in_proportion is not None:
        return in_proportion
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


def _same_ratio(reference: str, expression: str) -> bool | None:
    """Whether two ratios (3:4) are in proportion, or two times of day (3:45 p.m.) equal; None if
    one is neither and the other at most a quotient.
    """
    first, second = TIME.fullmatch(reference), TIME.fullmatch(expression)
    if first and second:
        marks = {(mark or "").lower() for mark in (first[3], second[3])} - {""}
        return (int(first[1]), first[2]) == (int(second[1]), second[2]) and len(marks) < 2
    if (first and first[3]) or (second and second[3]):
        return False
    given, said = _ratio(reference), _ratio(expression)
    if given is None or said is None:
        parts = given if said is None else said
        return None if parts is None or len(parts) <= 2 else False
    return len(given) == len(said) and all(
        one * said[0] == other * given[0] for one, other in zip(given, said, strict=True)
    )


def _ratio(text: str) -> list[Fraction] | None:
    """The numbers of a ratio such as 1:2:3, none of them zero; None for other texts."""
    parts = [SIZES.sub("", part) for part in text.split(":")]
    values = [
        number if (number := plain_number(part)) is not None else calculate(part) for part in parts
    ]
    found = [value for value in values if value]
    return found if 1 < len(found) == len(values) else None


def outer_brackets(first: str, second: str) -> bool:
    """Whether two expressions (LaTeX) are both lists in brackets, but in different kinds of
    brackets: a pair or an open interval `(1, 2)`, a closed interval `[1, 2]`, a set `\\{1, 2\\}`.
    False if one is no such list.
    """
    ends = []
    for text in (first, second):
        bare = SIZES.sub("", text)
        if not ("," in bare and bare[:1] in "([{" and bare[-1:] in ")]}"):
            return False
        ends.append((bare[0], bare[-1]))
    return ends[0] != ends[1]


def as_intervals(text: str) -> str:
    r"""Inequalities of one variable (LaTeX) as intervals: `[0, 1)` for `0 \le x < 1`; with "or"
    between them, as a union. Other texts are returned as they are.
    """
    found = [one for part in OR.split(text) if (one := _interval(part)) is not None]
    return r" \cup ".join(found) if len(found) == len(OR.split(text)) else text


def _interval(text: str) -> str | None:
    sides = [side.strip() for side in RELATION.split(text)]
    values, signs = sides[::2], sides[1::2]
    rising = {sign in "<\u2264" or sign[1:2] == "l" for sign in signs}
    if len(rising) != 1 or any(sign == "\u2260" or sign[1:2] == "n" for sign in signs):
        return None
    if rising == {False}:
        values, signs = values[::-1], signs[::-1]
    if len(values) == 2 and NAME.fullmatch(values[0]):
        values, signs = ["-\\infty", *values], ["<", *signs]
    elif len(values) == 2:
        values, signs = [*values, "\\infty"], [*signs, "<"]
    if len(values) != 3 or [bool(NAME.fullmatch(value)) for value in values] != [
        False,
        True,
        False,
    ]:
        return None
    closed = [sign in "\u2264\u2265" or sign[2:3] == "e" for sign in signs]
    return f"{'(['[closed[0]]}{values[0]}, {values[2]}{')]'[closed[1]]}"
