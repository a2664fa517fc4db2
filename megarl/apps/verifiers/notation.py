r"""Rewrites the notations of final answers into the one that math-verify reads.

response or final expression --in_prose, cleaned--> LaTeX          `21st` -> `21`
final expression --plain_number, number_with_unit--> exact value   `1,234.50` -> 2469/2
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

from megarl.apps.verifiers.arithmetic import in_signs

NUMBER_CHARACTERS = 200  # nothing longer is read as a plain number: reading it could take long
NUMBER = re.compile(
    r"(?:[$\u20ac\u00a3])?([-+]?)(?:[$\u20ac\u00a3])?(\d{1,3}(?:,\d{3})+|\d+)?(\.\d+)?"
    r"(?:[eE]([-+]?\d{1,3}))?"
)
UNIT = re.compile(r"^(.*\d)\s+([A-Za-z]{2,}(?:\s+[A-Za-z]+)*)$")
# Words that change the number before them, so that it may not be read alone.
NOT_UNITS = re.compile(
    r"\b(?:hundreds?|thousands?|millions?|billions?|trillions?|dozens?|half|quarter|third|pi|sqrt|"
    r"times|plus|minus|over|and|or|to|by|mod|squared|cubed|factorial)\b",
    re.IGNORECASE,
)
PERCENT = r"\s*(?:\\?%|percent(?:age)?\b|\\text\{\s*(?:\\?%|percent(?:age)?)\s*\})"
FINAL_PERCENT = re.compile(rf"(?<=[\w)}}\].]){PERCENT}(?:\s+points?)?\s*$", re.IGNORECASE)
PERCENT_OF_NUMBER = re.compile(rf"(?<=\d)(?:\.\.\.)?{PERCENT}", re.IGNORECASE)
CURRENCY = re.compile(
    r"(?P<formula>\$\$.*?\$\$|\$(?!\d)[^$]*\$|\$\d[^$]*(?<!\s)\$(?!\d)"
    r"|\$\d[^$]*\$(?=[\s.,;:)*]|\Z)|\\\$)"
    r"|\$(?=\d)",
    re.DOTALL,
)
"""A formula, or a dollar sign before a number that does not begin a formula: the sign that closes a
formula has no space before it and no digit behind it."""
THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;: ]|~|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
SPACED = re.compile(r"(?<=\d) (?=\d{3}(?!\d))")
SPACED_NUMBER = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
"""A number with spaces between thousands."""
END = re.compile(r"(?<![\\.])[.,;:\u3002]\s*$")
"""A final punctuation mark."""
VULGAR = (
    "\u00bc\u00bd\u00be\u2150\u2151\u2152\u2153\u2154\u2155\u2156\u2157\u2158\u2159"
    "\u215a\u215b\u215c\u215d\u215e"
)  # one quarter, a half, ..., seven eighths
MIXED = re.compile(rf"(?:((?<!\d)\d{{1,100}})\s?)?([{VULGAR}])")
SUPERSCRIPTS = re.compile(r"(?<=[\w)}\]])\u207b?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
BARE_POWER = re.compile(r"(?<=\d)\s*\^\s*\{(-?[\d.]+)\}")
STARS = re.compile(r"(?<=[\w)}])\s*\*\*\s*(?=[-\w({])")
CHARACTERS = {
    **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # of full width
    "\u221e": "\\infty ", "\u2205": "\\emptyset ", "\u03c0": "\\pi ", "\u2212": "-",
}  # fmt: skip
WRITTEN = str.maketrans(CHARACTERS)
ANSWER = re.compile(
    r"(?:answer:(?=[-\d\\$])|(?:\u7b54\u6848|\u7b54)\s*(?:\u662f|\u4e3a|\u70ba|:)+)\s*",
    re.IGNORECASE,
)
"""The words before an answer, also in Chinese."""
NO_ANSWER = re.compile(
    r"\banswers?\b(?!\W{0,4}[:=\d$\\(]|[^.\n]{0,60}?\b(?:is|are|was|be|equals?)\b)", re.IGNORECASE
)
"""The word where no answer follows, as in "add 2 to the answer of the first step": math-verify
takes any number within 50 characters behind it for the final answer."""
ROOT = re.compile(r"\u221a\s*(?:\(([^()]*)\)|(\d+|[A-Za-z]))")
EXPONENT = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?[eE][-+]?\d{1,2})(?![\w.]\w)")
_TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|rm)"
WRAPPED = re.compile(_TEXT + r"\s*\{([^{}]*)\}")
WRAPPING = re.compile(rf"(?:{_TEXT}|\\(?:mathit|bm|boldsymbol|underline))\s*\{{")
KNOWN = frozenset(
    ["pi", "inf", "infinity", "infty", "exp", "log", "ln", "sqrt"]
    + [arc + name for arc in ("", "arc") for name in ("sin", "cos", "tan", "cot", "sec", "csc")]
)
"""Words that are names of functions or constants."""
_PLAIN = "|".join(
    sorted(KNOWN - {"sqrt", "exp", "inf", "infinity", "infty"}, key=len, reverse=True)
)
PLAIN_NAMES = re.compile(rf"(?<![\\A-Za-z])({_PLAIN})(?![A-Za-z])")
"""Names of functions and constants without LaTeX's backslash, such as in `2pi` and `sin x`."""
OPERATORS = re.compile(rf"\\(?:operatorname|mathrm|text)\{{\s*({_PLAIN})\s*\}}")
PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z{])sqrt\s+([A-Za-z0-9]+)")
WITH_FRACTION = re.compile(r"([-+]?)(\d{1,100})\s+(\d{1,100})\s*/\s*(\d{1,100})")
DEGREES = re.compile(r"([-+]?\d[\d.,]*)\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})")
DASH = re.compile(r"(?<![\w)}\]])[\u2212\u2013](?=[\d.\\$\u20ac\u00a3])")
LENGTHS = r"(?:[kcdm]?m|in|ft|yd|mi|[km]?g|lbs?|oz|[mc]?[lL]|m?s|sec|min|h|hr|hours?|mph|miles?)"
POWER = r"(?:\s*\^\s*(?:\d|\{\s*-?\d\s*\}))?"
AFTER_NUMBER = re.compile(
    rf"([-+]?\d[\d.,]*)(?:\s*[$\u20ac\u00a3]|\s+{LENGTHS}{POWER}(?:\s*/\s*{LENGTHS}{POWER})?)"
)
"""A number with a currency sign or a unit of measure behind it."""
SPACE = r"(?:~|\\[,;:! ]|\s)*"
_VARIABLE = r"\s*([abcefijknopqrtuvwxyz])\s*\}"
_UNIT = (
    rf"{_TEXT}\s*\{{(?!{_VARIABLE})(?=[^{{}}]*[A-Za-z])"
    rf"(?:[^{{}}\d^]|\^\s*-?\d|\^\s*\{{-?\d\}})*\}}{POWER}"
)
_QUOTIENT = rf"\\frac\s*\{{\s*{_UNIT}\s*\}}\s*\{{\s*{_UNIT}\s*\}}"
VARIABLE = re.compile(rf"\\(?:mathrm|text|operatorname)\s*\{{{_VARIABLE}")
"""A variable, e or i in text mode; other single letters in text mode are units."""
UNITS = re.compile(
    rf"(?<=[\w)}}\]])((?:{SPACE}(?:\\cdot|/)?{SPACE}(?:{_QUOTIENT}|{_UNIT}))+){SPACE}\Z"
)
"""Units: words in text mode behind a value."""
MULTIPLE = re.compile(
    rf"(.*\d){SPACE}(?:\\(?:text|mathrm)\s*\{{\s*)?(hundred|thousand|million|billion|trillion|dozen)\b"
    r"([A-Za-z\s]*)\}?"
)
SIZES: dict[str, int] = {
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
ORDINAL = re.compile(
    rf"([-+]?\d[\d,]*)\s*(?:\^\s*)?(?:\{{\s*)?(?:{_TEXT}\s*\{{\s*)?(?:st|nd|rd|th)\s*\}}{{0,2}}"
)
TIME = re.compile(
    rf"(\d{{1,2}}):([0-5]\d){SPACE}(?:{_TEXT}\s*\{{\s*)?(?:([ap])\.?\s?m\.?)?\s*\}}?", re.IGNORECASE
)
"""A time of day, such as 3:45 p.m."""
IN_PARENTHESES = re.compile(r"([-+]?\d*\.\d*)\((\d+)\)")
"""A decimal number whose repeating digits stand in parentheses, such as 0.1(6)."""
REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), written)
    for pattern, written in (
        (r"\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\text\s*\{\s*(?:\\?([$%,]))\s*\}", r"\1"),
        (r"\\[bB]igg?[lmr]?(?![A-Za-z])", ""),
        (r"\\(?:text)?color\s*\{[^{}]*\}|\\displaystyle(?![A-Za-z])", ""),
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"(\\[cdt]?frac)\s*(\d)", r"\1{\2}"),
        (r"(\\[cdt]?frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\log\s*_\s*(?:e|\{e\})(?![A-Za-z])", r"\\ln "),
        (r"(?<=[\d}])(?:\s+to\s+|\s*\\text\s*\{\s*to\s*\}\s*|\s*\\colon\s*)(?=[\d\\])", ":"),
        (r"\\dot\s*\{(\d)\}(\d*)\\dot\s*\{(\d)\}", r"\\overline{\1\2\3}"),
        (r"(?<=[.\d])\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))", r"\\overline{\1\2}"),
    )
)
"""(pattern, replacement) of notations that math-verify or `calculate` do not read, and the same
value in one that they do."""
BRACKETS = {"{": "}", "(": ")"}


