"""What verifiers share: where thinking ends and an answer begins, and which texts are the same
answer."""

from __future__ import annotations

import re
from typing import Any

from megarl.chat_template import TAGS
from megarl.environments.config import EnvironmentConfig
from megarl.schema import replace
from megarl.types import Prompt

THOUSANDS = re.compile(r"[-+]?\$?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
"""A number with a comma before each group of three digits."""


class Counted(str):
    """The text of a response that knows how many tokens the model generated for it."""

    __slots__ = ("num_tokens",)
    num_tokens: int

    @classmethod
    def of(cls, text: str, num_tokens: int) -> Counted:
        """`text` with its number of tokens."""
        made = cls(text)
        made.num_tokens = num_tokens
        return made


def without_thousands(text: str) -> str:
    """`text` without surrounding whitespace and, if it is one number, without its commas."""
    text = text.strip()
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


def after_last(marker: str, text: str) -> str | None:
    """The text after the last `marker`; the whole text without a marker, None where it does not
    occur.
    """
    if not marker:
        return text
    _, found, rest = text.rpartition(marker)
    return rest if found else None


def row_value(prompt: Prompt, column: str, setting: str) -> Any:
    """The value of a column of the prompt's row; a name with dots selects a nested column. Raises
    `ValueError` that names `setting` if there is none.
    """
    if column in prompt.fields:
        return prompt.fields[column]
    value: Any = prompt.fields
    for part in column.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(
                f"row {prompt.index} of the data has no column '{column}'; set {setting} to one of"
                f" {', '.join(prompt.fields)}"
            )
        value = value[part]
    return value


def with_tags(config: EnvironmentConfig, tags: tuple[str, str]) -> EnvironmentConfig:
    """The configuration with `tags` for `thinking`, unless it names others or turns them off."""
    if config.thinking is None or config.thinking:
        return config
    return replace(config, thinking=tags)


def answer_part(response: str, thinking: tuple[str, ...] | None, question: str = "") -> str:
    """What follows the thinking in a response; the whole response if there is no thinking, and ""
    if the thinking does not end. `thinking`: as in `EnvironmentConfig`. `question`: the prompt's
    text, whose end may be the opening tag.
    """
    if thinking is None:
        return response
    opening, closing = thinking or TAGS
    _, ended, rest = response.rpartition(closing)
    begun = not ended and question.rstrip().endswith(opening)
    return "" if begun or opening in rest else rest


def without_opening(prompt: Prompt, thinking: tuple[str, ...] | None) -> Prompt:
    """The prompt without an opening tag at its end, for an answer that the model did not write."""
    opening = (thinking or TAGS)[0]
    if thinking is None or not prompt.text.rstrip().endswith(opening):
        return prompt
    return replace(prompt, text=prompt.text.rstrip().removesuffix(opening))
