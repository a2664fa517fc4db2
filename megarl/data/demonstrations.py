"""Demonstrations for supervised fine-tuning: (prompt, response) rows, or whole conversations,
checked and tokenised before the run starts.

    DemonstrationsConfig --load_demonstrations--> DemonstrationList --at(ordinal)--> Demonstration

Prompt and response are tokenised apart, because that is how the policy meets them: the prompt's
tokens are given, and what it samples starts with a token of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.chat_template import ChatTemplate, Turn, end_of_turn, without_end
from megarl.data.chats import (
    as_written,
    check_question,
    check_reply,
    conversation,
    conversation_tokens,
    parsed_chat,
    tools_of,
    turns_of,
)
from megarl.data.config import DemonstrationsConfig
from megarl.data.forms import demonstrations_as_read
from megarl.data.lengths import fit, picked
from megarl.data.order import Order
from megarl.data.render import chat_template, column, render, template_settings, text_of
from megarl.data.round_trip import check_texts, lost_text, unwrapped
from megarl.data.rows import Row, Table, canonical_json, fingerprint, read_rows
from megarl.data.tokens import (
    TokenLists,
    prompt_tokens,
    response_tokens,
    text_tokens,
)
from megarl.schema import require, shortened
from megarl.types import Demonstration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DemonstrationList:
    """The demonstrations (prompt, response) of a run in their training order."""

    def __init__(
        self,
        prompts: TokenLists,
        responses: TokenLists,
        order: Order,
        fingerprint: str,
        masks: TokenLists | None = None,
        warning: str = "",
    ) -> None:
        """`masks`: for each response, which of its tokens are trained on; None: all are."""
        self._masks = masks
        self._prompts, self._responses, self._order = prompts, responses, order
        self.fingerprint = fingerprint
        """Digest of the demonstrations and their order."""
        self.warning = warning
        """What the user should know of the demonstrations; empty if nothing."""

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response together."""
        return int((self._prompts.lengths + self._responses.lengths).max())

    def at(self, ordinal: int) -> Demonstration:
        """The demonstration at position `ordinal` of training, over all epochs. It depends only on
        the seed and the ordinal.
        """
        index = self._order.row(ordinal)
        return Demonstration(
            index=index,
            prompt_ids=self._prompts[index],
            response_ids=self._responses[index],
            response_mask=self._masks[index] if self._masks is not None else None,
        )


def load_demonstrations(
    config: DemonstrationsConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    setting: str = "demonstrations",
) -> DemonstrationList:
    """Read, check and tokenise all demonstrations. Raises `ValueError` that names the file, the row
    and the setting to change. `setting`: the section of the recipe.
    """
    table = read_rows(config.source, split=config.split, limit=config.limit, setting=setting)
    table = as_written(table, config.tools_column)
    config, table = demonstrations_as_read(config, table, setting)
    template = chat_template(tokenizer, config, setting)
    end = end_of_turn(tokenizer, config.template, config.template_variables)
    masks = None
    bare = ""
    if config.text_column:
        values = texts = _whole_texts(config, table, setting)
        check_texts(table, setting, texts)
        whole = text_tokens(tokenizer, texts, config.template)
        # Nothing stands before the first token, by which it could be predicted.
        prompts, responses = whole.split(1)
        marks = ["text"] * len(values)
        warning = lost_text(tokenizer, texts, whole, what=f"texts of {setting}")
    else:
        if config.messages_column:
            assert template is not None  # `DemonstrationsConfig` requires `template: chat`
            values, pieces = _conversations(config, table, template, setting)
            texts = [row[0][0] for row in pieces]
            replies = ["".join(text for text, _ in row[1:]) for row in pieces]
            check_texts(table, setting, texts, replies)
            prompts, responses, masks = conversation_tokens(tokenizer, pieces, end)
            marks = ["conversation"] * len(values)
        else:
            values, marks, texts, replies = _pairs(config, table, template, setting)
            check_texts(table, setting, texts, replies)
            replies = without_end(tokenizer, replies, end)
            prompts = prompt_tokens(tokenizer, texts, config.template)
            responses = response_tokens(tokenizer, replies, end)
            bare = unwrapped(tokenizer, texts, config.template, setting)
        warning = lost_text(tokenizer, texts, prompts, what=f"prompts of {setting}") or lost_text(
            tokenizer, replies, responses, what=f"responses of {setting}"
        )
    kept, prompts, note = fit(
        table,
        prompts,
        responses.lengths,
        limit=config.max_tokens,
        key="max_tokens",
        too_long=config.too_long,
        setting=setting,
    )
    prompts, responses = prompts.only(kept), responses.only(kept)
    values, marks = picked(values, kept), picked(marks, kept)
    settings: list[Any] = [config.template, config.shuffle]
    settings += template_settings(tokenizer, config)
    if note and config.too_long == "truncate_left":
        settings.append(f"truncated to {config.max_tokens}")
    return DemonstrationList(
        prompts,
        responses,
        Order(len(prompts), seed=seed, shuffle=config.shuffle),
        fingerprint(settings, zip(values, marks, strict=True)),
        masks.only(kept) if masks is not None else None,
        "; ".join(filter(None, (warning, note, bare))),
    )


