"""The text of a row's columns: what the model is asked, and what the verifier compares with.

row --column--> value --render or text_of--> text
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from megarl.data.rows import Row, kind_of
from megarl.schema import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """Convert a text or a number to text; raises `ValueError` for any other value."""
    if isinstance(value, str):
        return value
    require(
        isinstance(value, int | float),
        f"{place}: {what} is {kind_of(value)}, not a text; set its column to one that holds texts"
        " (dots reach inside)",
    )
    return str(value)


def render(
    value: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: Literal["none", "chat"],
    system: str = "",
    instruction: str = "",
    place: str,
    setting: str,
) -> str:
    """Render a prompt, given as a text or a chat (a list of {role, content}), to the text that the
    model sees before its response.
    """
    if template == "none":
        require(
            not isinstance(value, list),
            f"{place}: the prompt is a chat, but {setting}.template is 'none'; set it to 'chat'",
        )
        text = text_of(value, what="the prompt", place=place)
        return f"{text}\n{instruction}" if instruction else text
    chat = [{"role": "user", "content": value}] if isinstance(value, str) else value
    whole = isinstance(chat, list) and all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in chat
    )
    require(
        whole and len(chat) > 0,
        f"{place}: the prompt is neither a text nor a chat (a list of objects with the texts role"
        f" and content); set {setting}.prompt_column to one that is",
    )
    chat = [{"role": turn["role"], "content": turn["content"]} for turn in chat]
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
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates raise what they like, jinja2's errors among them
        raise ValueError(
            f"{place}: the chat template refuses this chat: {error}; mend the chat or the template"
        ) from error


def check_template(
    tokenizer: PreTrainedTokenizerBase, template: Literal["none", "chat"], setting: str
) -> None:
    """Raise `ValueError` where `template` is 'chat' and the tokenizer has no chat template."""
    require(
        template == "none" or bool(getattr(tokenizer, "chat_template", None)),
        f"{setting}.template is 'chat', but the tokenizer has no chat template; set"
        f" {setting}.template to 'none', use an instruction-tuned model, or put a"
        " chat_template.jinja beside the tokenizer",
    )
