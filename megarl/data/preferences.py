"""Preferences: prompts with a better and a worse response, checked and tokenised before the run
starts.

    PreferencesConfig --load_preferences--> PreferenceList --at(ordinal)--> Preference

Prompt and responses are tokenised apart, because that is how the policy meets them. KTO judges
single responses: a pair becomes two of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from megarl.chat_template import ChatTemplate, Turn, end_of_turn, without_end
from megarl.data.chats import (
    as_written,
    check_question,
    check_reply,
    parsed_chat,
    tools_of,
    turns_of,
)
from megarl.data.config import PreferencesConfig
from megarl.data.forms import preferences_as_read, value_or_none
from megarl.data.lengths import fit, picked
from megarl.data.order import Order
from megarl.data.render import chat_template, column, render, template_settings, text_of
from megarl.data.round_trip import check_texts, lost_text, unwrapped
from megarl.data.rows import Row, Table, canonical_json, fingerprint, read_rows
from megarl.data.tokens import TokenLists, prompt_tokens, response_tokens
from megarl.schema import require, shortened
from megarl.types import Preference

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
"""{label in lower case: whether the response is desirable}"""


class Columns(NamedTuple):
    """The texts of a data set, one entry for each row: of pairs two responses, of singles one."""

    rows: list[Any]
    """What each row says, before a template, which may write today's date, has written it."""
    prompts: list[str]
    responses: tuple[list[str], ...]
    """(chosen, rejected) or (response,)."""
    margins: list[float]
    labels: list[bool]

    def only(self, rows: list[int]) -> Columns:
        """The texts of `rows`."""
        replies = tuple(picked(texts, rows) for texts in self.responses)
        margins, labels = picked(self.margins, rows), picked(self.labels, rows)
        prompts = picked(self.prompts, rows)
        return Columns(picked(self.rows, rows), prompts, replies, margins, labels)


