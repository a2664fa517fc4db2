"""Demonstrations for supervised fine-tuning: (prompt, response) rows, or whole conversations.

    DemonstrationsConfig --load_demonstrations--> DemonstrationList --at(ordinal)--> Demonstration

Prompt and response are tokenised separately, as in generation, where what the policy samples starts
with a token of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.data import chats
from megarl.data.chat_template import ChatTemplate, Turn, ends_of_turns, without_end
from megarl.data.order import Order
from megarl.data.reading import Reading, picked
from megarl.data.rows import Cells, fingerprint, text_of
from megarl.data.tokens import TokenLists, response_tokens, text_tokens
from megarl.settings.data import DemonstrationsConfig
from megarl.settings.schema import shortened
from megarl.system.files import canonical_json
from megarl.types import Demonstration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class DemonstrationList:
    """The tokenised demonstrations of a run; `at(n)` is the n-th of training."""

    prompts: TokenLists
    responses: TokenLists
    masks: TokenLists | None
    """For each response, 1 for its tokens that are trained on and 0 for others; None: all are."""
    order: Order
    fingerprint: str
    """Of the demonstrations and their order."""
    warning: str
    """What the user should know of the demonstrations; may be empty."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        """Largest number of tokens of a prompt and its response together."""
        return int((self.prompts.lengths + self.responses.lengths).max())

    def at(self, ordinal: int) -> Demonstration:
        """The demonstration at position `ordinal` of training, from 0 over all epochs; depends on
        seed and ordinal only.
        """
        index = self.order.row(ordinal)
        mask = self.masks[index] if self.masks is not None else None
        return Demonstration(index, self.prompts[index], self.responses[index], mask)


class Example(NamedTuple):
    """The texts that one row demonstrates."""

    value: Any
    """The prompt or conversation as the row has it, with its tools."""
    mark: str
    """The response as the row has it, or "text" or "conversation"; for the fingerprint."""
    pieces: list[tuple[str, bool]]
    """(text, whether it is trained on), in order."""


def load_demonstrations(
    config: DemonstrationsConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    setting: str = "demonstrations",
) -> DemonstrationList:
    """Read, check and tokenise all demonstrations of the section `config` of a recipe. `seed`: of
    shuffling. `setting`: name of the section, for messages. Raises `ValueError`, which names the
    file, the row and the setting to change, for a missing column, an empty response or, if the
    recipe refuses them, too many tokens.
    """
    data = Reading(config, tokenizer, seed, setting)
    config, masks = data.config, None
    ends = ends_of_turns(tokenizer, config.template, config.template_variables)
    make = _conversation if config.messages_column else _pair
    make = _whole_text if config.text_column else make
    pairs = [(cells, example) for cells in data.rows for example in make(cells, data.template)]
    if len(pairs) > len(data.rows):
        data.notes.append(
            f"{len(data.rows)} conversations of {setting} become {len(pairs)} rows, as the chat"
            " template writes some turns in another way once others follow; each turn is trained as"
            " it is written when it is the last one"
        )
    data.rows, examples = [cells for cells, _ in pairs], [example for _, example in pairs]
    texts = [example.pieces[0][0] for example in examples]
    replies = ["".join(text for text, _ in example.pieces[1:]) for example in examples]
    data.check_texts(texts, replies)
    if config.text_column:
        whole = text_tokens(tokenizer, texts, config.template)
        data.note_lost(texts, whole, "texts")
        # Nothing stands before the first token, by which it could be predicted.
        prompts, responses = whole.split(1)
    elif config.messages_column:
        pieces = [example.pieces for example in examples]
        prompts, responses, masks = chats.conversation_tokens(tokenizer, pieces, ends)
        data.note_lost(texts, prompts, "prompts")
    else:
        if config.template != "chat":
            replies = without_end(tokenizer, replies, ends[0])
        prompts = data.prompt_tokens(texts)
        responses = response_tokens(tokenizer, replies, ends)
    if not config.text_column:
        data.note_lost(replies, responses, "responses")
    kept, prompts = data.fit(prompts, responses.lengths)
    settings = [config.template, config.shuffle, *data.settings, *data.cut_settings]
    return DemonstrationList(
        prompts.only(kept),
        responses.only(kept),
        masks.only(kept) if masks is not None else None,
        data.order(len(kept)),
        fingerprint(
            settings, ((example.value, example.mark) for example in picked(examples, kept))
        ),
        data.warning,
    )


def _pair(cells: Cells[DemonstrationsConfig], template: ChatTemplate | None) -> list[Example]:
    """A prompt with its response."""
    asked = chats.parsed_chat(cells.value("prompt_column"))
    tools = chats.tools_of(cells) if template is not None else []
    answer = _answer(cells)
    # Turns of one text alone are the same data as that text.
    is_text = set(answer) == {"role", "content"}
    mark = answer["content"] if is_text else canonical_json(answer)
    if template is None:
        texts = chats.plain_prompt(cells), answer["content"]
    else:
        chat = chats.turns_of(cells, "prompt_column", role="user")
        chats.check_question(chat, cells)
        texts = template.answered([*chat, answer], cells.place, tools)
    pieces = [(texts[0], False), (texts[1], True)]
    return [Example([asked, tools] if tools else asked, mark, pieces)]


def _answer(cells: Cells[DemonstrationsConfig]) -> Turn:
    """The response of a row: a text, or a chat of one turn of the assistant."""
    name = f"column '{cells.config.response_column}'"
    value = chats.parsed_chat(cells.value("response_column"))
    if isinstance(value, list):
        cells.require(
            cells.config.template == "chat",
            f"{name} holds a chat; set {cells.setting}.template to 'chat'",
        )
        turns = chats.turns_of(cells, "response_column")
        roles = [turn["role"] for turn in turns]
        cells.require(
            roles == ["assistant"],
            f"{name} is a chat of {shortened(', '.join(roles))}, but a response is one turn of the"
            f" assistant; set {cells.setting}.messages_column to a column of whole conversations",
        )
        answer = turns[0]
    else:
        text = text_of(value, what="the response", place=cells.place)
        answer = {"role": "assistant", "content": text}
    chats.check_reply(answer, cells, f"the response ({name})")
    return answer


def _whole_text(cells: Cells[DemonstrationsConfig], template: ChatTemplate | None) -> list[Example]:
    """A text, all of which is trained on."""
    value = cells.value("text_column")
    cells.require(
        not isinstance(chats.parsed_chat(value), list),
        f"column '{cells.config.text_column}' holds a chat; set {cells.setting}.messages_column to"
        f" it, and {cells.setting}.template to 'chat'",
    )
    text = text_of(value, what="the text", place=cells.place)
    cells.require(bool(text.strip()), "the text is empty; drop the row or fill it")
    return [Example(text, "text", [(text, True)])]


def _conversation(
    cells: Cells[DemonstrationsConfig], template: ChatTemplate | None
) -> list[Example]:
    """One example, or as many as the template needs to write each turn of the assistant as the last
    one.
    """
    assert template is not None  # `DemonstrationsConfig` requires `template: chat`
    value, tools = cells.value("messages_column"), chats.tools_of(cells)
    turns = chats.turns_of(cells, "messages_column")
    rows = chats.conversation(template, turns, cells, tools)
    return [Example([value, tools] if tools else value, "conversation", pieces) for pieces in rows]