@lru_cache(maxsize=1024)  # all rollouts of a group have one reference answer
def cleaned(text: str) -> str:
    r"""A final expression, of a response or a reference answer, as LaTeX without what does not
    change its value: Markdown's `**`, `$` or `\(` around it, a final percent sign, units, doubled
    brackets. Characters such as ½ and ², and names such as pi and sin, become LaTeX.
    """
    text = re.sub(r"^[*`\s]+|(?<!\^)[*`\s]+$", "", text)
    for before, after in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = text[len(before) : -len(after)]
        if text.startswith(before) and text.endswith(after) and inner and before not in inner:
            text = inner.strip()
    if (wrapped := WRAPPING.match(text)) and (wrapped.end() - 1, len(text) - 1) in pairs(text):
        text = text[wrapped.end() : -1].strip()
    text = VARIABLE.sub(r"\1", STARS.sub("^", END.sub("", text).translate(WRITTEN)))
    text = FINAL_PERCENT.sub("", rewritten(text).strip())
    if TIME.fullmatch(text):
        return text
    text = ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", without_units(text))
    text = SUPERSCRIPTS.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = MIXED.sub(lambda found: latex(_mixed(found)), DASH.sub("-", text))
    text = text.replace("\u2212", "-").replace("\u00b0", "^\\circ")
    text = OPERATORS.sub(r"\\\1 ", in_signs(text))
    text = PLAIN_ROOT.sub(r"\\sqrt{\1}", PLAIN_NAMES.sub(r"\\\1 ", text)).rstrip()
    if number := DEGREES.fullmatch(text) or ORDINAL.fullmatch(text):
        return number[1]
    if repeating := IN_PARENTHESES.fullmatch(text):
        return f"{repeating[1]}\\overline{{{repeating[2]}}}"
    if parts := WITH_FRACTION.fullmatch(text):
        whole, over, under = (int(part) for part in parts.groups()[1:])
        if over < under:
            return parts[1] + latex(whole + Fraction(over, under))
    return without_doubled(text)


