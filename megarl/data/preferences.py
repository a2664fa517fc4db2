"""Preferences: prompts with a better and a worse response.

    PreferencesConfig --load_preferences--> PreferenceList --at(ordinal)--> Preference

Prompt and responses are tokenised separately, as in generation, where the response starts with a
token of its own. KTO trains on single responses: a pair becomes two examples.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from megarl.data import chats
from megarl.data.chat_template import ChatTemplate, Turn, ends_of_turns, tags_of, without_end
from megarl.data.order import Order
from megarl.data.reading import Reading, picked
from megarl.data.rows import Cells, Row, column, fingerprint, text_of
from megarl.data.tokens import TokenLists, response_tokens
from megarl.settings.data import PreferencesConfig
from megarl.settings.schema import require, shortened
from megarl.system.files import canonical_json
from megarl.types import Preference

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""{label in lower case: whether the response is desirable}"""


class Judged(NamedTuple):
    """The texts of one row: a prompt with its chosen and rejected response, or, for KTO, with one
    labelled response.
    """

    raw: list[Any]
    """Prompt and responses before a chat template, which may write today's date, has rendered them.
    """
    prompt: str
    replies: list[str]
    """[chosen, rejected], or [response]."""
    margin: float
    label: bool


@dataclass
class PreferenceList:
    """The tokenised preferences of a run; `at(n)` is the n-th of training."""

    prompts: TokenLists
    responses: list[TokenLists]
    """Two: chosen and rejected ones; of single responses these, and for each a response to another
    prompt, for the estimate of the KL divergence."""
    margins: list[float]
    labels: list[bool] | None
    """Whether each single response is desirable; None for pairs."""
    cuts: np.ndarray
    """[N] int64: tokens at the beginning of each prompt that are left out before the second
    response."""
    order: Order
    fingerprint: str
    """Of the preferences and their order."""
    warning: str
    """What the user should know of the preferences; may be empty."""

    def __len__(self) -> int:
        return len(self.prompts)

    def at(self, ordinal: int) -> Preference:
        """The preference at position `ordinal` of training, from 0 over all epochs; depends on seed
        and ordinal only.
        """
        return self.row(self.order.row(ordinal))

    def row(self, index: int) -> Preference:
        """The preference in row `index`, from 0 in file order."""
        first, second = self.responses
        return Preference(
            index=index,
            prompt_ids=self.prompts[index],
            responses=(first[index], second[index]),
            margin=self.margins[index],
            is_single=self.labels is not None,
            is_desirable=self.labels is None or self.labels[index],
            cut=int(self.cuts[index]),
        )

    @property
    def longest(self) -> int:
        """Largest number of tokens of a prompt and one of its responses together."""
        first, second = (self.prompts.lengths + side.lengths for side in self.responses)
        return int(max(first.max(), (second - self.cuts).max()))

    @property
    def digest(self) -> str:
        """xxh3-128 digest, in hexadecimal, of the token ids in file order, whatever the order of
        training.
        """
        hasher = xxhash.xxh3_128()
        for lists in (self.prompts, *self.responses):
            hasher.update(lists.offsets.tobytes())
            hasher.update(lists.ids.tobytes())
        if self.cuts.any():
            hasher.update(self.cuts.tobytes())
        return hasher.hexdigest()


