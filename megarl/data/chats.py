"""Chats (lists of {role, content}) of a row: prompts, and whole conversations to imitate.

row --turns_of--> [{role, content: text}] --conversation--> pieces (text, whether trained on)
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megarl.data.chat_template import ChatTemplate, Tools, Turn
from megarl.data.rows import Cells, kind_of, text_of
from megarl.data.tokens import TokenLists, tokenised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def parsed_chat(value: Any) -> Any:
    """A chat that is stored as JSON text, as in CSV files, parsed; other values unchanged."""
    if not (isinstance(value, str) and value.lstrip().startswith("[")):
        return value
    chat = from_json(value)
    turns = isinstance(chat, list) and all(
        isinstance(turn, dict) and "role" in turn and {"content", "tool_calls"} & set(turn)
        for turn in chat
    )
    return chat if chat and turns else value


def plain_prompt(cells: Cells[Any]) -> str:
    """The text of a row's prompt where `template` is not 'chat'. Raises `ValueError` if the prompt
    is a chat, or neither a text nor a number.
    """
    value = parsed_chat(cells.value("prompt_column"))
    cells.require(
        not isinstance(value, list),
        f"the prompt is a chat, but {cells.setting}.template is '{cells.config.template}'; set it"
        " to 'chat'",
    )
    return text_of(value, what="the prompt", place=cells.place)


def turns_of(cells: Cells[Any], name: str, value: Any = None, *, role: str = "") -> list[Turn]:
    """The turns of the chat `value`, or of the column that the setting `name` names. A chat is a
    list of turns, or its JSON text; any other text is one turn of `role`, if that is given.

    Each turn is a new dict: `role`, `content` as one text (None beside tool calls alone), and its
    other keys without null, [] and {}. OpenAI's content parts ({type: text, text: ...}) are joined.
    Raises `ValueError` for anything else.
    """
    value = parsed_chat(cells.value(name) if value is None else value)
    value = [{"role": role, "content": value}] if role and isinstance(value, str) else value
    whole = isinstance(value, list) and all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and (isinstance(turn.get("content"), str | list) or _only_calls(turn))
        for turn in value
    )
    cells.require(
        whole and len(value) > 0,
        "the prompt is neither a text nor a chat (a list of objects with the texts role and"
        f" content); set {cells.setting}.{name} to one that is",
    )
    turns: list[Turn] = []
    for turn in value:
        kept = {key: item for key, item in turn.items() if item not in (None, [], {})}
        content = turn.get("content")
        kept["content"] = None if content is None else _text(content, cells)
        if "tool_calls" in kept:
            kept["tool_calls"] = _calls(kept["tool_calls"], cells)
        turns.append(kept)
    return turns


def _only_calls(turn: dict[str, Any]) -> bool:
    return turn.get("content") is None and bool(turn.get("tool_calls"))


def _calls(calls: Any, cells: Cells[Any]) -> list[dict[str, Any]]:
    """Tool calls whose arguments are objects, as chat templates expect them; OpenAI's format has
    their JSON text.
    """
    parsed: list[dict[str, Any]] = []
    cells.require(isinstance(calls, list), f"tool_calls is {kind_of(calls)}; make it a list")
    for call in calls:
        inner: Any = call.get("function", call) if isinstance(call, dict) else None
        cells.require(
            isinstance(inner, dict) and isinstance(inner.get("name"), str),
            "a tool call is not {type: function, function: {name, arguments}}; mend the row",
        )
        arguments = from_json(inner.get("arguments"))
        cells.require(
            isinstance(arguments, dict),
            f"the arguments of a call of '{inner['name']}' are neither an object nor the text of"
            " its JSON; mend the row",
        )
        function = inner | {"arguments": arguments}
        parsed.append(call | {"function": function} if "function" in call else function)
    return parsed


def tools_of(cells: Cells[Any]) -> list[dict[str, Any]]:
    """A row's tools, in OpenAI's format, from `tools_column`: a list of objects or its JSON text.
    Empty if the setting or the column is empty, or the default column "tools" is missing. Raises
    `ValueError` for anything else.
    """
    name, named = cells.config.tools_column, f"{cells.setting}.tools_column"
    cells.require(
        name in cells.row or name in ("", "tools"),
        f"no column '{name}'; set {named} to one of: {', '.join(cells.row)}",
    )
    tools = from_json(cells.row.get(name) or [])
    cells.require(
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools),
        f"column '{name}' is {kind_of(tools)}, not a list of tools ({{type: function, function:"
        f" {{name, description, parameters}}}}); mend the row, or set {named} to the column of the"
        " tools, or to '' for none",
    )
    return tools


def from_json(value: Any) -> Any:
    """The value of a JSON text; other values and texts unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _text(content: str | list[Any], cells: Cells[Any]) -> str:
    for item in content if isinstance(content, list) else ():
        form = item.get("type") if isinstance(item, dict) else kind_of(item)
        cells.require(
            form == "text" and isinstance(item.get("text"), str),
            f"the chat has a content part that is {form!r}, but only parts {{type: text, text:"
            " ...}} are read; drop the row or convert it",
        )
    return content if isinstance(content, str) else "".join(item["text"] for item in content)


