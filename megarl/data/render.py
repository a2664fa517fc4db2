"""The text of a row's columns: what the model is asked, and what the verifier compares with.

row --column--> value --render or text_of--> text
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from megarl.chat_template import ChatTemplate, Tools
from megarl.data.chats import check_question, parsed_chat, turns_of
from megarl.data.config import DemonstrationsConfig, PreferencesConfig, PromptsConfig
from megarl.data.rows import Row, kind_of
from megarl.schema import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MOST_WHOLE = 1e22
"""Largest power of ten that a float holds exactly; larger floats keep their exponent."""


def column(row: Row, name: str, *, place: str, setting: str) -> Any:
    """The value of column `name` in a row; a name with dots selects a nested column. Raises
    `ValueError`, listing the columns, if there is none of that name.
    """
    if name in row:
        value = row[name]
    else:
        value, so_far = row, ""
        for part in name.split("."):
            there = ", ".join(f"{so_far}{key}" for key in value) if isinstance(value, dict) else ""
            require(
                isinstance(value, dict) and part in value,
                f"{place}: no column '{name}'; set {setting} to one of:"
                f" {there or f'{so_far[:-1]} (it has no columns inside)'}",
            )
            value, so_far = value[part], f"{so_far}{part}."
    require(
        value is not None,
        f"{place}: column '{name}' is null; fill it, drop the row, or set {setting} to another"
        " column",
    )
    return value


def text_of(value: Any, *, what: str, place: str) -> str:
    """Convert a text or a finite number to text; raises `ValueError` for any other value. A
    `Decimal`, as parquet files hold, keeps its digits and is never written with an exponent. A
    float that is a whole number, as pandas makes of a column with gaps, is written as one: 72.
    """
    if isinstance(value, str):
        return value
    number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    require(
        number and (isinstance(value, int) or math.isfinite(value)),
        f"{place}: {what} is {kind_of(value)}, not a text or a finite number; set its column to one"
        " that holds texts (dots reach inside)",
    )
    if isinstance(value, float) and value.is_integer() and abs(value) <= MOST_WHOLE:
        return str(int(value))
    return f"{value:f}" if isinstance(value, Decimal) else str(value)


def render(
    value: Any,
    template: ChatTemplate | None,
    *,
    system: str = "",
    instruction: str = "",
    place: str,
    setting: str,
    tools: Tools = (),
) -> str:
    """Render a prompt, given as a text or a chat (a list of {role, content}, or the JSON of one as
    a text), to the text that the model sees before its response. Raises `ValueError` for a chat
    that asks nothing (see `check_question`), or of which the template leaves something out.
    Without `template` the prompt is a text, which stays as it is. `tools`: what the model may call.
    """
    if template is None:
        require(
            not isinstance(value, list),
            f"{place}: the prompt is a chat, but {setting}.template is 'none'; set it to 'chat'",
        )
        text = text_of(value, what="the prompt", place=place)
        return f"{text}\n{instruction}" if instruction else text
    value = parsed_chat(value)
    chat = [{"role": "user", "content": value}] if isinstance(value, str) else value
    chat = turns_of(chat, place=place, setting=f"{setting}.prompt_column")
    check_question(chat, place=place)
    if instruction:
        asked = [number for number, turn in enumerate(chat) if turn["role"] == "user"]
        require(
            bool(asked),
            f"{place}: the chat has no user message to append {setting}.instruction to; remove the"
            " instruction",
        )
        chat[asked[-1]]["content"] += f"\n{instruction}"
    if system:
        require(
            chat[0]["role"] != "system",
            f"{place}: the chat has a system message of its own; remove {setting}.system",
        )
        chat.insert(0, {"role": "system", "content": system})
    text = template.text(chat, place, asks=True, tools=tools)
    template.check_whole(chat, place, tools)
    return text


def chat_template(
    tokenizer: PreTrainedTokenizerBase,
    config: PromptsConfig | DemonstrationsConfig | PreferencesConfig,
    setting: str,
) -> ChatTemplate | None:
    """The chat template of the tokenizer where `template` is 'chat', else None. Raises `ValueError`
    if the tokenizer has none, or one that does not read a variable of `template_variables`.
    """
    if config.template != "chat":
        return None
    require(
        bool(getattr(tokenizer, "chat_template", None)),
        f"{setting}.template is 'chat', but the tokenizer has no chat template; set"
        f" {setting}.template to 'none', use an instruction-tuned model, or put a"
        " chat_template.jinja beside the tokenizer",
    )
    found = ChatTemplate(tokenizer, config.template_variables, setting)
    found.check_variables()
    return found


def template_settings(
    tokenizer: PreTrainedTokenizerBase,
    config: PromptsConfig | DemonstrationsConfig | PreferencesConfig,
) -> list[Any]:
    """What a fingerprint covers of how rows are written: the template's text and variables."""
    if config.template != "chat":
        return []
    variables = config.template_variables
    return [tokenizer.chat_template, *([{"variables": variables}] if variables else [])]
