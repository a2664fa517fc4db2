"""Demonstrations for supervised fine-tuning: (prompt, response) rows, or whole conversations,
checked and tokenised before the run starts.

    DemonstrationsConfig --load_demonstrations--> DemonstrationList --at(ordinal)--> Demonstration

Prompt and response are tokenised separately, because in generation the prompt's tokens are given,
and what the policy samples starts with a token of its own.
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
    """The tokenised demonstrations, (prompt, response) pairs for supervised fine-tuning, of a run,
    made by `load_demonstrations`. `at(n)` returns the n-th of training as a `Demonstration`, lists
    of token ids of prompt and response; `len` is the number of demonstrations.
    """

    prompts: TokenLists
    responses: TokenLists
    masks: TokenLists | None
    """For each response, 1 for its tokens that are trained on and 0 for others; None: all are."""
    order: Order
    fingerprint: str
    """Number of rows and xxh3-128 digest of the demonstrations and their order."""
    warning: str
    """What the user should know of the demonstrations; empty if nothing."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        """Largest number of tokens of a prompt and its response together."""
        return int((self.prompts.lengths + self.responses.lengths).max())

    def at(self, ordinal: int) -> Demonstration:
        """The demonstration at position `ordinal` of training, from 0 over all epochs: index of its
        row, lists of token ids of prompt and response, and which response tokens are trained on. It
        depends only on the seed and the ordinal.
        """
        index = self.order.row(ordinal)
        mask = self.masks[index] if self.masks is not None else None
        return Demonstration(index, self.prompts[index], self.responses[index], mask)


class Example(NamedTuple):
    """What one row of the data set demonstrates, as texts before they are tokenised: `pieces`,
    (text, whether it is trained on) in order, which begin with what the model is given.
    """

    value: Any
    """The prompt or the conversation as the row has it, with tools if the row has some."""
    mark: str
    """The response as the row has it, or "text" or "conversation"; for the digest of the data."""
    pieces: list[tuple[str, bool]]
    """(text, whether it is trained on), in order: what is given, then what follows."""


def load_demonstrations(
    config: DemonstrationsConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    setting: str = "demonstrations",
) -> DemonstrationList:
    """Read, check and tokenise all demonstrations of the section `config` of a recipe; blocks until
    that is done. Returns a `DemonstrationList`, whose `at(n)` gives the token ids of the n-th pair
    of prompt and response in training. `seed`: of shuffling. `setting`: name of the section, for
    messages. Raises `ValueError`, which names the file, the row and the setting to change, for a
    row with a missing column, an empty response or, if the recipe does not allow it, too many
    tokens.
    """
    data = Reading(config, tokenizer, seed, setting)
    config, masks = data.config, None
    ends = ends_of_turns(tokenizer, config.template, config.template_variables)
    make = _conversation if config.messages_column else _pair
    make = _whole_text if config.text_column else make
    made = [(cells, one) for cells in data.rows for one in make(cells, data.template)]
    if len(made) > len(data.rows):
        data.notes.append(
            f"{len(data.rows)} conversations of {setting} become {len(made)} rows, as the chat"
            " template writes some turns in another way once others follow; each turn is trained as"
            " it is written when it is the last one"
        )
    data.rows, examples = [cells for cells, _ in made], [one for _, one in made]
    texts = [one.pieces[0][0] for one in examples]
    replies = ["".join(text for text, _ in one.pieces[1:]) for one in examples]
    data.check_texts(texts, replies)
    if config.text_column:
        whole = text_tokens(tokenizer, texts, config.template)
        data.note_lost(texts, whole, "texts")
        # Nothing stands before the first token, by which it could be predicted.
        prompts, responses = whole.split(1)
    elif config.messages_column:
        pieces = [one.pieces for one in examples]
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
        fingerprint(settings, ((one.value, one.mark) for one in picked(examples, kept))),
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
        said = text_of(value, what="the response", place=cells.place)
        answer = {"role": "assistant", "content": said}
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
    """A whole conversation, of which the turns of the assistant are trained on: one example, or as
    many as the template needs to write each of these turns as the last one.
    """
    assert template is not None  # `DemonstrationsConfig` requires `template: chat`
    value, tools = cells.value("messages_column"), chats.tools_of(cells)
    turns = chats.turns_of(cells, "messages_column")
    rows = chats.conversation(template, turns, cells, tools)
    return [Example([value, tools] if tools else value, "conversation", one) for one in rows]
