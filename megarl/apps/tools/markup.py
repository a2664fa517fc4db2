"""What the chat template writes between two turns of the model: the end of its turn, the results of
its tool calls, and the beginning of its next turn.

    TurnMarkup(tokenizer, schemas).results(what the model wrote, names, results) -> text
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.apps.tools.tool import Schema
from megarl.chat_template import SAID, ChatTemplate, Turn, Variables, end_of_turn
from megarl.control_tokens import unmarked
from megarl.files import canonical_json
from megarl.schema import require

SETTING = "tools (environment.tools or environment.agent): the chat template"
ASKED = {"role": "user", "content": "?"}
MOST_QUESTIONS = 64
CALL_ID = "call00000"
"""Id of a call in rendered conversations: nine letters and digits, as the templates of Mistral's
models require."""


class TurnMarkup:
    """Writes the results of tool calls as text in the markup of the model's chat template.

    The conversation itself is not rendered again, so that the model's own tokens stay as sampled.
    Instead a made-up conversation with as many calls is rendered, and its text after the model's
    turn is used.
    """

    takes_several: bool
    """Whether the chat template can write several calls in one turn of the model."""

    def __init__(
        self,
        tokenizer: Any,
        schemas: Sequence[Schema],
        variables: Variables | None = None,
        *,
        control_tokens: bool = False,
    ) -> None:
        """`tokenizer`: of transformers. `schemas`: the tools, as dicts in OpenAI's format; empty
        where each conversation brings its own (`following`). `variables`: of the chat template.
        `control_tokens`: results and messages may write control tokens.
        Raises `ValueError` if the template does not show the tools or their results.
        """
        self._template = ChatTemplate(tokenizer, variables, control_tokens=control_tokens)
        self._schemas = list(schemas)
        names = [schema["function"]["name"] for schema in schemas]
        self._asked = self._render([ASKED])
        self._questions: dict[str, str] = {}
        """{tools as JSON: `ASKED` as the template writes it with these tools}"""
        base = [ASKED, {"role": "assistant", "content": SAID}]
        self._closing = self._render(base).rpartition(SAID)[2]
        """The end of the model's turn, as the template writes it."""
        end = tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer, "chat", variables))
        before, found, _ = self._closing.partition(end)
        self._least_held = len(before) + len(end) if found else max(1, len(self._closing))
        """Least number of characters of `_closing` that the model can have written: up to the token
        that ends a turn. Without this, a `<` at the end of a text would pass for a part of it."""
        if not names:
            return
        fix = "use a model whose template does, or put one beside the tokenizer"
        fix += " (chat_template.jinja)"
        shown = unmarked(self._asked)
        missing = ", ".join(name for name in names if name not in shown)
        require(not missing, f"{SETTING} does not show the model its tools ({missing}); {fix}")
        is_shown = SAID in self._with_results(names[:1], [SAID])
        require(is_shown, f"{SETTING} does not show the model the result of a call; {fix}")
        self.results("", names[:1], [SAID])
        try:
            self.results("", [names[0]] * 2, ["", ""])
            self.takes_several = True
        except ValueError:
            self.takes_several = False

    def results(self, said: str, names: Sequence[str], results: Sequence[str]) -> str:
        """The text to append to a turn of the model in which it called the tools `names`: the end
        of the turn, the text of each result in the template's markup, and the beginning of the
        model's next turn. `results` has one text for each call. Raises `ValueError` if the chat
        template cannot write such a conversation.

        `said`: the model's turn, decoded with special tokens; what it already holds of the end of a
        turn is not written twice.
        """
        return self._after_turn(said, self._with_results(names, results), self._asked)

    def following(
        self, said: str, turn: Turn, messages: Sequence[Turn], tools: Sequence[Schema]
    ) -> str:
        """The text to append to a turn of the model in any conversation: the end of the turn,
        `messages` in the template's markup, and the beginning of the model's next turn.

        `said`: the model's turn, decoded with special tokens. `turn`: the same as a message, of
        which only the tool calls are used, as results may follow. `tools`: of the conversation.
        Raises `ValueError` if the chat template cannot write such a conversation.
        """
        calls = turn.get("tool_calls")
        shown = {"content": "", "tool_calls": calls} if calls else {"content": SAID}
        key = canonical_json(list(tools))
        if key not in self._questions:
            kept = dict(list(self._questions.items())[1 - MOST_QUESTIONS :])
            self._questions = kept | {key: self._render([ASKED], tools=tools)}
        asked = self._questions[key]
        chat = [ASKED, {"role": "assistant"} | shown, *messages]
        return self._after_turn(said, self._render(chat, asks=True, tools=tools), asked)

    def whole(self, chat: Sequence[Turn], tools: Sequence[Schema]) -> str:
        """A conversation as the model reads it before it answers. Raises `ValueError` if the chat
        template refuses it.
        """
        return self._render(chat, asks=True, tools=tools)

    def _after_turn(self, said: str, whole: str, asked: str) -> str:
        """What follows the model's turn in `whole`, which begins with the question `asked`."""
        # The turn of the model is the first after the question, and its calls hold no such mark.
        place = whole.find(self._closing, len(asked)) if self._closing else -1
        require(
            place >= 0,
            f"{SETTING} writes no end of a turn of the model before what follows it, so"
            " that no observation can be appended; use another chat template",
        )
        return self._closing[self._held(said) :] + whole[place + len(self._closing) :]

    def without_closing(self, said: str) -> str:
        """The text `said` without the markup at its end that closes a turn, such as "<|im_end|>";
        unchanged if there is none. `said`: a turn of the model, decoded with special tokens.
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
        calls = [
            {
                "id": f"{CALL_ID[:-1]}{number % 10}",
                "type": "function",
                "function": {"name": name, "arguments": {}},
            }
            for number, name in enumerate(names)
        ]
        told = [
            {"role": "tool", "name": name, "tool_call_id": call["id"], "content": result}
            for name, call, result in zip(names, calls, results, strict=True)
        ]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        return self._render([ASKED, turn, *told], asks=True)

    def _render(
        self,
        chat: Sequence[Turn],
        *,
        asks: bool = False,
        tools: Sequence[Schema] | None = None,
    ) -> str:
        shown = self._schemas if tools is None else tools
        try:
            return self._template.text(chat, "", asks=asks, tools=shown)
        except ValueError as error:
            raise ValueError(
                f"{SETTING} refuses a conversation with tool calls: {error.__cause__}; use a model"
                " whose template takes them"
            ) from error
