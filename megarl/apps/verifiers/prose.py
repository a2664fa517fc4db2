r"""Where the final answer stands in a response, and which words beside it take it back.

response --stated_answer--> LaTeX      `So she has 2 2/3 cups.` -> `2 2/3`; `It is 5 or 7.` -> None
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megarl.apps.verifiers.expression import DECIMAL, MULTIPLES, VULGAR

MAX_CHARACTERS = 10_000
"""Of a response without a marked answer, only so many characters from its end are searched."""
NUMBER_WORDS = {
    word: value for value, word in enumerate(
        [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
]
    )
} | {word: 10 * value for value, word in enumerate(
    ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], 2)}  # fmt: skip
PARTS = {
    word: value for value, word in enumerate(
        ["half", "third", "quarter", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"], 2)
} | {"halve": 2, "fourth": 4}  # fmt: skip
_PARTS = "|".join(word + "s?" for word in PARTS)
_WORDS = "|".join(sorted(NUMBER_WORDS, key=len, reverse=True))
IN_WORDS = re.compile(
    rf"(?<![\w-])(?:(?P<whole>\d+|{_WORDS})\s+and\s+)?"
    rf"(?P<over>\d+|an?|{_WORDS})[\s-]+(?P<part>{_PARTS})(?![\w-])",
    re.IGNORECASE,
)
"""A fraction in words: two thirds, 2 and a half."""
NUMBER_IN_WORDS = re.compile(
    rf"(?<![\w-])(?:{_WORDS})(?:[\s-]+(?:{_WORDS}))*(?![\w-])", re.IGNORECASE
)
AND_FRACTION = re.compile(r"(?<![\d.,/$])(\d+)\s+and\s+(\d+\s*/\s*\d+)(?![\d/])")
CURRENCY = re.compile(
    r"(?P<formula>\$\$.*?\$\$|\$(?!\d)[^$\n]+\$|\$\d[^$]*(?<!\s)\$(?!\d)"
    r"|\$\d[^$]*\$(?=[\s.,;:)*]|\Z)|\\\$)|\$(?=\d)",
    re.DOTALL,
)
"""A formula, or a dollar sign before a number that does not begin a formula: the sign that closes a
formula has no space before it and no digit behind it."""
FORMULA = r"\$\$[^$]+\$\$|\$[^$\n]+\$|\\\(.*?\\\)|\\\[.*?\\\]"
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_MULTIPLES = "|".join(word + "s?" for word in MULTIPLES)
ATOM = (
    r"(?:\d*\.\d*(?:\\(?:overline|dot|bar)\s?(?:\{\d+\}|\d)\d*)+"
    rf"|{FORMULA}|(?<![\w.])\d{{1,2}}:[0-5]\d(?:\s?[ap]\.?m\b)?"
    rf"|(?<![A-Za-z_\d])(?<!\d[.,])(?:\d+\s+\d+\s*/\s*\d+(?![\d/])|\d*[{VULGAR}]|{DECIMAL}"
    r"(?:[eE][-+]?\d{1,3}(?!\w))?)(?:(?:st|nd|rd|th)\b|(?![kKMB]\b))"
    rf"|\\(?!text|boxed)[a-zA-Z]+(?:\s*(?:{_GROUP}|\[\d\]))*|\\boxed\s*{_GROUP}|(?<=[\^_]){_GROUP}"
    r"|(?<![\w'])[a-zA-Z](?=\s?[=+*/^(\u2212-]\s?[\w\\$(.-])(?!\()"
    r"|(?<=[=+*/^\d-])[a-zA-Z](?![\w'])|(?<=[=+*/^] )[a-zA-Z](?![\w']))"
)
SIGN = r"(?:(?<![\w)}\]])[-+\u2212\u2013](?=[\d.\\$(])|\b(?:minus|negative)\s+|(?<!\w)-)?"
JOIN = (
    r"[ ]?(?:[-+*/^=\u00d7\u00b7\u22c5\u00f7\u2212\u2013:\u2248<>\u2264\u2265]|\*\*)[ ]?"
    r"|\s(?:x|plus|minus|times|over|divided\s+by|multiplied\s+by|to\s+the\s+power\s+of"
    r"|or|to|through|mod)\s|[ ]?[()][ ]?|,?[ ]+(?:or|and)[ ]+|,[ ]*|[ ]*"
)
OPENED, CLOSED = r"[(\[]*", r"(?:[)\]]|!|\s?\\?%|\u00b0)*"
RUN = re.compile(
    rf"{SIGN}{OPENED}{SIGN}{ATOM}{CLOSED}(?:(?:{JOIN}){SIGN}{OPENED}{SIGN}{ATOM}{CLOSED})*"
    rf"(?:\s+(?:{_MULTIPLES})\b|\s+squared\b|\s+cubed\b)?",
    re.DOTALL,
)
"""A number, formula or expression in a sentence, whole: with its sign, its other parts, and the
numbers that `or`, `to`, an operator or a comma joins to it."""
STATED = re.compile(
    r"(?:\banswer\b[\s*]*(?:(?:to|for)\s[^.\n]{0,60}?\s)?(?:\bis|\bare|\bwas|[:\uff1a=])+|^\**A\s*:"
    r"|(?:\u7b54\u6848|\u7b54)\s*(?:\u662f|\u4e3a|\u70ba|:|\uff1a)+)"
    r"(?:[\s*:\uff1a]|\bis\b|\btherefore\b|\bthus\b|\bsimply\b)*",
    re.IGNORECASE | re.MULTILINE,
)
"""The words before an answer, also in Chinese."""
SENTENCE_END = re.compile(r"[.!?]\s|[.!?]\Z|\n|\u3002")
_HEDGE = r"(?:or|maybe|perhaps|possibly|probably|alternatively|otherwise|unless|versus|vs)"
HEDGED = re.compile(rf"\b{_HEDGE}\b[^\d.\n]{{0,30}}\Z", re.IGNORECASE)
HEDGE_BEHIND = re.compile(
    rf"\W*(?:[a-z]+\s){{0,2}}\(?(?:\b(?:but|though)\s)?\b{_HEDGE}\b"
    r"(?!\s+(?:more|less)\b)",
    re.IGNORECASE,
)
NEGATED = re.compile(
    r"(?:\b(?:not|never|cannot|neither|nor|except|without|unlike)|n't|rather\s+than|instead\s+of"
    r"|other\s+than|(?:more|less|fewer|greater|smaller|larger)\s+than|anything\s+but)\b"
    r"(?:\s+(?:be|equal(?:\s+to)?|the|an?|exactly|really|is|just|simply|actually|have|has))*[\s*$:(]*\Z",
    re.IGNORECASE,
)
NEGATED_BEHIND = re.compile(
    r"\W*(?:is|was|would\s+be|seems)\s+(?:clearly\s+|surely\s+)?"
    r"(?:wrong|incorrect|not\b|false|impossible)",
    re.IGNORECASE,
)
RANGE = re.compile(r"\b(?:between|from)\s+\Z", re.IGNORECASE)
COMPOUND = re.compile(
    r"[\s-]*(?:feet|foot|ft|hours?|hrs?|h|minutes?|min|pounds?|lbs?|dollars?|weeks?|days?|years?"
    r"|yards?|meters?|metres?|kilometers?|kg|m|degrees?|gallons?)[,\s]*(?:and\s)?\s*\Z",
    re.IGNORECASE,
)  # fmt: skip
SMALLER = re.compile(
    r"[\s-]*(?:inch(?:es)?|in|minutes?|mins?|seconds?|s|ounces?|oz|cents?|days?|months?|hours?|feet|cm"
    r"|centimeters?|grams?|g|pints?|quarts?)\b",
    re.IGNORECASE,
)
BULLET = re.compile(r"^\s*[-*\u2022]\s+|(?<!\w)#+\s", re.MULTILINE)
BOLD = re.compile(r"(?<![\w)}])\*\*([^*\n]+?)\*\*(?![\w(])")


def without_words(text: str) -> str:
    """`text` with numbers that are written in words as digits: `2/3` for two thirds, `2 1/2` for
    two and a half.
    """

    def fraction(found: re.Match[str]) -> str:
        part = found["part"].lower()
        under = PARTS[part if part in PARTS else part.removesuffix("s")]
        over = 1 if found["over"].lower() in ("a", "an") else _in_digits(found["over"])
        if found["whole"]:
            return f"{_in_digits(found['whole'])} {over}/{under}"
        return f"{over}/{under}"

    text = IN_WORDS.sub(fraction, AND_FRACTION.sub(r"\1 \2", text))
    return NUMBER_IN_WORDS.sub(lambda found: str(_in_digits(found[0])), text)


def _in_digits(text: str) -> int | str:
    values = [NUMBER_WORDS.get(word.lower()) for word in re.split(r"[\s-]+", text)]
    if None in values:
        return text
    if len(values) == 1 or (len(values) == 2 and values[0] >= 20 and 0 < values[1] < 10):  # type: ignore[operator]
        return sum(value for value in values if value is not None)
    return text


def _plain(text: str) -> str:
    """A response without the marks of Markdown and the signs of currencies."""
    text = BULLET.sub(" ", BOLD.sub(r"\1", text))
    text = re.sub(r"`([^`\n]*)`", r"\1", text)
    return CURRENCY.sub(lambda found: (found["formula"] or "").replace("\\$", ""), text)


def runs(text: str) -> Iterator[re.Match[str]]:
    """The expressions in `text`, in their order."""
    return RUN.finditer(text)


def stated_answer(response: str, *, alone: bool = False) -> str | None:
    """The expression that a response, in which no answer is marked, ends with, or that one of its
    sentences calls the answer; None without one, and if the words beside it name another one or
    negate it. `alone`: no other expression may stand in `response`.
    """
    text = without_words(_plain(response[-MAX_CHARACTERS:]))
    found = [one for one in runs(text) if re.search(rf"[\d{VULGAR}\\$]", one[0])]
    allowed = [one for one in found if not is_negated(text, one)]
    if not allowed or (alone and len(found) > 1):
        return None
    index = len(allowed) - 1
    stated = [one.end() for one in STATED.finditer(text)]
    for start in reversed(stated):
        end = SENTENCE_END.search(text, start)
        behind = [
            n for n, one in enumerate(allowed)
            if start - 1 <= one.start() < min(end.start() if end else len(text), start + 61)
        ]  # fmt: skip
        if behind:
            index = behind[0]
            break
    last = allowed[index]
    place = found.index(last)
    before = text[found[place - 1].end() if place else 0 : last.start()]
    behind_it = text[last.end() : found[place + 1].start() if place + 1 < len(found) else len(text)]
    if (place and HEDGED.search(before)) or RANGE.search(before) or HEDGE_BEHIND.match(behind_it):
        return None
    if alone and re.search(rf"\b{_HEDGE}\b", behind_it, re.IGNORECASE):
        return None
    if place + 1 < len(found) and HEDGED.search(behind_it):
        return None
    if place and COMPOUND.fullmatch(before) and SMALLER.match(behind_it):
        return None
    if place + 1 < len(found) and COMPOUND.fullmatch(behind_it) and SMALLER.match(
        text, found[place + 1].end()
    ):  # fmt: skip
        return None
    return expression(last[0])


def is_negated(text: str, found: re.Match[str]) -> bool:
    """Whether the words around an expression, a match in `text`, negate it."""
    return bool(
        NEGATED.search(text, max(0, found.start() - 60), found.start())
        or NEGATED_BEHIND.match(text, found.end())
    )


def expression(run: str) -> str:
    """A run as LaTeX: without the dollar signs of its formulas and the punctuation at its end."""
    text = re.sub(r"\$+|\\[()\[\]]", " ", run).strip(" ,;")
    if text.count("(") < text.count(")"):
        text = text.rstrip(")")
    return re.sub(r"^\((.*)\Z", r"\1", text) if text.count("(") > text.count(")") else text


def stated_words(response: str) -> str | None:
    """The words that a sentence of `response` calls the answer, up to its end; None without such a
    sentence.
    """
    text = _plain(response[-MAX_CHARACTERS:])
    stated = list(STATED.finditer(text))
    return re.split(r"[.\n]", text[stated[-1].end() :], maxsplit=1)[0].strip() if stated else None
