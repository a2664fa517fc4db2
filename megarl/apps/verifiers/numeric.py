r"""The verifier `numeric`: is a number of the response near the reference answer?

response --numbers--> values     1,234.5   1.5e3   1.5 \times 10^3   2^10   50%   3/4   \frac{3}{4}
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from fractions import Fraction

from megarl.environments.response_text import after_last
from megarl.settings.environments import EnvironmentConfig
from megarl.types import Prompt

MOST_CHARACTERS = 10_000
"""Of a longer text, only so many characters are searched: from its end or, behind a marker, from
its beginning."""
MOST_DIGITS = 400
"""A number of more characters has no value: computing with it could take long."""
PLAIN = (
    r"(?:[0-9]{1,3}(?:(?:,|\{,\}|\\,)[0-9]{3})+(?![0-9])|[0-9]+)?(?:\.[0-9]+)?(?<=[0-9])"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9.]))?"
)
SIGN = r"(?:(?<![\w.)}\]])[-+\u2212])?"
BEFORE = r"(?:\\?[$\u20ac\u00a3]\s?)?"
NOT_BEHIND = r"(?<![\w.^])(?<!\^[ {+\u2212-])(?<!\^[ {][+\u2212-])"
"""Regular expression for a place where a number may begin. The exponent of a unit is no number:
`25 m^2`, `9.8 m s^{-2}`."""
NUMBER = re.compile(
    rf"{NOT_BEHIND}(?P<sign>{SIGN}){BEFORE}"
    r"(?P<ones>[0-9]{1,9}(?:\s+(?=[0-9]+\s*/\s*[0-9])|\s*(?=\\[dt]?frac)))?(?:"
    rf"\\[dt]?frac\s*\{{\s*(?P<over>[-+]?{PLAIN})\s*\}}\s*\{{\s*(?P<under>{PLAIN})\s*\}}"
    rf"|(?P<whole>{PLAIN})(?:"
    r"\s*(?:\\times|\\cdot|[x\u00d7*\u00b7])\s*10\s*\^\s*\{?(?P<power>[-+\u2212]?[0-9]{1,3})\}?"
    r"|\s*\^\s*\{?(?P<exponent>[-+\u2212]?[0-9]{1,3})(?![0-9.])\}?"
    rf"|\s*/\s*(?P<divisor>{PLAIN})(?!\s*/))?)"
    r"(?P<percent>\s*\\?%|\s+percent\b)?"
)


def numbers(text: str, *, percent_is_hundredths: bool = False) -> Iterator[Fraction | None]:
    """Yield the exact values of the numbers in `text`, in their order, such as 3/4 for
    `\\frac{3}{4}`; None for a number that is too long, or divided by zero. The exponent of a unit
    (`m^2`) is no number. `percent_is_hundredths`: whether `50%` is 1/2; otherwise it is 50.
    """
    for match in NUMBER.finditer(text):
        yield _value(match, percent_is_hundredths)


def _value(match: re.Match[str], percent_is_hundredths: bool) -> Fraction | None:
    if len(match[0]) > MOST_DIGITS:
        return None
    over, under = match["over"] or match["whole"], match["under"] or match["divisor"] or "1"
    value, divisor = _plain(over), _plain(under)
    if divisor == 0:
        return None
    value = value / divisor + int(match["ones"] or 0)
    if match["exponent"]:
        exponent = int(match["exponent"].replace("\u2212", "-"))
        if abs(exponent) * len(over) > MOST_DIGITS or (exponent < 0 and value == 0):
            return None
        value **= exponent
    if match["power"]:
        value *= Fraction(10) ** int(match["power"].replace("\u2212", "-"))
    if match["percent"] and percent_is_hundredths:
        value /= 100
    return -value if match["sign"] in ("-", "\u2212") else value


def _plain(text: str) -> Fraction:
    return Fraction(re.sub(r"\{,\}|\\,|,", "", text))


def numeric(config: EnvironmentConfig) -> Callable[[Prompt, str], Awaitable[float]]:
    """Make the verifier `numeric` from the recipe: an async function (prompt, response) that
    returns 1.0 if the last number of the response, or with `environment.answer_after` the first
    number after the last marker, differs from the reference answer by at most
    max(`numeric.absolute`, `numeric.relative` x size of the reference), else 0.0. The function
    raises `ValueError` if the reference answer holds not exactly one number.
    """
    settings = config.numeric
    hundredths = settings.percent == "hundredths"
    relative, absolute = Fraction(repr(settings.relative)), Fraction(repr(settings.absolute))

    async def verify(prompt: Prompt, response: str) -> float:
        reference = list(numbers(prompt.answer, percent_is_hundredths=hundredths))
        expected = reference[0] if len(reference) == 1 else None
        if expected is None:
            raise ValueError(
                f"the reference answer {prompt.answer!r:.80} of row {prompt.index} is not one"
                " number; set environment.verifier to another"
            )
        text = after_last(config.answer_after, response)
        if text is None:
            return 0.0
        text = text[:MOST_CHARACTERS] if config.answer_after else text[-MOST_CHARACTERS:]
        values = list(numbers(text, percent_is_hundredths=hundredths))
        value = values[0 if config.answer_after else -1] if values else None
        near = max(absolute, relative * abs(expected))
        return float(value is not None and abs(value - expected) <= near)

    return verify
