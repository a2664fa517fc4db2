"""What verifiers share: where a model's thinking ends and its answer begins, and which texts count
as the same answer.
"""

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
    """The text of a response, a `str`, with the number of tokens that the model generated for it as
    the attribute `num_tokens`. Made by `Counted.of`; string methods return plain texts without the
    number.
    """

    __slots__ = ("num_tokens",)
    num_tokens: int

    @classmethod
    def of(cls, text: str, num_tokens: int) -> Counted:
        """A new text equal to `text` whose `num_tokens` is the given number."""
        made = cls(text)
        made.num_tokens = num_tokens
        return made


def without_thousands(text: str) -> str:
    """`text` without surrounding whitespace and, if all of it is one number with commas between its
    thousands (`$1,234.50`), without the commas. Other texts keep theirs.
    """
    text = text.strip()
    return text.replace(",", "") if THOUSANDS.fullmatch(text) else text


def after_last(marker: str, text: str) -> str | None:
    """The part of `text` after the last occurrence of `marker`: the whole text if `marker` is
    empty, None if `marker` does not occur.
    """
    if not marker:
        return text
    _, found, rest = text.rpartition(marker)
    return rest if found else None


def row_value(prompt: Prompt, column: str, setting: str) -> Any:
    """The value in column `column` of the data set row that `prompt` was made of (`prompt.fields`);
    `"a.b"` is key `b` of the object in column `a`, unless a column has that whole name. Raises
    `ValueError` that names `setting`, the recipe's key with the column's name, if there is no such
    column.
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
    """`config`, with `tags` as its setting `thinking` if that setting is empty. `thinking` holds
    the tags around what a model thinks before it answers, (opening, closing). `tags`: such a pair,
    as the model's chat template names it.

    If `config.thinking` is an empty tuple, the default, a copy of `config` with `thinking` = `tags`
    is returned. If it names two tags, `config` itself is returned. If it is None, which means that
    verifiers read the thinking too, `config` itself is returned.
    """
    if config.thinking is None or config.thinking:
        return config
    return replace(config, thinking=tags)


def answer_part(response: str, thinking: tuple[str, ...] | None, question: str = "") -> str:
    """The part of a response after its last closing tag of thinking. The whole response if it has
    no thinking, and "" if the thinking does not end. `question`: the prompt's text; if it ends with
    the opening tag, the response begins inside the thinking.

    `thinking`: the pair (opening, closing) of tags. An empty tuple stands for `<think>` and
    `</think>`. If it is None, every response is returned whole.
    """
    if thinking is None:
        return response
    opening, closing = thinking or TAGS
    _, ended, rest = response.rpartition(closing)
    begun = not ended and question.rstrip().endswith(opening)
    return "" if begun or opening in rest else rest


def without_opening(prompt: Prompt, thinking: tuple[str, ...] | None) -> Prompt:
    """A copy of the prompt whose `text` does not end with the opening tag of thinking, for scoring
    an answer that the model did not write. The prompt itself if its text does not end so.

    `thinking`: the pair (opening, closing) of tags. An empty tuple stands for `<think>` and
    `</think>`. If it is None, the prompt itself is returned.
    """
    opening = (thinking or TAGS)[0]
    if thinking is None or not prompt.text.rstrip().endswith(opening):
        return prompt
    return replace(prompt, text=prompt.text.rstrip().removesuffix(opening))
