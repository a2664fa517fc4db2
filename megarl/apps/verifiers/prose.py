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
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES = "|".join(SCALES)
_AFTER = r"(?:(?<=hundred)|(?<=thousand)|(?<=million)|(?<=billion))"
_NEXT = (
    rf"(?:[\s-]+|(?<!hundred){_AFTER},\s|\s+point\s+|{_AFTER}\s+and\s+)(?:{_WORDS}|{_SCALES})(?!\w)"
)
_FIRST = (
    rf"(?<![\w.,-])(?:(?:(?<!half\s)an?|\d[\d,]{{0,20}})\s+(?:{_SCALES})|{_WORDS}|{_SCALES})(?!\w)"
)
NUMBER_IN_WORDS = re.compile(rf"{_FIRST}(?:{_NEXT})*(?!-\w)", re.IGNORECASE)
"""A number in words, whole: one hundred and twenty, 3 thousand five hundred."""
_SHORT = rf"{_FIRST}(?:{_NEXT}){{0,12}}"
TWICE = re.compile(
    rf"(?<![\w.,-])(?:(\d[\d,]{{0,20}})\s+\(({_SHORT})\)|({_SHORT})\s+\((\d[\d,]{{0,20}})\))",
    re.IGNORECASE,
)
"""A number in digits and in words: 5 (five)."""
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
    r"|(?<![\w'<])(?<!</)[a-zA-Z](?=\s?[=+*/^(\u2212<>\u2264\u2265\u2260-]\s?[\w\\$(.-])(?!\()"
    r"|(?<=[=+*/^\d-])[a-zA-Z](?![\w'])|(?<=[=+*/^] )[a-zA-Z](?![\w']))"
)
SIGN = r"(?:(?<![\w)}\]])[-+\u00b1\u2212\u2013](?=[\d.\\$(])|\b(?:minus|negative)\s+|(?<!\w)-)?"
JOIN = (
    r"[ ]?(?:[-+*/^=\u00d7\u00b7\u22c5\u00f7\u2212\u2013:\u2248<>\u2264\u2265\u2260\u00b1]"
    r"|\*\*)[ ]?"
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
    rf"[^\w.!?\n]*(?:[a-z]+\s){{0,2}}\(?(?:\b(?:but|though)\s)?\b{_HEDGE}\b"
    r"(?!\s+(?:more|less)\b)",
    re.IGNORECASE,
)
NEW_ANSWER = re.compile(
    rf"\W*\b{_HEDGE}\b(?:\W+(?:maybe|perhaps|possibly|even|it|is|it's|the|answer))*[\s,:$]*(?=\d|\\boxed)",
    re.IGNORECASE,
)
"""Words behind an answer, also in the next sentence, that name another one."""
NEGATED = re.compile(
    r"(?:\b(?:not|never|cannot|neither|nor|except|without|unlike|impossible|no\s+way"
    r"|(?<!no\s)(?<!a\s)doubt)|n['\u2019]t|rather\s+than|instead\s+of"
    r"|other\s+than|(?:more|less|fewer|greater|smaller|larger)\s+than|anything\s+but)\b"
    r"(?:\s+(?:be|equal(?:\s+to)?|the|an?|exactly|really|is|just|simply|actually|have|has|that|it"
    r"|it['\u2019]s|answer|there|are))*[\s*$:(]*\Z",
    re.IGNORECASE,
)
NEGATED_BEHIND = re.compile(
    r"\W*(?:is|was|would\s+be|seems)\s+(?:clearly\s+|surely\s+)?"
    r"(?:wrong|incorrect|not\b|false|impossible|unknown)"
    r"|[^\w.!?\n]*(?:(?:is|was|ca|could)n['\u2019]t|cannot)\b"
    r"(?!\s+be\s+(?:further\s+)?(?:simplified|reduced|factored|improved))",
    re.IGNORECASE,
)
REFUSED = re.compile(
    r"\b(?:don't|do\s+not)\s+know\b|\bcan(?:'t|not|\s+not)\s+(?:be\s+)?(?:solve|answer|determine)"
    r"|\b(?:answer|result|solution)\b.{0,60}\b(?:is|are|remains)\s+(?:unknown|undefined)\b",
    re.IGNORECASE | re.DOTALL,
)
"""Words that say there is no answer in a sentence, whatever numbers are in it."""
NO_SOLUTION = re.compile(r"\bno\s+solutions?\b", re.IGNORECASE)
UNKNOWN = re.compile(r"\bI\s+(?:don't|do\s+not)\s+know\b[^.!?\n\d]{0,30}[.!]\s+\Z", re.IGNORECASE)
BOUND = re.compile(
    r"(?:(?<=\S)[ \t]*(?<![=-])>=?|[<\u2264\u2265\u2260\u00b1]=?|!=|\bat\s+(?:most|least)"
    r"|\bthan\s+or\s+equal\s+to)\s*\Z",
    re.IGNORECASE,
)
"""Words and signs before a number that is only a bound."""
BOUND_BEHIND = re.compile(
    r"\s*(?:[a-z]+\s+){0,2}(?:or|and)\s+(?:more|less|fewer|higher|lower|greater|larger|smaller"
    r"|above|below|up)\b(?!\s+\w+ly\b)",
    re.IGNORECASE,
)
PLAIN_END = re.compile(r"[-\u2212]?[\d.,]+!")
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

    def fraction(match: re.Match[str]) -> str:
        word = match["part"].lower()
        under = PARTS[word if word in PARTS else word.removesuffix("s")]
        over = 1 if match["over"].lower() in ("a", "an") else _in_digits(match["over"])
        if match["whole"]:
            return f"{_in_digits(match['whole'])} {over}/{under}"
        return f"{over}/{under}"

    def once(match: re.Match[str]) -> str:
        digits, words = match[1] or match[4], match[2] or match[3]
        return digits if digits.replace(",", "") == str(_in_digits(words)) else match[0]

    text = IN_WORDS.sub(fraction, AND_FRACTION.sub(r"\1 \2", TWICE.sub(once, text)))
    text = NUMBER_IN_WORDS.sub(lambda match: str(_in_digits(match[0])), text)
    return AND_FRACTION.sub(r"\1 \2", text)


