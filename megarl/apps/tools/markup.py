"""What the chat template writes between two turns of the model: the end of its turn, the results of
its tool calls, and the beginning of its next turn.

    TurnMarkup(tokenizer, schemas).results(what the model wrote, names, results) -> text
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from megarl.apps.tools.tool import Schema
from megarl.chat_template import SAID, ChatTemplate, Variables, end_of_turn

CALL_ID = "call00000"
"""Nine letters and digits, as the templates of Mistral's models require."""


class TurnMarkup:
    """Writes the results of tool calls as the model's chat template does.

    The whole conversation is not rendered again: the model's own tokens stay as sampled, and only
    what follows them is taken from the template, rendered for a short conversation with the same
    number of calls.
    """

    takes_several: bool
    """Whether the template takes several calls in one turn."""

    def __init__(
        self, tokenizer: Any, schemas: Sequence[Schema], variables: Variables | None = None
    ) -> None:
        """`tokenizer`: of transformers. `variables`: of its chat template. Raises `ValueError` if
        the template does not show tools or their results.
        """
        self._template, self._schemas = ChatTemplate(tokenizer, variables), list(schemas)
        names = [schema["function"]["name"] for schema in schemas]
        self._asked = self._render([self._ask()])
        base = [self._ask(), {"role": "assistant", "content": SAID}]
        self._closing = self._render(base).rpartition(SAID)[2]
        """The end of the model's turn, as the template writes it."""
        end = tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer, "chat", variables))
        before, found, _ = self._closing.partition(end)
        self._least_held = len(before) + len(end) if found else max(1, len(self._closing))
        """Least number of characters of `_closing` that the model can have written: up to the token
        that ends a turn. Without this, a `<` at the end of a text would pass for a part of it."""
        self._check(names)
        try:
            self.results("", [names[0]] * 2, ["", ""])
            self.takes_several = True
        except ValueError:
            self.takes_several = False

    def _check(self, names: Sequence[str]) -> None:
        setting = "environment.tools: the chat template"
        missing = [name for name in names if name not in self._asked]
        if missing:
            raise ValueError(
                f"{setting} does not show the model its tools ({', '.join(missing)}); use a model"
                " whose template does, or put such a chat_template.jinja beside the tokenizer"
            )
        if SAID not in self._with_results(names[:1], [SAID]):
            raise ValueError(
                f"{setting} does not show the model the result of a call; use a model whose"
                " template does, or put such a chat_template.jinja beside the tokenizer"
            )
        self.results("", names[:1], [SAID])

    def results(self, said: str, names: Sequence[str], results: Sequence[str]) -> str:
        """The text that follows a turn of the model, `said`, in which it called the tools `names`,
        one by one: `results` in the template's markup, up to where the model writes again.

        `said`: decoded with special tokens; what it already holds of the end of a turn is not
        written twice.
        """
        whole = self._with_results(names, results)
        # The turn of the model is the first after the question, and its calls hold no such mark.
        place = whole.find(self._closing, len(self._asked)) if self._closing else -1
        if place < 0:
            raise ValueError(
                "environment.tools: the chat template writes no end of a turn of the model before"
                " the results of its calls, so that no observation can be appended; use another"
                " chat template"
            )
        return self._closing[self._held(said) :] + whole[place + len(self._closing) :]

    def without_closing(self, said: str) -> str:
        """A turn of the model, decoded with special tokens, without the end that the template
        writes too.
        """
        return said[: len(said) - self._held(said)]

    def _held(self, said: str) -> int:
        """Number of characters of the end of a turn with which `said` ends."""
        counts = range(min(len(self._closing), len(said)), self._least_held - 1, -1)
        return next((count for count in counts if said.endswith(self._closing[:count])), 0)

    def _with_results(self, names: Sequence[str], results: Sequence[str]) -> str:
        """A question, one turn that calls the tools `names`, their results, and the beginning of
        the next turn of the model.
        """
        calls = self._calls(tuple(names))
        told = [
            {"role": "tool", "name": name, "tool_call_id": call["id"], "content": result}
            for name, call, result in zip(names, calls, results, strict=True)
        ]
        return self._render([self._ask(), self._called(calls), *told], asks=True)

    def _ask(self) -> dict[str, Any]:
        return {"role": "user", "content": "?"}

    def _called(self, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "tool_calls": list(calls)}

    def _calls(self, names: tuple[str, ...]) -> list[dict[str, Any]]:
        return [
            {
                "id": f"{CALL_ID[:-1]}{number % 10}",
                "type": "function",
                "function": {"name": name, "arguments": {}},
            }
            for number, name in zip(itertools.count(), names)
        ]

    def _render(self, chat: Sequence[dict[str, Any]], *, asks: bool = False) -> str:
        try:
            return self._template.text(chat, "", asks=asks, tools=self._schemas)
        except ValueError as error:
            raise ValueError(
                f"environment.tools: the chat template refuses a conversation with tool calls:"
                f" {error.__cause__}; use a model whose template takes them"
            ) from error