def rewritten(text: str) -> str:
    """Replace notation that math-verify and `calculate` cannot read in `text`, an expression in
    LaTeX, by equal notation that they can, such as `\\frac12` by `\\frac{1}{2}`. Returns the new
    text.
    """
    for pattern, written in REWRITES:
        text = pattern.sub(written, text)
    return text


def without_units(text: str) -> str:
    """`text`, a value in LaTeX, without a unit in text mode behind it, such as `12` for
    `12\\text{ cm}^2`; words that change the value stay. `12 million` becomes 12000000.
    """
    found = MULTIPLE.fullmatch(text)
    if found and not NOT_UNITS.search(found[3]):
        number = plain_number(found[1])
        return text if number is None else latex(number * SIZES[found[2]])
    units = UNITS.search(text)
    return text if units is None or NOT_UNITS.search(units[0]) else text[: units.start()]


def in_prose(text: str) -> str:
    """Rewrite `text`, a response that marks no final answer, so that math-verify finds the numbers
    in it: currency and percent signs and thin spaces are removed, and exponents such as 5e3 written
    out. Returns the new text.
    """
    text = ANSWER.sub("answer: ", text.translate(WRITTEN).replace("\u3002", ". "))
    text = NO_ANSWER.sub("result", text)
    text = PERCENT_OF_NUMBER.sub("", CURRENCY.sub(lambda found: found["formula"] or "", text))
    text = in_signs(THIN_SPACE.sub("", text))
    text = MIXED.sub(lambda found: str(_mixed(found)), BARE_POWER.sub(r"^(\1)", text))
    return without_doubled(EXPONENT.sub(lambda found: latex(Fraction(found[0])), text))