class PreferenceList:
    """The preferences of a run in their training order."""

    def __init__(
        self,
        prompts: TokenLists,
        responses: tuple[TokenLists, TokenLists],
        order: Order,
        fingerprint: str,
        *,
        margins: list[float],
        labels: list[bool] | None = None,
        cuts: np.ndarray | None = None,
        warning: str = "",
    ) -> None:
        """`labels`: whether each response is desirable, for single responses; None for pairs. The
        second column of `responses` then holds responses to other prompts. `cuts` [N]: the first
        tokens of each prompt that the second response goes without; None for 0.
        """
        self._cuts = np.zeros(len(prompts), np.int64) if cuts is None else cuts
        self._prompts, self._responses, self._order = prompts, responses, order
        self._margins, self._labels = margins, labels
        self.fingerprint = fingerprint
        """Digest of the preferences and their order."""
        self.warning = warning
        """What the user should know of the preferences; empty if nothing."""

    def __len__(self) -> int:
        return len(self._prompts)

    def at(self, ordinal: int) -> Preference:
        """The preference at position `ordinal` of training, over all epochs. It depends only on the
        seed and the ordinal.
        """
        return self.row(self._order.row(ordinal))

    def row(self, index: int) -> Preference:
        """The preference with index `index` in the data set."""
        first, second = self._responses
        return Preference(
            index=index,
            prompt_ids=self._prompts[index],
            responses=(first[index], second[index]),
            margin=self._margins[index],
            is_single=self._labels is not None,
            is_desirable=self._labels is None or self._labels[index],
            cut=int(self._cuts[index]),
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response together."""
        first, second = (self._prompts.lengths + one.lengths for one in self._responses)
        return int(max(first.max(), (second - self._cuts).max()))

    @property
    def digest(self) -> str:
        """xxh3-128 digest of all token ids, whatever the order of training."""
        hasher = xxhash.xxh3_128()
        for lists in (self._prompts, *self._responses):
            hasher.update(lists.offsets.tobytes())
            hasher.update(lists.ids.tobytes())
        if self._cuts.any():
            hasher.update(self._cuts.tobytes())
        return hasher.hexdigest()


def load_preferences(
    config: PreferencesConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    single: bool = False,
    setting: str = "preferences",
) -> PreferenceList:
    """Read, check and tokenise all preferences. With `single`, as KTO wants them: a pair becomes a
    desirable and an undesirable response. `setting`: the section of the recipe.

    Raises `ValueError` that names the file, the row and the setting to change.
    """
    table = read_rows(
        config.source,
        split=config.split,
        limit=config.limit,
        setting=setting,
        subset=config.subset,
    )
    table = as_written(table, config.tools_column)
    config, table = preferences_as_read(config, table, setting, single=single)
    template = chat_template(tokenizer, config, setting)
    end = end_of_turn(tokenizer, config.template, config.template_variables)
    columns = _columns(config, table, template, setting)
    check_texts(table, setting, columns.prompts, *columns.responses)
    prompts = prompt_tokens(tokenizer, columns.prompts, config.template)
    replies = [without_end(tokenizer, texts, end) for texts in columns.responses]
    responses = [response_tokens(tokenizer, texts, end) for texts in replies]
    _check_sides(table, responses)
    warning = lost_text(tokenizer, columns.prompts, prompts, what=f"prompts of {setting}")
    bare = unwrapped(tokenizer, columns.prompts, config.template, setting)
    for texts, ids in zip(replies, responses, strict=True):
        warning = warning or lost_text(tokenizer, texts, ids, what=f"responses of {setting}")
    kept, prompts, note = fit(
        table,
        prompts,
        np.max([lists.lengths for lists in responses], axis=0),
        limit=config.max_tokens,
        key="max_tokens",
        too_long=config.too_long,
        setting=setting,
    )
    prompts, responses = prompts.only(kept), [lists.only(kept) for lists in responses]
    columns = columns.only(kept)
    settings: list[Any] = [config.template, config.shuffle, single]
    settings += template_settings(tokenizer, config)
    labels, margins, cuts = None, columns.margins, None
    if single:
        prompts, responses, labels = _singles(prompts, responses, columns, setting)
        cuts, more = _cuts(config, prompts, responses[1], setting)
        margins, warning = [0.0] * len(labels), "; ".join(filter(None, (warning, more)))
    if (note and config.too_long == "truncate_left") or (cuts is not None and cuts.any()):
        settings.append(f"truncated to {config.max_tokens}")
    marks = zip(columns.margins, columns.labels, strict=True)
    digest = fingerprint(
        settings, zip(columns.rows, (canonical_json(mark) for mark in marks), strict=True)
    )
    return PreferenceList(
        prompts,
        (responses[0], responses[1]),
        Order(len(prompts), seed=seed, shuffle=config.shuffle),
        digest,
        margins=margins,
        labels=labels,
        cuts=cuts,
        warning="; ".join(filter(None, (warning, note, bare))),
    )


def _columns(
    config: PreferencesConfig, table: Table, template: ChatTemplate | None, setting: str
) -> Columns:
    """The rendered texts of all rows."""
    single = bool(config.response_column)
    names = (
        ("response_column",) if single else ("chosen_column", "rejected_column")
    )  # settings that name the columns of responses
    found = Columns([], [], tuple([] for _ in names), [], [])
    for index, row in enumerate(table.rows):
        place = table.place(index)
        texts = [_texts(config, row, name, template, place, setting) for name in names]
        require(
            len({prompt for prompt, _, _ in texts}) == 1,
            f"{place}: the conversations of columns '{config.chosen_column}' and"
            f" '{config.rejected_column}' differ before their last turn; drop the row",
        )
        found.rows.append([said for _, _, said in texts])
        found.prompts.append(texts[0][0])
        for place_of, (_, reply, _) in zip(found.responses, texts, strict=True):
            place_of.append(reply)
        found.margins.append(_margin(config, row, place, setting))
        found.labels.append(_label(config, row, place, setting) if single else True)
    if single:
        require(
            len(set(found.labels)) == 2,
            f"{table.source}: all responses are {'' if found.labels[0] else 'un'}desirable (column"
            f" '{config.label_column}'), so that there is nothing to tell apart; set"
            f" {setting}.label_column or other data",
        )
    return found


def _check_sides(table: Table, responses: list[TokenLists]) -> None:
    """Raise `ValueError` if the two responses of a row have the same tokens."""
    for index in range(len(responses[0])):
        require(
            len(responses) == 1 or responses[0][index] != responses[1][index],
            f"{table.place(index)}: the chosen and the rejected response are equal as tokens, so"
            " that there is nothing to learn; drop the row",
        )


def _texts(
    config: PreferencesConfig,
    row: Row,
    name: str,
    template: ChatTemplate | None,
    place: str,
    setting: str,
) -> tuple[str, str, Any]:
    """(prompt, response, both as the row has them) of the column that the setting `name` names, the
    first two as texts of the model.
    """
    key, named = getattr(config, name), f"{setting}.{name}"
    value = parsed_chat(column(row, key, place=place, setting=named))
    what = f"{place}: the response (column '{key}')"
    if template is None:
        require(
            not isinstance(value, list),
            f"{place}: column '{key}' holds a chat; set {setting}.template to 'chat'",
        )
        reply = text_of(value, what=f"the response (column '{key}')", place=place)
        check_reply({"content": reply}, what)
        asked = column(row, config.prompt_column, place=place, setting=f"{setting}.prompt_column")
        text = render(parsed_chat(asked), None, place=place, setting=setting)
        return text, reply, [asked, reply]
    reply = value if isinstance(value, list) else text_of(value, what="the response", place=place)
    reply = reply if isinstance(reply, list) else [{"role": "assistant", "content": reply}]
    reply = turns_of(reply, place=place, setting=named)
    chat = _joined(config, row, reply, f"{place}: column '{key}'", place, setting)
    require(
        chat[-1]["role"] == "assistant",
        f"{place}: column '{key}' ends with a turn of {chat[-1]['role']!r}, not of the assistant;"
        " drop the row",
    )
    check_reply(chat[-1], what)
    check_question(chat[:-1], place=place)
    tools = tools_of(row, config.tools_column, place=place, setting=f"{setting}.tools_column")
    return *template.answered(chat, place, tools), [chat, tools]


def _joined(
    config: PreferencesConfig, row: Row, reply: list[Turn], side: str, place: str, setting: str
) -> list[Turn]:
    """The prompt and a response as one chat. The response may repeat the prompt, or its last turns;
    or hold turns before a prompt that is its last question. Raises `ValueError`, which begins with
    `side`, if prompt and response are two conversations.
    """
    named = config.prompt_column
    goes_on = reply[0]["role"] in ("assistant", "tool")
    if len(reply) > 1 and (not named or (not goes_on and value_or_none(row, named) is None)):
        return reply
    key = f"{setting}.prompt_column"
    value = parsed_chat(column(row, named, place=place, setting=key))
    asked = turns_of(
        [{"role": "user", "content": value}] if isinstance(value, str) else value,
        place=place,
        setting=key,
    )
    size = len(asked)
    if not goes_on and any(reply[at : at + size] == asked for at in range(len(reply) - size)):
        return reply
    for count in range(min(size, len(reply)), 0, -1):
        if asked[-count:] == reply[:count]:
            return asked + reply[count:]
    require(
        goes_on or all(turn["role"] in ("system", "developer") for turn in asked),
        f"{side} is a conversation that neither goes on from the prompt (column '{named}') nor"
        f" repeats it; mend the row, or set {key} to '' if the conversations hold their prompt",
    )
    return asked + reply


def _margin(config: PreferencesConfig, row: Row, place: str, setting: str) -> float:
    if not config.margin_column:
        return 0.0
    value = column(row, config.margin_column, place=place, setting=f"{setting}.margin_column")
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # CSV files hold texts
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    require(
        math.isfinite(number),
        f"{place}: the margin (column '{config.margin_column}') is {shortened(repr(value))}, not a"
        " finite number; drop the row or mend it",
    )
    return number


def _label(config: PreferencesConfig, row: Row, place: str, setting: str) -> bool:
    value = column(row, config.label_column, place=place, setting=f"{setting}.label_column")
    found = LABELS.get(str(value).lower())  # CSV files hold texts
    require(
        found is not None,
        f"{place}: the label (column '{config.label_column}') is {shortened(repr(value))}, not true"
        " or false; mend the row",
    )
    return bool(found)


def _singles(
    prompts: TokenLists, responses: list[TokenLists], columns: Columns, setting: str
) -> tuple[TokenLists, list[TokenLists], list[bool]]:
    """The examples that KTO trains on, each a prompt, one response, and a label that says whether
    the response is desirable. Returns (prompts, [responses, mismatched responses], labels), all of
    the same length. A pair becomes two examples: its chosen response with label True, then its
    rejected one with label False. The mismatched response of an example, with which KTO estimates
    the KL divergence, is that of the next row whose prompt is another one.
    """
    num_rows, texts = len(prompts), columns.prompts
    require(
        len(set(texts)) > 1,
        f"{setting}: all rows have the same prompt, but KTO compares with responses to other"
        " prompts; set a source with several",
    )
    other = [0] * num_rows
    # From the back, twice around: row i takes what its successor takes, unless that itself differs.
    for step in range(2 * num_rows - 1, -1, -1):
        here, after = step % num_rows, (step + 1) % num_rows
        other[here] = after if texts[after] != texts[here] else other[after]
    sides = [(responses[0], columns.labels)] if len(responses) == 1 else []
    sides = sides or [(responses[0], [True] * num_rows), (responses[1], [False] * num_rows)]
    asked = [prompts[index] for index in range(num_rows) for _ in sides]
    replies = [lists[index] for index in range(num_rows) for lists, _ in sides]
    others = [lists[other[index]] for index in range(num_rows) for lists, _ in sides]
    labels = [marks[index] for index in range(num_rows) for _, marks in sides]
    return TokenLists(asked), [TokenLists(replies), TokenLists(others)], labels


def _cuts(
    config: PreferencesConfig, prompts: TokenLists, others: TokenLists, setting: str
) -> tuple[np.ndarray, str]:
    """For KTO, which also scores each prompt with the response `others` of another row: (number of
    tokens to cut off the beginning of each of the N prompts so that the two fit into
    `config.max_tokens`, int [N]; a warning for the user, "" if nothing is cut). Each prompt keeps
    at least one token. Raises `ValueError` if a cut is needed and `config.too_long` is "refuse".
    """
    lengths, limit = prompts.lengths + others.lengths, config.max_tokens
    longest, cuts = int(lengths.max()), np.maximum(0, lengths - limit)
    count = int((cuts > 0).sum())
    require(
        not count or config.too_long != "refuse",
        f"{setting}: a prompt with a response to another prompt, with which KTO estimates a"
        f" divergence, has {longest} tokens, but {setting}.max_tokens is {limit};"
        f" set it to at least {longest}, or {setting}.too_long to 'truncate_left'",
    )
    found = f"{count} of {len(cuts)} prompts lose their first tokens before a response to another"
    return cuts, f"{found} prompt, with which KTO estimates a divergence" if count else ""
