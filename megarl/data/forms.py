"""Data sets with the columns of other libraries, recognised by these columns, become rows and
settings of megarl.

    section, Table --as_read--> section, Table

To add a form, add a `RowForm` to the section's list in `FORMS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from megarl.data.chats import parsed_chat
from megarl.data.rows import C, Row, Table, column, kind_of, text_of
from megarl.settings.data import DemonstrationsConfig, PreferencesConfig, PromptsConfig
from megarl.settings.schema import replace, require
from megarl.system import console

ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "function_call": "assistant",
    "system": "system",
    **dict.fromkeys(("tool", "function", "function_response", "observation"), "tool"),
}
"""{`from` of a ShareGPT turn: role}"""
TURN = re.compile(r"\n\n(Human|Assistant): ?")
"""What stands before a turn in the texts of Anthropic's HH pairs."""


class RowForm(NamedTuple):
    """Columns of another library, and how they become ours."""

    words: str
    """What the rows are, for the line that says so; empty for our own form."""
    fits: Callable[[list[Row]], bool]
    """Whether rows have this form, mostly by the first."""
    columns: Mapping[str, str] = {}
    """{setting: column} with which the rows are read."""
    change: Callable[[Row, str], Row] = lambda row, place: {}
    """(row, place for errors) -> the columns that are added to the row."""
    template: Literal["any", "chat", "none"] = "any"
    """Which `template` writes the rows: the chat template alone, any other, or either."""


def as_read(config: C, table: Table, setting: str) -> tuple[C, Table]:
    """(`config` with the columns of the form of `table`, `table` with these columns); both
    unchanged if the recipe names columns or no form is recognised. Raises `ValueError` for a row of
    another form than the first, or if `config.template` does not suit the form.
    """
    for form in FORMS[type(config)]:
        names = COLUMNS.get(type(config), form.columns)
        if not (all(map(config.is_default, names)) and form.fits(table.rows)):
            continue
        is_chat = config.template == "chat"
        require(
            is_chat or form.template != "chat",
            f"{setting}: the rows are {form.words}, which a chat template writes; set"
            f" {setting}.template to 'chat'",
        )
        require(
            not is_chat or form.template != "none",
            f"{setting}: the rows are {form.words}, which no template writes; set"
            f" {setting}.template to 'none'",
        )
        if form.words:
            console.say(f"{setting}: {form.words}")
        pairs = zip(table.rows, table.places, strict=True)
        rows = [row | form.change(row, location) for row, location in pairs]
        return replace(config, **form.columns), replace(table, rows=rows)
    return config, table


def _has(*names: str) -> Callable[[list[Row]], bool]:
    """Whether the first row has these columns."""
    return lambda rows: {*names} <= rows[0].keys()


def _holds(name: str, *kinds: type, without: str = "") -> Callable[[list[Row]], bool]:
    """Whether column `name` of the first row is of one of these types, and there is no column
    `without`.
    """
    return lambda rows: isinstance(rows[0].get(name), kinds) and without not in rows[0]


def _several_turns(rows: list[Row]) -> bool:
    if not _has("prompt", "completion")(rows):
        return False
    chats = (parsed_chat(row.get("completion")) for row in rows)
    return any(isinstance(chat, list) and len(chat) > 1 for chat in chats)


def _is_hh(rows: list[Row]) -> bool:
    chosen = rows[0].get("chosen")
    return "prompt" not in rows[0] and isinstance(chosen, str) and bool(TURN.match(chosen))


def _value(row: Row, name: str, place: str) -> Any:
    return column(row, name, place=place, setting="the column's setting")


def _prompt_completion(row: Row, place: str) -> Row:
    """The turns of a prompt and its completion as one conversation. Training counts every turn of
    the assistant, so that the prompt may have none.
    """
    asked, reply = (parsed_chat(_value(row, name, place)) for name in ("prompt", "completion"))
    asked = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    require(
        isinstance(reply, list),
        f"{place}: the completion is {kind_of(reply)}, and that of other rows is a chat; make all"
        " of them chats",
    )
    require(
        all(isinstance(turn, Mapping) and turn.get("role") != "assistant" for turn in asked),
        f"{place}: the prompt has a turn of the assistant and the completion more than a reply in"
        " plain text, so that no conversation says which turns to train on; write conversations in"
        " a column 'messages'",
    )
    return {"messages": [*asked, *reply]}


def _turn(turn: Any, place: str) -> dict[str, Any]:
    """A ShareGPT turn {from, value} as {role, content}; a turn may have these names already."""
    turn = dict(turn) if isinstance(turn, Mapping) else {}
    author, value = turn.pop("from", None), turn.pop("value", None)
    role, content = turn.get("role"), turn.get("content")
    role = ROLES.get(str(author).lower()) if role is None else role
    require(
        role is not None,
        f"{place}: a turn of the conversation is from {author!r:.40}; known are {', '.join(ROLES)}",
    )
    return turn | {"role": role, "content": value if content is None else content}