def load_preferences(
    config: PreferencesConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    single: bool = False,
    setting: str = "preferences",
) -> PreferenceList:
    """Read, check and tokenise all preferences of the section `config` of a recipe. With `single`,
    for KTO, each example has one response and a label. `seed`: of shuffling. `setting`: name of the
    section, for messages.

    Raises `ValueError`, which names the file, the row and the setting to change, for a missing
    column, an empty response, two equal responses or, if the recipe refuses them, too many tokens.
    """
    data = Reading(config, tokenizer, seed, setting)
    config = data.config
    require(
        single or not config.response_column,
        f"{data.source} has single responses with a label (columns 'prompt', 'completion',"
        f" 'label'), on which only KTO trains; set loss.method to 'kto', or {setting}.source to"
        " pairs",
    )
    sides = (config.chosen_column, config.rejected_column)
    sides = (config.response_column,) if config.response_column else sides
    require(
        not all(_repeats_prompt(cells, sides) for cells in data.rows),
        f"{data.source}: {' and '.join(map(repr, sides))} begin with the text of"
        f" '{config.prompt_column}', which would be read twice; cut it off, or drop the column"
        f" '{config.prompt_column}'",
    )
    ends = ends_of_turns(tokenizer, config.template, config.template_variables)
    rows = [_judged(cells, data.template) for cells in data.rows]
    desirable = {row.label for row in rows}
    require(
        not config.response_column or len(desirable) == 2,
        f"{data.source}: all responses are {'' if True in desirable else 'un'}desirable (column"
        f" '{config.label_column}'), so that there is nothing to tell apart; set"
        f" {setting}.label_column or other data",
    )
    texts, sides = [row.prompt for row in rows], [*zip(*(row.replies for row in rows), strict=True)]
    data.check_texts(texts, *sides)
    prompts = data.prompt_tokens(texts)
    is_chat = config.template == "chat"
    replies = sides if is_chat else [without_end(tokenizer, side, ends[0]) for side in sides]
    responses = [response_tokens(tokenizer, side, ends) for side in replies]
    for index, cells in enumerate(data.rows):
        cells.require(
            len(responses) == 1 or responses[0][index] != responses[1][index],
            "the chosen and the rejected response are equal as tokens, so that there is nothing to"
            " learn; drop the row",
        )
    for side, ids in zip(replies, responses, strict=True):
        data.note_lost(side, ids, "responses")
    kept, prompts = data.fit(prompts, np.max([lists.lengths for lists in responses], axis=0))
    prompts, responses = prompts.only(kept), [lists.only(kept) for lists in responses]
    rows = picked(rows, kept)
    margins, labels, cuts = [row.margin for row in rows], None, np.zeros(len(rows), np.int64)
    if single:
        prompts, responses, labels = _singles(prompts, responses, rows, setting)
        margins, cuts = [0.0] * len(labels), _cuts(data, prompts, responses[1])
    settings = [config.template, config.shuffle, single, *data.settings, *data.cut_settings]
    marks = ((row.raw, canonical_json((row.margin, row.label))) for row in rows)
    return PreferenceList(
        prompts,
        responses,
        margins,
        labels,
        cuts,
        data.order(len(prompts)),
        fingerprint(settings, marks),
        data.warning,
    )


def _repeats_prompt(cells: Cells[PreferencesConfig], sides: Sequence[str]) -> bool:
    """Whether the texts of the columns `sides` begin with the prompt's."""
    asked, *replies = (
        _value_or_none(cells.row, name) for name in (cells.config.prompt_column, *sides)
    )
    if not (isinstance(asked, str) and asked.strip()):
        return False
    return all(isinstance(reply, str) and reply.startswith(asked) for reply in replies)


def _value_or_none(row: Row, name: str) -> Any:
    with contextlib.suppress(ValueError):
        return column(row, name, place="", setting="")
    return None


def _judged(cells: Cells[PreferencesConfig], template: ChatTemplate | None) -> Judged:
    config = cells.config
    single = bool(config.response_column)
    names = ("response_column",) if single else ("chosen_column", "rejected_column")
    texts = [_texts(cells, name, template) for name in names]
    # A prompt may end before or behind the tag that opens thoughts, by those of its response.
    prompt = min((prompt for prompt, _, _ in texts), key=len)
    rests = [longer.removeprefix(prompt) for longer, _, _ in texts]
    opened = {"", *(tags_of(template.tokenizer.chat_template) if template else ())}
    cells.require(
        all(rest.strip() in opened for rest in rests),
        f"the conversations of columns '{config.chosen_column}' and '{config.rejected_column}'"
        " differ before their last turn; drop the row",
    )
    margin = _margin(cells) if config.margin_column else 0.0
    label = not single or _label(cells)
    replies = [rest + reply for rest, (_, reply, _) in zip(rests, texts, strict=True)]
    return Judged([raw for _, _, raw in texts], prompt, replies, margin, label)


def _texts(
    cells: Cells[PreferencesConfig], name: str, template: ChatTemplate | None
) -> tuple[str, str, Any]:
    """(prompt, response, both as the row has them) of the column that the setting `name` names."""
    key = f"column '{getattr(cells.config, name)}'"
    value, label = chats.parsed_chat(cells.value(name)), f"the response ({key})"
    if template is None:
        cells.require(
            not isinstance(value, list),
            f"{key} holds a chat; set {cells.setting}.template to 'chat'",
        )
        reply = text_of(value, what=label, place=cells.place)
        chats.check_reply({"content": reply}, cells, label)
        return chats.plain_prompt(cells), reply, [cells.value("prompt_column"), reply]
    if not isinstance(value, list):
        value = text_of(value, what="the response", place=cells.place)
    chat = _joined(cells, chats.turns_of(cells, name, value, role="assistant"), key)
    cells.require(
        chat[-1]["role"] == "assistant",
        f"{key} ends with a turn of {chat[-1]['role']!r}, not of the assistant; drop the row",
    )
    chats.check_reply(chat[-1], cells, label)
    chats.check_question(chat[:-1], cells)
    tools = chats.tools_of(cells)
    return *template.answered(chat, cells.place, tools), [chat, tools]


