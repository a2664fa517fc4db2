r"""Final answers without what does not change them: marks of Markdown, formulas and styles."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from megarl.apps.verifiers.expression import MAX_CHARACTERS, TEXT, WRITTEN, Node, parse_expression

END = re.compile(r"(?<![\\.])[.,;:]\s*$")
"""A final punctuation mark."""
FINAL_PERCENT = re.compile(
    r"(?<=[\w)}\].])(?:\s*\\?%|\s*percent(?:age)?\b|\s*\\text\{\s*(?:\\?%|percent(?:age)?)\s*\})"
    r"(?:\s+points?)?\s*$", re.IGNORECASE,
)  # fmt: skip
WRAPPING = re.compile(rf"(?:{TEXT}|\\(?:mathit|bm|boldsymbol|underline))\s*\{{")
WRAPPED = re.compile(TEXT + r"\s*\{([^{}]*)\}")
SPACE = r"(?:~|\\[,;:! ]|\s)*"
TIME = re.compile(
    rf"(\d{{1,2}}):([0-5]\d){SPACE}(?:{TEXT}\s*\{{\s*)?(?:([ap])\.?\s?m\.?)?\s*\}}?", re.IGNORECASE
)
"""A time of day, such as 3:45 p.m."""


@lru_cache(maxsize=1024)  # all rollouts of a group have one reference answer
def cleaned(text: str) -> str:
    r"""A final expression, of a response or a reference answer, as LaTeX without what does not
    change its value: Markdown's `**`, `$` or `\(` around it, a style around all of it, a final
    percent sign or full stop, doubled brackets.
    """
    if len(text) > MAX_CHARACTERS * 10:
        return text
    text = re.sub(r"^[*`\s]+|(?<!\^)[*`\s]+$", "", text.translate(WRITTEN))
    for before, after in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = text[len(before) : -len(after)]
        if text.startswith(before) and text.endswith(after) and inner and before not in inner:
            text = inner.strip()
    wrapped = WRAPPING.match(text)
    if wrapped and text.endswith("}") and _closes(text, wrapped.end() - 1) == len(text) - 1:
        text = text[wrapped.end() : -1].strip()
    text = FINAL_PERCENT.sub("", END.sub("", text).strip())
    while text[:1] == "(" == text[1:2] and _closes(text, 0) == len(text) - 1 and (
        _closes(text, 1) == len(text) - 2
    ):  # fmt: skip
        text = text[1:-1]
    return text


def _closes(text: str, start: int) -> int:
    """Position of the bracket that closes the one at `start`; -1 without one."""
    opening, level = text[start], 0
    closing = {"{": "}", "(": ")"}[opening]
    for index in range(start, len(text)):
        level += (text[index] == opening) - (text[index] == closing)
        if level == 0:
            return index
    return -1


def plain_number(text: str) -> Fraction | None:
    """The exact value of a text that is one number, otherwise None. A sign, `$`, `%` (which is
    dropped), thousands separators, an exponent (5e3), a final full stop and a unit are allowed.
    """
    return _value(parse_expression(cleaned(text)))


def _value(node: Node | None) -> Fraction | None:
    if node is not None and node.type == "negative":
        value = _value(node.items[0])
        return None if value is None else -value
    if node is not None and node.type == "product" and len(node.items) > 1:
        return _value(node.items[0]) if all(n.type == "unit" for n in node.items[1:]) else None
    return node.value if node is not None and node.type == "number" else None
