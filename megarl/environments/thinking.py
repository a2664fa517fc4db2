"""What a model thinks before it answers, and where the answer begins.

<think>maybe 5</think>The answer is 7. --answer_part--> The answer is 7.
"""

from __future__ import annotations

import dataclasses

from megarl.chat_template import TAGS
from megarl.environments.config import EnvironmentConfig
from megarl.types import Prompt


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
