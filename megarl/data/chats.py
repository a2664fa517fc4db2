"""Chats (lists of {role, content}) of a row: as prompts, and as whole conversations to imitate.

row --turns_of--> [{role, content: text}] --conversation--> pieces: what is given, what is
trained
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megarl.chat_template import ChatTemplate, Tools, Turn
from megarl.data.rows import Row, Table, kind_of
from megarl.data.tokens import TokenLists, tokenised
from megarl.schema import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


JSON_FILE = re.compile(
    r"\.jsonl?(?:\.gz)?(?:, line \d+)? \(row \d+, counted from 0\)$", re.IGNORECASE
)
"""End of the place of a row of a JSON file, whose nulls are those of its author."""


def as_written(table: Table, tools_column: str) -> Table:
    """The table without the nulls inside the tools and the turns of its rows: Arrow, which holds
    parquet files and what `datasets` reads, gives every object the keys of all others. The nulls
    of a JSON file stay, as do those in the text of JSON.
    """

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: changed(one) for key, one in value.items()}
        turns = isinstance(value, list) and all(
            isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in value
        )
        # The keys of turns themselves may be null in any file; see `turns_of`.
        return (
            [{key: _bare(one) for key, one in turn.items()} for turn in value] if turns else value
        )

    rows: list[Row] = []
    for index, row in enumerate(table.rows):
        if not JSON_FILE.search(table.place(index)):
            row = changed(row) | {key: _bare(row[key]) for key in {tools_column} & row.keys()}
        rows.append(row)
    return table.holding(rows)


def _bare(value: Any) -> Any:
    """A value without the nulls of the objects in it."""
    if isinstance(value, list):
        return [_bare(one) for one in value]
    if isinstance(value, dict):
        return {key: _bare(one) for key, one in value.items() if one is not None}
    return value


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
    turns = all(
        isinstance(turn, dict) and "role" in turn and {"content", "tool_calls"} & set(turn)
        for turn in chat
    )
    return chat if chat and turns else value


def turns_of(value: Any, *, place: str, setting: str) -> list[Turn]:
    """The turns of a chat, each with all its keys but empty ones (null, [] and {}, with which
    parquet files fill up), and its content as one text. A chat may be given as the text of its
    JSON. Content may be a text, a list of OpenAI content parts ({type: text, text: ...}), which are
    joined, or null beside tool calls. Raises `ValueError`, naming the recipe key `setting`, for
    anything else.
    """
    value = parsed_chat(value)
    whole = isinstance(value, list) and all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and (isinstance(turn.get("content"), str | list) or _only_calls(turn))
        for turn in value
    )
    require(
        whole and len(value) > 0,
        f"{place}: the prompt is neither a text nor a chat (a list of objects with the texts role"
        f" and content); set {setting} to one that is",
    )
    found: list[Turn] = []
    for turn in value:
        kept = {key: one for key, one in turn.items() if one not in (None, [], {})}
        content = turn.get("content")
        kept["content"] = None if content is None else _text(content, place)
        if "tool_calls" in kept:
            kept["tool_calls"] = _calls(kept["tool_calls"], place)
        found.append(kept)
    return found


def _only_calls(turn: dict[str, Any]) -> bool:
    return turn.get("content") is None and bool(turn.get("tool_calls"))


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects, as chat templates expect them; OpenAI's format
    has the text of their JSON.
    """
    found: list[dict[str, Any]] = []
    require(isinstance(calls, list), f"{place}: tool_calls is {kind_of(calls)}; make it a list")
    for call in calls:
        inner: Any = call.get("function", call) if isinstance(call, dict) else None
        require(
            isinstance(inner, dict) and isinstance(inner.get("name"), str),
            f"{place}: a tool call is not {{type: function, function: {{name, arguments}}}}; mend"
            " the row",
        )
        arguments = from_json(inner.get("arguments"))
        require(
            isinstance(arguments, dict),
            f"{place}: the arguments of a call of '{inner['name']}' are neither an object nor the"
            " text of its JSON; mend the row",
        )
        made = inner | {"arguments": arguments}
        found.append(call | {"function": made} if "function" in call else made)
    return found


