"""What a model thinks before it answers, and where the answer begins.

chat template --tags_of--> ("<think>", "</think>")
<think>maybe 5</think>The answer is 7. --answer_part--> The answer is 7.
"""

from __future__ import annotations

import dataclasses
import re

from megarl.environments.config import EnvironmentConfig
from megarl.types import Prompt

TAGS = ("<think>", "</think>")
"""The tags where the chat template names none."""
CLOSING = re.compile(
    r"([<\[\u25c1])/((?:\w+:)?(?:think|thinking|thoughts?|reason|reasoning))([>\]\u25b7])",
    re.IGNORECASE,
)
"""A closing tag of thinking in a chat template, such as `</think>` and `[/THINK]`."""


def tags_of(chat_template: object) -> tuple[str, str]:
    """The tags around the thinking of a model that a chat template names; `TAGS` without one."""
    found = CLOSING.search(chat_template) if isinstance(chat_template, str) else None
    return (f"{found[1]}{found[2]}{found[3]}", found[0]) if found else TAGS


def with_tags(config: EnvironmentConfig, tags: tuple[str, str]) -> EnvironmentConfig:
    """The configuration with `tags` for `thinking`, unless it names others or turns them off."""
    if config.thinking is None or config.thinking:
        return config
    return dataclasses.replace(config, thinking=tags)


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
    return dataclasses.replace(prompt, text=prompt.text.rstrip().removesuffix(opening))
