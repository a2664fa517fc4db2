"""Verifiers that search the text of the response: `regex`, `choice` and `format`."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import regex as patterns

from megarl.environments.response_text import after_last, without_thousands
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.schema import require, shortened
from megarl.types import Prompt

Verify = Callable[[Prompt, str], Awaitable[float]]


def regex(config: EnvironmentConfig) -> Verify:
    """Make the verifier `regex` from the recipe: an async function (prompt, response) that returns
    1.0 or 0.0. It is 1.0 if the last match of `regex.pattern` in the response, or the group in the
    pattern if there is one, equals the reference answer. With `regex.answer_is_pattern` it is 1.0
    if the response has a match of the reference answer, read as a pattern.

    The function raises `ValueError` for a search that takes longer than `regex.search_limit_s`, and
    for an answer that is to be a pattern and is none. Making the verifier raises `ValueError` for a
    `regex.pattern` that is no regular expression or has several groups.
    """
    own = config.regex
    flags = patterns.IGNORECASE if own.ignore_case else 0
    fixed = None if own.answer_is_pattern else _compiled(own.pattern, flags, "regex.pattern")

    def same(text: str, answer: str) -> bool:
        text, answer = without_thousands(text), without_thousands(answer)
        return text.casefold() == answer.casefold() if own.ignore_case else text == answer

    async def verify(prompt: Prompt, response: str) -> float:
        if not response:  # no thinking ended, and a pattern may match nothing
            return 0.0
        pattern = fixed or _compiled(prompt.answer, flags, f"the answer of row {prompt.index}")
        last = None
        try:
            for last in pattern.finditer(response, timeout=own.search_limit_s):
                if fixed is None:
                    return 1.0
        except TimeoutError:
            raise ValueError(
                f"the pattern {shortened(repr(pattern.pattern))} was not searched for within"
                f" regex.search_limit_s = {own.search_limit_s:g} s; set a simpler one"
            ) from None
        if last is None:
            return 0.0
        value = last[pattern.groups]  # group 0 is the whole match
        return float(value is not None and same(value, prompt.answer))

    return verify


def _compiled(pattern: str, flags: int, what: str) -> patterns.Pattern[str]:
    try:
        compiled = patterns.compile(pattern, flags)
    except (patterns.error, RecursionError) as error:
        raise ValueError(
            f"{what} {shortened(repr(pattern))} is no regular expression ({error}); correct it"
        ) from None
    require(
        compiled.groups <= 1 or not what.startswith("regex"),
        f"{what} {shortened(repr(pattern))} has {compiled.groups} groups; set one with at most one,"
        " around the answer, and write (?:...) for others",
    )
    return compiled


WORD = r"(?:text|textbf|mathbf|mathrm|mathsf|textsf|rm|bf)"
ARTICLES = frozenset("AI")
"""Labels that are words by themselves, as in `the answer is A good one`."""
MOST_CHARACTERS = 10_000
"""Of a longer response, only so many characters from its end are searched."""


def choice(config: EnvironmentConfig) -> Verify:
    r"""Make the verifier `choice` from the recipe: an async function (prompt, response) that
    returns 1.0 if the response chooses the label, such as B, that is the reference answer, else
    0.0.

    The choice is in the last `\boxed{}`; else behind the last `environment.answer_after`, if that
    is set; else behind the last "answer is", "answer:", "option is" or the like; else it is a last
    line that begins with a label (`B`, `(B)`, `B. Paris`), if no line before begins with another
    label. A place that names two labels (`A or B`) is no choice. The function raises `ValueError`
    if the reference answer is no label of `choice.labels`.
    """
    labels = config.choice.labels
    letters = rf"[({{\[*_$\\\s]*(?:\\{WORD}\s*\{{\s*)?\(?\s*([{labels}{labels.lower()}])(?![\w'])"
    label = re.compile(letters)
    other = re.compile(
        rf"[)}}\]*_$.\s]*(?:,|/|\\|&|\band\b|\bor\b)+\s*(?:and\s|or\s)?[({{\[*_$\s]*"
        rf"(?:option\s+)?[({{\[]?([{labels}])(?![\w'])"
    )
    stated = re.compile(
        r"(?:answer|choice|option)\b[\s*_]*(?:\([^()\n]{0,40}\)\s*)?"
        r"(?:(?:would|must|should)\s+be|is|was|:|=)[\s*_:]*"
        r"(?:(?:therefore|thus|clearly|option|choice|answer|letter)\b[\s*_:]*)*",
        re.IGNORECASE,
    )
    heads = re.compile(rf"^[\s*_]*\(?([{labels}])(?:[).:\]]+[*_]*(?:\s|$)|[\s*_.]*$)")

    def read(text: str, *, inside: bool = False) -> str | None:
        """The label (a capital letter) with which `text` begins, such as B in "(B) Paris"; None if
        there is none, or two. `inside`: nothing but a label is expected, so that a small letter and
        "A" as a word count too.
        """
        match = label.match(text)
        if match is None or other.match(text, match.end()):
            return None
        letter, rest = match[1], text[match.end() :]
        bare = not inside and text[match.start(1) - 1 : match.start(1)] != "("
        if bare and letter.islower():
            return None
        if bare and letter in ARTICLES and re.match(r"\s+(?!because|since|as\b)[a-z]", rest):
            return None
        return letter.upper()

    def chosen(response: str) -> str | None:
        boxes = list(re.finditer(r"\\(?:boxed|fbox)\s*\{", response))
        if boxes:
            return read(response[boxes[-1].end() :][:200], inside=True)
        marker = config.answer_after
        if marker:
            rest = after_last(marker, response)
            return None if rest is None else read(rest[:200].lstrip(), inside=True)
        statements = list(stated.finditer(response))
        for statement in reversed(statements):
            match = label.match(response, statement.end())
            if match is not None:
                return read(response[statement.end() :][:200])
        lines = [line for line in response.split("\n") if line.strip()]
        begun = [match[1] for line in lines if (match := heads.match(line[:200]))]
        if lines and heads.match(lines[-1][:200]) and len(set(begun)) == 1:
            return begun[0]
        return None

    async def verify(prompt: Prompt, response: str) -> float:
        answer = prompt.answer.strip().strip("().")
        require(
            len(answer) == 1 and answer.upper() in labels,
            f"the reference answer {prompt.answer!r:.80} of row {prompt.index} is none of"
            f" choice.labels '{labels}'; set choice.labels, or prompts.choices_column, which turns"
            " answers into labels",
        )
        return float(chosen(response[-MOST_CHARACTERS:]) == answer.upper())

    return verify


def format(config: EnvironmentConfig) -> Verify:
    """Make the verifier `format` from the recipe: an async function (prompt, response) that returns
    1.0 if the opening and closing tags of `format.tags` are in the response, each exactly once and
    in that order, and, with `format.alone`, no text outside of them; else 0.0. It reads no
    reference answer.
    """
    settings = config.format
    marks = [mark for tag in settings.tags for mark in (f"<{tag}>", f"</{tag}>")]

    async def verify(prompt: Prompt, response: str) -> float:
        if prompt.text.rstrip().endswith(marks[0]):  # which the chat template has written
            response = marks[0] + response
        if any(response.count(mark) != 1 for mark in marks):
            return 0.0
        places = [response.index(mark) for mark in marks]
        if places != sorted(places):
            return 0.0
        # All at once: without one pair, the text around it could form another.
        pairs = "|".join(f"<{tag}>.*?</{tag}>" for tag in settings.tags)
        outside = re.sub(pairs, "", response, flags=re.DOTALL)
        return float(not settings.alone or not outside.strip())

    return verify
