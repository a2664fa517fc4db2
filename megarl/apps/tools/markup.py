"""What the chat template writes between two turns of the model: the end of its turn, the results of
its tool calls, and the beginning of its next turn.

    TurnMarkup(tokenizer, schemas).results(what the model wrote, names, results) -> text
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.apps.tools.tool import Schema
from megarl.data.chat_template import ChatTemplate, Turn, Variables
from megarl.data.control_tokens import unmarked
from megarl.data.turn_ends import CALL_ID, SAID, alike
from megarl.settings.schema import require
from megarl.system.files import canonical_json

SETTING = "tools (environment.tools or environment.agent): the chat template"
QUESTION = "MEGARLASKEDTHIS"
ASKED = {"role": "user", "content": QUESTION}
MOST_TOOL_SETS = 64


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
        asked = self._render([ASKED])
        self._after_question = asked.partition(QUESTION)[2]
        """What the template writes behind a question that nothing follows."""
        self._repeats: dict[str, bool] = {}
        """{tools as JSON: whether the template writes them with a later message of the user}"""
        self._ends = self._template.ends
        end = self._ends.turn or self._ends.closing.strip()  # of a template without such a token
        stops = (end, self._ends.call, self._ends.chat, tokenizer.eos_token)
        self._stops = [str(stop) for stop in dict.fromkeys(stops) if stop]
        if not names:
            return
        fix = "use a model whose template does, or put one beside the tokenizer"
        fix += " (chat_template.jinja)"
        shown = unmarked(asked)
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
        return self._after_turn(said, self._with_results(names, results))

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
        # Mistral's templates write the tools before the last message of the user; the model has
        # read them before an earlier one.
        asks_again = any(message["role"] == "user" for message in messages)
        written = [] if asks_again and tools and self._writes_again(tools) else tools
        chat = [ASKED, {"role": "assistant"} | shown, *messages]
        return self._after_turn(said, self._render(chat, asks=True, tools=written))

    def _writes_again(self, tools: Sequence[Schema]) -> bool:
        """Whether the template writes the tools with a later message of the user."""
        key = canonical_json(list(tools))
        if key not in self._repeats:
            chat = [ASKED, {"role": "assistant", "content": SAID}, ASKED]
            texts = [self._render(chat, tools=some).partition(SAID)[2] for some in (tools, [])]
            kept = dict(list(self._repeats.items())[1 - MOST_TOOL_SETS :])
            self._repeats = kept | {key: texts[0] != texts[1]}
        return self._repeats[key]

    def whole(self, chat: Sequence[Turn], tools: Sequence[Schema]) -> str:
        """A conversation as the model reads it before it answers. Raises `ValueError` if the chat
        template refuses it.
        """
        return self._render(chat, asks=True, tools=tools)

    def _after_turn(self, said: str, whole: str) -> str:
        """What follows the model's turn in `whole`, a conversation of `ASKED`, that turn, and
        others; with the end of the turn if `said` has none.
        """
        _, is_text, after = whole.partition(SAID)
        if not is_text:
            after = whole.partition(QUESTION)[2]
            after = after[len(alike(after, self._after_question)) :]
        places = {after.find(stop): stop for stop in self._stops if stop in after}
        require(
            places or is_text,
            f"{SETTING} writes no end of a turn of the model before what follows it, so"
            " that no observation can be appended; use another chat template",
        )
        place = min(places, default=0)
        stop = places.get(place, "")
        rest = after[place + len(stop) :]
        end = self._end_of(said)
        if end is None:
            return (self._ends.closing if stop == self._ends.turn else stop) + rest
        is_other = self._ends.opens_next and stop and said[end:].rstrip() != stop
        held = "" if is_other else said[end:].partition(said[end:].rstrip())[2]
        return (stop if is_other else "") + rest.removeprefix(held)

    def without_closing(self, said: str) -> str:
        """The text `said` without the markup at its end that closes a turn, such as "<|im_end|>";
        unchanged if there is none. `said`: a turn of the model, decoded with special tokens.
        """
        end = self._end_of(said)
        if end is None:
            return said
        return said[:end].removesuffix(self._ends.closing.removesuffix(self._ends.turn))

    def _end_of(self, said: str) -> int | None:
        """Where the token that ends the turn `said` begins; None if it has none."""
        text = said.rstrip()
        return next((len(text) - len(one) for one in self._stops if text.endswith(one)), None)

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
        replies = [
            {"role": "tool", "name": name, "tool_call_id": call["id"], "content": result}
            for name, call, result in zip(names, calls, results, strict=True)
        ]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        return self._render([ASKED, turn, *replies], asks=True)

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