def _sharegpt(row: Row, place: str) -> Row:
    turns = _value(row, "conversations", place)
    require(
        isinstance(turns, list),
        f"{place}: the conversation is {kind_of(turns)}; make it a list of turns",
    )
    turns = [_turn(turn, place) for turn in turns]
    system = row.get("system")
    if isinstance(system, str) and system and turns:
        require(
            turns[0]["role"] != "system",
            f"{place}: the row has a column 'system' and a turn of the system; drop one of them",
        )
        turns.insert(0, {"role": "system", "content": system})
    return {"messages": turns}


def _sharegpt_pair(row: Row, place: str) -> Row:
    asked = _sharegpt(row, place)["messages"]
    sides = {}
    for name in ("chosen", "rejected"):
        side = _value(row, name, place)
        if not isinstance(side, Mapping):
            text = text_of(side, what="the response", place=place)
            side = {"role": "assistant", "content": text}
        sides[name] = [*asked, _turn(side, place)]
    return sides


def _alpaca(row: Row, place: str) -> Row:
    prompt = text_of(_value(row, "instruction", place), what="the instruction", place=place)
    unread = [name for name in ("system", "history") if row.get(name) not in (None, "", [])]
    require(
        not unread,
        f"{place}: Alpaca's column '{', '.join(unread)}' is not read; write the rows as"
        " conversations in a column 'messages'",
    )
    more = row.get("input")
    more = "" if more is None else text_of(more, what="the input", place=place)
    prompt += f"\n{more}" if more.strip() else ""
    return {"prompt": prompt, "response": _value(row, "output", place)}


def _human_assistant(row: Row, place: str) -> Row:
    return {name: _hh_turns(_value(row, name, place), place) for name in ("chosen", "rejected")}


def _hh_turns(text: Any, place: str) -> list[dict[str, str]]:
    """The chat of a text "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    parts = TURN.split(text) if isinstance(text, str) else []
    require(
        len(parts) >= 3 and not parts[0].strip(),
        f"{place}: the text does not begin with a turn 'Human:', as that of the first row does;"
        " drop the row",
    )
    roles = ["user" if name == "Human" else "assistant" for name in parts[1::2]]
    pairs = zip(roles, parts[2::2], strict=True)
    return [{"role": role, "content": content.strip()} for role, content in pairs]


COLUMNS = {
    DemonstrationsConfig: ("prompt_column", "response_column", "messages_column", "text_column"),
    PreferencesConfig: (
        *("prompt_column", "chosen_column", "rejected_column", "response_column", "label_column"),
    ),
}
"""{section: settings, any of which keeps all forms from being looked for}; in other sections only
those that the form sets."""
MESSAGES = {"messages_column": "messages"}
FORMS: dict[type, tuple[RowForm, ...]] = {
    DemonstrationsConfig: (
        RowForm("", _has("prompt", "response")),
        RowForm(
            "chats of prompt and completion (columns 'prompt', 'completion')",
            *(_several_turns, MESSAGES, _prompt_completion, "chat"),
        ),
        RowForm(
            "prompt and completion (columns 'prompt', 'completion')",
            *(_has("prompt", "completion"), {"response_column": "completion"}),
        ),
        RowForm(
            "conversations (column 'messages')",
            *(_holds("messages", list, str), MESSAGES),
            template="chat",
        ),
        RowForm(
            "ShareGPT conversations (column 'conversations')",
            *(_holds("conversations", list), MESSAGES, _sharegpt, "chat"),
        ),
        RowForm(
            "Alpaca rows (columns 'instruction', 'input', 'output')",
            *(_has("instruction", "output"), {}, _alpaca),
        ),
        RowForm(
            "whole texts, all of which is trained on (column 'text')",
            *(_holds("text", str), {"text_column": "text"}),
            template="none",
        ),
    ),
    PreferencesConfig: (
        RowForm(
            "responses with a label (columns 'prompt', 'completion', 'label')",
            lambda rows: _has("prompt", "completion", "label")(rows) and "chosen" not in rows[0],
            {"response_column": "completion"},
        ),
        RowForm(
            "pairs of texts with 'Human:' and 'Assistant:'", *(_is_hh, {}, _human_assistant, "chat")
        ),
        RowForm(
            "ShareGPT pairs (column 'conversations')",
            *(_holds("conversations", list, without="prompt"), {}, _sharegpt_pair, "chat"),
        ),
    ),
    PromptsConfig: (
        RowForm(
            "verl's rows (columns 'prompt', 'reward_model.ground_truth')",
            _holds("reward_model", dict, without="answer"),
            {"answer_column": "reward_model.ground_truth"},
        ),
        *(
            RowForm(
                f"problems (column '{name}')",
                lambda rows, name=name, other=other: (
                    name in rows[0] and not {"prompt", other} & rows[0].keys()
                ),
                {"prompt_column": name},
            )
            for name, other in (("question", "problem"), ("problem", "question"))
        ),
    ),
}
"""{section: its forms, of which the first that fits is taken}"""
