"""The conversations of one rollout, as a tree: where a call of the agent continues what was sampled
before, and what the model has to read beyond that.

    Conversations.place(chat, tools) -> Place(follows, text)
    Conversations.asked(place, number, tokens), .answered(place, ..., turn, said)

An agent sends its whole conversation with each call. Where its beginning is a conversation that was
recorded, the recorded tokens are kept, and only what is new is written by the chat template. Where
the agent has changed, shortened or dropped earlier messages, or is another agent, a conversation of
its own begins.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from megarl.apps.tools.markup import TurnMarkup
from megarl.data.chat_template import Tools, Turn
from megarl.system.files import canonical_json

TEXTS = {"text", "input_text", "output_text", "refusal"}
"""Types of content parts that are texts."""
WRITTEN = ("name", "reasoning", "reasoning_content")
"""Fields of a message, besides its content and calls, that templates write."""
NEW = -1
"""Value of `Place.follows` for a conversation of its own."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call stands in a rollout's tree of segments: `follows`, the number of the segment
    that it continues, or -1, and `text`, what the model reads after that segment before it answers.
    """

    follows: int
    text: str
    tokens: int
    """Tokens of the conversation up to the end of the segment `follows`."""
    key: bytes
    """Digest of the call's messages and tools."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A point of the tree at which another call may continue."""

    number: int
    """Of the segment whose end this is."""
    tokens: int
    """Tokens of the conversation up to here."""
    text: str = ""
    """The model's turn with special tokens, if the segment is one."""


def _after(key: bytes, turn: Turn) -> bytes:
    """Digest of a conversation that ends with the message `turn`, {role, content, tool_calls, ...};
    `key`: the digest of what is before it. It is equal for messages that mean the same: the
    contents are equal, those of the model but for white space around them, which some clients
    remove, and the calls have the same names and values of arguments. Ids of calls and empty fields
    do not count. Thoughts and names, which templates may write, do, but for the model's name,
    which some clients add.
    """
    is_models = turn["role"] == "assistant"
    written = [turn.get(name) for name in WRITTEN if not (is_models and name == "name")]
    head = json.dumps([turn["role"], *written])
    if calls := turn.get("tool_calls"):
        head = f"{head} {canonical_json(_values(calls))}"
    content = turn.get("content") or ""
    text = f"{head}\n{content.strip() if is_models else content}"
    return blake2b(key + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _values(calls: Sequence[dict[str, Any]]) -> list[Any]:
    """[name, arguments] of tool calls, in which values that clients write in several ways are the
    same: 3 and 3.0, no field and one that is null, what is no object and `other_forms` makes one.
    """
    functions = [call.get("function") or {} for call in calls]
    pairs = json.loads(
        canonical_json([[item.get("name"), item.get("arguments")] for item in functions]),
        parse_float=lambda text: int(float(text)) if float(text).is_integer() else float(text),
        object_hook=lambda fields: {k: v for k, v in fields.items() if v is not None},
    )
    return [
        [name, values if isinstance(values, dict) else {"arguments": values}]
        for name, values in pairs
    ]


def plain(message: dict[str, Any]) -> Turn:
    """A message of a chat request, in OpenAI's format, as chat templates read it: content parts
    joined to one text, the arguments of calls as an object, empty fields left out. Raises
    `ValueError` for content that is no text.
    """
    turn = {key: value for key, value in message.items() if value not in (None, [], "")}
    content = message.get("content")
    if isinstance(content, list):
        kinds = {item.get("type") if isinstance(item, dict) else item for item in content} - TEXTS
        if kinds:
            names = ", ".join(map(str, kinds))
            raise ValueError(f"messages may hold text only, and one has {names:.80}")
        content = "".join(item.get("text") or "" for item in content)
    if not isinstance(content, str | None):
        raise ValueError(f"the content of a message is no text and no list, but {content!r:.80}")
    turn["content"] = content or ""
    turn["role"] = "system" if turn.get("role") == "developer" else turn.get("role", "user")
    if turn.get("tool_calls"):
        turn["tool_calls"] = [_as_object(call) for call in turn["tool_calls"]]
    return turn


def _as_object(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments, a JSON text, are read, as far as they can be."""
    function = dict(call.get("function") or {})
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        arguments = json.loads(function.get("arguments") or "{}")
        canonical_json(arguments)  # what is nested too deep to be written stays a text
        function["arguments"] = arguments
    return dict(call) | {"function": function}


class Conversations:
    """What the model was asked and has answered in one rollout, by which a later call is found to
    continue an earlier one: `place` for each call, then `asked` and, for each answer, `answered`.
    """

    def __init__(self, markup: TurnMarkup) -> None:
        """`markup`: of the model's chat template."""
        self._markup = markup
        self._asked: dict[bytes, _Recorded] = {}
        """{digest of messages and tools: what was written for them}"""
        self._answered: dict[bytes, _Recorded] = {}
        """{digest of messages and tools, the last one the model's: its turn}"""
        self.started = 0
        """Conversations of their own that have begun."""

    def place(self, chat: Sequence[Turn], tools: Tools) -> Place:
        """Where the call with the messages `chat` and `tools` (as `plain` returns them, and in
        OpenAI's format) continues the rollout. Raises `ValueError` if the chat template refuses it.
        """
        keys = [blake2b(canonical_json(list(tools)).encode(), digest_size=16).digest()]
        for turn in chat:
            keys.append(_after(keys[-1], turn))
        if (again := self._asked.get(keys[-1])) is not None:  # one more answer
            return Place(again.number, "", again.tokens, keys[-1])
        for length in range(len(chat), 0, -1):
            if (before := self._answered.get(keys[length])) is not None:
                turn, new = chat[length - 1], chat[length:]
                text = self._markup.following(before.text, turn, new, tools)
                return Place(before.number, text, before.tokens, keys[-1])
        return Place(NEW, self._markup.whole(chat, tools), 0, keys[-1])

    def asked(self, place: Place, number: int, tokens: int) -> None:
        """Remember that segment `number` of the rollout was written for the call at `place`, whose
        conversation has `tokens` tokens with it.
        """
        self.started += place.follows == NEW
        self._asked[place.key] = _Recorded(number, tokens)

    def answered(self, place: Place, number: int, tokens: int, turn: Turn, said: str) -> None:
        """Remember that the model has answered the call at `place` with the message `turn`, segment
        `number` of the rollout, with which the conversation has `tokens` tokens. `said`: the turn
        with special tokens.
        """
        self._answered[_after(place.key, turn)] = _Recorded(number, tokens, said)