def plain_number(text: str) -> Fraction | None:
    """The exact value of a text that is a plain number, otherwise None. A sign, `$`, `%` (which is
    dropped), thousands separators, an exponent (5e3), a final full stop and a unit are allowed.
    """
    if len(text) > NUMBER_CHARACTERS:
        return None
    text = THIN_SPACE.sub(",", text.replace("\\$", "$").replace("{,}", ",").replace("\\!", ""))
    text = text.replace("\u2212", "-").strip()
    if len(text) > 2 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()
    text = FINAL_PERCENT.sub("", END.sub("", text).rstrip())
    text = SPACED.sub(",", text) if SPACED_NUMBER.fullmatch(text) else text
    unit = UNIT.match(text)
    if unit and not NOT_UNITS.search(unit[2]):
        text = unit[1]
    match = NUMBER.fullmatch(re.sub(r"^([-+]?[$\u20ac\u00a3])\s+", r"\1", text))
    if not match or not (match[2] or match[3]):
        return None
    digits = f"{match[1]}{(match[2] or '0').replace(',', '')}{match[3] or ''}"
    return Fraction(f"{digits}e{match[4] or 0}")


def number_with_unit(text: str) -> Fraction | None:
    """The value of a number with a unit of measure or a currency sign behind it, such as 5 for
    `5 cm^2`; None for other texts.
    """
    found = AFTER_NUMBER.fullmatch(text)
    return plain_number(found[1]) if found else None


def _mixed(found: re.Match[str]) -> Fraction:
    """The value of a match of `MIXED`, such as 3/2 for 1½."""
    over, under = unicodedata.normalize("NFKC", found[2]).split("\u2044")
    return Fraction(found[1] or 0) + Fraction(int(over), int(under or 1))


def pairs(text: str) -> list[tuple[int, int]]:
    """(opening, closing) positions of all brackets `{}` and `()` in `text` that match, in the order
    of their closings. A bracket without a partner is left out.
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


def latex(number: Fraction) -> str:
    """`number` in LaTeX: `3`, or `\\frac{1}{2}` if it is no whole number."""
    if number.denominator == 1:
        return str(number.numerator)
    return f"\\frac{{{number.numerator}}}{{{number.denominator}}}"