def _pairs(
    config: DemonstrationsConfig, table: Table, template: ChatTemplate | None, setting: str
) -> tuple[list[Any], list[str], list[str], list[str]]:
    """(values of the prompt column, with tools if a row has some, responses as the rows have them,
    rendered prompts, rendered responses) of all rows.
    """
    values: list[Any] = []
    marks: list[str] = []
    pairs: list[tuple[str, str]] = []
    for index, row in enumerate(table.rows):
        place = table.place(index)
        named = f"{setting}.prompt_column"
        asked = column(row, config.prompt_column, place=place, setting=named)
        tools = _tools(config, row, place, setting) if template is not None else []
        values.append([asked, tools] if tools else asked)
        answer = _answer(config, row, place, setting)
        # Turns of one text alone are the same data as that text.
        is_text = set(answer) == {"role", "content"}
        marks.append(answer["content"] if is_text else canonical_json(answer))
        if template is None:
            text = render(parsed_chat(asked), None, place=place, setting=setting)
            pairs.append((text, answer["content"]))
            continue
        asked = parsed_chat(asked)
        asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        chat = turns_of(asked, place=place, setting=named)
        check_question(chat, place=place)
        pairs.append(template.answered([*chat, answer], place, tools))
    return values, marks, [asked for asked, _ in pairs], [said for _, said in pairs]


def _answer(config: DemonstrationsConfig, row: Row, place: str, setting: str) -> Turn:
    """The response of a row: a text, or a chat of one turn of the assistant."""
    name, named = config.response_column, f"{setting}.response_column"
    value = parsed_chat(column(row, name, place=place, setting=named))
    if isinstance(value, list):
        require(
            config.template == "chat",
            f"{place}: column '{name}' holds a chat; set {setting}.template to 'chat'",
        )
        turns = turns_of(value, place=place, setting=named)
        roles = [turn["role"] for turn in turns]
        require(
            roles == ["assistant"],
            f"{place}: column '{name}' is a chat of {shortened(', '.join(roles))}, but a response"
            f" is one turn of the assistant; set {setting}.messages_column to a column of whole"
            " conversations",
        )
        answer = turns[0]
    else:
        said = text_of(value, what="the response", place=place)
        answer = {"role": "assistant", "content": said}
    check_reply(answer, f"{place}: the response (column '{name}')")
    return answer


def _whole_texts(config: DemonstrationsConfig, table: Table, setting: str) -> list[str]:
    """The texts of all rows."""
    texts = []
    for index, row in enumerate(table.rows):
        place, named = table.place(index), f"{setting}.text_column"
        value = column(row, config.text_column, place=place, setting=named)
        require(
            not isinstance(parsed_chat(value), list),
            f"{place}: column '{config.text_column}' holds a chat; set {setting}.messages_column"
            f" to it, and {setting}.template to 'chat'",
        )
        texts.append(text_of(value, what="the text", place=place))
        require(bool(texts[-1].strip()), f"{place}: the text is empty; drop the row or fill it")
    return texts


def _conversations(
    config: DemonstrationsConfig, table: Table, template: ChatTemplate, setting: str
) -> tuple[list[Any], list[list[tuple[str, bool]]]]:
    """(values of the messages column, with tools if a row has some, pieces as `conversation` makes
    them) of all rows.
    """
    values: list[Any] = []
    pieces: list[list[tuple[str, bool]]] = []
    named = f"{setting}.messages_column"
    for index, row in enumerate(table.rows):
        place = table.place(index)
        value = column(row, config.messages_column, place=place, setting=named)
        tools = _tools(config, row, place, setting)
        values.append([value, tools] if tools else value)
        turns = turns_of(value, place=place, setting=named)
        pieces.append(conversation(template, turns, place, tools))
    return values, pieces


def _tools(
    config: DemonstrationsConfig, row: Row, place: str, setting: str
) -> list[dict[str, Any]]:
    return tools_of(row, config.tools_column, place=place, setting=f"{setting}.tools_column")
