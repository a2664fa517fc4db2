"""Whether the text of a data set reaches the model whole: half characters cannot be encoded, images
are not shown, and characters that a tokenizer has no token for are lost in silence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megarl import console
from megarl.data.chats import from_json
from megarl.data.rows import NOT_TEXT, Table
from megarl.data.tokens import TokenLists
from megarl.schema import require, shortened
from megarl.third_party import opening

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TEXTS = 1000
"""Largest number of texts that are decoded again, evenly spread over the data set."""

HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which JSON can write (`"\\ud800"`) and no encoding has."""


def check_texts(table: Table, setting: str, *texts: Sequence[str]) -> None:
    """Raise `ValueError`, naming row and column, if one of `texts` cannot be encoded, or has a
    place for an image or sound of its row (`<image>`). Say where rows have images or sound besides,
    as a reward may read. Each of `texts` holds a text for every row of `table`, as it is read, or
    as the chat template has written it.
    """
    more = [
        sorted(name for name in NOT_TEXT & row.keys() if row[name] not in (None, "", [], {}))
        for row in table.rows
    ]
    for index, names in enumerate(more):
        for name in names:
            mark = f"<{name.rstrip('s')}>"
            require(
                not any(mark in column[index] for column in texts),
                f"{table.place(index)}: '{mark}' stands for column '{name}', which is not shown to"
                " the model; drop the row",
            )
    if any(more):
        names = ", ".join(map(repr, sorted({name for names in more for name in names})))
        console.say(
            f"{setting}: {sum(map(bool, more))} of {len(more)} rows have more than text (columns"
            f" {names}), which is not shown to the model"
        )
    for index, row in enumerate(zip(*texts, strict=True)):
        half = next(filter(None, map(HALF.search, row)), None)
        if half is not None:
            names = [name for name, value in table.rows[index].items() if _has_half(value)]
            there = f"column '{', '.join(names)}'" if names else "the text"
            raise ValueError(
                f"{table.place(index)}: {there} holds half of a surrogate pair"
                f" (U+{ord(half[0]):04X}), which is no character; mend the text or drop the row"
            )


def _has_half(value: Any) -> bool:
    """Whether a text in `value`, or in the JSON that it is the text of, has a half pair."""
    value = from_json(value)
    if isinstance(value, dict):
        return any(map(_has_half, [*value, *value.values()]))
    if isinstance(value, list):
        return any(map(_has_half, value))
    return isinstance(value, str) and HALF.search(value) is not None


def lost_text(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], token_ids: TokenLists, *, what: str
) -> str:
    """A warning if some of `texts` differ from what their tokens decode to, with their share and
    the first of them; empty if none does. `what` names the texts in the warning.

    White space is not compared, since tokenizers add and join it. Tokens around a text, such as a
    beginning of sequence, do not count as a difference.
    """
    every = -(-len(texts) // MOST_TEXTS)
    chosen = range(0, len(texts), max(every, 1))
    lists = [token_ids[index] for index in chosen]
    with opening("the tokenizer cannot decode the data", fix="fetch the tokenizer again"):
        decoded = tokenizer.batch_decode(lists, clean_up_tokenization_spaces=False)
    lost = [
        (texts[index], again)
        for index, again in zip(chosen, decoded, strict=True)
        if _bare(texts[index]) not in _bare(again)
    ]
    if not lost:
        return ""
    text, again = (shortened(repr(part), 60) for part in lost[0])
    return (
        f"the tokenizer changes {len(lost) / len(lists):.0%} of the {what} ({len(lost)} of"
        f" {len(lists)} looked at): {text} becomes {again}; set a tokenizer that has a token for"
        " every character of the data"
    )


def unwrapped(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], template: str, setting: str
) -> str:
    """A warning where the model has a chat template, and `texts`, the prompts of section `setting`,
    are written with none; empty otherwise, as where the first text has a special token.
    """
    is_bare = template == "none" and bool(tokenizer.chat_template)
    if not is_bare or any(one in texts[0] for one in tokenizer.all_special_tokens):
        return ""
    return (
        f"{setting}.template is none, so the model reads the texts of {setting} bare, without its"
        " chat template; a model that was trained on chats answers those badly: set"
        f" {setting}.template to chat, unless this is a base model"
    )


def _bare(text: str) -> str:
    """`text` without white space."""
    return "".join(text.split())
