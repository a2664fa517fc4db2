r"""Comparison of final answers as text, which would be read as products, quotients
or numbers without end: words, numbers in a base, ratios, times of day, letters of a multiple
choice.
"""

from __future__ import annotations

import re

from megarl.apps.verifiers.expression import KNOWN, PRODUCTS
from megarl.apps.verifiers.notation import SPACE, TIME, WRAPPED

WORDS = re.compile(r"(?=.*[A-Za-z]{2})[A-Za-z]+(?:[\s-]+[A-Za-z]+)*")
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
    """Compare final expressions (LaTeX) of kinds that would be misread or computed without
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
    return _same_time(reference, expression)


def _plain_words(text: str) -> list[str] | None:
    """The words of a text that holds nothing else, in lower case; None for other texts, for
    products of variables and for names of functions and constants.
    """
    text = WRAPPED.sub(r"\1", text).strip().removesuffix(".")
    if not WORDS.fullmatch(text) or PRODUCTS.fullmatch(text):
        return None
    words = re.split(r"[\s-]+", text.lower())
    return None if KNOWN & set(words) else words


def _same_time(reference: str, expression: str) -> bool | None:
    """Whether two times of day (3:45 p.m.) are equal, also if only one has a.m. or p.m. A time with
    a.m. or p.m. differs from other text; None for other pairs: 3:45 may be a ratio.
    """
    first, second = TIME.fullmatch(reference), TIME.fullmatch(expression)
    if first and second:
        halves = {half.lower() for half in (first[3], second[3]) if half}  # "a" of a.m., or "p"
        return (int(first[1]), first[2]) == (int(second[1]), second[2]) and len(halves) < 2
    return False if (first and first[3]) or (second and second[3]) else None
