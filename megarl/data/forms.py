"""Data sets with the columns of other libraries, recognised by these columns: rows and settings are
changed to those that megarl reads.

    DemonstrationsConfig, Table --demonstrations_as_read--> DemonstrationsConfig, Table

This is done only if the recipe names no columns and the default columns are not there. One line on
standard error says what was recognised.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl import console
from megarl.data.chats import parsed_chat
from megarl.data.config import DemonstrationsConfig, PreferencesConfig, PromptsConfig
from megarl.data.rows import Row, Table, column, kind_of, text_of
from megarl.schema import replace, require

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


def demonstrations_as_read(
    config: DemonstrationsConfig, table: Table, setting: str
) -> tuple[DemonstrationsConfig, Table]:
    """Recognise fine-tuning data in the form of other libraries (prompt and completion, messages,
    ShareGPT, Alpaca or whole texts) by the columns of the first row of `table`, and convert the
    rows to the columns that megarl reads. Returns new (`config`, `table`), where `config` names
    these columns; both unchanged if the recipe names columns or no form is recognised. `setting`:
    name of the section, for messages. Raises `ValueError` for a row whose form is not that of the
    first, or if `config.template` does not suit the form: chats need 'chat', whole texts anything
    else.
    """
    first = table.rows[0]
    names = ("prompt_column", "response_column", "messages_column", "text_column")
    if {"prompt", "response"} <= set(first) or not all(map(config.is_default, names)):
        return config, table
    if {"prompt", "completion"} <= set(first):
        if any(isinstance(parsed_chat(row.get("completion")), list) for row in table.rows):
            table = _each(table, _parsed)
        else:
            _say(setting, "prompt and completion (columns 'prompt', 'completion')")
            return replace(config, response_column="completion"), table
        _needs_chat(config, setting, "chats of prompt and completion")
        if all(_is_reply(row.get("completion")) for row in table.rows):
            return config, _each(table, _prompt_reply)
        return replace(config, messages_column="messages"), _each(table, _prompt_completion)
    if isinstance(first.get("messages"), list | str):
        _needs_chat(config, setting, "conversations (column 'messages')")
        return replace(config, messages_column="messages"), table
    if isinstance(first.get("conversations"), list):
        _needs_chat(config, setting, "ShareGPT conversations (column 'conversations')")
        return replace(config, messages_column="messages"), _each(table, _sharegpt)
    if {"instruction", "output"} <= set(first):
        _say(setting, "Alpaca rows (columns 'instruction', 'input', 'output')")
        return config, _each(table, _alpaca)
    if isinstance(first.get("text"), str):
        require(
            config.template != "chat",
            f"{setting}: the rows are whole texts (column 'text'), which no template writes; set"
            f" {setting}.template to 'none'",
        )
        _say(setting, "whole texts, all of which is trained on (column 'text')")
        return replace(config, text_column="text"), table
    return config, table


def preferences_as_read(
    config: PreferencesConfig, table: Table, setting: str, *, single: bool
) -> tuple[PreferencesConfig, Table]:
    """Recognise preferences in the form of other libraries (prompt, completion and label;
    Anthropic's Human/Assistant texts; ShareGPT pairs) by the columns of the first row of `table`,
    and convert the rows to the columns that megarl reads. Returns new (`config`, `table`), where
    `config` names these columns; both unchanged if the recipe names columns or no form is
    recognised. `single`: whether the method trains on single responses with labels, as KTO does.
    `setting`: name of the section, for messages. Raises `ValueError` for a row whose form is not
    that of the first, if `config.template` is not 'chat' for chats, for labels without `single`,
    and if every response begins with its prompt.
    """
    config, table = preferences_form(config, table, setting, single=single)
    sides = (config.chosen_column, config.rejected_column)
    sides = (config.response_column,) if config.response_column else sides
    require(
        not all(_repeats_prompt(row, config.prompt_column, sides) for row in table.rows),
        f"{table.source}: {' and '.join(map(repr, sides))} begin with the text of"
        f" '{config.prompt_column}', which would be read twice; cut it off, or drop the column"
        f" '{config.prompt_column}'",
    )
    return config, table


def preferences_form(
    config: PreferencesConfig, table: Table, setting: str, *, single: bool
) -> tuple[PreferencesConfig, Table]:
    """As `preferences_as_read`, without the look at repeated prompts."""
    names = ("prompt_column", "chosen_column", "rejected_column", "response_column", "label_column")
    if not all(map(config.is_default, names)):
        return config, table
    first = table.rows[0]
    if {"prompt", "completion", "label"} <= set(first) and "chosen" not in first:
        require(
            single,
            f"{table.source} has single responses with a label (columns 'prompt', 'completion',"
            f" 'label'), on which only KTO trains; set loss.method to 'kto', or {setting}.source to"
            " pairs",
        )
        _say(setting, "responses with a label (columns 'prompt', 'completion', 'label')")
        return replace(config, response_column="completion"), table
    chosen = first.get("chosen")
    if "prompt" not in first and isinstance(chosen, str) and TURN.match(chosen):
        _needs_chat(config, setting, "pairs of texts with 'Human:' and 'Assistant:'")
        return config, _each(table, _human_assistant)
    if "prompt" not in first and isinstance(first.get("conversations"), list):
        _needs_chat(config, setting, "ShareGPT pairs (column 'conversations')")
        return config, _each(table, _sharegpt_pair)
    return config, table


def _repeats_prompt(row: Row, prompt: str, sides: Sequence[str]) -> bool:
    """Whether the texts of the columns `sides` begin with that of the column `prompt`."""
    asked, *said = (value_or_none(row, name) for name in (prompt, *sides))
    if not (isinstance(asked, str) and asked.strip()):
        return False
    return all(isinstance(side, str) and side.startswith(asked) for side in said)


def value_or_none(row: Row, name: str) -> Any:
    """The value of column `name` in a row; `"a.b"` is key `b` of the object in column `a`, unless a
    column has that whole name. None if there is no such column.
    """
    with contextlib.suppress(ValueError):
        return _value(row, name, "")
    return None


def prompts_as_read(
    config: PromptsConfig, table: Table, setting: str
) -> tuple[PromptsConfig, Table]:
    """Recognise prompts with the columns of verl (`reward_model.ground_truth`) or with a column
    `question` or `problem`, by the first row. Returns (settings with these columns, table
    unchanged); settings that the recipe has set stay, and all stay where the first row has none of
    these columns. What was recognised is printed in a line that begins with `setting`, the name of
    the section.
    """
    first = table.rows[0]
    has_truth = isinstance(first.get("reward_model"), dict)
    if config.is_default("answer_column") and "answer" not in first and has_truth:
        _say(setting, "verl's rows (columns 'prompt', 'reward_model.ground_truth')")
        config = replace(config, answer_column="reward_model.ground_truth")
    if config.is_default("prompt_column") and "prompt" not in first:
        found = [name for name in ("question", "problem") if name in first]
        if len(found) == 1:
            _say(setting, f"problems (column '{found[0]}')")
            config = replace(config, prompt_column=found[0])
    return config, table


def _say(setting: str, form: str) -> None:
    console.say(f"{setting}: {form}")


def _needs_chat(config: Any, setting: str, form: str) -> None:
    require(
        config.template == "chat",
        f"{setting}: the rows are {form}, which a chat template writes; set {setting}.template to"
        " 'chat'",
    )
    _say(setting, form)


def _each(table: Table, change: Callable[[Row, str], Row]) -> Table:
    """The table with `change(row, place)` added to each row."""
    pairs = zip(table.rows, table.places, strict=True)
    return replace(table, rows=[row | change(row, place) for row, place in pairs])


def _value(row: Row, name: str, place: str) -> Any:
    return column(row, name, place=place, setting="the column's setting")


def _is_reply(value: Any) -> bool:
    """Whether a completion is a chat of one turn of the assistant, which is a text alone."""
    turn = value[0] if isinstance(value, list) and len(value) == 1 else None
    if not (isinstance(turn, Mapping) and isinstance(turn.get("content"), str)):
        return False
    more = [key for key in turn if key != "content" and turn[key] not in (None, "", [], {})]
    return more == ["role"] and turn["role"] == "assistant"


def _parsed(row: Row, place: str) -> Row:
    """The row {prompt, completion} with chats that are stored as JSON text parsed."""
    return {name: parsed_chat(_value(row, name, place)) for name in ("prompt", "completion")}


def _prompt_reply(row: Row, place: str) -> Row:
    """The row {prompt, completion} as {response}: the text of the completion's first turn."""
    return {"response": _value(row, "completion", place)[0]["content"]}


def _prompt_completion(row: Row, place: str) -> Row:
    """The row {prompt, completion} as a row {messages}: the turns of the prompt, then those of the
    completion. A prompt in plain text is one turn of the user. Training counts every turn of the
    assistant, so `ValueError` is raised if the prompt has such a turn, and if the completion is
    plain text. `place`: the row, for errors.
    """
    asked, reply = _value(row, "prompt", place), _value(row, "completion", place)
    asked = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    require(
        isinstance(reply, list),
        f"{place}: the completion is {kind_of(reply)}, and that of the first row is a chat; make"
        " all of them chats",
    )
    require(
        all(isinstance(turn, Mapping) and turn.get("role") != "assistant" for turn in asked),
        f"{place}: the prompt has a turn of the assistant and the completion more than a reply in"
        " plain text, so that no conversation says which turns to train on; write conversations in"
        " a column 'messages'",
    )
    return {"messages": [*asked, *reply]}


def _turn(turn: Any, place: str) -> dict[str, Any]:
    """A ShareGPT turn {from, value} as {role, content}. It may have both names of a key, with one
    value.
    """
    turn = dict(turn) if isinstance(turn, Mapping) else {}
    said, value = turn.pop("from", None), turn.pop("value", None)
    role, content = turn.get("role"), turn.get("content")
    role = ROLES.get(str(said).lower()) if role is None else role
    require(
        role is not None,
        f"{place}: a turn of the conversation is from {said!r:.40}; known are {', '.join(ROLES)}",
    )
    same = said is None or ROLES.get(str(said).lower(), said) == ROLES.get(str(role).lower(), role)
    for one, a, other, b, is_same in (
        ("from", said, "role", role, same),
        ("value", value, "content", content, value is None or content in (None, value)),
    ):
        require(
            is_same,
            f"{place}: a turn has '{one}' {a!r:.40} and '{other}' {b!r:.40}; keep one of the two",
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
    found, asked = {}, _sharegpt(row, place)["messages"]
    for name in ("chosen", "rejected"):
        side = _value(row, name, place)
        if not isinstance(side, Mapping):
            said = text_of(side, what="the response", place=place)
            side = {"role": "assistant", "content": said}
        found[name] = [*asked, _turn(side, place)]
    return found


def _alpaca(row: Row, place: str) -> Row:
    asked, more = _value(row, "instruction", place), row.get("input")
    prompt = text_of(asked, what="the instruction", place=place)
    unread = [name for name in ("system", "history") if row.get(name) not in (None, "", [])]
    require(
        not unread,
        f"{place}: Alpaca's column '{', '.join(unread)}' is not read; write the rows as"
        " conversations in a column 'messages'",
    )
    more = "" if more is None else text_of(more, what="the input", place=place)
    prompt += f"\n{more}" if more.strip() else ""
    return {"prompt": prompt, "response": _value(row, "output", place)}


def _human_assistant(row: Row, place: str) -> Row:
    return {name: _turns(_value(row, name, place), place) for name in ("chosen", "rejected")}


def _turns(text: Any, place: str) -> list[dict[str, str]]:
    """The chat of a text "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    parts = TURN.split(text) if isinstance(text, str) else []
    require(
        len(parts) >= 3 and not parts[0].strip(),
        f"{place}: the text does not begin with a turn 'Human:', as that of the first row does;"
        " drop the row",
    )
    roles = ["user" if name == "Human" else "assistant" for name in parts[1::2]]
    return [
        {"role": role, "content": said.strip()}
        for role, said in zip(roles, parts[2::2], strict=True)
    ]