def _joined(cells: Cells[PreferencesConfig], reply: list[Turn], side: str) -> list[Turn]:
    """The prompt and a response as one chat. The response may repeat the prompt or its last turns,
    or hold turns before a prompt that is its last question. Raises `ValueError`, which begins with
    `side`, if the two are different conversations.
    """
    named = cells.config.prompt_column
    goes_on = reply[0]["role"] in ("assistant", "tool")
    has_no_prompt = not named or (not goes_on and _value_or_none(cells.row, named) is None)
    if len(reply) > 1 and has_no_prompt:
        return reply
    asked = chats.turns_of(cells, "prompt_column", role="user")
    size = len(asked)
    if not goes_on and any(reply[at : at + size] == asked for at in range(len(reply) - size)):
        return reply
    for count in range(min(size, len(reply)), 0, -1):
        if asked[-count:] == reply[:count]:
            return asked + reply[count:]
    cells.require(
        goes_on or all(turn["role"] in ("system", "developer") for turn in asked),
        f"{side} is a conversation that neither goes on from the prompt (column '{named}') nor"
        f" repeats it; mend the row, or set {cells.setting}.prompt_column to '' if the"
        " conversations hold their prompt",
    )
    return asked + reply


def _margin(cells: Cells[PreferencesConfig]) -> float:
    value = cells.value("margin_column")
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # CSV files hold texts
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    cells.require(
        math.isfinite(number),
        f"the margin (column '{cells.config.margin_column}') is {shortened(repr(value))}, not a"
        " finite number; drop the row or mend it",
    )
    return number


def _label(cells: Cells[PreferencesConfig]) -> bool:
    value = cells.value("label_column")
    label = LABELS.get(str(value).lower())  # CSV files hold texts
    cells.require(
        label is not None,
        f"the label (column '{cells.config.label_column}') is {shortened(repr(value))}, not true or"
        " false; mend the row",
    )
    return bool(label)


def _singles(
    prompts: TokenLists, responses: list[TokenLists], rows: Sequence[Judged], setting: str
) -> tuple[TokenLists, list[TokenLists], list[bool]]:
    """The examples of KTO: (prompts, [responses, mismatched responses], labels), all of the same
    length. A pair becomes its chosen response with label True, then its rejected one with label
    False. The mismatched response, with which KTO estimates the KL divergence, is that of the next
    row with another prompt.
    """
    num_rows, texts = len(rows), [row.prompt for row in rows]
    require(
        len(set(texts)) > 1,
        f"{setting}: all rows have the same prompt, but KTO compares with responses to other"
        " prompts; set a source with several",
    )
    other = [0] * num_rows
    # From the back, twice around: row i takes what its successor takes, unless that itself differs.
    for step in range(2 * num_rows - 1, -1, -1):
        current, after = step % num_rows, (step + 1) % num_rows
        other[current] = after if texts[after] != texts[current] else other[after]
    is_single = len(responses) == 1
    sides = [(responses[0], [not is_single or row.label for row in rows])]
    sides += [] if is_single else [(responses[1], [False] * num_rows)]
    asked = [prompts[index] for index in range(num_rows) for _ in sides]
    replies = [lists[index] for index in range(num_rows) for lists, _ in sides]
    others = [lists[other[index]] for index in range(num_rows) for lists, _ in sides]
    labels = [marks[index] for index in range(num_rows) for _, marks in sides]
    return TokenLists(asked), [TokenLists(replies), TokenLists(others)], labels


def _cuts(data: Reading[PreferencesConfig], prompts: TokenLists, others: TokenLists) -> np.ndarray:
    """How many tokens each prompt loses at its beginning, int [N], so that it fits into
    `max_tokens` with the mismatched response of `others`; it keeps at least one. Notes in `data`
    that prompts are cut, or raises `ValueError` if `too_long` is "refuse".
    """
    lengths, limit = prompts.lengths + others.lengths, data.config.max_tokens
    longest, cuts = int(lengths.max()), np.maximum(0, lengths - limit)
    why = "another prompt, with which KTO estimates a divergence"
    require(
        not cuts.any() or data.config.too_long != "refuse",
        f"{data.setting}: a prompt with a response to {why}, has {longest} tokens, but"
        f" {data.setting}.max_tokens is {limit}; set it to at least {longest}, or"
        f" {data.setting}.too_long to 'truncate_left'",
    )
    if count := int((cuts > 0).sum()):
        data.is_cut = True
        data.notes.append(
            f"{count} of {len(cuts)} prompts lose their first tokens before a response to {why}"
        )
    return cuts