def check_question(chat: Sequence[Turn], cells: Cells[Any]) -> None:
    """Raise `ValueError` if a chat is no prompt to answer: the last turn is the assistant's, a turn
    of the user is empty, or all turns are system messages.
    """
    cells.require(
        chat[-1]["role"] != "assistant",
        "the last turn of the prompt is of the assistant, so that the model would read the answer;"
        " drop the last turn (task: sft trains on whole conversations with"
        " demonstrations.messages_column)",
    )
    for number, turn in enumerate(chat):
        cells.require(
            turn["role"] != "user" or bool((turn["content"] or "").strip()),
            f"the prompt's user message (turn {number}, from 0) is empty; fill it or drop the row",
        )
    cells.require(
        any(turn["role"] not in ("system", "developer") for turn in chat),
        "the prompt has a system message only; add a user message or drop the row",
    )


def check_reply(turn: Turn, cells: Cells[Any], what: str) -> None:
    """Raise `ValueError` if an assistant's turn, called `what`, has neither text nor tool calls."""
    is_there = bool((turn["content"] or "").strip() or turn.get("tool_calls"))
    cells.require(is_there, f"{what} is empty; drop the row or fill it")


def conversation(
    template: ChatTemplate, chat: Sequence[Turn], cells: Cells[Any], tools: Tools = ()
) -> list[list[tuple[str, bool]]]:
    """Render a whole chat and cut the text into pieces (text, whether it is trained on): an
    assistant turn, up to its end token and as the template writes it when it is the last, is
    trained on. The pieces alternate, and begin with one that is not. Returns one list of pieces, or
    several if the template writes a turn in another way once others follow.

    Raises `ValueError` if there is no assistant turn or it comes first, if one is empty, if the
    template leaves something out, or renders a prompt differently once the reply follows.
    """
    location = cells.place
    replies = [number for number, turn in enumerate(chat) if turn["role"] == "assistant"]
    cells.require(
        bool(replies) and replies[0] > 0,
        "a conversation needs a turn of another role and then one of the assistant; drop the row",
    )
    for number in replies:
        check_reply(chat[number], cells, f"turn {number} (from 0), of the assistant,")
    template.text(chat, location, asks=False, tools=tools)
    template.check_whole(chat, location, tools)
    rows: list[list[tuple[str, bool]]] = [[]]
    for number in replies:
        before, reply = template.reply(chat[: number + 1], location, tools)
        cells.require(
            reply is not None,
            f"the chat template writes the turns before turn {number} (from 0) in another way once"
            " it has been answered; use a template that does not",
        )
        done = "".join(text for text, _ in rows[-1])
        again = template.inside(done)
        if before.startswith(again) and again != done:
            ended, _ = rows[-1][-1]
            rows[-1][-1], done = (template.inside(ended), True), again
        elif not before.startswith(done):
            rows.append([])
            done = ""
        rows[-1] += [(before[len(done) :], False), (str(reply), True)]
    return rows


def conversation_tokens(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[tuple[str, bool]]], ends: list[int]
) -> tuple[TokenLists, TokenLists, TokenLists]:
    """Tokenise conversations, each given as pieces of `conversation`. Returns (prompts, responses,
    masks): a prompt is the first piece, a response all others, its mask 1 for tokens that are
    trained on.

    Pieces are tokenised separately, because a policy is given the tokens before its reply. A last
    reply gets the first of the token ids `ends` if it ends with none of them.
    """
    texts = [text for pieces in rows for text, _ in pieces]
    encoded = iter(tokenised(tokenizer, texts, add_special_tokens=False))
    prompts, responses, masks = [], [], []
    for pieces in rows:
        prompt, *parts = itertools.islice(encoded, len(pieces))
        trained = pieces[1:]
        if parts[-1][-1:] == [] or parts[-1][-1] not in ends:
            parts[-1].append(ends[0])
        prompts.append(prompt)
        responses.append([token for ids in parts for token in ids])
        masks.append(
            [int(flag) for ids, (_, flag) in zip(parts, trained, strict=True) for _ in ids]
        )
    return TokenLists(prompts), TokenLists(responses), TokenLists(masks)
