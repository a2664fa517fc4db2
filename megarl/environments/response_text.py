"""What verifiers share: where a model's thinking ends, and which texts are the same answer."""

from __future__ import annotations

import re
from typing import Any

from megarl.data.chat_template import TAGS
from megarl.settings.environments import EnvironmentConfig
from megarl.settings.schema import replace
from megarl.types import Prompt

THOUSANDS = re.compile(r"[-+]?\$?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
"""A number with a comma before each group of three digits."""


class Counted(str):
    """The text of a response with the number of tokens that the model generated. Its string methods
    return plain texts.
    """

    __slots__ = ("num_tokens",)
    num_tokens: int

    @classmethod
    def of(cls, text: str, num_tokens: int) -> Counted:
        counted = cls(text)
        counted.num_tokens = num_tokens
        return counted


def without_thousands(text: str) -> str:
    """`text` stripped and, if it is one number with commas between its thousands (`$1,234.50`),
    without these.
    """
    text = text.strip()
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


def after_last(marker: str, text: str) -> str | None:
    """The text after the last `marker`, all of it if `marker` is empty; None if it does not
    occur.
    """
    if not marker:
        return text
    _, separator, rest = text.rpartition(marker)
    return rest if separator else None


def row_value(prompt: Prompt, column: str, setting: str) -> Any:
    """The value in column `column` of the prompt's row; `"a.b"` is key `b` of the object in column
    `a`, unless a column has that whole name. Raises `ValueError` that names `setting` if there is
    none.
    """
    if column in prompt.fields:
        return prompt.fields[column]
    value: Any = prompt.fields
    for key in column.split("."):
        if not isinstance(value, dict) or key not in value:
            raise ValueError(
                f"row {prompt.index} of the data has no column '{column}'; set {setting} to one of"
                f" {', '.join(prompt.fields)}"
            )
        value = value[key]
    return value


def with_tags(config: EnvironmentConfig, tags: tuple[str, str]) -> EnvironmentConfig:
    """`config`; if its `thinking` is empty, the default, a copy with `tags` there, (opening,
    closing) of the chat template. None stays: verifiers then read the thinking too.
    """
    if config.thinking is None or config.thinking:
        return config
    return replace(config, thinking=tags)


def answer_part(response: str, thinking: tuple[str, ...] | None, question: str = "") -> str:
    """The response after its last closing tag of thinking; "" if the thinking does not end. If
    `question`, the prompt's text, ends with the opening tag, the response begins inside.
    `thinking`: (opening, closing); empty: `TAGS`; None: no tags.
    """
    if thinking is None:
        return response
    opening, closing = thinking or TAGS
    _, ended, rest = response.rpartition(closing)
    begun = not ended and question.rstrip().endswith(opening)
    return "" if begun or opening in rest else rest


def without_opening(prompt: Prompt, thinking: tuple[str, ...] | None) -> Prompt:
    """The prompt without an opening tag of thinking at the end of its `text`, for scoring an answer
    that the model did not write. `thinking`: as for `answer_part`.
    """
    opening = (thinking or TAGS)[0]
    if thinking is None or not prompt.text.rstrip().endswith(opening):
        return prompt
    return replace(prompt, text=prompt.text.rstrip().removesuffix(opening))