def _in_digits(text: str) -> int | str:
    """The value of a number in words; `text` itself if it is none."""
    words = re.split(r"[\s-]+", re.sub(r",|\band\s", "", text.lower()))
    if words[0].isdecimal() and len(words) < 3:  # "5 million" is read as an expression
        return text
    total, group, least = 0, 0, 10**15
    for index, word in enumerate(words):
        value = NUMBER_WORDS.get(word)
        if index == 0 and (word in ("a", "an") or word.isdecimal()):
            group = 1 if word in ("a", "an") else int(word)
        elif value is not None:
            below_100 = group % 100
            if (value == 0 and len(words) > 1) or (
                below_100 and not (below_100 >= 20 and below_100 % 10 == 0 and value < 10)
            ):
                return text
            group += value
        elif word == "hundred" and 0 < group < 100:
            group *= 100
        elif SCALES.get(word, 0) > 100 and group and SCALES[word] < least:
            least = SCALES[word]
            total, group = total + group * least, 0
        else:
            return text
    return total + group


def _plain(text: str) -> str:
    """A response without the marks of Markdown and the signs of currencies."""
    text = text.replace("\u2019", "'")
    text = BULLET.sub(" ", BOLD.sub(r"\1", text))
    text = re.sub(r"`([^`\n]*)`", r"\1", text)
    return CURRENCY.sub(lambda match: (match["formula"] or "").replace("\\$", ""), text)


def runs(text: str) -> Iterator[re.Match[str]]:
    """The expressions in `text`, in their order."""
    return RUN.finditer(text)


