"""The tokens with which a chat template ends turns of the model, read from rendered
conversations.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.data.control_tokens import ControlTokens

Render = Callable[[Sequence[dict[str, Any]]], str | None]
"""The text that a template makes of a chat; None if it refuses the chat."""
CALL_ID = "call00000"
"""Nine letters and digits, as the templates of Mistral's models require."""
SAID, HEARD = "MEGARLWROTETHIS", "MEGARLREADTHIS"
"""A turn of the model, and the user's reply, in conversations rendered to learn a template's
markup."""


@dataclass(frozen=True)
class TurnEnds:
    """Texts of the tokens with which a chat template ends turns of the model; each may be empty."""

    turn: str
    """Behind a turn that another follows: its last token, or the first of the next turn."""
    call: str
    """Behind a turn with tool calls."""
    call_closing: str
    """What the template writes behind calls up to `call`, if it writes that with results alone."""
    chat: str
    """Behind the last turn of a conversation, where that is another token."""
    closing: str
    """What it writes behind a text of the model, up to `turn` or, without one, the next turn."""
    opens_next: bool
    """Whether `turn` is the first token of the next turn."""
    is_inside: bool
    """Whether `turn` is also written inside a turn, behind its thoughts."""

    @classmethod
    def of(cls, render: Render, tokenizer: Any) -> TurnEnds:
        """The tokens of the chat template that `render` applies, among those of `tokenizer`."""
        asked, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": SAID}
        heard, markup = {"role": "user", "content": HEARD}, _Markup(render, tokenizer)
        tokens_in, between_of = markup.tokens, markup.between
        last = (render([asked, answer]) or "").rpartition(SAID)[2]
        between = between_of([asked, answer, heard], SAID, HEARD)
        after_user = tokens_in(between_of([heard, answer], HEARD, SAID))[:1]
        both = tokens_in(alike(last, between))
        ends = both or tokens_in(between) or tokens_in(last)
        turn = next(iter([token for token in after_user if token in both] or ends), "")
        other = "" if turn in tokens_in(last) else "".join(tokens_in(last)[:1])
        thinks = answer | {"thinking": HEARD, "reasoning_content": HEARD}
        return cls(
            turn,
            *markup.call_ends(turn),
            chat=other,
            closing=_up_to(between, turn) if turn else alike(last, between),
            opens_next=bool(turn) and turn not in last and not other,
            is_inside=turn in tokens_in(between_of([asked, thinks], HEARD, SAID)),
        )


class _Markup:
    """Pieces of markup in rendered conversations, and the tokens in them."""

    def __init__(self, render: Render, tokenizer: Any) -> None:
        self._render, self._control = render, ControlTokens.of(tokenizer)
        added = tokenizer.added_tokens_decoder.values()
        self._special = {token.content for token in added if token.special}

    def call_ends(self, turn: str) -> tuple[str, str]:
        """(`call`, `call_closing`) of `TurnEnds`, empty if the template writes no calls. `turn`:
        the token that ends a turn.
        """
        asked, last, between = {"role": "user", "content": "?"}, "", ""
        for name, arguments in (("f", {"a": SAID}), (SAID, {})):  # some write no arguments
            call = {"name": name, "arguments": arguments}
            calls = [{"id": CALL_ID, "type": "function", "function": call}]
            called = {"role": "assistant", "content": "", "tool_calls": calls}
            result = {"role": "tool", "content": HEARD, "name": name, "tool_call_id": CALL_ID}
            last = last or (self._render([asked, called]) or "").partition(SAID)[2]
            between = between or self.between([asked, called, result], SAID, HEARD)
        same = alike(last, between)
        special = self.tokens(same, only_special=True)
        if turn in self.tokens(same) or special:
            return turn if turn in self.tokens(same) else special[-1], ""
        end = "".join(self.tokens(between, only_special=True)[:1])
        return end, _up_to(between.removeprefix(last), end) if between.startswith(last) else ""

    def between(self, chat: Sequence[dict[str, Any]], first: str, second: str) -> str:
        """The text between two texts in a rendered chat; empty if the template refuses it."""
        return (self._render(chat) or "").partition(first)[2].partition(second)[0]

    def tokens(self, markup: str, *, only_special: bool = False) -> list[str]:
        """The special tokens in a piece of markup, in order; if there are none, its control tokens,
        such as </answer>.
        """
        known = self._control.within(markup)
        special = [token for token in known if token in self._special]
        return special if special or only_special else known


def alike(first: str, second: str) -> str:
    """The longest text with which both texts begin."""
    return os.path.commonprefix([first, second])  # noqa: RUF071 (texts, not paths)


def _up_to(text: str, end: str) -> str:
    """`text` up to the first `end`; empty if there is none."""
    return text[: text.find(end) + len(end)] if end and end in text else ""