def tools_of(row: Row, name: str, *, place: str, setting: str) -> list[dict[str, Any]]:
    """The tools that the model is shown with a row: its column `name`, a list of objects or the
    text of its JSON; none if `name` or the column is empty, or rows have no column of the default
    name. Raises `ValueError`, naming the recipe key `setting`, for anything else.
    """
    require(
        name in row or name in ("", "tools"),
        f"{place}: no column '{name}'; set {setting} to one of: {', '.join(row)}",
    )
    tools = from_json(row.get(name) or [])
    require(
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools),
        f"{place}: column '{name}' is {kind_of(tools)}, not a list of tools ({{type: function,"
        f" function: {{name, description, parameters}}}}); mend the row, or set {setting} to the"
        " column of the tools, or to '' for none",
    )
    return tools


def from_json(value: Any) -> Any:
    """What a text is the JSON of; any other value, and a text that is no JSON, unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


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
            turn["role"] != "user" or bool((turn["content"] or "").strip()),
            f"{place}: the prompt's user message (turn {number}, from 0) is empty; fill it or drop"
            " the row",
        )
    require(
        any(turn["role"] not in ("system", "developer") for turn in chat),
        f"{place}: the prompt has a system message only; add a user message or drop the row",
    )


def check_reply(turn: Turn, what: str) -> None:
    """Raise `ValueError`, which begins with `what`, if a turn of the assistant is empty: has
    neither text nor tool calls.
    """
    require(
        bool((turn["content"] or "").strip() or turn.get("tool_calls")),
        f"{what} is empty; drop the row or fill it",
    )


def conversation(
    template: ChatTemplate, chat: Sequence[Turn], place: str, tools: Tools = ()
) -> list[tuple[str, bool]]:
    """(text, whether it is trained on) of the pieces of a whole chat: an assistant turn, up to the
    token that ends it, is trained on; everything else is given. `tools`: what the model
    may call.

    Raises `ValueError` if there is no assistant turn behind another one, if an assistant turn is
    empty, if the template leaves something out, or if it writes a turn in another way once later
    turns follow.
    """
    replies = [number for number, turn in enumerate(chat) if turn["role"] == "assistant"]
    require(
        bool(replies) and replies[0] > 0,
        f"{place}: a conversation needs a turn of another role and then one of the assistant; drop"
        " the row",
    )
    for number in replies:
        check_reply(chat[number], f"{place}: turn {number} (from 0), of the assistant,")
    whole = template.text(chat, place, asks=False, tools=tools)
    template.check_whole(chat, place, tools)
    pieces: list[tuple[str, bool]] = []
    done = 0
    for number in replies:
        before, reply = template.reply(chat[: number + 1], place, tools)
        if number + 1 == len(chat) and reply is not None:
            whole = before + reply  # of which a template may drop the thoughts once it is over
        require(
            reply is not None and whole.startswith(before + reply) and len(before) >= done,
            f"{place}: the chat template writes turn {number} (from 0) in another way once it has"
            " been answered or others follow, so that no text is both trained on and met later;"
            " make it a row of its own, with prompt_column and response_column",
        )
        pieces += [(whole[done : len(before)], False), (str(reply), True)]
        done = len(before) + len(str(reply))
    return pieces  # what follows the last reply is nothing that a reply depends on


def conversation_tokens(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[tuple[str, bool]]], end: int
) -> tuple[TokenLists, TokenLists, TokenLists]:
    """(prompts, responses, masks) of conversations as `conversation` makes them. A prompt is what
    is given before the first reply, a response all that follows; its mask is 1 for the tokens of
    replies, with the token that ends a turn, and 0 for others.

    Pieces are tokenised apart, because that is how a policy meets them. A last reply gets the token
    `end` if the template writes none.
    """
    encoded = tokenised(
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
        replies = list(zip(parts, pieces, strict=True))[1:]
        prompts.append(parts[0])
        responses.append([token for ids, _ in replies for token in ids])
        masks.append([int(trained) for ids, (_, trained) in replies for _ in ids])
    return TokenLists(prompts), TokenLists(responses), TokenLists(masks)
