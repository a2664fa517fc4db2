"""Chats (lists of {role, content}) of a row: as prompts, and as whole conversations to imitate.

row --turns_of--> [{role, content: text}] --conversation--> pieces: what is given, what is
trained
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.data.rows import kind_of
from megarl.data.tokens import TokenLists, encode
from megarl.schema import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = dict[str, str]


def parsed_chat(value: Any) -> Any:
    """The chat that a text is the JSON of, as CSV files and some parquet files store chats; any
    other value unchanged.
    """
    if not (isinstance(value, str) and value.lstrip().startswith("[")):
        return value
    try:
        chat = json.loads(value)
    except (ValueError, RecursionError):
        return value
    turns = all(isinstance(turn, dict) and {"role", "content"} <= set(turn) for turn in chat)
    return chat if chat and turns else value


def turns_of(value: Any, *, place: str, setting: str) -> list[Turn]:
    """The turns of a chat, each with its content as one text. A chat may be given as the text of
    its JSON. Content may be a text or a list of OpenAI content parts ({type: text, text: ...}),
    which are joined. Raises `ValueError`, naming the recipe key `setting`, for anything else.
    """
    value = parsed_chat(value)
    whole = isinstance(value, list) and all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str | list)
        for turn in value
    )
    require(
        whole and len(value) > 0,
        f"{place}: the prompt is neither a text nor a chat (a list of objects with the texts role"
        f" and content); set {setting} to one that is",
    )
    return [{"role": turn["role"], "content": _text(turn["content"], place)} for turn in value]


def _text(content: str | list[Any], place: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else kind_of(part)
        require(
            kind == "text" and isinstance(part.get("text"), str),
            f"{place}: the chat has a content part that is {kind!r}, but only parts"
            " {type: text, text: ...} are read; drop the row or convert it",
        )
    return "".join(part["text"] for part in content)


def check_question(chat: Sequence[Turn], *, place: str) -> None:
    """Raise `ValueError` where a chat is no question to answer: where its last turn is of the
    assistant, a turn of the user is empty, or no turn asks anything.
    """
    require(
        chat[-1]["role"] != "assistant",
        f"{place}: the last turn of the prompt is of the assistant, so that the model would read"
        " the answer; drop the last turn (megarl sft trains on whole conversations with"
        " demonstrations.messages_column)",
    )
    for number, turn in enumerate(chat):
        require(
            turn["role"] != "user" or bool(turn["content"].strip()),
            f"{place}: the prompt's user message (turn {number}, from 0) is empty; fill it or drop"
            " the row",
        )
    require(
        any(turn["role"] not in ("system", "developer") for turn in chat),
        f"{place}: the prompt has a system message only; add a user message or drop the row",
    )


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    chat: Sequence[Turn],
    place: str,
    *,
    asks: bool,
    tools: Sequence[dict[str, Any]] = (),
) -> str:
    """A chat as the tokenizer's template writes it; with `asks`, up to where a reply begins; with
    `tools`, which the model may call. Raises `ValueError` if the template refuses the chat.
    """
    try:
        return str(
            tokenizer.apply_chat_template(
                list(chat),
                tools=list(tools) or None,  # pyright: ignore[reportArgumentType]
                tokenize=False,
                add_generation_prompt=asks,
            )
        )
    except Exception as error:  # templates raise what they like, jinja2's errors among them
        raise ValueError(
            f"{place}: the chat template refuses this chat: {error}; mend the chat or the template"
        ) from error


def conversation(
    tokenizer: PreTrainedTokenizerBase, chat: Sequence[Turn], place: str
) -> list[tuple[str, bool]]:
    """(text, whether it is trained on) of the pieces of a whole chat: an assistant turn, with what
    the template writes behind it, is trained on; everything else is given.

    Raises `ValueError` if there is no assistant turn behind another one, if an assistant turn is
    empty, or if the template writes a turn in another way once later turns follow.
    """
    replies = [number for number, turn in enumerate(chat) if turn["role"] == "assistant"]
    require(
        bool(replies) and replies[0] > 0,
        f"{place}: a conversation needs a turn of another role and then one of the assistant; drop"
        " the row",
    )
    for number in replies:
        require(
            bool(chat[number]["content"].strip()),
            f"{place}: turn {number} (from 0), of the assistant, is empty; drop the row or fill it",
        )
    whole = rendered(tokenizer, chat, place, asks=False)
    pieces: list[tuple[str, bool]] = []
    done = 0
    for number in replies:
        before = rendered(tokenizer, chat[:number], place, asks=True)
        after = rendered(tokenizer, chat[: number + 1], place, asks=False)
        require(
            whole.startswith(after) and after.startswith(before) and len(before) >= done,
            f"{place}: the chat template writes turn {number} (from 0) in another way once it has"
            " been answered or others follow, so that no text is both trained on and met later;"
            " make it a row of its own, with prompt_column and response_column",
        )
        pieces += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
        done = len(after)
    return pieces  # what follows the last reply is nothing that a reply depends on


def conversation_tokens(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[tuple[str, bool]]]
) -> tuple[TokenLists, TokenLists, TokenLists]:
    """(prompts, responses, masks) of conversations as `conversation` makes them. A prompt is what
    is given before the first reply, a response all that follows; its mask is 1 for the tokens of
    replies, each up to its end-of-sequence token, and 0 for others.

    Pieces are tokenised apart, because that is how a policy meets them. A last reply without an
    end-of-sequence token gets one.
    """
    end: Any = tokenizer.eos_token_id
    encoded = encode(
        tokenizer,
        [text for pieces in rows for text, _ in pieces],
        add_special_tokens=False,
        fix=lambda text, ids: ids,
    )
    prompts: list[list[int]] = []
    responses: list[list[int]] = []
    masks: list[list[int]] = []
    place = 0
    for pieces in rows:
        parts = [encoded[place + number] for number in range(len(pieces))]
        place += len(pieces)
        if end not in parts[-1]:
            parts[-1] = [*parts[-1], end]
        kept = [
            (ids, _until_last(ids, end) if trained else np.zeros(len(ids), np.int32))
            for ids, (_, trained) in zip(parts, pieces, strict=True)
        ]
        prompts.append(parts[0])
        responses.append([token for ids, _ in kept[1:] for token in ids])
        masks.append([int(one) for _, mask in kept[1:] for one in mask])
    return TokenLists(prompts), TokenLists(responses), TokenLists(masks)


def _until_last(ids: list[int], end: int) -> np.ndarray:
    """[T] 1 up to and including the last token `end`, then 0; all 1 without that token."""
    length = len(ids) - ids[::-1].index(end) if end in ids else len(ids)
    return (np.arange(len(ids)) < length).astype(np.int32)