UNREADABLE = "\ufffd"
"""What stands in a text for bytes that are no UTF-8."""


def stated_answer(response: str, *, alone: bool = False, factorial: bool = False) -> str | None:
    """The expression that a response, in which no answer is marked, ends with, or that one of its
    sentences calls the answer; None without one, and if the words beside it name another one or
    negate it. `alone`: no other expression may stand in `response`;
    `factorial`: a `!` behind a number at the end of a sentence is a factorial, no punctuation.
    """
    text = without_words(_plain(response[-MAX_CHARACTERS:]))
    hits = [hit for hit in runs(text) if re.search(rf"[\d{VULGAR}\\$]", hit[0])]
    # A number between bytes that are no text is chance: an untrained model on GSM8K wrote one.
    allowed = [
        hit
        for hit in hits
        if not is_negated(text, hit)
        and UNREADABLE not in (text[hit.start() - 1 : hit.start()], text[hit.end() : hit.end() + 1])
    ]
    if not allowed or (alone and len(hits) > 1):
        return None
    index = len(allowed) - 1
    stated = [hit.end() for hit in STATED.finditer(text)]
    for start in reversed(stated):
        end = SENTENCE_END.search(text, start)
        behind = [
            n for n, hit in enumerate(allowed)
            if start - 1 <= hit.start() < min(end.start() if end else len(text), start + 61)
        ]  # fmt: skip
        if behind:
            index = behind[0]
            break
    last = allowed[index]
    at = hits.index(last)
    before = text[hits[at - 1].end() if at else 0 : last.start()]
    behind_it = text[last.end() : hits[at + 1].start() if at + 1 < len(hits) else len(text)]
    if (at and HEDGED.search(before)) or RANGE.search(before) or HEDGE_BEHIND.match(behind_it):
        return None
    if alone and re.search(rf"\b{_HEDGE}\b", behind_it, re.IGNORECASE):
        return None
    if at + 1 < len(hits) and HEDGED.search(behind_it):
        return None
    if at and COMPOUND.fullmatch(before) and SMALLER.match(behind_it):
        return None
    if at + 1 < len(hits) and COMPOUND.fullmatch(behind_it) and SMALLER.match(
        text, hits[at + 1].end()
    ):  # fmt: skip
        return None
    if _is_refused(text, last) or _is_bound(text, last):
        return None
    if not factorial and PLAIN_END.fullmatch(last[0]) and re.match(r"\s|\Z", text[last.end() :]):
        return expression(last[0][:-1])
    return expression(last[0])


def _is_refused(text: str, match: re.Match[str]) -> bool:
    """Whether the sentence of an expression asks, or says that there is no answer."""
    start = max((end.end() for end in SENTENCE_END.finditer(text, 0, match.start())), default=0)
    end = SENTENCE_END.search(text, match.end() - match[0].endswith("!"))
    sentence = text[start : end.end() if end else len(text)]
    is_value = re.match(r"[a-zA-Z]\s*=", match[0])  # "no solution if k = 4"
    return bool(
        sentence.rstrip().endswith(("?", "\uff1f"))
        or REFUSED.search(sentence)
        or (NO_SOLUTION.search(sentence) and not is_value)
        or UNKNOWN.search(text, 0, start)
    )


def _is_bound(text: str, match: re.Match[str]) -> bool:
    """Whether the words or signs around an expression make it only a bound of the value."""
    before = text[max(0, match.start() - 60) : match.start()]
    is_tag = re.search(r"<[^<>\n]*\w>\s*\Z", before)
    return bool((BOUND.search(before) and not is_tag) or BOUND_BEHIND.match(text, match.end()))


def is_negated(text: str, match: re.Match[str]) -> bool:
    """Whether the words around an expression, a match in `text`, negate it."""
    return bool(
        NEGATED.search(text, max(0, match.start() - 60), match.start())
        or NEGATED_BEHIND.match(text, match.end())
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
